"""The distilled loss against its formula written out, and training under a teacher."""

import copy
import json
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from scaleop.corpus import write_tokens
from scaleop.distillation import Distillation, DistilledLoss
from scaleop.train import NextTokenLoss, Recipe, train
from tests.conftest import neox_config, random_ids, random_model

RECIPE = Recipe(tokens=150, batch=2, length=8, peak_lr=3e-3, warmup_steps=4, eval_every=40, precision="bf16",
                checkpoint_every=3)  # ten steps of 16 tokens
IDS = torch.tensor(random_ids(36).reshape(4, 9))


@pytest.fixture
def teacher():
    """Wider and deeper than the student, with seven more vocabulary rows."""
    return random_model(neox_config(layers=3, width=32, vocab=68), seed=1)


def softmax(logits):
    """(..., vocabulary) fp64 probabilities, from the definition."""
    powers = np.exp(logits - logits.max(-1, keepdims=True))
    return powers / powers.sum(-1, keepdims=True)


def reference(student, teacher, temperature):
    """Cross-entropy, KL(teacher || student) and KL(student || teacher), position by position in fp64."""
    with torch.no_grad():
        s, t = (model(input_ids=IDS).logits.double().numpy()[..., :61] for model in (student, teacher))
    entropies, forwards, backwards = [], [], []
    for row, ids in enumerate(IDS.tolist()):
        for position in range(len(ids) - 1):
            entropies.append(-np.log(softmax(s[row, position])[ids[position + 1]]))
            p, q = softmax(t[row, position] / temperature), softmax(s[row, position] / temperature)
            forwards.append((p * np.log(p / q)).sum())
            backwards.append((q * np.log(q / p)).sum())
    return np.mean(entropies), np.mean(forwards), np.mean(backwards)


def test_the_papers_settings_are_the_defaults():
    assert Distillation() == Distillation(temperature=2.0, alpha=0.5)


@pytest.mark.parametrize("temperature, alpha", [(2.0, 0.5), (1.0, 0.0), (3.5, 0.2)])
def test_the_loss_is_the_formula_with_the_teacher_first(model, teacher, temperature, alpha):
    entropy, ours, other = reference(model, teacher, temperature)
    loss = DistilledLoss(model, teacher, Distillation(temperature, alpha))(IDS).item()
    assert loss == pytest.approx(alpha * entropy + (1 - alpha) * temperature**2 * ours, rel=1e-6)
    swapped = alpha * entropy + (1 - alpha) * temperature**2 * other
    assert abs(loss - swapped) > 5e-4 * loss  # hundreds of times the tolerance: the direction shows


def test_alpha_one_is_plain_cross_entropy_and_a_perfect_teacher_adds_nothing(model, teacher):
    plain = NextTokenLoss(model)(IDS)
    assert torch.equal(DistilledLoss(model, teacher, Distillation(alpha=1.0))(IDS), plain)
    taught = DistilledLoss(model, copy.deepcopy(model), Distillation(alpha=0.25))(IDS)
    assert taught.item() == pytest.approx(0.25 * plain.item(), rel=1e-6)


def test_the_students_gradient_is_softened_student_minus_softened_teacher(model, teacher):
    """d loss / d logits at alpha 0 is T (q - p) over the number of shifted positions; read off the head's bias."""
    loss, temperature = DistilledLoss(model, teacher, Distillation(3.0, 0.0)), 3.0
    shift = torch.zeros(61, requires_grad=True)
    model.lm_head.register_forward_hook(lambda module, inputs, output: output + shift)
    loss(IDS).backward()
    with torch.no_grad():
        q, p = (model_(input_ids=IDS).logits.double().numpy()[:, :-1, :61] for model_ in (model, teacher))
    expected = temperature * (softmax(q / temperature) - softmax(p / temperature)).mean(axis=(0, 1))
    assert shift.grad.numpy() == pytest.approx(expected, rel=1e-4, abs=1e-7)


def test_the_teacher_stays_out_of_training(model, teacher):
    loss = DistilledLoss(model, teacher.train(), Distillation())
    loss.train()
    loss(IDS).backward()
    assert not teacher.training
    assert all(parameter.grad is None for parameter in teacher.parameters())
    assert all(parameter.grad.abs().sum() > 0 for parameter in model.parameters())
    assert [id(p) for p in loss.parameters()] == [id(p) for p in model.parameters()]
    assert set(loss.state_dict()) == {f"model.{name}" for name in model.state_dict()}


def test_a_teacher_elsewhere_is_copied_to_the_student(teacher):
    student = random_model(neox_config()).to("meta")
    loss = DistilledLoss(student, teacher, Distillation())
    assert {p.device.type for p in loss.frozen[0].parameters()} == {"meta"}
    assert {p.device.type for p in teacher.parameters()} == {"cpu"}


def test_a_teacher_with_a_smaller_vocabulary_is_refused(model):
    with pytest.raises(ValueError, match="teacher knows 60 tokens, the student 61"):
        DistilledLoss(model, random_model(neox_config(vocab=60)), Distillation())


@pytest.mark.parametrize("settings, message", [({"temperature": 0.0}, "temperature=0.0 must be positive"),
                                               ({"temperature": float("nan")}, "temperature=nan"),
                                               ({"alpha": 1.5}, r"alpha=1.5 must lie in \[0, 1\]")])
def test_impossible_settings_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        Distillation(**settings)


# Training under a teacher

class Killed(Exception):
    """Raised by a test to end a run early."""


def run(teacher, stream, folder, recipe=RECIPE, dies_at=None, settings=None):
    """Train a fresh student; returns its weights and curve. `dies_at`: the evaluation that ends the run."""
    student, calls = random_model(neox_config()), iter(range(100))

    def evaluate(model):
        if next(calls) == dies_at:
            raise Killed
        return model.lm_head.weight.double().sum().item()
    curve = train(student, stream, recipe, key="key", name="taught", folder=folder, evaluate=evaluate,
                  loss=partial(DistilledLoss, teacher=teacher, settings=settings or Distillation()))
    return student.state_dict(), curve


@pytest.fixture
def stream(tmp_path):
    return write_tokens(tmp_path / "stream", random_ids(400).astype(np.uint16), np.array([0]))


def test_a_killed_run_resumes_under_its_teacher_bit_identical(teacher, stream, tmp_path):
    before = {name: tensor.clone() for name, tensor in teacher.state_dict().items()}
    weights, curve = run(teacher, stream, tmp_path / "whole")
    with pytest.raises(Killed):
        run(teacher, stream, tmp_path / "killed", dies_at=2)  # at step 5, behind the checkpoint of step 3
    checkpoint = tmp_path / "killed" / "checkpoint"
    assert json.loads((checkpoint / "state.json").read_text())["step"] == 3
    assert set(load_file(checkpoint / "model.safetensors")) == set(weights)  # the student alone
    resumed, again = run(teacher, stream, tmp_path / "killed")
    assert again == curve and len(curve) == 5
    assert all(torch.equal(resumed[name], weights[name]) for name in weights)
    assert all(torch.equal(tensor, before[name]) for name, tensor in teacher.state_dict().items())


def test_the_curves_loss_is_the_distilled_one(teacher, stream, tmp_path):
    """At rate 0 the student stands still, so the mean of the steps' losses is the formula's over all their tokens."""
    recipe = replace(RECIPE, peak_lr=0.0, eval_every=10_000, precision="no")
    rows = torch.from_numpy(stream.tokens[:160].astype(np.int64)).view(20, 8)
    expected = DistilledLoss(random_model(neox_config()), teacher, Distillation())(rows).item()
    exact = run(teacher, stream, tmp_path / "fp32", recipe)[1][-1]["loss"]
    assert exact == pytest.approx(expected, rel=1e-6)
    rounded = run(teacher, stream, tmp_path / "bf16", replace(recipe, precision="bf16"))[1][-1]["loss"]
    assert rounded == pytest.approx(expected, rel=2e-2) and rounded != exact


def test_alpha_one_trains_as_without_a_teacher(teacher, stream, tmp_path):
    taught, _ = run(teacher, stream, tmp_path / "taught", settings=Distillation(alpha=1.0))
    plain = random_model(neox_config())
    train(plain, stream, RECIPE, key="key", name="plain", folder=tmp_path / "plain", evaluate=lambda model: 1.0)
    assert all(torch.allclose(taught[name], tensor, atol=1e-6) for name, tensor in plain.state_dict().items())
    distilled, _ = run(teacher, stream, tmp_path / "distilled")
    assert (distilled["lm_head.weight"] - plain.lm_head.weight).abs().max() > 1e-3

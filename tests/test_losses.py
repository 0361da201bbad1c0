"""What makes a step fit a smaller memory changes neither its loss nor its gradients: micro-batches, checkpointed
activations, cross-entropy a chunk of positions at a time, one by one and all together."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch

from scaleop.corpus import write_tokens
from scaleop.distillation import Distillation, DistilledLoss
from scaleop.evaluate import perplexity
from scaleop.experiment import load_experiment
from scaleop.losses import NextTokenLoss, next_tokens
from scaleop.race import Race
from scaleop.settings import RaceSettings
from scaleop.store import digest
from scaleop.train import Recipe, backward, make_accelerator, settings, train
from tests.conftest import neox_config, random_ids, random_model

ROWS = torch.tensor(random_ids(55).reshape(5, 11))  # five rows, so that two at a time do not come out even
TEACHER = random_model(neox_config(layers=3, width=32, vocab=68), seed=1)  # seven more vocabulary rows
LOSSES = {"plain": NextTokenLoss, "taught": partial(DistilledLoss, teacher=TEACHER, settings=Distillation(3.0, 0.3))}
WAYS = {"micro-batches": {"micro_batch": 2}, "checkpointing": {"checkpoint_activations": True}, "chunks": {"chunk": 7},
        "chunks of one": {"chunk": 1}, "one large chunk": {"chunk": 1000},
        "all": {"micro_batch": 2, "checkpoint_activations": True, "chunk": 4}}
RECIPE = Recipe(tokens=5 * 11 * 6, batch=5, length=11, peak_lr=3e-3, warmup_steps=2, eval_every=110, precision="no")


def step(loss=NextTokenLoss, precision="no", micro_batch=None, checkpoint_activations=False, chunk=None):
    """Loss and {name: gradient} of one step on ROWS."""
    model = random_model(neox_config()).train()
    if checkpoint_activations:
        model.activation_checkpointing_enable({"use_reentrant": False})
    accelerator = make_accelerator(precision)
    value = backward(accelerator, accelerator.prepare(loss(model, chunk=chunk)), ROWS, micro_batch)
    return value.item(), {name: parameter.grad for name, parameter in model.named_parameters()}


def apart(ours, expected):
    """Largest difference of two steps' gradients, as a share of the whole gradient's norm."""
    norm = torch.sqrt(sum(gradient.double().square().sum() for gradient in expected.values()))
    return max((ours[name] - expected[name]).abs().max().item() for name in expected) / norm.item()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("loss", LOSSES)
def test_a_step_that_saves_memory_has_the_plain_steps_loss_and_gradients(loss, way):
    value, gradients = step(LOSSES[loss])
    ours, found = step(LOSSES[loss], **WAYS[way])
    assert ours == pytest.approx(value, rel=1e-5)
    assert gradients.keys() == found.keys() and apart(found, gradients) < 1e-5
    for name in ("lm_head.weight", "gpt_neox.embed_in.weight", "gpt_neox.layers.0.mlp.dense_4h_to_h.weight"):
        assert torch.allclose(found[name], gradients[name], rtol=1e-4, atol=1e-5 * gradients[name].abs().max()), name


def test_a_mean_of_unequal_parts_would_have_been_seen():
    """The last micro-batch holds one row of five: were its mean to weigh as much as the others', the loss would move
    by more than ten times the tolerance above."""
    value, _ = step()
    model = random_model(neox_config())
    means = [NextTokenLoss(model)(part).item() for part in ROWS.split(2)]
    assert np.dot(means, [2 / 5, 2 / 5, 1 / 5]) == pytest.approx(value, rel=1e-6)
    assert abs(np.mean(means) - value) > 1e-4 * value


@pytest.mark.parametrize("loss", LOSSES)
def test_whole_training_is_the_same(loss, tmp_path):
    """Six optimiser steps with everything switched on against the plain ones: loss and perplexity along the way."""
    stream = write_tokens(tmp_path / "stream", random_ids(400).astype(np.uint16), np.array([0]))
    curves, held_out = [], random_ids(200, seed=5)
    for name, more in (("plain", {}), ("all", WAYS["all"])):
        curves.append(train(random_model(neox_config(), std=0.1), stream, replace(RECIPE, **more), key="key", name=name,
                            folder=tmp_path / name, loss=LOSSES[loss],
                            evaluate=lambda model: perplexity(model, held_out, 16, 8).value))
    plain, ours = curves
    assert [point["step"] for point in ours] == [point["step"] for point in plain] == [0, 2, 4, 6]
    for key in ("ppl", "loss"):
        assert [point.get(key, 0) for point in ours] == pytest.approx([p.get(key, 0) for p in plain], rel=1e-5)
    assert plain[0]["ppl"] != pytest.approx(plain[-1]["ppl"], rel=1e-3)  # it did train


# That memory is saved at all: what is never there at once

def test_no_more_logits_than_a_chunk_ever_exist_and_they_are_computed_twice():
    model, seen = random_model(neox_config()).train(), []
    model.lm_head.register_forward_hook(lambda module, inputs, output: seen.append(output.shape))
    NextTokenLoss(model, chunk=10)(ROWS).backward()
    assert seen == [(10, 61)] * 5 + [(5, 61)] + [(5, 61)] + [(10, 61)] * 5  # forward, then backward from the end


def test_the_teachers_logits_come_in_chunks_too():
    teacher, seen = random_model(neox_config(width=32)), []
    teacher.lm_head.register_forward_hook(lambda module, inputs, output: seen.append(len(output)))
    DistilledLoss(random_model(neox_config()), teacher, Distillation(), chunk=20)(ROWS).backward()
    assert seen == [20, 20, 15, 15, 20, 20]


def test_rows_come_in_micro_batches_and_blocks_run_again_where_activations_are_not_kept(tmp_path):
    stream = write_tokens(tmp_path / "stream", random_ids(400).astype(np.uint16), np.array([0]))
    for way, expected in (({"micro_batch": 2}, [2, 2, 1]), ({"checkpoint_activations": True}, [5, 5])):
        model, seen = random_model(neox_config()), []
        hook = model.gpt_neox.layers[0].mlp.register_forward_pre_hook(lambda _, x, seen=seen: seen.append(len(x[0])))
        train(model, stream, replace(RECIPE, tokens=55, **way), key="key", name="toy", folder=tmp_path / str(way),
              evaluate=lambda model: 1.0)
        assert seen == expected
        hook.remove()
        assert not model.is_activation_checkpointing  # as it was lent


def test_chunks_gradients_are_summed_in_fp32_under_bf16():
    """With autocast's usual one bf16 copy of the head for all 55 chunks its gradient would be summed in bf16."""
    exact, plain, chunked = (step(**more)[1]["lm_head.weight"] for more in (
        {}, {"precision": "bf16"}, {"precision": "bf16", "chunk": 1}))
    error, ours = ((each - exact).norm().item() for each in (plain, chunked))
    assert ours < 1.2 * error


def test_the_last_position_has_no_next_token():
    assert next_tokens(torch.tensor([[5, 6, 7], [1, 2, 3]])).tolist() == [[6, 7, -100], [2, 3, -100]]


# Settings

def test_what_is_not_used_is_not_in_a_runs_key():
    plain = settings(RECIPE)
    assert not {"micro_batch", "checkpoint_activations", "chunk"} & plain.keys()
    assert settings(replace(RECIPE, chunk=8)) == {**plain, "chunk": 8}
    keys = {digest(settings(replace(RECIPE, **more))) for more in ({}, {"chunk": 8}, {"chunk": 9}, {"micro_batch": 8},
                                                                   {"checkpoint_activations": True})}
    assert len(keys) == 5


def test_an_experiments_settings_reach_its_recipe():
    experiment = load_experiment("toy")
    assert Race(experiment).recipe.chunk is None
    values = experiment.race.model_dump() | {"micro_batch": 2, "checkpoint_activations": True, "chunk": 512}
    recipe = Race(experiment.model_copy(update={"race": RaceSettings.model_validate(values)})).recipe
    assert (recipe.micro_batch, recipe.checkpoint_activations, recipe.chunk) == (2, True, 512)
    assert digest(Race(load_experiment("nano")).facts("hybrid_rs", 0)) == "20b30eb19b92"  # as it ever was

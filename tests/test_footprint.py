"""What a step needs, computed without running it: against closed forms, a step that was run, and a measurement."""

import gc
from dataclasses import replace

import pytest
import torch

from scaleop import footprint as module
from scaleop.footprint import Peak, footprint, ways
from scaleop.losses import NextTokenLoss
from scaleop.paths import ROOT
from scaleop.store import read_json
from scaleop.train import Recipe, backward, make_accelerator, make_optimizer
from tests.conftest import neox_config, random_model

RECIPE = Recipe(tokens=1, batch=4, length=32, peak_lr=1e-3, warmup_steps=0, eval_every=1, precision="no")


def config(**more):
    return neox_config(layers=3, width=64, heads=4, mlp=256, vocab=1000, attn_implementation="eager", **more)


def test_weights_gradients_and_moments_are_the_parameters_sizes():
    parameters = list(random_model(config()).parameters())
    numbers, buffers = sum(p.numel() for p in parameters), 4 * 8 // 2  # 8 rotary dims give 4 frequencies
    found = footprint(config(), RECIPE)
    assert found.gradients == 4 * numbers
    assert found.moments == 8 * numbers + 4 * len(parameters)  # two fp32 each, and a step count for every tensor
    assert 0 <= found.weights - 4 * numbers <= 8 * buffers  # and the rotary table, twice
    assert found.rest == found.peak - found.weights - found.gradients - found.moments


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_a_step_without_contents_takes_what_the_same_step_takes_with_them(precision):
    """The same counter over real tensors: a small step first, as there, then the whole one."""
    recipe = replace(RECIPE, precision=precision, micro_batch=2, chunk=24, checkpoint_activations=True)
    accelerator = make_accelerator(precision)
    with Peak() as memory:
        model = module.empty_model(config()).train()
        model.activation_checkpointing_enable({"use_reentrant": False})
        optimizer = make_optimizer(model, recipe)
        loss_of = accelerator.prepare(NextTokenLoss(model, recipe.chunk))
        for size in (1, 4):
            backward(accelerator, loss_of, torch.zeros(size, 32, dtype=torch.long), 2)
            optimizer.step()
            optimizer.zero_grad()
    del model, optimizer, loss_of, accelerator
    gc.collect()
    assert footprint(config(), recipe).peak == pytest.approx(memory.most, rel=0.01)


def test_a_tensor_is_counted_once_and_until_it_is_gone():
    with Peak() as memory:
        a = torch.zeros(1000)
        view = a.view(10, 100)[2:]
        assert memory.now == 4000  # a view is no storage of its own
        b = a + 1
        assert memory.now == memory.most == 8000
        del b
        assert (memory.now, memory.most) == (4000, 8000)
        del a
        assert memory.now == 4000 and view is not None  # the view still holds it
        del view
        assert memory.now == 0


def test_each_way_saves_what_it_says():
    plain, micro, blocks, chunk, everything = (footprint(config(), recipe).rest for recipe in (
        RECIPE, replace(RECIPE, micro_batch=1), replace(RECIPE, checkpoint_activations=True), replace(RECIPE, chunk=16),
        replace(RECIPE, micro_batch=1, checkpoint_activations=True, chunk=16)))
    logits = 4 * 4 * 32 * 1000  # bytes of one fp32 array of them
    assert plain - chunk > logits  # of the several that there were at once, one eighth is left
    assert max(micro, blocks, chunk, everything) < plain


def test_four_processes_with_a_quarter_each_need_what_one_needs_for_that_quarter():
    assert footprint(config(), RECIPE, processes=4) == footprint(config(), replace(RECIPE, batch=1))


@pytest.mark.parametrize("chunk", [None, 16])
def test_a_teacher_is_held_beside_the_student(chunk):
    recipe, teacher = replace(RECIPE, chunk=chunk), neox_config(layers=2, width=96, heads=4, mlp=384, vocab=1100)
    plain, taught = footprint(config(), recipe), footprint(config(), recipe, teacher=teacher)
    assert (taught.weights, taught.gradients, taught.moments) == (plain.weights, plain.gradients, plain.moments)
    its = 4 * sum(parameter.numel() for parameter in random_model(teacher).parameters())
    assert taught.rest - plain.rest > its


def test_the_ways_are_one_by_one_and_all_together():
    names, recipes = zip(*ways(RECIPE).items(), strict=True)
    assert names == ("as it is", "micro_batch", "checkpoint_activations", "chunk", "all three")
    changed = [{name for name in vars(RECIPE) if vars(recipe)[name] != vars(RECIPE)[name]} for recipe in recipes]
    assert changed == [set(), {"micro_batch"}, {"checkpoint_activations"}, {"chunk"}, set.union(*changed)]


def test_the_measured_peaks_lie_above_the_computed_ones_by_what_kernels_and_allocator_add():
    """A process holds more than its tensors: oneDNN's copies of weights, holes in the heap, libraries' own pages. On
    record this is 15 to 30 per cent at the 160m shape; the tensors are never less than computed."""
    for name, found in read_json(ROOT / "benchmarks" / "results" / "memory.json")["variants"].items():
        assert 1.0 < found["peak"] / found["computed"] < 1.3, name

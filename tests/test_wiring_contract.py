"""What any wiring table must pass: that it says of its models what transformers computes, tensor by tensor.

Nothing here knows an architecture. `tests/families.py` holds a few tiny configs of every table.
"""

import re

import numpy as np
import pytest
import torch
from transformers import StableLmConfig

from scaleop import tables
from scaleop.activations import hooked, stream_statistics
from scaleop.arms import ARMS, Donor, build
from scaleop.maps import Maps, Selection, scored_selection
from scaleop.paths import ROOT
from scaleop.shards import Checkpoint
from scaleop.shrink import shrink
from scaleop.weights import assemble, extract, keys, load, module_of
from scaleop.wiring import (
    KEYS,
    MLP,
    QK,
    READ_IN,
    READ_OUT,
    RESIDUAL,
    TABLES,
    VALUES,
    VO,
    VOCAB,
    config_like,
    shape_of,
    wiring_of,
)
from tests.conftest import random_model
from tests.families import CONFIGS, SIZES

IDS = torch.as_tensor(np.random.default_rng(0).integers(0, 61, (3, 12)))
SEQUENCES = np.random.default_rng(1).integers(0, 61, (40, 12))
LAST = 1  # the last block


@pytest.fixture(scope="module", params=list(CONFIGS))
def model(request):
    """A random model of each config; tests leave it as it is."""
    return random_model(CONFIGS[request.param])


@pytest.fixture(scope="module")
def wiring(model):
    return wiring_of(model.config)


@pytest.fixture(scope="module")
def shape(model):
    return shape_of(model.config)


@torch.no_grad()
def logits(model):
    return model(input_ids=IDS).logits


@torch.no_grad()
def seen(model, modules):
    """What each module reads and what it writes."""
    reads, writes = {}, {}

    def keep(module, inputs, output):
        reads[module], writes[module] = inputs[0], output

    with hooked([module.register_forward_hook(keep) for module in modules]):
        model(input_ids=IDS)
    return [reads[module] for module in modules], [writes[module] for module in modules]


def same(first, second, tolerance=1e-5):
    return (first - second).abs().max() <= tolerance * second.abs().max()


def test_every_table_has_configs_here():
    assert {config.model_type for config in CONFIGS.values()} == set(TABLES)


# Tensors

@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", list(CONFIGS))
def test_a_model_rebuilt_from_its_own_weights_is_exact(name, dtype):
    model = random_model(CONFIGS[name], dtype=dtype)
    rebuilt = assemble(extract(model), model.config)
    for (path, ours), theirs in zip(rebuilt.state_dict().items(), model.state_dict().values(), strict=True):
        assert ours.dtype == dtype and torch.equal(ours, theirs), path
    assert torch.equal(logits(rebuilt), logits(model))


def test_axes_have_the_sizes_of_the_tensors_and_leave_none_out(model, wiring, shape):
    weights = extract(model)
    assert set(weights) == {key for key, _ in keys(wiring, shape.layers)}
    for (block, name), tensor in weights.items():
        assert tuple(tensor.shape) == tuple(shape.size(axis) for axis in wiring[name].axes), (block, name)
    assert sum(tensor.numel() for tensor in weights.values()) == model.num_parameters()


def test_a_config_of_the_same_sizes_is_the_same_config(model, shape):
    assert config_like(model.config, **shape.sizes()).to_dict() == model.config.to_dict()


def test_a_checkpoint_on_disk_has_the_same_weights_as_the_model(model, wiring, shape, tmp_path):
    model.save_pretrained(tmp_path)
    checkpoint, weights = Checkpoint(tmp_path), extract(load(tmp_path))
    for (block, name), tensor in extract(model).items():
        assert torch.equal(weights[block, name], tensor)
        assert torch.equal(checkpoint.weights(block, [name])[block, name], tensor)


# Levers

def test_read_ins_are_fronted_by_a_norm(model, wiring, shape):
    """With neutral norms every read-in reads rows of mean square 1, wherever it stands."""
    weights = {key: tensor if wiring[key[1]].neutral is None else torch.full_like(tensor, wiring[key[1]].neutral)
               for key, tensor in extract(model).items()}
    plain = assemble(weights, model.config)
    readers = [module_of(plain, role, block) for (block, _), role in keys(wiring, shape.layers)
               if role.lever == READ_IN and len(role.axes) == 2]
    reads, _ = seen(plain, [*readers, plain.get_output_embeddings()])
    for read in reads:
        assert torch.allclose(read.square().mean(dim=-1), torch.ones(IDS.shape), atol=1e-2)
    assert len(readers) >= 4 * shape.layers  # Q, K, V and an MLP's


def test_a_read_in_reads_what_its_norm_writes(model, wiring, shape):
    for (block, _), role in keys(wiring, shape.layers):
        if role.lever == READ_IN and len(role.axes) == 2:
            (_, read), (written, _) = seen(model, [module_of(model, wiring[f"{role.norm}_GAIN"], block),
                                                   module_of(model, role, block)])
            assert torch.equal(read, written), role.name


def test_a_stage_reads_what_the_stages_before_it_left(model, wiring):
    """The stream before a stage is the block's input and all that earlier read-outs wrote; behind the last, it is the
    block's output."""
    block, stages = model.get_submodule(wiring.block.format(b=LAST)), wiring.stages(model.config)
    assert [role.name for stage in stages for role in stage.read_outs] == ["O", "MLP_DOWN"]
    (stream,), (behind,) = seen(model, [block])
    for stage in stages:
        norms = [module_of(model, wiring[f"{name}_GAIN"], LAST) for name in stage.norms]
        for read in seen(model, norms)[0]:
            assert same(read, stream)
        stream = stream + sum(seen(model, [module_of(model, role, LAST) for role in stage.read_outs])[1])
    assert same(behind, stream)


def test_read_outs_write_straight_to_the_residual_stream(model, wiring):
    """A read-out twice as loud adds what it wrote once more to the stream behind its block."""
    for role in wiring.lever(READ_OUT):
        weights = extract(model)
        for other in wiring.lever(READ_OUT):  # the last block's others are silent: they would answer
            for name in {other.name, f"{other.name}_BIAS"} - {role.name, f"{role.name}_BIAS"}:
                if (LAST, name) in weights:
                    weights[LAST, name].zero_()
        once = assemble(weights, model.config)
        for name in (role.name, f"{role.name}_BIAS"):
            if (LAST, name) in weights:
                weights[LAST, name] *= 2
        twice = assemble(weights, model.config)
        streams = []
        for each in (once, twice):
            _, (written, stream) = seen(each, [module_of(each, role, LAST),
                                               each.get_submodule(wiring.block.format(b=LAST))])
            streams.append((written, stream))
        (written, before), (_, after) = streams
        assert same(after - before, written, 1e-4), role.name
        assert written.std() > 0.1


def test_every_matrix_of_a_block_has_the_lever_of_its_side(model, wiring):
    """What reads the residual stream is a read-in, what writes it a read-out, in the forward pass's order."""
    matrices = [role for role in wiring.roles if role.per_block and len(role.axes) == 2]
    for role in matrices:
        assert role.lever == (READ_IN if role.axes[1] == RESIDUAL else READ_OUT), role.name
        assert role.axes.count(RESIDUAL) == 1, role.name
    names = [role.name for role in matrices if role.name != "MLP_GATE"]
    assert names == ["Q", "K", "V", "O", "MLP_UP", "MLP_DOWN"]


def test_the_gate_is_the_matrix_behind_the_activation(model, wiring):
    """What MLP_DOWN reads is linear in MLP_UP, and not in MLP_GATE."""
    if all(role.name != "MLP_GATE" for role in wiring.roles):
        pytest.skip("no gate")
    reads = {}
    for name in ("", "MLP_UP", "MLP_GATE"):
        weights = extract(model)
        for each in {name, f"{name}_BIAS"} & {role.name for role in wiring.roles}:
            weights[LAST, each] *= -1
        turned = assemble(weights, model.config)
        (reads[name],), _ = seen(turned, [module_of(turned, wiring["MLP_DOWN"], LAST)])
    assert same(reads["MLP_UP"], -reads[""]) and not same(reads["MLP_GATE"], -reads[""], 1e-2)


def test_a_scaled_read_in_scales_what_it_computes_as_if_its_norm_were_louder(model, wiring):
    """The head's factor, on its own tensor or, where that is the input embedding, on the final norm."""
    weights = extract(model)
    for role in wiring.lever(READ_IN):
        if not role.per_block:
            weights[None, role.name] *= 3
    assert same(logits(assemble(weights, model.config)), 3 * logits(model))


# What wiring leaves free

def identity(shape):
    axes = {(None, axis): Selection(torch.arange(shape.size(axis)))
            for axis in (RESIDUAL, QK, VO, KEYS, VALUES, MLP, VOCAB)}
    return Maps(tuple(range(shape.layers)), axes)


def moved(model, wiring, shape, axes):
    """The logits after permuting those axes in all blocks."""
    maps = identity(shape)
    maps = Maps(maps.blocks, {**maps.axes, **{(None, axis): Selection(index) for axis, index in axes.items()}})
    return logits(assemble(shrink(extract(model), wiring, maps), model.config))


def by_dims(shape, groups, within, dims):
    """Indices for (queries', keys') axes: groups in that order, their query heads in that, dims (a list a group)."""
    d = shape.head_dim
    queries = [(g * shape.sharing + q) * d + i for g in groups for q in within for i in dims[g]]
    return torch.tensor(queries), torch.tensor([g * d + i for g in groups for i in dims[g]])


def test_the_identity_is_exact(model, wiring, shape):
    assert torch.equal(moved(model, wiring, shape, {}), logits(model))


def test_selecting_everything_is_the_identity(model, wiring, shape):
    weights = extract(model)
    maps = scored_selection(weights, shape, shape, stream_statistics(model, SEQUENCES))
    for (block, axis), map_ in maps.axes.items():
        assert torch.equal(map_.index, torch.arange(shape.size(axis))), (block, axis)
    small = shrink(weights, wiring, maps)
    assert all(torch.equal(small[key], tensor) for key, tensor in weights.items())


def test_heads_and_their_groups_may_change_places(model, wiring, shape):
    groups, within = [*range(shape.groups)][::-1], [*range(1, shape.sharing), 0]
    queries, shared = by_dims(shape, groups, within, [range(shape.head_dim)] * shape.groups)
    assert same(moved(model, wiring, shape, {QK: queries, VO: queries, KEYS: shared, VALUES: shared}), logits(model))
    if shape.sharing > 1 and shape.groups > 1:  # query heads in a foreign group
        wrong = torch.arange(shape.size(QK)).roll(shape.head_dim)
        assert not same(moved(model, wiring, shape, {QK: wrong, VO: wrong}), logits(model), 1e-2)
    assert not same(moved(model, wiring, shape, {QK: torch.arange(shape.size(QK)).roll(1)}), logits(model), 1e-2)


def test_value_dims_may_change_places_inside_a_group(model, wiring, shape):
    dims = [torch.randperm(shape.head_dim, generator=torch.Generator().manual_seed(g)).tolist()
            for g in range(shape.groups)]
    queries, shared = by_dims(shape, range(shape.groups), range(shape.sharing), dims)
    assert same(moved(model, wiring, shape, {VO: queries, VALUES: shared}), logits(model))
    if wiring["V"].axes[0] != VO:
        assert not same(moved(model, wiring, shape, {VO: queries}), logits(model), 1e-2)


def test_mlp_units_may_change_places(model, wiring, shape):
    units = torch.randperm(shape.mlp, generator=torch.Generator().manual_seed(0))
    assert same(moved(model, wiring, shape, {MLP: units}), logits(model))


def test_query_dims_that_do_not_rotate_may_change_places_and_pairs_only_with_their_frequencies(model, wiring, shape):
    d, pairs, fixed = shape.head_dim, shape.rotary_dims // 2, range(shape.rotary_dims, shape.head_dim)

    def after(dims):
        queries, shared = by_dims(shape, range(shape.groups), range(shape.sharing), [dims] * shape.groups)
        return {QK: queries, KEYS: shared}

    assert same(moved(model, wiring, shape, after([*range(shape.rotary_dims), *reversed(fixed)])), logits(model))
    order = [*range(1, pairs), 0]
    turned = after([*order, *(pairs + j for j in order), *fixed])
    assert not same(moved(model, wiring, shape, turned), logits(model), 1e-2)
    maps = identity(shape)
    maps = Maps(maps.blocks, {**maps.axes, **{(None, axis): Selection(index) for axis, index in turned.items()}})
    other = assemble(shrink(extract(model), wiring, maps), model.config)
    tables = [module for module in other.modules() if hasattr(module, "inv_freq")]
    for table in tables:
        table.inv_freq = table.inv_freq[order]
    assert same(logits(other), logits(model)) and tables and len(turned[QK]) == shape.heads * d


def test_frequencies_are_the_models_own(model, shape):
    tables = [module.inv_freq for module in model.modules() if hasattr(module, "inv_freq")]
    assert tables and shape.rotary_dims >= 4
    for table in tables:
        assert torch.allclose(torch.tensor(shape.frequencies()), table, rtol=1e-6)


def test_without_queries_every_query_head_reads_the_mean_of_its_groups_values(model, wiring, shape):
    weights = extract(model)
    for name in {"Q", "Q_BIAS"} & {role.name for role in wiring.roles}:
        weights[LAST, name].zero_()
    silent = assemble(weights, model.config)
    reader = next(role for role in wiring.roles if role.name == "V")
    (stream, read), _ = seen(silent, [module_of(silent, reader, LAST), module_of(silent, wiring["O"], LAST)])
    values = stream[:, :6] @ weights[LAST, "V"].T + weights.get((LAST, "V_BIAS"), 0)  # 6: no longer than any window
    values = values.unflatten(-1, (shape.groups, 1, shape.head_dim)).expand(-1, -1, -1, shape.sharing, -1).flatten(2)
    mean = values.cumsum(1) / torch.arange(1, 7)[:, None]
    assert same(read[:, :6], mean, 1e-4)


# Conversions

TARGETS = {"half the width": {"layers": 2, "width": 16, "heads": 4, "mlp": 21},
           "half the heads and blocks": {"layers": 1, "width": 16, "heads": 2, "mlp": 20}}


@pytest.mark.parametrize("sizes", list(TARGETS))
def test_every_arm_builds_a_model_that_computes(model, shape, sizes, tmp_path):
    own = {"head_dim": 6 if sizes == "half the width" else 12} if shape.head_dim == 12 else {}
    groups = {"kv_heads": 1} if shape.kv_heads == 1 else {}
    target = config_like(model.config, **TARGETS[sizes], **own, **groups)
    donor = Donor(model, SEQUENCES, 30, "donor", tmp_path)
    for arm in ARMS.values():
        made, _ = build(arm, donor, target, 0)
        assert shape_of(made.config) == shape_of(target)
        assert logits(made).isfinite().all(), arm.name


# The page that tells how to add a wiring

def test_the_page_shows_a_table_that_passes(monkeypatch):
    """book/add_a_wiring.md: its table and its configs, as a newcomer would put them in place."""
    table, configs = re.findall(r"```python\n(.*?)```", (ROOT / "book" / "add_a_wiring.md").read_text("utf-8"), re.S)
    names = dict(vars(tables))
    exec(table, names)
    monkeypatch.setitem(TABLES, "stablelm", names["STABLELM"])
    for name, config in eval(f"{{{configs}}}", {"SIZES": SIZES, "StableLmConfig": StableLmConfig}).items():
        model = random_model(config)
        wiring, shape = wiring_of(config), shape_of(config)
        assert 0 < shape.rotary_dims < shape.head_dim and ((None, "EMB_OUT") in extract(model)) != ("tied" in name)
        monkeypatch.setitem(CONFIGS, name, config)
        test_a_model_rebuilt_from_its_own_weights_is_exact(name, torch.float32)
        for check in (test_axes_have_the_sizes_of_the_tensors_and_leave_none_out, test_read_ins_are_fronted_by_a_norm,
                      test_heads_and_their_groups_may_change_places, test_value_dims_may_change_places_inside_a_group,
                      test_mlp_units_may_change_places, test_selecting_everything_is_the_identity,
                      test_query_dims_that_do_not_rotate_may_change_places_and_pairs_only_with_their_frequencies,
                      test_without_queries_every_query_head_reads_the_mean_of_its_groups_values):
            check(model, wiring, shape)
        test_a_read_in_reads_what_its_norm_writes(model, wiring, shape)
        test_a_stage_reads_what_the_stages_before_it_left(model, wiring)
        test_read_outs_write_straight_to_the_residual_stream(model, wiring)
        test_every_matrix_of_a_block_has_the_lever_of_its_side(model, wiring)
        test_the_gate_is_the_matrix_behind_the_activation(model, wiring)
        test_a_scaled_read_in_scales_what_it_computes_as_if_its_norm_were_louder(model, wiring)
        test_frequencies_are_the_models_own(model, shape)

"""Cascaded compensation: donors that can be cut without loss are, every fit is the one by brute force, and what must
not matter does not."""

import dataclasses

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, Qwen2Config

from scaleop import arms
from scaleop.arms import CASCADES, Arm, arm_named, build
from scaleop.blocks import InMemory
from scaleop.blockwise import check_arm
from scaleop.cascade import cascade
from scaleop.cascade_settings import Cascade
from scaleop.cascade_streams import stream_basis, stream_moments
from scaleop.donor import Donor
from scaleop.experiment import ExperimentError
from scaleop.maps import Basis, Maps, Selection, scored_selection
from scaleop.regression import Gram
from scaleop.shards import Checkpoint
from scaleop.shrink import shrink
from scaleop.weights import assemble, extract, keys
from scaleop.wiring import (
    KEYS,
    MLP,
    QK,
    READ_IN,
    READ_OUT,
    RESIDUAL,
    VALUES,
    VO,
    VOCAB,
    config_like,
    shape_of,
    wiring_of,
)
from tests.conftest import neox_config, random_model

SEQUENCES = np.random.default_rng(0).integers(0, 61, (60, 12))  # 720 positions, far more than any fit has features
IDS = torch.as_tensor(np.random.default_rng(1).integers(0, 61, (3, 12)))
SIZES = {"vocab_size": 61, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 20,
         "max_position_embeddings": 64, "rms_norm_eps": 1e-9, "head_dim": 8}
EXACT = 1e-12  # of the mean diagonal: a ridge that hides no error


def small_config(name):
    """Configs of targets, of which donors are made below."""
    if name.startswith("neox"):
        config = neox_config(layers=2, width=16, heads=2, mlp=20, use_parallel_residual="parallel" in name,
                             layer_norm_eps=1e-9)
        config.tie_word_embeddings = "tied" in name
        return config
    kind = Qwen2Config if name.startswith("qwen2") else LlamaConfig
    sizes = {key: value for key, value in SIZES.items() if key != "head_dim" or kind is LlamaConfig}
    return kind(**sizes, num_key_value_heads=1 if "grouped" in name else 2, tie_word_embeddings="tied" in name)


FAMILIES = ["neox, parallel", "neox, sequential", "neox, parallel, tied", "llama", "llama, grouped",
            "llama, grouped, tied", "qwen2, grouped, tied"]


def large_config(small):
    """Twice of everything: blocks, width, heads (and groups), MLP units."""
    shape = shape_of(small)
    sizes = {"layers": 2 * shape.layers, "width": 2 * shape.width, "heads": 2 * shape.heads, "mlp": 2 * shape.mlp}
    groups = {} if shape.kv_heads is None else {"kv_heads": 2 * shape.kv_heads, "head_dim": shape.head_dim}
    return config_like(small, **sizes, **groups)


def places(shape, seed=0):
    """Where a small model's coordinates sit in one of twice its size, {axis: index}: residual features at even places,
    whole groups of heads and MLP units drawn at random."""
    draw = np.random.default_rng(seed)
    groups = draw.permutation(2 * shape.groups)[: shape.groups]
    units = draw.permutation(2 * shape.mlp)[: shape.mlp]
    query = (groups[:, None] * shape.sharing + np.arange(shape.sharing)).ravel()
    dims = np.arange(shape.head_dim)
    queries, shared = ((chosen[:, None] * shape.head_dim + dims).ravel() for chosen in (query, groups))
    return {RESIDUAL: 2 * np.arange(shape.width), QK: queries, VO: queries, KEYS: shared, VALUES: shared,
            MLP: units, VOCAB: np.arange(shape.vocab)}


def planted(small, duplicate, seed=0):
    """A model of twice the sizes of `small` that computes the same. Every second block writes nothing. Of the heads and
    units, those that are not `small`'s write nothing. Residual features at odd places are zero, or, with `duplicate`,
    copies of those before them, each reader taking an uneven share of both."""
    config, at = large_config(small.config), places(shape_of(small.config), seed)
    weights, shape = extract(small), shape_of(config)
    wiring, draw, large = wiring_of(config), torch.Generator().manual_seed(seed), {}
    for (b, name), role in keys(wiring, shape.layers):
        tensor = torch.randn([shape.size(axis) for axis in role.axes], generator=draw) * 0.3
        given = weights.get((b if b is None else b // 2, name))
        index = [torch.as_tensor(at[axis]) for axis in role.axes]
        if role.axes[0] == RESIDUAL and role.lever == READ_OUT:
            tensor.zero_()  # nothing is written but what follows
        if name in ("EMB_IN", "O_BIAS", "MLP_DOWN_BIAS"):
            tensor.zero_()
        if b is not None and b % 2 and (role.lever == READ_OUT or role.axes == (RESIDUAL,)):
            large[b, name] = tensor  # such a block's norms and readers are noise
            continue
        for shift in (0, 1):  # the features themselves, and their copies
            spots = [i + shift if axis == RESIDUAL else i for i, axis in zip(index, role.axes, strict=True)]
            if shift and not (duplicate and RESIDUAL in role.axes):
                continue
            share = (0.3, 0.7)[shift] if duplicate and role.lever == READ_IN else 1.0  # a tied head: its final norm
            tensor[torch.meshgrid(*spots, indexing="ij") if len(spots) > 1 else spots[0]] = given * share
        large[b, name] = tensor
    return assemble(large, config)


@torch.no_grad()
def logits(model):
    return model(input_ids=IDS).logits


def off(first, second):
    """Largest difference of two models' logits, softmax's blind spot aside, in units of the second's spread."""
    first, second = (each - each.mean(dim=-1, keepdim=True) for each in (logits(first), logits(second)))
    return ((first - second).abs().max() / second.std()).item()


def donor_of(model, folder, sequences=SEQUENCES):
    return Donor(model, sequences, len(sequences), "donor", folder)


def arm(**switches):
    return Arm("an arm", maps="scored", cascade=Cascade(**{"ridge": EXACT} | switches))


def with_residual(maps, map_):
    return Maps(maps.blocks, {**maps.axes, (None, RESIDUAL): map_})


# Donors that can be cut without loss

@pytest.mark.parametrize("name", FAMILIES)
def test_a_donor_of_copies_is_cut_without_loss(name, tmp_path):
    """Every residual feature twice, heads, groups and units that write nothing, blocks that do nothing."""
    small = random_model(small_config(name), seed=3)
    donor = donor_of(planted(small, duplicate=True), tmp_path)
    assert off(donor.model, small) < 1e-4
    shape = shape_of(small.config)
    maps = with_residual(donor.maps("scored", shape), Selection(torch.as_tensor(places(shape)[RESIDUAL])))
    assert maps.blocks == (0, 2)
    weights, solves = cascade(Cascade(ridge=EXACT, stream="selected"), InMemory(donor.weights, donor.config), maps,
                              small.config, SEQUENCES, tmp_path)
    made = assemble(weights, small.config)
    assert off(made, small) < 1e-4
    assert all(solve.r2 > 1 - 1e-6 for solve in solves.values())
    assert not any(tmp_path.glob("cascade-*"))  # nothing is left behind


def rotated(model):
    """The same function in another basis of the residual stream, for a model whose norms are RMS and without gains."""
    shape, wiring = shape_of(model.config), wiring_of(model.config)
    turn = Basis(torch.linalg.qr(torch.randn(shape.width, shape.width, dtype=torch.float64,
                                             generator=torch.Generator().manual_seed(5))).Q)
    weights = {}
    for (b, name), tensor in extract(model).items():
        for dim, axis in enumerate(wiring[name].axes):
            if axis == RESIDUAL and wiring[name].neutral is None:
                tensor = turn.apply(tensor, dim)
        weights[b, name] = tensor
    return assemble(weights, model.config)


@pytest.mark.parametrize("name", [name for name in FAMILIES if not name.startswith("neox")])
def test_a_rotated_stream_with_empty_directions_is_cut_without_loss(name, tmp_path):
    """Half of the stream's directions are empty, in a basis where no coordinate is: a selection cannot, PCA can."""
    small = random_model(small_config(name), seed=3)
    for path, parameter in small.named_parameters():
        if "norm" in path:
            parameter.data.fill_(1.0)
    straight = planted(small, duplicate=False)
    weights, wiring = extract(straight), wiring_of(straight.config)
    for (_, role), tensor in weights.items():
        if wiring[role].neutral is not None:
            tensor.fill_(1.0)
        if wiring[role].lever == READ_IN:  # RMS over twice the features, half of them empty; a tied head's is its norm
            tensor /= 2**0.5
    turned = rotated(assemble(weights, straight.config))
    assert off(turned, small) < 1e-4
    donor = donor_of(turned, tmp_path)
    made, facts = build(arm(stream="pca"), donor, small.config, 0)
    assert off(made, small) < 1e-4
    assert off(build(arm(stream="pca_raw"), donor, small.config, 0)[0], small) < 1e-4
    assert off(build(arm(stream="selected"), donor, small.config, 0)[0], small) > 1e-2
    assert off(build(arm(stream="rotation"), donor, small.config, 0)[0], small) > 1e-2
    assert facts["solves"]["head"]["positions"] == SEQUENCES.size
    assert ("EMB_OUT" in {role for _, role in extract(made)}) != ("tied" in name)


# Every fit, by brute force

MODULES = {
    "gpt_neox": ("gpt_neox.layers.{}", "input_layernorm", "post_attention_layernorm", "attention.dense",
                 "mlp.dense_4h_to_h"),
    "llama": ("model.layers.{}", "input_layernorm", "post_attention_layernorm", "self_attn.o_proj", "mlp.down_proj"),
}


def seen(model):
    """Everything of a forward pass that a fit may ask for, stacked over positions, fp64: {(block, what)}; ("end",
    what) behind the last block."""
    found, family = {}, MODULES[model.config.model_type]
    block, *inside = family

    def note(key):
        return lambda _, given, output: found.update({key: (given[0].flatten(0, -2).double(),
                                                            output.flatten(0, -2).double())})
    layers = model.config.num_hidden_layers
    paths = dict(zip(("LN_ATTN", "LN_MLP", "O", "MLP_DOWN"), inside, strict=True))
    handles = [model.get_submodule(f"{block.format(b)}.{path}").register_forward_hook(note((b, what)))
               for b in range(layers) for what, path in paths.items()]
    last = "gpt_neox.final_layer_norm" if "gpt_neox" in model.config.model_type else "model.norm"
    handles.append(model.get_submodule(last).register_forward_hook(note((layers, "LN_ATTN"))))
    with torch.no_grad():
        model(input_ids=torch.as_tensor(SEQUENCES))
    for handle in handles:
        handle.remove()
    return found


def regress(x, y, intercept, times=1e-3):
    """Ridge of y on x from stacked rows: (matrix, offset), lambda 1e-3 times the mean diagonal."""
    mean = x.mean(dim=0) if intercept else torch.zeros(x.shape[1], dtype=x.dtype)
    about = x - mean
    damping = times * about.square().sum() / x.shape[1]
    design = torch.cat([about, damping.sqrt() * torch.eye(x.shape[1], dtype=x.dtype)])
    level = y.mean(dim=0) if intercept else torch.zeros(y.shape[1], dtype=y.dtype)
    aims = torch.cat([y - level, torch.zeros(x.shape[1], y.shape[1], dtype=y.dtype)])
    matrix = torch.linalg.lstsq(design, aims, driver="gelsd").solution.T
    return matrix, level - matrix @ mean


def by_brute_force(settings, donor, maps, target):
    """The same from whole forward passes of whole models and stacked activations; pre-activations are regressed
    themselves, role by role, and the head on the donor's final norm."""
    given, wiring = extract(donor), wiring_of(target)
    neutral = isinstance(maps(None, RESIDUAL), Basis)
    small, theirs = shrink(given, wiring, maps, neutral), seen(donor)

    def project(stream):
        return maps(None, RESIDUAL).apply(stream, 1)

    parallel = getattr(target, "use_parallel_residual", False)
    stages = [("LN_ATTN", "LN_MLP")] if parallel else [("LN_ATTN",), ("LN_MLP",)]
    readers = {"LN_ATTN": ("Q", "K", "V"), "LN_MLP": ("MLP_GATE", "MLP_UP")}
    writer = {"LN_ATTN": "O", "LN_MLP": "MLP_DOWN"}
    for b, block in enumerate(maps.blocks):
        following = (*maps.blocks, donor.config.num_hidden_layers)[b + 1]
        for norms in stages:
            if settings.read_ins:
                ours = seen(assemble(small, target))
                for norm in norms:
                    for role in readers[norm]:
                        if (b, role) not in small:
                            continue
                        bias = f"{role}_BIAS"
                        y = theirs[block, norm][1] @ given[block, role].double().T + given.get((block, bias), 0)
                        matrix, offset = regress(ours[b, norm][1], maps(b, wiring[role].axes[0]).apply(y, 1),
                                                 (b, bias) in small)
                        small[b, role] = matrix.float()
                        if (b, bias) in small:
                            small[b, bias] = offset.float()
            if settings.read_outs:
                ours, roles = seen(assemble(small, target)), [writer[norm] for norm in norms]
                here, there = (block, norms[0]), (following, "LN_ATTN") if norms[-1] == "LN_MLP" else (block, "LN_MLP")
                start = ours[b, norms[0]][0] if settings.correct else project(theirs[here][0])
                x = torch.cat([ours[b, role][0] for role in roles], dim=1)
                biased = (b, f"{roles[0]}_BIAS") in small
                matrix, offset = regress(x, project(theirs[there][0]) - start, biased)
                for role, part in zip(roles, matrix.split([len(small[b, role][0]) for role in roles], 1), strict=True):
                    small[b, role] = part.float()
                    if biased:
                        small[b, f"{role}_BIAS"] = torch.zeros(len(offset))
                if biased:
                    small[b, f"{roles[-1]}_BIAS"] = offset.float()
    if settings.head:
        end = seen(assemble(small, target))[len(maps.blocks), "LN_ATTN"][1]
        table = given[None, "EMB_OUT"].double()
        small[None, "EMB_OUT"] = regress(end, theirs[donor.config.num_hidden_layers, "LN_ATTN"][1] @ table.T,
                                         False)[0].float()
    return small


@pytest.mark.parametrize(("name", "switches"), [
    ("neox, parallel", {}),
    ("neox, parallel", {"stream": "selected", "correct": False}),
    ("neox, sequential", {"stream": "selected"}),
    ("neox, sequential", {"correct": False, "head": False}),
    ("llama, grouped", {"stream": "selected", "read_ins": False}),
    ("llama, grouped", {}),
    ("llama, grouped", {"correct": False}),
])
@pytest.mark.parametrize("layers", [2, 4])
def test_every_fit_is_the_one_by_brute_force(name, switches, layers, tmp_path):
    """A random donor, nothing of which is compressible; block by block against whole models and stacked rows."""
    target = small_config(name)
    sizes = shape_of(large_config(target)).sizes() | {"layers": layers}
    donor = random_model(config_like(target, **sizes), seed=layers)
    settings, source = Cascade(**switches), InMemory(extract(donor), donor.config)
    maps = donor_of(donor, tmp_path).maps("scored", shape_of(target))
    if settings.stream == "pca":
        maps = with_residual(maps, stream_basis("pca", stream_moments(source, SEQUENCES, tmp_path), 32, 16))
    found, _ = cascade(settings, source, maps, target, SEQUENCES, tmp_path, batch=7)
    expected = by_brute_force(settings, donor, maps, target)
    assert found.keys() == expected.keys()
    for key, tensor in found.items():
        scale = expected[key].abs().max()
        assert torch.allclose(tensor, expected[key], rtol=1e-3, atol=1e-3 * scale), key


def test_directions_of_the_stream_are_those_of_stacked_streams(tmp_path):
    donor = random_model(large_config(small_config("llama")), seed=2)
    found = stream_moments(InMemory(extract(donor), donor.config), SEQUENCES, tmp_path, batch=7)
    with torch.no_grad():
        streams = [*donor.model(torch.as_tensor(SEQUENCES), output_hidden_states=True).hidden_states[:-1],
                   seen(donor)[4, "LN_ATTN"][0]]  # transformers' last one is normed
    grams = [rows.T @ rows for rows in (stream.flatten(0, -2).double() for stream in streams)]
    assert len(grams) == 5
    assert torch.allclose(found["pca_raw"], sum(grams), rtol=1e-5)
    assert torch.allclose(found["pca"], sum(gram / gram.trace() for gram in grams), rtol=1e-5, atol=1e-9)
    for kind in ("pca", "pca_raw", "rotation"):
        basis = stream_basis(kind, found, 32, 16).matrix
        assert torch.allclose(basis @ basis.T, torch.eye(16, dtype=torch.float64), atol=1e-10)
    kept = [torch.trace(stream_basis(kind, found, 32, 16).matrix @ found["pca"] @ stream_basis(
        kind, found, 32, 16).matrix.T).item() for kind in ("pca", "rotation")]
    assert kept[0] == pytest.approx(np.linalg.eigvalsh(found["pca"].numpy())[-16:].sum()) and kept[0] > kept[1]


# What must not matter

@pytest.fixture(scope="module")
def incompressible():
    """A random Llama in groups, four blocks, and the config of half of it."""
    target = small_config("llama, grouped")
    return random_model(large_config(target), seed=1), target


def test_a_donor_on_disk_and_a_stream_on_disk_change_no_bit(incompressible, tmp_path):
    model, target = incompressible
    model.save_pretrained(tmp_path / "model")
    maps = donor_of(model, tmp_path).maps("scored", shape_of(target))
    for settings in (Cascade(stream="selected"), Cascade(stream="selected", correct=False)):
        found = [cascade(settings, source, maps, target, SEQUENCES, tmp_path / "work", spill=spill)[0]
                 for source, spill in ((InMemory(extract(model), model.config), 10**9),
                                       (Checkpoint(tmp_path / "model"), 0))]
        assert all(torch.equal(tensor, found[1][key]) for key, tensor in found[0].items())
        assert not any((tmp_path / "work").iterdir())


def test_the_order_of_the_calibration_text_does_not_matter(incompressible, tmp_path):
    model, target = incompressible
    order = np.random.default_rng(4).permutation(len(SEQUENCES))
    first, second = (build(arm(ridge=1e-3), donor_of(model, tmp_path / str(i), sequences), target, 0)[0]
                     for i, sequences in enumerate((SEQUENCES, SEQUENCES[order])))
    assert off(first, second) < 1e-6


def permuted(model, seed=6):
    """The donor with its groups of heads and its MLP units in another order: the same function."""
    shape, draw, axes = shape_of(model.config), np.random.default_rng(seed), {}
    for b in range(shape.layers):
        groups, dims = draw.permutation(shape.groups), np.arange(shape.head_dim)
        query = (groups[:, None] * shape.sharing + draw.permutation(shape.sharing)).ravel()
        queries, shared = ((chosen[:, None] * shape.head_dim + dims).ravel() for chosen in (query, groups))
        axes |= {(b, axis): Selection(torch.as_tensor(index)) for axis, index in (
            (QK, queries), (VO, queries), (KEYS, shared), (VALUES, shared), (MLP, draw.permutation(shape.mlp)))}
    axes |= {(None, axis): Selection(torch.arange(shape.size(axis))) for axis in (RESIDUAL, VOCAB)}
    return assemble(shrink(extract(model), wiring_of(model.config), Maps(tuple(range(shape.layers)), axes)),
                    model.config)


@pytest.mark.parametrize("name", ["neox, parallel", "llama, grouped"])
def test_the_donors_order_of_heads_and_units_does_not_matter(name, tmp_path):
    target = small_config(name)
    model = random_model(large_config(target), seed=1)
    other = permuted(model)
    assert off(other, model) < 1e-4
    kept = [scored_selection(extract(each), shape_of(each.config), shape_of(target),
                             donor_of(each, tmp_path / str(i)).statistics)(1, MLP).index
            for i, each in enumerate((model, other))]
    assert not torch.equal(*kept)
    first, second = (build(arm(ridge=1e-3), donor_of(each, tmp_path / str(i)), target, 0)[0]
                     for i, each in enumerate((model, other)))
    assert off(first, second) < 1e-3


# What is said

def test_too_few_tokens_are_warned_of_and_regularised(incompressible, tmp_path):
    model, target = incompressible
    donor = donor_of(model, tmp_path, SEQUENCES[:2, :8])  # 16 tokens; MLP_DOWN reads 20 units
    with pytest.warns(UserWarning, match="a cascade on 16 calibration tokens fits matrices of up to 20 inputs"):
        made, facts = build(arm(ridge=1e-3), donor, target, 0)
    assert logits(made).isfinite().all()
    assert all(np.isfinite(solve["condition"]) and solve["ridge"] > 0 for solve in facts["solves"].values()
               if solve["rule"] != "gain")


def test_activations_that_are_not_finite_are_refused_with_block_and_role(incompressible, tmp_path):
    model, target = incompressible
    weights = extract(model)
    weights[2, "LN_MLP_GAIN"][5] = float("inf")
    maps = donor_of(model, tmp_path).maps("scored", shape_of(target))
    assert maps.blocks == (0, 2)
    with pytest.raises(FloatingPointError, match=r"1\.MLP_GATE: activations are not finite on the calibration tokens"):
        cascade(Cascade(stream="selected"), InMemory(weights, model.config), maps, target, SEQUENCES, tmp_path)
    with pytest.raises(FloatingPointError, match="stream behind block 2 is not finite"):
        stream_moments(InMemory(weights, model.config), SEQUENCES, tmp_path)


def test_facts_hold_every_fit_as_compensation_does(incompressible, tmp_path):
    model, target = incompressible
    made, facts = build(CASCADES["cascade"], donor_of(model, tmp_path), target, 0)
    roles = ("Q", "K", "V", "O", "MLP_GATE", "MLP_UP", "MLP_DOWN")
    assert set(facts["solves"]) == {f"{b}.{role}" for b in range(2) for role in roles} | {"head"}
    compensated = build(arm_named("hybrid"), donor_of(model, tmp_path), target, 0)[1]["solves"]["0.O"]
    assert set(compensated) <= set(facts["solves"]["0.O"])
    assert facts["solves"]["0.O"]["r2"] < 1 and facts["blocks"] == (0, 2) and "kept" in facts
    selected = build(CASCADES["cascade_sel"], donor_of(model, tmp_path), target, 0)[1]
    assert facts["kept"] != selected["kept"]  # the blended stream has no index to be in it
    assert made.num_parameters() == build(arm_named("subclone"), donor_of(model, tmp_path), target, 0)[
        0].num_parameters()


# The table of arms

@pytest.mark.parametrize(("name", "base", "roles"), [
    ("cascade_read_outs", "subclone", {"O", "MLP_DOWN", "O_BIAS", "MLP_DOWN_BIAS"}),
    ("cascade_correct", "cascade_read_outs", {"O", "MLP_DOWN", "MLP_DOWN_BIAS"}),  # written at once: one bias
    ("cascade_sel", "cascade_read_ins", {"EMB_OUT"}),
    ("cascade_no_head", "cascade", {"EMB_OUT"}),
])
def test_a_switch_changes_what_its_name_says_and_nothing_else(donor, target, name, base, roles):
    first, second = (extract(build(arm_named(each), donor, target, 0)[0]) for each in (name, base))
    assert {role for (b, role), tensor in first.items() if not torch.equal(tensor, second[b, role])} == roles


def test_read_ins_that_are_not_fitted_are_the_selections_and_norms_are_neutral_behind_a_basis(donor, target):
    plain, sel, whole, none = (extract(build(arm_named(each), donor, target, 0)[0]) for each in (
        "subclone", "cascade_sel", "cascade", "cascade_no_read_outs"))
    for (b, role), tensor in whole.items():
        if role.startswith("LN_"):
            assert (tensor == (1 if role.endswith("GAIN") else 0)).all()
            assert torch.equal(sel[b, role], plain[b, role])
    basis = stream_basis("pca", donor.stream_moments, 32, 16)
    kept = donor.maps("scored", shape_of(target))(1, MLP).index
    expected = basis.apply(donor.weights[1, "MLP_DOWN"][:, kept], 0)
    assert torch.allclose(none[1, "MLP_DOWN"], expected, atol=1e-6)


def test_the_ladder_is_one_switch_at_a_time():
    rungs = [arm_named(name).cascade for name, _ in arms._LADDER]
    off_ = Cascade("selected", read_ins=False, read_outs=False, correct=False, head=False)
    for first, second in zip([off_, *rungs], rungs, strict=False):
        changed = [field.name for field in dataclasses.fields(Cascade)
                   if getattr(first, field.name) != getattr(second, field.name)]
        assert len(changed) == 1
    assert rungs[-1] == Cascade() and rungs[-2] == Cascade(stream="selected")


@pytest.mark.parametrize(("family", "name"), [
    ("llama, grouped", "cascade_blend_qk"), ("neox, sequential", "cascade_blend_vo"), ("llama", "cascade_blend_mlp"),
    ("llama, grouped, tied", "cascade_spectrum"), ("neox, parallel, tied", "cascade_holdout")])
def test_further_arms_build_models_that_compute(family, name, tmp_path):
    """Those that blend an inner axis too, whose read-ins aim at blended pre-activations, and the other ridge rules."""
    target = small_config(family)
    donor = donor_of(random_model(large_config(target), seed=1), tmp_path, SEQUENCES[:20])
    made, facts = build(arm_named(name), donor, target, 0)
    assert shape_of(made.config) == shape_of(target) and logits(made).isfinite().all()
    assert {solve["rule"] for solve in facts["solves"].values()} - {"gain"} == {CASCADES[name].cascade.ridge}
    assert "kept" in facts or "blend" in name


def test_what_does_not_go_together_is_refused():
    with pytest.raises(ValueError, match="a cascade fits what compensate"):
        Arm("odd", maps="scored", cascade=Cascade(), compensate=True)
    with pytest.raises(ValueError, match="no residual map; there are: selected, pca"):
        Cascade(stream="dct")
    with pytest.raises(ValueError, match="ridge = 'clamp'"):
        Cascade(ridge="clamp")
    with pytest.raises(ValueError, match="set read_outs=True too"):
        Cascade(read_outs=False)
    with pytest.raises(ExperimentError, match=r"take scaleop\.arms\.build"):
        check_arm(arm_named("cascade"))


def test_keys_hold_what_is_not_at_its_default():
    assert "cascade" not in arm_named("hybrid_rs").facts()
    assert arm_named("cascade").facts() == {"name": "cascade", "maps": "scored", "cascade": {}}
    assert arm_named("cascade_sel").facts()["cascade"] == {"stream": "selected"}
    assert arm_named("cascade").reads_text and not arm_named("cascade").needs_inputs


def test_a_ridge_chosen_on_the_held_out_sequences_is_not_judged_by_them():
    gram = Gram(2, 1, 10)
    x = torch.randn(10, 3, 2, generator=torch.Generator().manual_seed(0))
    gram.add(0, x, x.sum(dim=-1, keepdim=True))
    assert gram.r2("mean_diagonal", False) > 0.99 and gram.r2("holdout", False) is None


@pytest.mark.parametrize("changes", [{"maps": None}, {"ridge": "clamp"}, {"own_inputs": True, "compensate": True}])
def test_an_arm_that_contradicts_its_cascade_is_refused(changes):
    with pytest.raises(ValueError, match="arm 'x': a cascade"):
        Arm("x", **{"maps": "scored", "cascade": Cascade(), **changes})

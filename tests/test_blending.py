"""Mixed maps: exactly one axis is swapped; norms under four treatments; bases by Gram matrix and by full SVD."""

import numpy as np
import pytest
import torch

from scaleop.arms import ARMS, BLENDED, BLENDS, arm_named, build
from scaleop.blending import gram_against_svd, mix, shared_stacks, subspace_sine, treatments
from scaleop.maps import Basis, Maps, Selection, dense_bases, scored_selection
from scaleop.shrink import shrink
from scaleop.weights import extract
from scaleop.wiring import GPT_NEOX, MLP, QK, RESIDUAL, VO, VOCAB, shape_of
from tests.conftest import neox_config, random_model

TOUCHED = {  # roles with the axis among theirs
    axis: {role.name for role in GPT_NEOX.roles if axis in role.axes} for axis in (RESIDUAL, QK, VO, MLP)}


@pytest.fixture(scope="module")
def corners(donor, target):
    """(selection, bases), from the functions below the arms."""
    ingredients = (donor.weights, donor.shape, shape_of(target), donor.statistics)
    return scored_selection(*ingredients), dense_bases(*ingredients)


def same(first, second):
    return type(first) is type(second) and all(torch.equal(a, b) for a, b in
                                               zip(vars(first).values(), vars(second).values(), strict=True))


@pytest.mark.parametrize("axis", [RESIDUAL, QK, VO, MLP])
def test_mixing_swaps_exactly_one_axis(corners, axis):
    for base, other in (corners, corners[::-1]):
        mixed = mix(base, other, [axis])
        for block in (0, 1):
            for each in (RESIDUAL, QK, VO, MLP, VOCAB):
                assert same(mixed(block, each), (other if each == axis else base)(block, each)), (block, each)
        assert mixed.blocks == base.blocks


def test_a_shared_map_gives_way_to_per_block_ones_and_back(corners):
    selection, _ = corners
    shared = Maps(selection.blocks, {**{k: m for k, m in selection.axes.items() if k[1] != MLP},
                                     (None, MLP): Selection(torch.arange(20))})
    assert mix(shared, selection, [MLP])(1, MLP) is selection(1, MLP)
    assert mix(selection, shared, [MLP])(1, MLP).index.tolist() == list(range(20))


def test_mixing_refuses_unknown_axes_and_other_blocks(corners):
    selection, bases = corners
    with pytest.raises(ValueError, match="axis 'heads' is not mapped; there are: mlp, qk, residual, vo, vocab"):
        mix(selection, bases, ["heads"])
    with pytest.raises(ValueError, match="different blocks"):
        mix(selection, Maps((0, 0), bases.axes), [MLP])


@pytest.mark.parametrize("axis", BLENDED)
def test_a_swapped_arm_differs_from_its_corner_on_that_axis_only(donor, target, axis):
    """With norms set aside (the residual swap makes them neutral), only tensors with the axis may change."""
    for name, corner in (("subclone_blend", "subclone"), ("projection_keep", "projection")):
        swapped, base = (extract(build(arm_named(arm), donor, target, 0)[0]) for arm in (f"{name}_{axis}", corner))
        for key, tensor in swapped.items():
            if GPT_NEOX[key[1]].neutral is None:
                assert torch.equal(tensor, base[key]) != (key[1] in TOUCHED[axis]), (name, key)


def test_norms_are_neutral_wherever_the_stream_is_blended():
    assert len(BLENDS) == 9 and not BLENDS.keys() & ARMS.keys()
    for arm in BLENDS.values():
        blended = not isinstance(arm.maps, str) and arm.maps[RESIDUAL] == "dense"
        assert arm.neutral_norms == (blended or arm.name == "subclone_neutral") and not arm.in_paper


def test_maps_are_chosen_once(donor, target, corners):
    found = donor.maps("dense", shape_of(target))
    assert donor.maps("dense", shape_of(target)) is found and same(found(1, QK), corners[1](1, QK))
    mixed = donor.maps({"residual": "scored", "qk": "dense", "vo": "scored", "mlp": "scored"}, shape_of(target))
    assert isinstance(mixed(0, QK), Basis) and isinstance(mixed(0, VO), Selection)


def test_treatments_share_every_matrix_and_differ_in_norms(donor, corners):
    projected, selected = (shrink(donor.weights, GPT_NEOX, maps) for maps in reversed(corners))
    trained = extract(random_model(neox_config(layers=2, width=16, heads=2, mlp=20), seed=3))
    found = treatments(projected, selected, trained, GPT_NEOX)
    sources = {"own": trained, "projected": projected, "selected": selected}
    assert list(found) == ["own", "projected", "selected", "neutral"]
    for name, weights in found.items():
        for key, tensor in weights.items():
            neutral = GPT_NEOX[key[1]].neutral
            if neutral is None:
                assert torch.equal(tensor, projected[key])
            elif name == "neutral":
                assert (tensor == neutral).all()
            else:
                assert torch.equal(tensor, sources[name][key])
    assert list(treatments(projected, selected, None, GPT_NEOX)) == ["projected", "selected", "neutral"]


def test_the_sine_between_subspaces_is_scipys():
    from scipy.linalg import subspace_angles

    first, second = (np.linalg.qr(np.random.default_rng(seed).normal(size=(9, 4)))[0] for seed in (0, 1))
    found = subspace_sine(torch.from_numpy(first.T), torch.from_numpy(second.T))
    assert found == pytest.approx(np.sin(subspace_angles(first, second).max()), rel=1e-9)
    turned = torch.linalg.qr(torch.randn(4, 4, dtype=torch.float64))[0] @ torch.from_numpy(first.T)
    assert subspace_sine(torch.from_numpy(first.T), turned) < 1e-14


def test_gram_and_svd_agree_on_the_shared_stacks(donor):
    weights = {role: donor.weights[1, role] for role in ("Q", "K", "O", "MLP_UP", "MLP_DOWN")}
    for axis, k in ((QK, 16), (VO, 16), (MLP, 20)):
        matrix = shared_stacks(weights)[axis]
        found = gram_against_svd(matrix, k)
        values = np.linalg.svd(matrix.double().numpy(), compute_uv=False)
        assert found["sine"] < 1e-9
        assert found["gap"] == pytest.approx(values[k - 1] / values[k])
        assert found["energy"] == pytest.approx((values[:k] ** 2).sum() / (values**2).sum())
    assert gram_against_svd(torch.eye(4)[:, :2] + 0.1, 2)["gap"] is None  # nothing is dropped

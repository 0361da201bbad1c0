"""Arms as data: what each line of the table builds, checked against the levers written out."""

import inspect
import math

import pytest
import torch

from scaleop import arms, donor_moments
from scaleop.arms import ARMS, arm_named, build
from scaleop.donor import Donor
from scaleop.experiment import ExperimentError
from scaleop.maps import scored_selection
from scaleop.shrink import compensate, shrink
from scaleop.weights import extract
from scaleop.wiring import GPT_NEOX, MLP, RESIDUAL, VO, config_like, shape_of
from tests.conftest import neox_config

READ_INS, READ_OUTS = ("Q", "K", "V", "MLP_UP", "EMB_OUT"), ("O", "MLP_DOWN")


@pytest.fixture(scope="module")
def plain(donor, target):
    """The bare selection, from the functions below the arms table."""
    maps = scored_selection(donor.weights, donor.shape, shape_of(target), donor.statistics)
    return maps, shrink(donor.weights, GPT_NEOX, maps)


def weights_of(name, donor, target, seed=0):
    return extract(build(arm_named(name), donor, target, seed)[0])


def test_subclone_is_the_bare_selection(donor, target, plain):
    for key, tensor in weights_of("subclone", donor, target).items():
        assert torch.equal(tensor, plain[1][key]), key


@pytest.mark.parametrize(("name", "scaled"), [("subclone_iso", READ_OUTS), ("subclone_rs", READ_INS + READ_OUTS)])
def test_rescaled_arms_differ_from_subclone_by_one_factor_a_matrix(donor, target, plain, name, scaled):
    factor = {"MLP_DOWN": math.sqrt(48 / 20)}
    for (block, role), tensor in weights_of(name, donor, target).items():
        expected = plain[1][block, role] * (factor.get(role, math.sqrt(2)) if role in scaled else 1)
        assert torch.allclose(tensor, expected, rtol=1e-6), (block, role)


def test_hybrid_rs_replaces_the_read_out_scale_by_the_fit(donor, target, plain):
    maps, selected = plain
    moments, weights = donor.moments(maps), weights_of("hybrid_rs", donor, target)
    rows = maps(None, RESIDUAL).index
    for block in range(2):
        for role, axis in (("O", VO), ("MLP_DOWN", MLP)):
            fitted, _ = compensate(donor.weights[block, role][rows], moments[block, role], maps(block, axis).index)
            assert torch.allclose(weights[block, role], fitted)
        for role in ("Q", "K", "V", "MLP_UP"):
            assert torch.allclose(weights[block, role], selected[block, role] * math.sqrt(2))
    assert torch.allclose(weights[None, "EMB_OUT"], selected[None, "EMB_OUT"] * math.sqrt(2))
    for untouched in ("EMB_IN", "LN_FINAL_GAIN", "LN_FINAL_BIAS"):
        assert torch.equal(weights[None, untouched], selected[None, untouched])


def test_hybrid_and_hybrid_rs_share_their_read_outs(donor, target):
    hybrid, stacked = (weights_of(name, donor, target) for name in ("hybrid", "hybrid_rs"))
    assert all(torch.equal(hybrid[b, role], stacked[b, role]) for b in range(2) for role in READ_OUTS)


def test_projection_has_neutral_norms_and_blended_weights(donor, target):
    weights = weights_of("projection", donor, target)
    for (_, role), tensor in weights.items():
        if role.startswith("LN_"):
            assert (tensor == (1 if role.endswith("GAIN") else 0)).all()
    assert weights[1, "MLP_UP_BIAS"].abs().sum() > 0  # projected, not zeroed


def test_random_is_transformers_own_rule_and_follows_the_seed(donor, target):
    first, again, other = (weights_of("random", donor, target, seed) for seed in (0, 0, 1))
    assert torch.equal(first[0, "Q"], again[0, "Q"]) and not torch.equal(first[0, "Q"], other[0, "Q"])
    assert first[1, "O"].std().item() == pytest.approx(0.02, rel=0.15)
    pythia = weights_of("random_pythia", donor, target)
    assert pythia[1, "O"].std().item() == pytest.approx(2 / (2 * math.sqrt(16)), rel=0.15)


def test_converted_arms_do_not_depend_on_the_seed(donor, target):
    for name in ("subclone", "projection", "hybrid_rs", "stride"):
        first, second = (weights_of(name, donor, target, seed) for seed in (0, 7))
        assert all(torch.equal(first[key], second[key]) for key in first), name


def test_stride_uses_no_activations(donor, target, monkeypatch):
    monkeypatch.setattr("scaleop.donor.stream_statistics", lambda *_: pytest.fail("stride read activations"))
    fresh = Donor(donor.model, donor.frozen, 20, "another", donor.folder / "fresh")
    build(ARMS["stride"], fresh, target, 0)


def test_statistics_are_gathered_once_and_read_back_exactly(donor, target, monkeypatch):
    build(ARMS["hybrid"], donor, target, 0)
    for name in ("stream_statistics", "second_moments"):
        monkeypatch.setattr(f"scaleop.donor.{name}", lambda *_: pytest.fail("gathered twice"))
    again = Donor(donor.model, donor.frozen, 20, "a-donor", donor.folder)
    assert torch.equal(again.statistics.variance, donor.statistics.variance)
    build(ARMS["hybrid"], again, target, 0)
    with pytest.raises(pytest.fail.Exception, match="twice"):
        _ = Donor(donor.model, donor.frozen, 20, "other weights", donor.folder).statistics


def test_a_donors_moments_are_those_of_its_own_frozen_set(donor, target, tmp_path, monkeypatch):
    """`donor_moments.measured` keeps what it found by the set's shape too, and refuses two stretches that overlap."""
    monkeypatch.setattr(donor_moments, "STORE", tmp_path)
    maps = donor.maps("scored", shape_of(target))
    with pytest.raises(ValueError, match="sequences = 16 need 32 frozen ones, but there are 30: measure fewer"):
        donor_moments.measured(donor, maps, sequences=16)
    short = Donor(donor.model, donor.frozen[:, :5], 20, donor.key, donor.folder)
    rows = [donor_moments.measured(each, maps, sequences=12) for each in (donor, short)]
    assert [{row["positions"] for row in found} for found in rows] == [{120}, {60}]


def test_no_arm_can_receive_a_trained_target():
    """`build` takes a config for the target; nothing it is given holds target weights."""
    assert list(inspect.signature(build).parameters) == ["arm", "donor", "target", "seed"]
    assert not hasattr(config_like(neox_config(), layers=2, width=16, heads=2, mlp=20), "state_dict")


def test_an_unknown_arm_is_refused_with_the_nearest_name():
    with pytest.raises(ExperimentError, match="did you mean 'hybrid_rs'"):
        arm_named("hybrid_sr")


@pytest.mark.parametrize(("levers", "said"), [
    ({"compensate": True, "bias": True, "ridge": "holdout"}, "'holdout' would choose lambda on uncentred ones"),
    ({"own_inputs": True}, "set compensate=True too"),
    ({"own_inputs": True, "compensate": True, "bias": True}, "own inputs has no bias"),
])
def test_levers_that_do_not_go_together_are_refused(levers, said):
    with pytest.raises(ValueError, match=f"arm 'odd': .*{said}"):
        arms.Arm("odd", maps="scored", **levers)


def changed(name, base, donor, target):
    """Roles whose weights differ between two arms."""
    first, second = weights_of(name, donor, target), weights_of(base, donor, target)
    return {role for (block, role), tensor in first.items() if not torch.equal(tensor, second[block, role])}


@pytest.mark.parametrize(("name", "base", "roles"), [
    ("subclone_bias", "subclone", {"O_BIAS", "MLP_DOWN_BIAS"}),
    ("hybrid_bias", "hybrid", {"O_BIAS", "MLP_DOWN_BIAS", "O", "MLP_DOWN"}),
    ("hybrid_rs_bias", "hybrid_rs", {"O_BIAS", "MLP_DOWN_BIAS", "O", "MLP_DOWN"}),
    ("hybrid_rs_spectrum", "hybrid_rs", {"O", "MLP_DOWN"}),
    ("hybrid_rs_holdout", "hybrid_rs", {"O", "MLP_DOWN"}),
    ("hybrid_holdout", "hybrid", {"O", "MLP_DOWN"}),
    ("hybrid_rs_own", "hybrid_rs", {"O", "MLP_DOWN"}),
    ("hybrid_rs_distill", "hybrid_rs", set()),  # the start is the same; the teacher only speaks in training
    ("random_distill", "random", set()),
])
def test_a_variant_changes_what_its_name_says_and_nothing_else(donor, target, name, base, roles):
    assert changed(name, base, donor, target) == roles


def test_the_mean_output_of_every_read_out_is_the_donors_once_biases_absorb_it(donor, target, plain):
    """On the donor's own inputs: mean of M'x_K + b' equals mean of Mx + b, with the fit and without."""
    maps, rows = plain[0], plain[0](None, RESIDUAL).index
    for name in ("subclone_bias", "hybrid_bias"):
        weights = weights_of(name, donor, target)
        for block in range(2):
            for role, axis in (("O", VO), ("MLP_DOWN", MLP)):
                mean = donor.input_statistics[block, role][0]
                theirs = (donor.weights[block, role].double() @ mean + donor.weights[block, f"{role}_BIAS"])[rows]
                kept = mean[maps(block, axis).index]
                ours = weights[block, role].double() @ kept + weights[block, f"{role}_BIAS"]
                assert torch.allclose(ours, theirs, atol=1e-5)


def test_a_key_holds_only_what_is_not_at_its_default():
    assert ARMS["hybrid_rs"].facts() == {"name": "hybrid_rs", "maps": "scored", "compensate": True,
                                         "rescale": ("read_in",)}
    assert arm_named("hybrid_rs_holdout").facts()["ridge"] == "holdout"
    assert arm_named("hybrid_rs_distill").facts()["distill"] == {"temperature": 2.0, "alpha": 0.5}
    assert ARMS["stride"].facts() == {"name": "stride", "maps": "uniform"}

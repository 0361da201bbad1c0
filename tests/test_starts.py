"""Starts that no race asks for, on a tiny tied Llama: errors by brute force, and models that the arms build."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from scaleop import starts
from scaleop.arms import ARMS, arm_named, build
from scaleop.donor import Donor
from scaleop.evaluate import perplexity
from scaleop.maps import Selection
from scaleop.ridge import RULES
from scaleop.settings import Evaluation, TargetShape
from scaleop.shrink import kept_inputs
from scaleop.wiring import RESIDUAL, config_like, shape_of
from tests.conftest import random_ids, random_model
from tests.families import CONFIGS

SIZES = {"layers": 2, "width": 16, "heads": 2, "mlp": 20}


def race_of(config, folder, sequences=60, moments=40):
    """What `starts` needs of a race."""
    donor = Donor(random_model(config), np.random.default_rng(0).integers(0, 61, (sequences, 12)), moments, "a-donor",
                  folder)
    ids = random_ids(60, seed=3)
    return SimpleNamespace(
        donor=donor, target=config_like(donor.config, **SIZES), target_shape=TargetShape(**SIZES),
        corpus=SimpleNamespace(key="a-tokenizer"), quick=lambda model: perplexity(model, ids, 12, 6).value,
        experiment=SimpleNamespace(evaluation=Evaluation(window=12, stride=6, quick_tokens=60, limits={})))


@pytest.fixture
def race(tmp_path, monkeypatch):
    monkeypatch.setattr(starts, "STORE", tmp_path / "store")
    return race_of(CONFIGS["llama, tied"], tmp_path / "donor")


def inputs_of(donor, place, sequences):
    """(positions, n) fp64: what a read-out reads, by a hook of its own."""
    path = {"O": "self_attn.o_proj", "MLP_DOWN": "mlp.down_proj"}[place[1]]
    seen, module = [], donor.model.get_submodule(f"model.layers.{place[0]}.{path}")
    handle = module.register_forward_pre_hook(lambda _, given: seen.append(given[0].detach().double().flatten(0, 1)))
    with torch.no_grad():
        donor.model(torch.as_tensor(sequences))
    handle.remove()
    return seen[0]


def test_fits_err_on_sequences_they_never_saw_as_brute_force_has_it(race):
    donor = race.donor
    maps = donor.maps("scored", shape_of(race.target))
    fits = {(row["rule"], row["share"], row["block"], row["role"]): row for row in starts.compensated(race)["fits"]}
    assert len(fits) == (len(starts.SHARES) + len(RULES) - 1) * 2 * 2
    rows = maps(None, RESIDUAL).index
    for place, kept in kept_inputs(donor.wiring, maps).items():
        matrix, unseen = donor.weights[place].double()[rows], inputs_of(donor, place, donor.frozen[40:])
        power = (unseen @ matrix.T).square().sum()
        for share, count in ((1 / 8, 5), (1 / 2, 20), (1.0, 40)):
            x = inputs_of(donor, place, donor.frozen[:count])
            square = x[:, kept].T @ x[:, kept]
            damped = square + 1e-3 * square.trace() / len(kept) * torch.eye(len(kept))
            fitted = torch.linalg.solve(damped, x[:, kept].T @ x @ matrix.T).T
            row = fits["mean_diagonal", share, *place]
            off = unseen @ matrix.T - unseen[:, kept] @ fitted.T
            assert row["error"] == pytest.approx((off.square().sum() / power).item(), rel=1e-3)
            off = unseen @ matrix.T - unseen[:, kept] @ matrix[:, kept].T
            assert row["selected"] == pytest.approx((off.square().sum() / power).item(), rel=1e-4)
            assert (row["positions"], row["width"]) == (12 * count, len(kept))
            assert row["ridge"] == pytest.approx(1e-3, rel=1e-6)
            assert row["norm_ratio"] == pytest.approx((fitted.norm() / matrix[:, kept].norm()).item(), rel=1e-3)
        assert fits["clamp", 1.0, *place]["norm_ratio"] <= fits["mean_diagonal", 1.0, *place]["norm_ratio"] + 1e-6


def test_starts_are_those_of_the_arms_and_nothing_is_measured_twice(race, monkeypatch):
    found = starts.compensated(race)
    by = {(row["rule"], row["share"], row["arm"]): row["ppl"] for row in found["starts"]}
    assert len(by) == 6 * 2
    for rule in RULES:
        for arm in ("hybrid", "hybrid_rs"):
            name = arm if rule == "mean_diagonal" else f"{arm}_{rule}"
            model, _ = build(arm_named(name), race.donor, race.target, 0)
            assert by[rule, 1.0, arm] == pytest.approx(race.quick(model), rel=1e-3 if rule == "holdout" else 1e-9), name
    few = Donor(race.donor.model, race.donor.frozen, 5, "few", race.donor.folder)
    assert by["mean_diagonal", 1 / 8, "hybrid"] == pytest.approx(
        race.quick(build(ARMS["hybrid"], few, race.target, 0)[0]), rel=1e-3)
    monkeypatch.setattr(starts, "converted", None)
    assert starts.compensated(race) == found


def test_without_a_sequence_left_to_err_on_it_says_what_to_do(tmp_path):
    with pytest.raises(ValueError, match=r"all 40 frozen sequences give moments.*raise corpus\.frozen\.sequences"):
        starts.compensated(race_of(CONFIGS["llama, tied"], tmp_path, sequences=40))


def test_where_blocks_go_alone_the_rescale_has_nothing_to_do(race):
    rows = {row["arm"]: row for row in starts.depth_cut(race, 1, probes=30)}
    assert rows["subclone"]["moved"] == rows["subclone_rs"]["moved"] == 0
    assert rows["subclone"]["ppl"] == rows["subclone_rs"]["ppl"] and rows["hybrid"]["ppl"] == rows["hybrid_rs"]["ppl"]
    donor = race.donor
    small = config_like(donor.config, **{**donor.shape.sizes(), "layers": 1})
    maps = donor.maps("scored", shape_of(small))
    assert maps.blocks == (0,) and all(isinstance(map_, Selection) for map_ in maps.axes.values())
    assert rows["subclone"]["ppl"] == pytest.approx(race.quick(build(ARMS["subclone"], donor, small, 0)[0]))
    off, power = 0.0, sum(tensor.double().square().sum().item() for (b, _), tensor in donor.weights.items() if not b)
    for role in ("O", "MLP_DOWN"):
        x, matrix = inputs_of(donor, (0, role), donor.frozen[:30]), donor.weights[0, role].double()
        sigma = x.T @ x
        damped = sigma + 1e-3 * sigma.trace() / len(sigma) * torch.eye(len(sigma))
        off += (torch.linalg.solve(damped, sigma @ matrix.T).T - matrix).square().sum().item()
    assert rows["hybrid"]["moved"] == pytest.approx((off / power) ** 0.5, rel=1e-2)


def test_a_tied_heads_factor_goes_where_it_is_said_to(race, tmp_path):
    rows = {row["the head's factor goes to"]: row["ppl"] for row in starts.tied_head(race)}
    model, _ = build(ARMS["subclone_rs"], race.donor, race.target, 0)
    assert rows["the final norm"] == pytest.approx(race.quick(model), rel=1e-6)
    with torch.no_grad():
        model.model.norm.weight /= 2**0.5
        assert rows["nowhere"] == pytest.approx(race.quick(model), rel=1e-5)
        model.model.embed_tokens.weight *= 2**0.5  # the head is this tensor
        assert rows["the embedding"] == pytest.approx(race.quick(model), rel=1e-5)
    assert len(set(rows.values())) == 3
    assert starts.tied_head(race_of(CONFIGS["llama"], tmp_path / "untied")) == []

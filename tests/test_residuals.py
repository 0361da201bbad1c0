"""Section 6: effective rank, controls, patches, predictors, bootstraps; planted signal is found and noise is not."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import nbformat
import numpy as np
import pytest
import torch
import yaml
from scipy.stats import binomtest

from scaleop import corpus, planted, plots, predictors, residual_study, residuals, texts
from scaleop.claims.core import FAILS, HOLDS, NOT_RUN, evaluate, tabulate
from scaleop.claims.measured import Measured
from scaleop.claims.section6 import CLAIMS
from scaleop.claims.section6_tables import power_table, predictor_table, rank_table, stricter_table
from scaleop.corpus import train_tokenizer
from scaleop.evaluate import perplexity
from scaleop.experiment import ExperimentError, load_experiment
from scaleop.fitted import fit_pair
from scaleop.paths import NOTEBOOKS, PARAMS, ROOT
from scaleop.predictors import as_stacks, from_patches, held_out, inputs, repaired, targets, to_patches
from scaleop.published import published
from scaleop.residual_study import ResidualStudy
from scaleop.residuals import ResidualError, Scores, bootstrap, effective_rank, mean_cosine, shuffled, sign_test
from scaleop.weights import extract
from tests.conftest import neox_config, random_ids, random_model

SHAPES = {"Q": (32, 32), "O": (32, 32), "UP": (64, 32)}


def stacks(blocks=8, seed=0, shapes=SHAPES):
    """Normal stacks of unit variance, by type."""
    draw = torch.Generator().manual_seed(seed)
    return {name: torch.randn(blocks, *shape, generator=draw) for name, shape in shapes.items()}


# Test 1

def test_effective_rank_of_known_singular_values():
    values = torch.tensor([4.0, 2.0, 1.0, 1.0])
    left, right = (torch.linalg.qr(torch.randn(size, 4, generator=torch.Generator().manual_seed(size))).Q
                   for size in (9, 6))
    matrix = left @ torch.diag(values) @ right.T
    shares = np.array([0.5, 0.25, 0.125, 0.125])
    expected = math.exp(-(shares * np.log(shares)).sum())
    found = effective_rank(residuals.spectrum(matrix[None]))
    assert found.dtype == torch.float64 and found.item() == pytest.approx(expected, rel=1e-5)


def test_effective_rank_counts_equal_directions_and_ignores_scale():
    assert effective_rank(torch.ones(3, 7)).tolist() == pytest.approx([7.0] * 3)
    values = torch.rand(5, generator=torch.Generator().manual_seed(0))
    assert effective_rank(values * 1e4).item() == pytest.approx(effective_rank(values).item())
    assert effective_rank(torch.tensor([1.0, 0, 0])).item() == pytest.approx(1.0)


def test_shuffled_controls_keep_each_blocks_histogram_and_nothing_else():
    stack = stacks()["UP"]
    control = shuffled(stack)
    for block, other in zip(stack, control, strict=True):
        assert torch.equal(block.flatten().sort().values, other.flatten().sort().values)
        assert not torch.equal(block, other)
    assert torch.equal(control, shuffled(stack)) and not torch.equal(control, shuffled(stack, 100))


def test_gaussian_and_norm_matched_controls_match_what_they_say():
    stack = stacks()["UP"] * torch.logspace(-1, 1, 64)[:, None] + 0.3
    control = residuals.gaussian(stack)
    assert torch.allclose(control.std(dim=(1, 2)), stack.std(dim=(1, 2)), rtol=0.1)
    matched = residuals.norm_matched(stack)
    assert torch.allclose(matched.norm(dim=2), stack.norm(dim=2), rtol=1e-3)
    assert torch.allclose(matched.norm(dim=1), stack.norm(dim=1), rtol=1e-3)


def test_spectral_test_sees_uneven_norms_and_the_matched_control_explains_them():
    uneven = stacks()["UP"] * torch.logspace(-0.5, 0.5, 64)[:, None]
    found = residuals.spectral_test(uneven)
    assert found["below"] == found["blocks"] == 8
    assert found["norm_matched"] == pytest.approx(found["delta"], rel=0.01)
    even = residuals.spectral_test(stacks()["UP"])
    for name in ("shuffled", "gaussian", "norm_matched"):
        assert even[name] == pytest.approx(even["delta"], rel=0.02)


# Test 2

def test_mean_cosine_is_the_mean_over_ordered_pairs():
    stack = stacks()["Q"] + 0.2
    flat = stack.flatten(1).double()
    pairs = [torch.cosine_similarity(flat[i], flat[j], dim=0) for i in range(8) for j in range(8) if i != j]
    assert mean_cosine(stack) == pytest.approx(torch.stack(pairs).mean().item(), abs=1e-12)
    assert mean_cosine(stack[:1].expand(3, -1, -1)) == pytest.approx(1.0)


def test_the_spread_of_chance_is_the_one_shuffles_show():
    stack = stacks(blocks=5)["Q"]
    drawn = np.array([mean_cosine(shuffled(stack, 1000 * k)) for k in range(200)])
    assert drawn.std() == pytest.approx(residuals.cosine_test(stack)["sd"], rel=0.2)


def test_critical_is_the_two_sided_normal_quantile():
    assert residuals.critical(1) == pytest.approx(1.959964, abs=1e-5)
    assert residuals.critical(6) > residuals.critical(1)


# Patches

@pytest.mark.parametrize("shape", [(16, 16), (17, 33), (5, 40), (32, 16), (1, 1)])
def test_patches_round_trip_and_hold_every_entry_once(shape):
    stack = torch.arange(1.0, 1 + 3 * math.prod(shape)).reshape(3, *shape)
    tiles = to_patches(stack)
    assert tiles.shape == (3, math.ceil(shape[0] / 16), math.ceil(shape[1] / 16), 256)
    assert torch.equal(from_patches(tiles, shape), stack)
    assert (tiles != 0).sum() == stack.numel()  # the padding is zero, and nothing is lost or doubled


def test_a_patch_is_a_tile_of_the_matrix():
    stack = stacks()["UP"]
    tiles = to_patches(stack)
    assert torch.equal(tiles[2, 3, 1], stack[2, 48:64, 16:32].flatten())


def test_inputs_say_patch_type_and_place():
    seen = inputs(stacks(blocks=5, shapes={"A": (32, 48), "B": (20, 16)}))
    assert seen.features.shape == (5 * (2 * 3 + 2 * 1), 256 + 2 + 3)
    last = seen.features[29]  # type A, the last block, row and column
    assert last[256:].tolist() == [1, 0, 1, 1, 1]
    assert seen.features[0, 256:].tolist() == [1, 0, 0, 0, 0] and seen.features[30, 256:].tolist() == [0, 1, 0, 0, 0]
    assert seen.block.tolist() == [b for b in range(5) for _ in range(6)] + [b for b in range(5) for _ in range(2)]
    assert seen.inside[:30].all() and seen.inside[30].all() and seen.inside[31].sum() == 4 * 16


def test_targets_are_scaled_by_type_and_come_back():
    deltas = {name: 3.0 * stack + 1 for name, stack in stacks(shapes={"A": (17, 20), "B": (16, 16)}).items()}
    back = as_stacks(targets(deltas), deltas)
    assert all(torch.allclose(back[name], deltas[name], atol=1e-5) for name in deltas)


def test_repairing_moves_whole_blocks_and_nothing_else():
    deltas = stacks()
    for name, other in repaired(deltas).items():
        order = [next(b for b in range(8) if torch.equal(deltas[name][b], block)) for block in other]
        assert sorted(order) == list(range(8)) and order != list(range(8))
    assert all(torch.equal(a, b) for a, b in zip(repaired(deltas).values(), repaired(deltas).values(), strict=True))


def test_every_fourth_block_is_held_out_as_in_the_paper():
    assert held_out(24) == [3, 7, 11, 15, 19, 23] and held_out(8) == [3, 7]
    assert sorted(b for offset in range(4) for b in held_out(10, offset)) == list(range(10))


# Predictors

@pytest.mark.parametrize("hidden", [None, 8])
def test_predictors_side_by_side_are_those_that_train_alone(hidden):
    seen, goals = inputs(stacks(shapes={"A": (20, 16)})), torch.stack([targets(stacks(seed=s, shapes={"A": (20, 16)}))
                                                                      for s in (1, 2)])
    both = predictors.fit(seen.features, goals, seen.inside, hidden, steps=4)
    for k in range(2):
        alone = predictors.fit(seen.features, goals[k : k + 1], seen.inside, hidden, steps=4)
        assert torch.allclose(both(seen.features)[k], alone(seen.features)[0], atol=1e-5)


def test_a_predictor_is_the_written_out_one():
    """Adam on torch's own modules, batch by batch, gives the same predictions."""
    seen, goal = inputs(stacks(shapes={"A": (16, 16)})), targets(stacks(seed=1, shapes={"A": (16, 16)}))
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(260, 8), torch.nn.GELU(), torch.nn.Linear(8, 256))
    optimizer, draw = torch.optim.Adam(model.parameters(), lr=1e-3), torch.Generator().manual_seed(0)
    for _ in range(5):
        for rows in torch.randperm(8, generator=draw).split(2):
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(seen.features[rows]), goal[rows]).backward()
            optimizer.step()
    ours = predictors.fit(seen.features, goal[None], seen.inside, 8, steps=4)
    assert torch.allclose(ours(seen.features)[0], model(seen.features), atol=1e-5)


def test_padding_counts_neither_in_the_loss_nor_in_the_score():
    seen = inputs(stacks(shapes={"A": (20, 16)}))
    goal = targets(stacks(seed=1, shapes={"A": (20, 16)}))
    spoilt = torch.where(seen.inside, goal, 100.0)
    rows = seen.of([3, 7])
    found = [predictors.examine(seen, g[None], [3, 7])[0] for g in (goal, spoilt)]
    assert torch.equal(found[0].errors, found[1].errors) and torch.equal(found[0].sizes, found[1].sizes)
    assert found[0].sizes.sum().item() == pytest.approx((goal[rows].double() ** 2).sum().item())


def test_planted_signal_is_found_and_noise_is_not():
    shapes = {"A": (128, 256)}  # enough patches for the authors' 270 steps to get somewhere
    outputs, base = stacks(shapes=shapes), planted.noise(stacks(seed=1, shapes=shapes))
    strong = planted.plant(base, planted.signal("patch", outputs), 0.8)
    seen = inputs(outputs)
    goals = torch.stack([targets(s) for s in (base, repaired(base), strong, repaired(strong))])
    noise, noise_control, real, control = predictors.examine(seen, goals, [3, 7])
    found = residuals.compare(real, control)
    assert found["reduction"] > 0 and found["patches"]["p_one"] == 0 and found["patches"]["p_two"] < 0.01
    assert all(gap > 0 for gap in found["gaps"]) and found["blocks"]["low"] > 0
    nothing = residuals.compare(noise, noise_control)
    assert nothing["reduction"] <= 0 and abs(nothing["patches"]["gap"]) < 0.1 * found["patches"]["gap"]


def test_each_block_is_scored_once_in_a_cross_fit():
    seen, goals = inputs(stacks()), targets(stacks(seed=1))[None]
    (whole,) = predictors.cross_examine(seen, goals)
    assert sorted(whole.block.tolist()) == sorted(seen.block.tolist())
    (split,) = predictors.examine(seen, goals, held_out(8))
    assert torch.allclose(whole.of(held_out(8)).errors.sort().values, split.errors.sort().values)


# Statistics

def numbers(units=12, seed=0):
    draw = np.random.default_rng(seed)
    sizes, errors = draw.uniform(1, 2, (2, units)), draw.uniform(1, 2, (2, units))
    blocks = torch.arange(units) // 4
    return [Scores(torch.tensor(e), torch.tensor(s), blocks) for e, s in zip(errors, sizes, strict=True)]


def test_the_bootstrap_is_the_one_numpy_gives_on_the_same_draws():
    real, control = numbers()
    draw = torch.Generator().manual_seed(1)
    gaps = []
    for _ in range(200):
        rows = torch.randint(12, (12,), generator=draw).numpy()
        a, b = (1 - np.sqrt(s.errors.numpy()[rows].sum() / s.sizes.numpy()[rows].sum()) for s in (real, control))
        gaps.append(a - b)
    found = bootstrap(real, control, samples=200)
    assert (found["low"], found["high"]) == pytest.approx(tuple(np.percentile(gaps, [2.5, 97.5])), abs=1e-12)
    assert found["p_one"] == np.mean(np.array(gaps) <= 0)
    tails = min(np.sum(np.array(gaps) <= 0), np.sum(np.array(gaps) >= 0))
    assert found["p_two"] == pytest.approx(min(1, 2 * (tails + 1) / 201))
    assert found["gap"] == pytest.approx(real.reduction - control.reduction)


def test_by_block_sums_patches():
    real, _ = numbers()
    blocks = real.by_block()
    assert blocks.errors.tolist() == pytest.approx([real.errors[4 * b : 4 * b + 4].sum().item() for b in range(3)])
    assert blocks.reduction == pytest.approx(real.reduction)


def test_two_held_out_blocks_cannot_reject_by_sign_and_eight_can():
    assert sign_test([1.0, 2.0]) == 0.5 and sign_test([1.0] * 8) == pytest.approx(2**-7)
    for gaps in ([1, -1, 1, 1, 1, 1], [1, 1, -1, -1], [-1] * 5, [0, 1, 1]):
        signs = [gap for gap in gaps if gap]
        assert sign_test(gaps) == pytest.approx(binomtest(sum(g > 0 for g in signs), len(signs)).pvalue)


def test_the_rank_test_counts_controls():
    assert residuals.rank_test(1.0, [0.0] * 19) == 0.05 and residuals.rank_test(0.0, [0.0] * 19) == 1.0


# Refusals

def test_nan_and_too_few_blocks_are_refused_in_words():
    broken = stacks()
    broken["Q"][2, 0, 0] = math.nan
    with pytest.raises(ResidualError, match=r"block 2 hold NaN or infinity"):
        residuals.spectral_test(broken["Q"])
    with pytest.raises(ResidualError, match=r"block 2 hold NaN"):
        inputs(broken)
    with pytest.raises(ResidualError, match=r"needs at least 2, got 1"):
        residuals.cosine_test(stacks(blocks=1)["Q"])
    with pytest.raises(ResidualError, match=r"at least 4 blocks, got 3"):
        held_out(3)
    with pytest.raises(ResidualError, match=r"\(blocks, out, in\), got shape"):
        residuals.spectrum(torch.ones(4, 4))
    with pytest.raises(ResidualError, match=r"zero in all its entries"):
        residuals.residual(torch.ones(2, 3, 3), torch.ones(2, 3, 3))
    with pytest.raises(ResidualError, match=r"are \(2, 3, 3\), the operator's \(2, 3, 4\)"):
        residuals.residual(torch.ones(2, 3, 3), torch.ones(2, 3, 4))
    with pytest.raises(ResidualError, match=r"with one held-out block only patches"):
        bootstrap(*(s.of([0]).by_block() for s in numbers()))
    with pytest.raises(ResidualError, match=r"same number of blocks, got Q 8, O 4"):
        inputs({"Q": stacks()["Q"], "O": stacks(4)["O"]})
    with pytest.raises(ResidualError, match=r"leave nothing to learn from"):
        predictors.examine(inputs(stacks()), targets(stacks())[None], range(8))


def test_one_held_out_block_gives_no_block_bootstrap_but_no_error():
    found = residuals.compare(*(s.of([0]) for s in numbers()))
    assert found["blocks"] is None and found["p_sign"] == 1.0


# Planted signals

@pytest.mark.parametrize("kind", planted.KINDS)
def test_signals_have_unit_size_and_the_structure_they_are_named_for(kind):
    made = planted.signal(kind, stacks(shapes={"A": (20, 40)}))["A"]
    assert made.std().item() == pytest.approx(1.0, rel=1e-4) and made.shape == (8, 20, 40)
    assert torch.equal(made[0], made[5]) is (kind == "shared")
    assert (torch.linalg.matrix_rank(made[0]).item() == planted.RANK) is (kind == "low rank")


def test_planting_keeps_the_variance_and_plants_the_share():
    base, signals = planted.noise(stacks(seed=1)), planted.signal("shared", stacks())
    for share in (0.0, 0.3, 1.0):
        mixed = planted.plant(base, signals, share)["UP"]
        assert mixed.std().item() == pytest.approx(base["UP"].std().item(), rel=0.03)
        size = torch.corrcoef(torch.stack([mixed.flatten(), signals["UP"].flatten()]))[0, 1].item()
        assert size == pytest.approx(math.sqrt(share), abs=0.03)
    assert planted.ideal(0.19) == pytest.approx(0.1)
    with pytest.raises(ValueError, match=r"share = 2 of the variance"):
        planted.plant(base, signals, 2)
    with pytest.raises(ValueError, match=r"no signal of kind 'loud'"):
        planted.signal("loud", stacks())


def test_each_structure_test_finds_its_own_signal_and_not_noise():
    outputs, base = stacks(), planted.noise(stacks(seed=1))
    assert not any(test["found"] for test in planted.structure(base).values())
    assert planted.structure(planted.plant(base, planted.signal("shared", outputs), 0.3))["cosine"]["found"]
    assert planted.structure(planted.plant(base, planted.signal("low rank", outputs), 0.3))["effective rank"]["found"]


def test_the_least_share_found_is_the_one_above_which_none_is_missed():
    rows = [{"kind": "patch", "share": share, "test": "t", "found": found}
            for share, found in ((0.3, True), (0.1, True), (0.03, False), (0.01, True))]
    rows += [{"kind": "none", "share": 0.0, "test": "t", "found": found} for found in (False, True)]
    (row,) = planted.detection(rows)
    assert row == {"kind": "patch", "test": "t", "smallest": 0.1, "alarms": 1, "draws": 2}
    assert planted.detection([{**row, "found": False} for row in rows])[0]["smallest"] is None


# On models: operators, the study, its tables, claims and figures

@pytest.fixture(scope="module")
def models():
    """A random ladder: 8 blocks of width 32, 8 of 16, 4 of 12. The donor's MLP is wide enough to be reproduced."""
    shapes = {"large": (8, 32, 4, 128), "medium": (8, 16, 4, 32), "small": (4, 12, 3, 24)}
    return {name: random_model(neox_config(layers, width, heads, mlp), seed=seed)
            for seed, (name, (layers, width, heads, mlp)) in enumerate(shapes.items())}


TYPES = ("Q", "K", "V", "O", "MLP_UP", "MLP_DOWN")


def test_outputs_and_residuals_add_up_to_the_sibling_and_wide_types_are_set_aside(models, tmp_path):
    large, medium = extract(models["large"]), extract(models["medium"])
    fitted = fit_pair(large, medium, TYPES, tmp_path / "operators.safetensors")
    assert set(fitted.residuals) == {"Q", "K", "V", "O"} and set(fitted.reproduced) == {"MLP_UP", "MLP_DOWN"}
    for role, delta in fitted.residuals.items():
        whole = torch.stack([medium[b, role] for b in range(8)])
        assert torch.allclose(delta + fitted.outputs[role], whole, atol=1e-6)
        assert 0.4 < fitted.errors[role] < 0.95 and fitted.free[role] < 1
    for role in fitted.reproduced:
        assert fitted.free[role] >= 1 and fitted.errors[role] < 0.05
    again = fit_pair(large, medium, TYPES, tmp_path / "operators.safetensors")
    assert all(torch.equal(again.residuals[role], fitted.residuals[role]) for role in fitted.residuals)
    with pytest.raises(ResidualError, match=r"in every type: it leaves no residual"):
        fit_pair(large, medium, ("MLP_UP",), tmp_path / "wide.safetensors")


@pytest.fixture(scope="module")
def study(models, tmp_path_factory):
    """The study of that ladder, in a store of its own, with a stand-in for the race."""
    folder = tmp_path_factory.mktemp("ladder")
    for name, model in models.items():
        model.save_pretrained(folder / name)
    race = SimpleNamespace(
        experiment=SimpleNamespace(name="tiny", pair=SimpleNamespace(donor=str(folder / "large"),
                                                                     reference=str(folder / "medium")),
                                   evaluation=SimpleNamespace(model_dump=dict)),
        corpus=SimpleNamespace(key="text"), target=models["medium"].config,
        quick=lambda model: perplexity(model, random_ids(300), 32, 16).value)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(residual_study, "STORE", folder / "store")
        yield ResidualStudy(race, str(folder / "small"))


@pytest.fixture(scope="module")
def measured(study):
    return study.measured()


def test_a_study_measures_everything_once_and_every_claim_gets_a_verdict(study, measured):
    findings = evaluate(CLAIMS, measured)
    assert {finding.verdict for finding in findings} <= {HOLDS, FAILS}
    assert len(tabulate(findings)) == len(CLAIMS) == len({claim.id for claim in CLAIMS})
    again = ResidualStudy(study.race, study.names["small"])
    assert again.folder == study.folder and again.measured().values == measured.values
    stored = {path.name for path in study.folder.glob("*.json")}
    assert stored == {f"{name}.json" for name in
                      ("spectral", "cosine", "learnability", "transfer", "power", "behaviour")}


def test_unrelated_models_leave_no_learnable_residual(measured):
    """Random siblings: the paper's null holds for them, since there is nothing to find."""
    verdicts = {finding.claim.id: finding.verdict for finding in evaluate(CLAIMS, measured)}
    assert verdicts["no-direction"] == verdicts["beats-nothing"] == verdicts["nothing-transfers"] == HOLDS


def test_with_the_residual_itself_the_shell_is_the_reference_again(measured):
    found = measured["behaviour"]
    assert found["residual"] == pytest.approx(found["reference"], rel=1e-3)
    assert found["operator"] != pytest.approx(found["reference"], rel=1e-3)


def test_without_a_smaller_sibling_transfer_is_not_run(study, measured):
    alone = ResidualStudy(study.race)
    assert alone.transfer() is None and alone.folder != study.folder
    findings = evaluate(CLAIMS, Measured({**measured.values, "transfer": None, "depth_operator": None}))
    assert {f.claim.id for f in findings if f.verdict == NOT_RUN} == {"depth-fits-better", "nothing-transfers",
                                                                     "transfer-as-control"}
    assert "depth pair" not in set(stricter_table(Measured({**measured.values, "transfer": None}))["scored on"])


@pytest.fixture
def mini(study):
    """The study's race, as an experiment that names companions."""
    pair = load_experiment("mini").pair.model_copy(update={
        "donor": study.names["large"], "like": None, "reference": study.names["medium"], "target": None})
    return SimpleNamespace(**{**vars(study.race), "experiment": load_experiment("mini").model_copy(
        update={"pair": pair})})


def test_a_model_of_another_vocabulary_is_left_out_before_any_work(study, mini, tmp_path, capsys):
    """`smaller` is models/nano-s unless a page is told otherwise, in every world."""
    random_model(neox_config(4, 12, 3, 24, vocab=77)).save_pretrained(tmp_path / "other")
    found = ResidualStudy(mini, str(tmp_path / "other"))
    note = capsys.readouterr().out
    assert note.startswith(f"note: the transfer test is left out: {tmp_path / 'other'} has a vocabulary of 77, ")
    assert note.endswith("; -p smaller EleutherAI/pythia-14m@cf967c0a9a04383db6f7b1108d86b2962634b4ac runs it\n")
    assert set(found.called) == {"large", "medium"} and found.depth is None and found.transfer() is None
    assert found.keys == ResidualStudy(mini).keys and not capsys.readouterr().out
    assert set(ResidualStudy(mini, study.names["small"]).called) == {"large", "medium", "small"}
    mini.experiment = mini.experiment.model_copy(update={"companions": {}})
    ResidualStudy(mini, str(tmp_path / "other"))
    assert "; -p smaller NAME, with a sibling of the pair smaller than its reference, runs" in capsys.readouterr().out


def test_a_model_of_another_wiring_is_no_sibling(study, tmp_path):
    for name, model_type in (("one", "gpt_neox"), ("two", "gpt2")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps({"model_type": model_type, "vocab_size": 61}))
    one, two = str(tmp_path / "one"), str(tmp_path / "two")
    assert residual_study.stranger(two, one) == f"{two} is a gpt2, the pair's models are of gpt_neox"
    assert residual_study.stranger(one, one) is None


def test_where_operators_reproduce_every_type_of_the_smaller_sibling_transfer_is_left_out(study, tmp_path, capsys):
    random_model(neox_config(1, 12, 3, 24)).save_pretrained(tmp_path / "shallow")  # of one block: always reproduced
    found = ResidualStudy(study.race, str(tmp_path / "shallow"))
    assert found.depth is None and found.transfer() is None
    assert capsys.readouterr().out == (
        f"note: the transfer test is left out: {tmp_path / 'shallow'} is no target for it (with 1 blocks an operator "
        "has more free numbers than weights to fit, in every type: it leaves no residual to test)\n")


def test_an_experiment_without_reference_is_refused_in_words(study):
    pair = SimpleNamespace(donor=study.names["large"], reference=None)
    with pytest.raises(ExperimentError, match=r"pair\.reference of experiment 'toy' is null"):
        ResidualStudy(SimpleNamespace(experiment=SimpleNamespace(name="toy", pair=pair)))


def test_tables_have_the_papers_numbers_and_ours_in_one_row(measured):
    ranks = rank_table(measured).set_index("type")
    assert list(ranks.index) == list(TYPES)
    assert ranks.loc["Q", "Δ, paper"] == "771.3" and ranks.loc["Q", "deficit, paper"] == "6.4%"
    assert ranks.loc["Q", "Δ, ours"] == f"{measured['spectral']['Q']['delta']:.1f}"
    assert ranks.loc["MLP_UP", "Δ, ours"] == "-" and ranks.loc["MLP_UP", "Δ, paper"] == "947.2"
    table = predictor_table(measured)
    assert list(table["p, paper"]) == ["0.99", "1.00", "1.00", "1.00"]
    assert table["reduction, ours"][1] == f"{measured['learnability']['mlp512']['split']['reduction']:+.4f}"
    assert len(stricter_table(measured)) == 6
    assert set(power_table(measured).columns) == {"test", *planted.KINDS, "false alarms"}


def paper():
    """The paper's own numbers in the form of our evidence, as far as it printed them."""
    def value(name):
        record = published(name)
        return record["value"] if record["more_digits"] is None else record["more_digits"]

    def outcome(base, name):
        p = value(f"{base}.{name}.p")
        return {"reduction": value(f"{base}.{name}.reduction"), "control": value(f"{base}.{name}.shuffle"),
                "patches": {"p_one": p, "low": -3.8e-5, "high": -1.9e-6}}

    return Measured({
        "operator": {role: value(f"oper.err.{role}") for role in TYPES},
        "spectral": {role: {"delta": value(f"res.erank.delta.{role}"), "shuffled": value(f"res.erank.shuffle.{role}"),
                            "gaussian": value(f"res.erank.gauss.{role}")} for role in TYPES},
        "learnability": {name: {"split": outcome("res.pred", name)} for name in ("linear", "mlp512")},
        "transfer": {name: outcome("res.xfer", name) for name in ("linear", "mlp512")},
        "depth_operator": dict(zip(TYPES, (0.56, *[0.6] * 4, 0.74), strict=True)),
        "behaviour": {"operator": value("res.behav.operator"), "corrected": value("res.behav.operator_plus_R"),
                      "reference": value("anchor.real_410m"), "random": value("anchor.random_410m")}})


def test_the_papers_own_numbers_pass_its_claims_but_for_the_one_its_audit_contradicts():
    asked = ("most-is-left", "below-controls", "faint", "beats-nothing", "not-above-control", "indistinguishable",
             "depth-fits-better", "nothing-transfers", "transfer-as-control", "stays-broken", "correction-moves-little",
             "operator-beats-random", "most-variance-left")
    verdicts = {f.claim.id: f.verdict for f in evaluate([c for c in CLAIMS if c.id in asked], paper())}
    assert {name for name, verdict in verdicts.items() if verdict != HOLDS} == {
        "indistinguishable",  # both intervals lie below zero
        "most-variance-left"}  # Q and both MLP types: more than half of the variance is explained


def test_the_bootstraps_level_is_judged_by_the_alarms_on_noise(measured):
    def verdict(alarms, tries):
        rows = [{"kind": "none", "test": "linear: patches, two-sided", "p": 0.01 if k < alarms else 0.5}
                for k in range(tries)]
        (claim,) = [claim for claim in CLAIMS if claim.id == "keeps-level"]
        return evaluate([claim], Measured({"power": {"rows": rows, "table": []}}))[0]
    assert verdict(1, 12).verdict == HOLDS and verdict(4, 12).verdict == FAILS
    assert verdict(4, 12).ours == "4 alarms in 12 tries at 5 %"


def test_the_spectra_figure_draws_every_type_and_control(study):
    values = study.spectra(4)
    figure = plots.spectra(values, 4)
    assert [axis.get_title(loc="left") for axis in figure.axes] == ["Q", "K", "V", "O"]
    for axis, lines in zip(figure.axes, values.values(), strict=True):
        for line, (kind, singular) in zip(axis.lines, lines.items(), strict=True):
            assert line.get_label() == kind
            np.testing.assert_allclose(line.get_ydata(), singular)


def test_the_power_figure_fills_a_dot_where_a_test_finds_the_signal(study):
    rows = study.power()["rows"]
    gains, dots = plots.power(rows).axes
    assert {line.get_label() for line in gains.lines} >= {"linear", "MLP-512", "all of it"}
    planted_rows = [row for row in rows if row["kind"] != "none"]
    assert sum(len(line.get_xdata()) for line in dots.lines if line.get_gid() == "found") == sum(
        row["found"] for row in planted_rows)
    drawn = [len(line.get_xdata()) for line in dots.lines if line.get_gid() in ("found", "missed")]
    assert sum(drawn) == len(planted_rows)


# The notebook, as a user runs it

@pytest.mark.slow
def test_the_notebook_runs_on_a_tiny_ladder_and_keeps_its_numbers(tmp_path, monkeypatch):
    documents = texts.training_documents()[:60]
    tokenizer = train_tokenizer(documents[:10], 600, 64)
    for name, (layers, width, heads, mlp) in {"large": (8, 32, 4, 128), "medium": (8, 16, 4, 32),
                                              "small": (4, 12, 3, 24)}.items():
        random_model(neox_config(layers, width, heads, mlp, vocab=600), std=0.05).save_pretrained(tmp_path / name)
        tokenizer.save_pretrained(tmp_path / name)
    monkeypatch.setattr(corpus, "STORE", tmp_path / "store")
    monkeypatch.setattr(texts, "training_documents", lambda: documents)
    assert len(corpus.Corpus(tokenizer, (20, 32), 20_000).train.tokens) > 640
    settings = yaml.safe_load((PARAMS / "toy.yaml").read_text("utf-8"))
    settings["pair"] = {"donor": str(tmp_path / "large"), "reference": str(tmp_path / "medium"),
                        "target": {"layers": 8, "width": 16, "heads": 4, "mlp": 32}}
    settings["corpus"] |= {"frozen": {"sequences": 20, "length": 32, "similarity": 20, "moments": 20},
                           "seed_stride": 20_000}
    settings["evaluation"] |= {"window": 64, "stride": 32}
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(settings))
    command = [Path(sys.executable).with_name("papermill"), NOTEBOOKS / "06_residuals.ipynb", tmp_path / "out.ipynb",
               "-p", "experiment", tmp_path / "tiny.yaml", "-p", "smaller", tmp_path / "small"]
    done = subprocess.run(list(map(str, command)), cwd=ROOT, text=True, capture_output=True, check=False,
                          stdin=subprocess.DEVNULL, timeout=900,
                          env={**os.environ, "SCALEOP_STORE": str(tmp_path / "store"), "JUPYTER_PREFER_ENV_PATH": "1"})
    assert done.returncode == 0, done.stderr[-3000:]
    page = nbformat.read(tmp_path / "out.ipynb", 4)
    outputs = [output for cell in page.cells if cell.cell_type == "code" for output in cell.outputs]
    assert not [o for o in outputs if o.output_type == "error" or o.get("name") == "stderr"]
    assert sum("image/svg+xml" in output.get("data", {}) for output in outputs) == 2
    kept = json.loads((tmp_path / "store" / "results" / "06_residuals.json").read_text())
    assert {finding["id"] for finding in kept["findings"]} == {claim.id for claim in CLAIMS}
    assert not [finding for finding in kept["findings"] if finding["verdict"] == NOT_RUN]
    assert str(tmp_path) not in json.dumps(kept)

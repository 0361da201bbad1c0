"""Section 4: similarity and maps against independent references, captures against plain forwards, claims, figures."""

import itertools
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import nbformat
import numpy as np
import pytest
import scipy.linalg
import torch
import yaml
from sklearn.linear_model import Ridge

from scaleop import alignment, captures, corpus, plots, texts
from scaleop.alignment import (
    Similarity,
    at_random,
    block_scores,
    cka,
    diagonal,
    embedding_scores,
    held_out,
    in_order,
    procrustes,
    ridge,
)
from scaleop.claims import FAILS, HOLDS, NOT_RUN, evaluate, published, tabulate
from scaleop.claims.measured import Measured
from scaleop.claims.section4 import CLAIMS, alignment_evidence, alignment_table, middle
from scaleop.corpus import train_tokenizer
from scaleop.experiment import ExperimentError, load_experiment
from scaleop.paths import NOTEBOOKS, ROOT
from scaleop.store import StoreError
from tests.conftest import neox_config, random_ids, random_model


def samples(rows, columns, seed=0):
    """Gaussian rows with a mean far from zero and features of unequal size, as residual streams have."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, columns, generator=generator, dtype=torch.float64) * torch.linspace(
        0.1, 3, columns, dtype=torch.float64) + 5


def rotation(size, seed=0):
    """A random orthogonal matrix."""
    return torch.linalg.qr(torch.randn(size, size, generator=torch.Generator().manual_seed(seed),
                                       dtype=torch.float64)).Q


def related(rows=300, wide=12, narrow=5, noise=0.5, seed=0):
    """x, and a noisy linear image of it."""
    x = samples(rows, wide, seed)
    y = x @ samples(wide, narrow, seed + 1) / wide + noise * samples(rows, narrow, seed + 2)
    return x, y


# Similarity

def gram_cka(x, y):
    """CKA by its definition: the normalised alignment of centred Gram matrices between samples."""
    centre = torch.eye(len(x), dtype=torch.float64) - 1 / len(x)
    k, l = (centre @ (side @ side.T) @ centre for side in (x.double(), y.double()))  # noqa: E741 - as it is written
    return ((k * l).sum() / (k.norm() * l.norm())).item()


def test_cka_is_the_normalised_alignment_of_centred_gram_matrices():
    x, y = related()
    assert 0.1 < gram_cka(x, y) < 0.9
    assert cka(x, y) == pytest.approx(gram_cka(x, y), rel=1e-10)
    assert cka(x, x) == pytest.approx(1, abs=1e-12)
    assert cka(samples(4000, 6), samples(4000, 6, 1)) < 0.01  # unrelated


def test_cka_ignores_rotation_scale_and_shift_but_not_anisotropic_maps():
    x, y = related()
    moved = 7.5 * (x @ rotation(12)) - 40
    assert cka(moved, y) == pytest.approx(cka(x, y), rel=1e-10)
    assert cka(x, -0.01 * (y @ rotation(5))) == pytest.approx(cka(x, y), rel=1e-10)
    stretched = x * torch.tensor([30.0] + [1.0] * 11)
    assert abs(cka(stretched, y) - cka(x, y)) > 0.05
    assert cka(stretched, x) < 0.9


@pytest.mark.parametrize("batch", [1, 7, 300])
def test_streamed_similarity_equals_in_memory(batch):
    large = torch.stack([related(seed=seed)[0] for seed in range(3)]).float()
    small = torch.stack([related(seed=seed)[1] for seed in (0, 1)]).float()
    sums = Similarity()
    for start in range(0, 300, batch):
        sums.add(large[:, start : start + batch], small[:, start : start + batch])
    expected = [[gram_cka(x, y) for y in small] for x in large]
    np.testing.assert_allclose(sums.matrix(), expected, rtol=1e-6)


def test_similarity_survives_a_large_mean():
    """Residual streams have features a thousand times larger than their variation."""
    x, y = related(rows=200)
    sums = Similarity()
    for start in range(0, 200, 50):
        sums.add(x[None, start : start + 50] + 1e4, y[None, start : start + 50] - 1e4)
    assert sums.matrix().item() == pytest.approx(gram_cka(x, y), rel=1e-6)


def test_diagonal_reads_rows_as_the_large_models_blocks():
    matrix = torch.tensor([[0.9, 0.1], [0.0, 0.0], [0.8, 0.6], [0.0, 0.0]])  # four blocks, two matched: 0 and 2
    assert diagonal(matrix, (0, 2)) == (pytest.approx(0.75), 0.5)
    assert diagonal(torch.eye(3), range(3)) == (1.0, 1.0)


# Maps

def test_ridge_is_sklearns():
    x, y = related()
    penalty = 1e-3 * (x - x.mean(dim=0)).square().sum().item() / 12
    theirs = Ridge(alpha=penalty, fit_intercept=True).fit(x.numpy(), y.numpy())
    fitted = ridge(x, y)
    np.testing.assert_allclose(fitted.matrix, theirs.coef_.T, rtol=1e-8)
    new, truth = related(rows=60, seed=9)
    np.testing.assert_allclose(fitted(new), theirs.predict(new.numpy()), rtol=1e-8)
    expected = 1 - (truth.numpy() - theirs.predict(new.numpy())).__pow__(2).sum() / (
        (truth - y.mean(dim=0)).square().sum().item())
    assert fitted.r2(new, truth) == pytest.approx(expected, rel=1e-8)


def test_procrustes_is_scipys_rotation_with_a_scale():
    x, y = related(wide=5, narrow=5)
    x_centred, y_centred = ((side - side.mean(dim=0)).numpy() for side in (x, y))
    turn, total = scipy.linalg.orthogonal_procrustes(x_centred, y_centred)
    np.testing.assert_allclose(procrustes(x, y).matrix, turn * total / (x_centred**2).sum(), atol=1e-10)


def test_procrustes_reduces_a_wider_side_to_its_leading_directions():
    x, y = related()
    x_centred, y_centred = ((side - side.mean(dim=0)).numpy() for side in (x, y))
    leading = np.linalg.svd(x_centred, full_matrices=False)[2][:5].T
    turn, total = scipy.linalg.orthogonal_procrustes(x_centred @ leading, y_centred)
    expected = leading @ turn * total / ((x_centred @ leading) ** 2).sum()
    np.testing.assert_allclose(procrustes(x, y).matrix, expected, atol=1e-10)


def test_planted_maps_are_found():
    x = samples(400, 6)
    turned = 3 * x @ rotation(6) + 2
    assert held_out(x, turned)["procrustes"] == pytest.approx(1, abs=1e-10)
    scores = held_out(x, x * torch.tensor([1, 1, 1, 1, 1, 0.1]) + 2)  # linear, but no rotation
    assert scores["ridge"] > 0.999 and scores["procrustes"] < 0.9
    scores = held_out(samples(4000, 6), samples(4000, 6, 1))  # unrelated
    assert all(abs(score) < 0.02 for score in scores.values())


def test_the_split_is_in_order_and_its_means_are_the_training_rows():
    train, test = in_order(50_304)
    assert (len(train), len(test)) == (40_243, 10_061) and train[-1] + 1 == test[0]  # as the authors' embeddings
    x, y = related(rows=100)
    fitted = ridge(x[:80], y[:80])
    assert torch.equal(fitted.y_mean, y[:80].mean(dim=0))
    assert held_out(x, y)["ridge"] == pytest.approx(fitted.r2(x[80:], y[80:]), rel=1e-12)
    train, test = at_random(100, seed=3)
    assert sorted([*train.tolist(), *test.tolist()]) == list(range(100)) and len(train) == 80
    assert torch.equal(train, at_random(100, seed=3)[0]) and not torch.equal(train, at_random(100, seed=4)[0])


def test_blocks_are_scored_pair_by_pair_from_memory_maps(tmp_path):
    large, small = (np.stack([related(seed=seed)[side].float().numpy() for seed in range(4)]) for side in (0, 1))
    np.save(tmp_path / "large.npy", large)
    mapped = np.load(tmp_path / "large.npy", mmap_mode="r")
    found = block_scores(mapped, small[[0, 2]], (0, 2))
    expected = [held_out(torch.from_numpy(large[b]), torch.from_numpy(small[b])) for b in (0, 2)]
    assert found == {name: [scores[name] for scores in expected] for name in ("ridge", "procrustes")}


def test_embeddings_are_scored_on_shared_rows_in_order_and_at_random():
    x, y = related(rows=200)
    padded = torch.cat([x, torch.zeros(8, 12)])
    found = embedding_scores(padded, y, seeds=(1, 2))
    assert found["cka"] == pytest.approx(cka(x, y)) and found["ridge"] == pytest.approx(held_out(x, y)["ridge"])
    assert found["ridge_random"] == [held_out(x, y, at_random(200, seed))["ridge"] for seed in (1, 2)]


def test_order_matters_to_embeddings_whose_late_rows_are_noise():
    x, y = related(rows=400, noise=0.1)
    y[320:] = y[320:].flip(0)
    found = embedding_scores(x, y, seeds=(0,))
    assert found["ridge_random"][0] > found["ridge"] + 0.2


# What cannot be scored

@pytest.mark.parametrize(("change", "message"), [
    (lambda x, y: (x[:12], y[:12]), "12 training samples are too few for a map from 12 features: at least 13"),
    (lambda x, y: (x[:, :5] * 0 + 3, y), "x is constant over all 300 training samples"),
    (lambda x, y: (x, y * 0 + 0.1), "y is constant over all 300 training samples"),
    (lambda x, y: (x.index_fill(0, torch.tensor([4]), math.nan), y), "x holds NaN or infinity"),
    (lambda x, y: (x, y.index_fill(0, torch.tensor([4]), math.inf)), "y holds NaN or infinity"),
    (lambda x, y: (x[:-1], y), r"same rows, got shapes \(299, 12\) and \(300, 5\)"),
])
@pytest.mark.parametrize("fit", [ridge, procrustes])
def test_a_map_that_cannot_be_fitted_says_why(fit, change, message):
    with pytest.raises(ValueError, match=message):
        fit(*change(*related()))


@pytest.mark.parametrize(("change", "message"), [
    (lambda x, y: (x[:1], y[:1]), "at least two samples, got 1"),
    (lambda x, y: (x.float() * 0 + 0.1, y), "large set 0 is constant over all 300 samples"),
    (lambda x, y: (x, y * 0), "small set 0 is constant"),
    (lambda x, y: (x, y.index_fill(1, torch.tensor([0]), math.nan)), "small set 0 holds NaN"),
    (lambda x, y: (x[:9], y[:8]), r"small: expected \(sets, 9 samples, features\), got \(1, 8, 5\)"),
])
def test_a_similarity_that_is_undefined_says_why(change, message):
    with pytest.raises(ValueError, match=message):
        cka(*change(*related()))


def test_errors_of_blocks_name_the_block_and_a_test_needs_rows_that_vary():
    x, y = (np.stack([side.numpy()] * 2) for side in related())
    y[1] = 4
    with pytest.raises(ValueError, match="block 1: y is constant"):
        block_scores(x, y, (0, 1))
    with pytest.raises(ValueError, match="none of 0 samples"):
        held_out(torch.zeros(0, 3), torch.zeros(0, 2))
    x, y = related()
    fitted = ridge(x, y)
    with pytest.raises(ValueError, match="no variance to explain"):
        fitted.r2(x[:2], fitted.y_mean.expand(2, -1))


# Captures

@pytest.fixture
def pair(tmp_path, monkeypatch):
    """Donor, reference and (30, 12) token ids, in a store of their own."""
    monkeypatch.setattr(captures, "STORE", tmp_path)
    donor = random_model(neox_config(layers=3, width=16, heads=2), seed=1, std=0.2)
    reference = random_model(neox_config(layers=3, width=8, heads=2, mlp=24), seed=2, std=0.2)
    return donor, reference, random_ids(360).reshape(30, 12)


def streams(model, sequences):
    """(blocks, n, length, width) by another way: transformers' own hidden states, and one hook for the last block."""
    last = []
    handle = model.gpt_neox.layers[-1].register_forward_hook(lambda module, inputs, output: last.append(output))
    with torch.no_grad():
        states = model(input_ids=torch.as_tensor(sequences), output_hidden_states=True).hidden_states
    handle.remove()
    return torch.stack([*states[1:-1], last[0]])  # the last of `hidden_states` is behind the final norm


def test_a_capture_holds_means_and_last_positions_of_every_block(pair):
    donor, _, sequences = pair
    found, expected = captures.capture(donor, "a", sequences, batch=7), streams(donor, sequences)
    assert found.pooled.shape == found.last.shape == (3, 30, 16) and found.pooled.dtype == np.float32
    np.testing.assert_allclose(found.pooled, expected.mean(dim=2), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(found.last, expected[:, :, -1], rtol=1e-4, atol=1e-5)
    assert isinstance(found.pooled, np.memmap)


def test_a_capture_is_made_once_for_a_model_and_a_frozen_set(pair, monkeypatch):
    donor, _, sequences = pair
    first = captures.capture(donor, "a", sequences)
    monkeypatch.setattr(captures, "forward_all", lambda *_: pytest.fail("captured twice"))
    assert captures.capture(donor, "a", sequences.astype(np.int32)) == first
    assert first.manifest["model"] == "a" and first.manifest["shape"] == [3, 30, 16] and "commit" in first.manifest
    for key, ids in (("b", sequences), ("a", sequences[:-1]), ("a", sequences[::-1])):
        with pytest.raises(pytest.fail.Exception, match="twice"):
            captures.capture(donor, key, ids)


def test_a_failed_or_damaged_capture_is_never_taken_for_a_whole_one(pair):
    donor, _, sequences = pair
    with torch.no_grad():
        donor.gpt_neox.layers[1].mlp.dense_4h_to_h.bias[0] = math.nan
    with pytest.raises(ValueError, match="block 1 gives NaN or infinity"):
        captures.capture(donor, "a", sequences)
    assert not list(captures.STORE.glob("captures/*/manifest.json"))
    with torch.no_grad():
        donor.gpt_neox.layers[1].mlp.dense_4h_to_h.bias[0] = 0
    found = captures.capture(donor, "a", sequences)
    (found.folder / "pooled.npy").write_bytes((found.folder / "pooled.npy").read_bytes()[:200])
    with pytest.raises(StoreError, match=r"pooled\.npy is damaged"):
        _ = captures.Capture(found.folder).pooled


@pytest.mark.parametrize("memory", [1, 2**30])
def test_similarity_of_models_is_that_of_all_positions_whatever_the_memory(pair, memory):
    donor, reference, sequences = pair
    found = captures.similarity(donor, reference, ["a", "b"], sequences, batch=7, memory=memory)
    x, y = (streams(model, sequences).flatten(1, 2) for model in (donor, reference))
    np.testing.assert_allclose(found, [[gram_cka(a, b) for b in y] for a in x], rtol=1e-4)
    again = captures.similarity(None, None, ["a", "b"], sequences)  # from the store: no model is asked
    assert torch.equal(found, again)


def test_the_blocks_of_a_pass_fit_the_memory():
    large, small = neox_config(layers=24, width=2048, heads=16), neox_config(layers=24, width=1024, heads=16)
    group = captures.blocks_a_pass(large, small, 4 * 2**30)
    assert 8 * (group * (24 * 2048 * 1024 + 2048**2) + 24 * 1024**2) <= 4 * 2**30 and math.ceil(24 / group) == 3
    assert captures.blocks_a_pass(large, small, 1) == 1 and captures.blocks_a_pass(large, small, 2**50) == 24


def test_an_experiment_without_a_fitting_reference_is_refused_by_name(tmp_path):
    toy = load_experiment("toy") if (ROOT / "models" / "nano-s" / "config.json").exists() else None
    if toy is not None and toy.pair.reference is None:
        with pytest.raises(ExperimentError, match=r"experiment 'toy' has no reference.*set pair\.reference"):
            captures.reference_of(toy)
    random_model(neox_config(width=16)).save_pretrained(tmp_path / "small")
    other = experiment_of(tmp_path, {"layers": 2, "width": 8, "heads": 2, "mlp": 40})
    with pytest.raises(ExperimentError, match=r"pair\.reference .*small has width=16, the target 8"):
        captures.reference_of(other)
    assert captures.reference_of(experiment_of(tmp_path, {"layers": 2, "width": 16, "heads": 2, "mlp": 40}))
    with pytest.raises(ExperimentError, match=r"experiment 'tiny' has no reference, .*width=16"):
        captures.reference_of(experiment_of(tmp_path, {"layers": 2, "width": 16, "heads": 2, "mlp": 40}, None))


def experiment_of(folder, target, reference="small", donor="small"):
    """An experiment whose models lie in `folder`."""
    (folder / "tiny.yaml").write_text(yaml.safe_dump({
        "name": "tiny", "title": "a tiny pair",
        "pair": {"donor": str(folder / donor), "target": target,
                 "reference": reference and str(folder / reference)},
        "corpus": {"source": "embedded", "seed_stride": 20_000,
                   "frozen": {"sequences": 120, "length": 32, "similarity": 20, "moments": 20}},
        "evaluation": {"window": 64, "stride": 32, "quick_tokens": 500, "limits": {"heldout": 2000, "foreign": 2000}},
        "race": {"tokens": 16_384, "batch": 8, "length": 64, "peak_lr": 5e-3, "warmup_steps": 3, "eval_every": 4096,
                 "checkpoint_every": 10, "precision": "bf16", "attention": "eager", "arms": ["random"]},
        "seeds": [0]}))
    return load_experiment(str(folder / "tiny.yaml"))


# Claims

def imagined(**changes):
    """Evidence in which everything the paper says is so."""
    cka = np.full((8, 8), 0.97)
    np.fill_diagonal(cka, 0.98)
    cka[:2], cka[:, :2], cka[7], cka[:, 7] = 0.3, 0.3, 0.5, 0.5
    cka[[0, 1, 7], [0, 1, 7]] = 0.6, 0.5, 0.7
    cka[2:7, 3], cka[7, 3] = 0.99, 0.75  # one column is nearly everyone's best match
    ridge, rotated = [0.9, 0.7, 0.75, 0.8, 0.85, 0.85, 0.85, 0.9], [0.8, 0.6, 0.55, 0.7, 0.7, 0.7, 0.7, 0.75]
    scores = {"ridge": ridge, "procrustes": rotated}
    inside = {"cka": 0.5, "ridge": 0.25, "procrustes": 0.17, "ridge_random": [0.3, 0.32],
              "procrustes_random": [0.2, 0.2]}
    outside = {"cka": 0.7, "ridge": 0.39, "procrustes": 0.24, "ridge_random": [0.45, 0.5],
               "procrustes_random": [0.3, 0.3]}
    activations = {"act": scores, "last": scores,
                   "untrained": {name: [v - 0.5 for v in values] for name, values in scores.items()}}
    found = alignment_evidence(torch.from_numpy(cka), range(8), activations, {"emb_in": inside, "emb_out": outside})
    return Measured({**found.values, **changes})


def failing(measured):
    return {finding.claim.id for finding in evaluate(CLAIMS, measured) if finding.verdict != HOLDS}


def test_everything_holds_in_the_imagined_pair():
    assert failing(imagined()) == set()
    assert len(CLAIMS) == len({claim.id for claim in CLAIMS}) >= 15


@pytest.mark.parametrize(("changes", "claims"), [
    ({"act.cka_diag_mean": 0.4}, {"cka-diagonal"}),
    ({"act.cka_best_on_diag": 0.75}, {"cka-no-sharp-match"}),
    ({"act.cka": np.eye(8).tolist()}, {"cka-saturates", "cka-ends-distinct"}),
    ({"act.ridge_r2_mean": 0.45, "act.procrustes_r2_mean": 0.3},
     {"ridge-explains-most", "representation-parameter-gap", "gap-survives-random-split"}),
    ({"act.procrustes_r2_mean": 0.4}, {"procrustes-gets-most-of-it", "gap-carries-over"}),
    ({"act.procrustes_r2_mean": 0.9}, {"ridge-above-procrustes", "gap-carries-over"}),
    ({"act.procrustes": [0.5, 0.6, 0.7, 0.7, 0.7, 0.7, 0.7, 0.7]}, {"dip-together"}),  # lowest at an end
    ({"act.procrustes": [0.8, 0.6, 0.7, 0.7, 0.4, 0.7, 0.7, 0.7]}, {"dip-together"}),  # lowest elsewhere
    ({"emb_out.ridge_r2": 0.9}, {"embeddings-below-activations", "embeddings-loosely-linear",
                                 "representation-parameter-gap", "vocabulary-order-is-harder"}),
    ({"emb_in.cka": 0.8}, {"output-above-input"}),
    ({"last.ridge_r2_mean": 0.4}, {"last-token-alike"}),
    ({"untrained.ridge_r2_mean": 0.9}, {"alignment-is-learned"}),
    ({"emb_in.ridge_r2_random": [0.2, 0.2]}, {"vocabulary-order-is-harder"}),
    ({"emb_in.ridge_r2_random": [0.9, 0.9]}, {"gap-survives-random-split"}),
])
def test_a_changed_number_changes_exactly_the_verdicts_about_it(changes, claims):
    assert failing(imagined(**changes)) == claims


def test_the_paper_satisfies_its_own_claims_as_far_as_it_gives_numbers():
    names = ["act.cka_diag_mean", "act.cka_best_on_diag", "act.ridge_r2_mean", "act.procrustes_r2_mean",
             *(f"emb_{side}.{name}" for side in ("in", "out") for name in ("cka", "ridge_r2", "procrustes_r2"))]
    paper = Measured({name: published(f"align.{name}")["value"] for name in names})
    verdicts = {finding.claim.id: finding.verdict for finding in evaluate(CLAIMS, paper)}
    assert FAILS not in verdicts.values()
    curves = {"cka-saturates", "cka-ends-distinct", "dip-together", "dip-where-cka-is-low"}
    assert {claim for claim, verdict in verdicts.items() if verdict == NOT_RUN} == curves | {
        "last-token-alike", "alignment-is-learned", "vocabulary-order-is-harder", "gap-survives-random-split"}


def test_the_middle_band_is_the_papers():
    assert middle(24) == range(4, 23) and middle(8) == range(2, 7)
    found = evaluate(CLAIMS, Measured({"act.cka": [[1, 0], [0, 1]]}))
    assert {finding.verdict for finding in found} == {NOT_RUN}  # two blocks have no middle


def test_table_3_has_the_papers_numbers_beside_ours():
    table = alignment_table(imagined()).set_index("")
    row = table.loc["activations, mean-pooled"]
    assert list(row[["CKA, paper", "Procrustes R², paper", "ridge R², paper"]]) == ["0.883", "0.717", "0.844"]
    assert row["ridge R², ours"] == "0.825"
    assert table.loc["output embedding", "ridge R², paper"] == "0.386"
    assert table.loc["output embedding, random split (not in the paper)", "ridge R², ours"] == "0.475 ± 0.035"
    assert set(table.loc["activations, last token (not in the paper)"][["CKA, paper", "ridge R², paper"]]) == {"-"}
    assert set(alignment_table(Measured({}))["ridge R², ours"]) == {"-"}
    assert "dip" in " ".join(tabulate(evaluate(CLAIMS, imagined()))["claim"])


# Figures

def test_the_heat_map_has_donor_blocks_down_and_marks_matches_and_best():
    cka = np.array([[0.9, 0.1], [0.2, 0.3], [0.1, 0.8], [0.7, 0.2]])
    axis, bar = plots.similarity(cka, (0, 2), "nano-l", "nano-m").axes
    mesh, best = axis.collections[:2]
    np.testing.assert_allclose(mesh.get_array().reshape(4, 2), cka)
    assert (axis.get_xlabel(), axis.get_ylabel()) == ("block of nano-m", "block of nano-l")
    assert axis.yaxis_inverted() and mesh.get_clim() == (0, 1)
    np.testing.assert_allclose(best.get_offsets(), [[0.5, 0.5], [1.5, 1.5], [1.5, 2.5], [0.5, 3.5]])
    frames = [patch.get_xy() for patch in axis.patches if patch.get_gid() == "matched"]
    assert frames == [(0, 0), (1, 2)] and bar.get_ylabel() == "linear CKA"


def test_the_maps_figure_draws_both_lines_and_marks_their_lowest_blocks():
    pooled = {"ridge": [0.9, 0.7, 0.8], "procrustes": [0.8, 0.6, 0.5]}
    figure = plots.maps({"pooled": pooled, "last token": pooled}, {"ridge": [0.2] * 3, "procrustes": [-0.1] * 3})
    first, second, paper = figure.axes
    found = {line.get_label(): line for line in first.lines}
    np.testing.assert_allclose(found["ridge"].get_ydata(), pooled["ridge"])
    np.testing.assert_allclose(found["Procrustes"].get_ydata(), pooled["procrustes"])
    assert (*found["_dip of ridge"].get_xdata(), *found["_dip of Procrustes"].get_xdata()) == (1, 2)
    assert list(found["_untrained Procrustes"].get_ydata()) == [-0.1] * 3 and first.get_ylim()[0] < -0.1
    assert not [line for line in second.lines if line.get_label().startswith("_untrained")]
    assert {published("align.act.ridge_r2_layer5")["value"]} <= {
        y for line in paper.lines for y in line.get_ydata()}
    for axis in figure.axes:
        boxes = [text.get_window_extent() for text in axis.texts if text.get_gid() == "name"]
        assert len(boxes) == 2 and not any(a.overlaps(b) for a, b in itertools.combinations(boxes, 2))
        assert all(figure.bbox.x0 <= box.x0 and box.x1 <= figure.bbox.x1 for box in boxes)
    assert len(plots.maps({"pooled": pooled}, paper=False).axes) == 1


# The notebook, as a user runs it

@pytest.mark.slow
def test_the_notebook_runs_on_a_tiny_pair_and_keeps_its_numbers(tmp_path, monkeypatch):
    documents = texts.training_documents()[:60]
    tokenizer = train_tokenizer(documents[:10], 600, 64)
    for name, width in (("large", 32), ("small", 16)):
        random_model(neox_config(layers=4, width=width, heads=4, mlp=2 * width, vocab=600), std=0.05).save_pretrained(
            tmp_path / name)
        tokenizer.save_pretrained(tmp_path / name)
    monkeypatch.setattr(corpus, "STORE", tmp_path / "store")
    monkeypatch.setattr(texts, "training_documents", lambda: documents)
    assert len(corpus.Corpus(tokenizer, (120, 32), 20_000).train.tokens) > 4_000
    experiment_of(tmp_path, {"layers": 4, "width": 16, "heads": 4, "mlp": 32}, donor="large")
    command = [Path(sys.executable).with_name("papermill"), NOTEBOOKS / "04_alignment.ipynb", tmp_path / "out.ipynb",
               "-p", "experiment", tmp_path / "tiny.yaml"]
    done = subprocess.run(list(map(str, command)), cwd=ROOT, text=True, capture_output=True, check=False,
                          stdin=subprocess.DEVNULL, timeout=600,
                          env={**os.environ, "SCALEOP_STORE": str(tmp_path / "store"), "JUPYTER_PREFER_ENV_PATH": "1"})
    assert done.returncode == 0, done.stderr[-3000:]
    page = nbformat.read(tmp_path / "out.ipynb", 4)
    outputs = [output for cell in page.cells if cell.cell_type == "code" for output in cell.outputs]
    assert not [o for o in outputs if o.output_type == "error" or o.get("name") == "stderr"]
    assert sum("image/svg+xml" in output.get("data", {}) for output in outputs) == 2
    kept = json.loads((tmp_path / "store" / "results" / "04_alignment.json").read_text())
    assert {finding["id"] for finding in kept["findings"]} == {claim.id for claim in CLAIMS}
    assert not [finding for finding in kept["findings"] if finding["verdict"] == NOT_RUN]
    assert len(kept["values"]["act.ridge"]) == 4 and kept["commit"]


def test_alignment_takes_tensors_and_knows_no_model():
    """Section 4's mathematics can be called in a shell, on anything."""
    assert not [line for line in Path(alignment.__file__).read_text(encoding="utf-8").splitlines()
                if line.startswith(("from scaleop", "import scaleop"))]

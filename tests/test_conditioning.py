"""The controlled study of 7.6: sampling against brute force, solves against inverses, errors against theory."""

import json

import numpy as np
import pytest
import torch
from scipy.fft import idct
from scipy.optimize import brentq

from scaleop import conditioning, donor_moments
from scaleop.ridge import GRID, HeldOut, clamp_rows, effective_rank, holdout_errors, noise_floor
from scaleop.sampling import Moments, Population, bartlett, draw, gram, power_law
from scaleop.shrink import kept_inputs
from scaleop.solves import BATCH, HELD_OUT, Fits, accumulated, solve_single
from scaleop.tridiagonal import Tridiagonal
from scaleop.wiring import shape_of

RULES = ("mean_diagonal", "spectrum", "holdout", "clamp")


def truth(population):
    """(n, n) covariance and (n, n) second moments about zero, from the transform written out as a matrix."""
    n = len(population.spectrum)
    basis = np.array([[np.sqrt((1 if f == 0 else 2) / n) * np.cos(np.pi * f * (2 * i + 1) / (2 * n))
                       for f in range(n)] for i in range(n)])
    covariance = basis @ np.diag(population.spectrum) @ basis.T
    return covariance, covariance + np.outer(population.mean, population.mean)


def test_the_transform_is_orthogonal_and_the_spectrum_is_the_covariances():
    population = Population(12, 1.5, 0.4, rows=3, seed=2)
    mixed = idct(np.eye(24), norm="ortho", axis=0)
    np.testing.assert_allclose(mixed @ mixed.T, np.eye(24), atol=1e-14)
    covariance, second = truth(population)
    np.testing.assert_allclose(np.linalg.eigvalsh(covariance)[::-1], power_law(24, 1.5), rtol=1e-10)
    np.testing.assert_allclose(power_law(24, 1.5)[0] / power_law(24, 1.5)[8], 27)  # 9^1.5
    assert np.trace(second) == pytest.approx(population.energy) == pytest.approx(24 / 0.6)
    assert population.mean @ population.mean == pytest.approx(0.4 * population.energy)
    kept = population.kept
    np.testing.assert_allclose(population.square(), covariance[np.ix_(kept, kept)], atol=1e-13)
    np.testing.assert_allclose(population.factor @ population.factor.T, population.square(), atol=1e-13)
    np.testing.assert_allclose(population.times_covariance(np.eye(24)), covariance, atol=1e-13)


def test_kept_moments_are_made_in_chunks_of_any_size(monkeypatch):
    whole = Population(10, 1.0).square()
    monkeypatch.setattr("scaleop.sampling.CHUNK", 3)
    np.testing.assert_array_equal(Population(10, 1.0).square(), whole)


def test_errors_are_the_populations():
    population = Population(10, 1.3, 0.5, rows=4, seed=5)
    kept, matrix = population.kept, population.matrix
    for inputs, second in zip((population.without_mean(), population), truth(population), strict=True):
        fitted = np.random.default_rng(0).normal(size=(4, 10))
        placed = matrix.copy()
        placed[:, kept] -= fitted
        assert inputs.error(fitted) == pytest.approx(
            np.trace(placed @ second @ placed.T) / (4 * np.trace(second)), rel=1e-12)
        dropped = np.setdiff1d(np.arange(20), kept)
        assert inputs.selection_error() == pytest.approx(second[dropped, dropped].sum() / np.trace(second))
        best = matrix @ second[:, kept] @ np.linalg.inv(second[np.ix_(kept, kept)])  # Eq. 3, no ridge
        np.testing.assert_allclose(inputs.optimum(), best, rtol=1e-8)
        nudged = best + 1e-3 * fitted
        assert inputs.error(best) < inputs.error(nudged)


def test_errors_are_those_of_inputs_drawn_one_by_one():
    population = Population(10, 1.0, 0.3, rows=4, seed=1)
    fitted = population.matrix[:, population.kept]
    x = population.positions(200_000, np.random.default_rng(3))
    found = np.square(x @ population.matrix.T - x[:, population.kept] @ fitted.T).mean(axis=0).sum()
    assert population.error(fitted) * 4 * population.energy == pytest.approx(found, rel=0.01)


def test_bartletts_triangle_makes_wishart_matrices():
    rng, degrees = np.random.default_rng(0), 7
    draws = np.array([lower @ lower.T for lower in (bartlett(3, degrees, rng) for _ in range(20_000))])
    np.testing.assert_allclose(draws.mean(axis=0), degrees * np.eye(3), atol=0.12)
    np.testing.assert_allclose(draws.var(axis=0), degrees * (np.ones((3, 3)) + np.eye(3)), rtol=0.06)  # 2N, N
    assert np.array_equal(np.triu(bartlett(3, 7, rng), 1), np.zeros((3, 3)))
    with pytest.raises(ValueError, match="2 positions cannot fill moments of 3"):
        bartlett(3, 2, rng)


def test_drawn_moments_are_distributed_as_those_of_inputs_drawn_one_by_one():
    population, count, times = Population(16, 1.5, 0.3, rows=4, seed=1), 50, 4_000

    def entries(square, cross):
        """Some moments, and some products of two: what a wrong correlation would change."""
        some = np.concatenate([square[:3, :3][np.triu_indices(3)], cross[:2, :3].ravel()])
        return np.concatenate([some, np.outer(some, some)[np.triu_indices(len(some))]])

    def one_by_one(rng):
        x = population.positions(count, rng)
        return entries(x[:, population.kept].T @ x[:, population.kept] / count,
                       population.matrix @ x.T @ x[:, population.kept] / count)

    def at_once(rng):
        found = draw(population, count, rng)
        return entries(found.square + np.outer(found.mean, found.mean),
                       found.cross + np.outer(found.output, found.mean))

    brute, fast = (np.array([one(rng) for _ in range(times)]) for one, rng in
                   ((one_by_one, np.random.default_rng(1)), (at_once, np.random.default_rng(2))))
    z = (brute.mean(axis=0) - fast.mean(axis=0)) / np.sqrt((brute.var(axis=0) + fast.var(axis=0)) / times)
    assert len(z) == 12 + 78 and np.abs(z).max() < 4
    np.testing.assert_allclose(fast.std(axis=0), brute.std(axis=0), rtol=0.15)


def test_a_draw_of_many_positions_has_the_populations_moments():
    population = Population(8, 1.0, 0.5, rows=3, seed=4)
    found = draw(population, 1_000_000, np.random.default_rng(0))
    covariance, _ = truth(population)
    kept = population.kept
    np.testing.assert_allclose(found.square, covariance[np.ix_(kept, kept)], atol=0.02)
    np.testing.assert_allclose(found.cross, population.matrix @ covariance[:, kept], atol=0.08)
    np.testing.assert_allclose(found.mean, population.mean[kept], atol=0.01)
    np.testing.assert_allclose(found.output, population.matrix @ population.mean, atol=0.03)


def test_gram_is_the_product_with_the_transpose():
    lower = np.tril(np.random.default_rng(0).normal(size=(9, 9)))
    before = lower.copy()
    np.testing.assert_allclose(gram(lower), lower @ lower.T, atol=1e-13)
    np.testing.assert_array_equal(lower, before)


@pytest.mark.parametrize("first", [np.random.default_rng(1).normal(size=30), np.zeros(30), -np.eye(30)[0],
                                   np.eye(30)[3]])
def test_one_reduction_solves_at_any_ridge_and_any_share_of_the_mean(first):
    rng = np.random.default_rng(0)
    x, rows = rng.normal(size=(80, 30)), rng.normal(size=(4, 30))
    square = np.asfortranarray(x.T @ x)
    reduced = Tridiagonal(square, first)
    np.testing.assert_array_equal(square, x.T @ x)
    np.testing.assert_allclose(reduced.back(reduced.into(rows)), rows, atol=1e-12)
    for share, ridge in ((0, 0.0), (0, 3.0), (1, 0.1), (5, 40.0)):
        whole = square + share * np.outer(first, first)
        np.testing.assert_allclose(reduced.eigenvalues(share), np.linalg.eigvalsh(whole), rtol=1e-9)
        np.testing.assert_allclose(reduced.back(reduced.solve(reduced.into(rows), ridge, share)),
                                   rows @ np.linalg.inv(whole + ridge * np.eye(30)), rtol=1e-7, atol=1e-12)
    with pytest.raises(ValueError, match="not positive definite"):
        reduced.solve(rows, -1e9)


@pytest.fixture(scope="module")
def solved():
    """A population of 24 kept inputs, its moments from 60 positions, and every rule's fit about the mean and zero."""
    population = Population(24, 1.5, 0.6, rows=5, seed=3)
    moments = draw(population, 60, np.random.default_rng(7))
    fits = Fits(population, moments, np.random.default_rng(8))
    return population, moments, fits, [fits.by_rule(mean) for mean in (0, 1)]


@pytest.mark.parametrize("mean", [0, 1])
def test_each_rules_fit_is_eq_3_with_its_lambda(solved, mean):
    population, moments, _, found = solved
    eigenvalues, by_rule = found[mean]
    square = moments.square + mean * np.outer(moments.mean, moments.mean)
    cross = moments.cross + mean * np.outer(moments.output, moments.mean)
    np.testing.assert_allclose(eigenvalues, np.linalg.eigvalsh(square), rtol=1e-8)
    assert set(by_rule) == set(RULES)
    assert by_rule["mean_diagonal"][0] == by_rule["clamp"][0] == pytest.approx(1e-3 * np.trace(square) / 24)
    assert by_rule["spectrum"][0] == pytest.approx(noise_floor(torch.from_numpy(eigenvalues)))
    matrix = torch.from_numpy(population.matrix)
    for rule, (ridge, fitted) in by_rule.items():
        direct = cross @ np.linalg.inv(square + ridge * np.eye(24))
        if rule == "clamp":
            direct = clamp_rows(torch.from_numpy(direct), matrix).numpy()
        np.testing.assert_allclose(fitted, direct, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("mean", [0, 1])
def test_holdout_takes_the_lambda_that_ridge_holdout_errors_would(solved, mean):
    """The same positions, handed to the project's own rule as moments of all 48 inputs."""
    population, moments, fits, found = solved
    x = fits.held + mean * population.mean
    error = x.T @ x[:, population.kept]
    square = moments.square + mean * np.outer(moments.mean, moments.mean)
    cross = moments.cross + mean * np.outer(moments.output, moments.mean)
    columns, others = np.zeros((48, 24)), np.setdiff1d(np.arange(48), population.kept)
    columns[population.kept] = square  # Sigma[:, K]: any dropped rows will do that give M Sigma[:, K] = cross
    left = cross - population.matrix[:, population.kept] @ square
    columns[others] = np.linalg.lstsq(population.matrix[:, others], left, rcond=None)[0]
    errors = holdout_errors(torch.from_numpy(population.matrix),
                            HeldOut(torch.from_numpy(columns), torch.from_numpy(error)),
                            torch.from_numpy(population.kept))
    assert len(fits.held) == HELD_OUT
    chosen = found[mean][1]["holdout"][0]
    assert chosen == pytest.approx(GRID[errors.argmin()].item() * np.trace(square) / 24)
    assert 0 < int(errors.argmin()) < len(GRID) - 1  # not an end of the grid


def theory(population, ridge, positions):
    """Held-out error of ridge regression about the mean in the limit of many inputs and positions (Hastie et al. 2022):
    kappa solves kappa = ridge + kappa df1 / N, and error = (bias + noise) / (1 - df2 / N)."""
    values, basis = np.linalg.eigh(population.square())
    slopes, noise = population.regression
    slopes = slopes @ basis
    kappa = brentq(lambda each: each - ridge - each * (values / (values + each)).sum() / positions, ridge, 1e6)
    bias = (kappa**2 * slopes**2 * values / (values + kappa) ** 2).sum()
    df2 = (values**2 / (values + kappa) ** 2).sum()
    return (bias + np.trace(noise)) / (1 - df2 / positions) / (len(slopes) * len(population.spectrum))


@pytest.mark.parametrize(("exponent", "positions"), [(1.0, 1_000), (1.5, 4_000)])
def test_the_held_out_error_is_what_random_matrix_theory_says(exponent, positions):
    population = Population(400, exponent, 0.5, rows=32, seed=2)
    moments = draw(population, positions, np.random.default_rng(1))
    _, by_rule = Fits(population, moments, np.random.default_rng(2)).by_rule(0)
    for rule in ("mean_diagonal", "spectrum", "holdout"):
        ridge, fitted = by_rule[rule]
        found = population.without_mean().error(fitted)
        assert found == pytest.approx(theory(population, ridge, positions), rel=0.02)


def test_where_few_positions_make_the_papers_ridge_overfit_a_held_out_one_does_not():
    errors = {"mean_diagonal": [], "holdout": []}
    for seed in range(3):
        population = Population(200, 2.0, 0.0, rows=16, seed=seed)
        moments = draw(population, 220, np.random.default_rng(seed))
        _, by_rule = Fits(population, moments, np.random.default_rng(10 + seed)).by_rule(0)
        for rule in errors:
            errors[rule].append(population.error(by_rule[rule][1]) / population.error(population.optimum()))
    assert min(errors["mean_diagonal"]) > 2  # it overfits
    assert np.mean(errors["holdout"]) < 0.95 * np.mean(errors["mean_diagonal"])
    assert all(held <= paper for held, paper in zip(errors["holdout"], errors["mean_diagonal"], strict=True))


def test_running_fp32_sums_lose_as_much_as_the_authors_do():
    """Against moments that really are summed batch by batch in fp32, from the inputs themselves."""
    population, batches = Population(48, 1.5, 0.9, rows=4, seed=0), 63
    rng, kept = np.random.default_rng(0), population.kept
    real, exact = torch.zeros(48, 48), np.zeros((48, 48))
    for _ in range(batches):
        x = population.positions(BATCH, rng)[:, kept].astype(np.float32)
        real += torch.from_numpy(x).T @ torch.from_numpy(x)
        exact += x.astype(float).T @ x.astype(float)
    emulated = accumulated(exact.astype(np.float32), batches, np.random.default_rng(1))
    lost = [np.sqrt(np.mean(np.square(each.double().numpy() / exact - 1))) for each in (real, emulated)]
    assert 1e-8 < lost[0] < 1e-6
    assert 1 / 3 < lost[1] / lost[0] < 3


def test_fp32_goes_astray_where_the_mean_dominates_and_only_there():
    off = {}
    for share in (0.0, 0.99):
        population = Population(200, 1.0, share, rows=8, seed=1)
        moments = draw(population, 20_000, np.random.default_rng(2))
        mean = int(share > 0)
        fitted = Fits(population, moments, np.random.default_rng(3)).by_rule(mean)[1]["mean_diagonal"][1]
        single = solve_single(moments, mean, 10, np.random.default_rng(4))
        off[share] = np.linalg.norm(single - fitted) / np.linalg.norm(fitted)
    assert off[0.0] < 1e-5
    assert 1e-4 < off[0.99] < 0.1
    assert off[0.99] > 30 * off[0.0]


def test_single_rounds_each_moment_once(monkeypatch):
    monkeypatch.setattr("scaleop.sampling.CHUNK", 2)
    rng = np.random.default_rng(0)
    moments = Moments(rng.normal(size=(5, 5)), rng.normal(size=(2, 5)), rng.normal(size=5), rng.normal(size=2))
    square, cross = moments.single(1)
    np.testing.assert_array_equal(square, (moments.square + np.outer(moments.mean, moments.mean)).astype(np.float32))
    np.testing.assert_array_equal(cross, (moments.cross + np.outer(moments.output, moments.mean)).astype(np.float32))
    np.testing.assert_array_equal(moments.single(0)[0], moments.square.astype(np.float32))


def test_exponents_of_planted_spectra():
    kept = torch.arange(0, 128, 2)
    basis = torch.linalg.qr(torch.randn(64, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(0))).Q
    sigma = torch.zeros(128, 64, dtype=torch.float64)
    values = torch.arange(1, 65, dtype=torch.float64) ** -1.7
    values[0] = 3.0  # a mean's direction, outside the fitted ranks
    sigma[kept] = basis @ torch.diag(values) @ basis.T
    found = donor_moments.spectra({(2, "O"): sigma}, {(2, "O"): kept})
    torch.testing.assert_close(found[2, "O"], values)
    (row,) = donor_moments.exponents(found)
    assert (row["block"], row["role"], row["width"]) == (2, "O", 64)
    assert row["exponent"] == pytest.approx(1.7)
    assert row["largest"] == pytest.approx((3 / values.sum()).item())
    assert row["effective_rank"] == pytest.approx(effective_rank(values))
    assert row["smallest"] == pytest.approx((64**-1.7 / values.mean()).item())


@pytest.fixture
def small(tmp_path, monkeypatch):
    monkeypatch.setattr(conditioning, "STORE", tmp_path)
    return {"exponents": (1.0, 2.0), "widths": (32, 64), "positions": 2_000, "sweep": ((32, 500),), "repeats": 2,
            "rows": 8}


def test_a_study_is_repeatable_and_found_again(small, tmp_path, monkeypatch):
    rows = conditioning.study(**small)
    assert len(rows) == 3 * 2 * 2 * 2 * 5  # (width, positions), exponents, draws, about mean and zero, rules and fp32
    assert json.loads(json.dumps(rows)) == rows
    files = sorted((tmp_path / "conditioning").glob("*/rows.json"))
    assert len(files) == 12
    stored = json.loads(files[0].read_text())
    assert {"values", "commit", "versions", "seconds", "settings"} <= set(stored)
    with monkeypatch.context() as patch:
        patch.setattr(conditioning, "case", None)  # nothing is computed twice
        assert conditioning.study(**small) == rows
    monkeypatch.setattr(conditioning, "STORE", tmp_path / "elsewhere")
    assert conditioning.study(**small) == rows


def test_rows_are_consistent(small):
    for row in conditioning.study(**small):
        assert 0 < row["floor"] <= row["error"] < row["selected"] < 1
        assert row["mean_share"] in (0.0, 0.9)
        assert ("off" in row) == (row["rule"] == conditioning.SINGLE)
        assert row["condition"] <= 1 + row["width"] / row["lambda"]  # the largest eigenvalue is at most their sum


def test_summary_and_verdict_by_hand():
    def row(width, rule, error, seed=0, positions=128_000, **more):
        return {"exponent": 1.0, "mean_share": 0.0, "width": width, "positions": positions, "seed": seed, "rule": rule,
                "lambda": 1e-3, "condition": 10.0 * width, "effective_rank": 5.0, "error": error, "floor": 0.1,
                "selected": 0.5, "norm_ratio": 1.2, "floor_norm": 1.5, "row_ratio": 1.3, **more}

    rows = [row(512, "mean_diagonal", 0.11), row(512, "mean_diagonal", 0.13, seed=1), row(512, "holdout", 0.14)]
    rows += [row(1024, "mean_diagonal", 0.2), row(1024, "holdout", 0.15), row(512, "holdout", 9.0, positions=10)]
    rows += [row(width, conditioning.SINGLE, 0.3, off=0.01) for width in (512, 1024)]
    rows += [row(width, rule, 0.4) for width in (512, 1024) for rule in ("spectrum", "clamp")]
    table = conditioning.summary(rows)
    paper = table[(table["width"] == 512) & (table["rule"] == "mean_diagonal")].iloc[0]
    assert paper["error"] == pytest.approx(0.12) and paper["excess"] == pytest.approx(0.2)
    assert paper["noise"] == pytest.approx(512 / (128_000 - 513))
    narrow, wide = conditioning.verdict(rows).to_dict("records")
    assert (narrow["width"], narrow["best rule"], wide["width"], wide["best rule"]) == (
        512, "mean_diagonal", 1024, "holdout")
    assert wide["excess"] == pytest.approx(1.0) and wide["its excess"] == pytest.approx(0.5)
    assert wide["norm over optimum's"] == pytest.approx(0.8)
    assert wide["fp32 off"] == 0.01 and wide["fp32 excess"] == pytest.approx(2.0)


def test_impossible_settings_are_refused():
    with pytest.raises(ValueError, match="mean_share = 1"):
        Population(8, 1.0, 1)
    with pytest.raises(ValueError, match="8 positions cannot fill moments of 16"):
        conditioning.case(16, 1.0, 0.5, 9, 0, 4)


def test_effective_positions_count_repeats_once_and_independent_ones_fully():
    population = Population(100, 1.2, 0.5, rows=40, seed=1)
    matrix, kept = torch.from_numpy(population.matrix), torch.from_numpy(population.kept)
    for repeats in (1, 4):
        stretches = []
        for seed in (1, 2):
            x = np.repeat(population.positions(600, np.random.default_rng(seed)), repeats, axis=0)
            stretches.append(torch.from_numpy(x.T @ x))
        found = donor_moments.effective_positions(*stretches, matrix, kept)
        assert found["effective"] == pytest.approx(600, rel=0.05)  # of 600, and of 2,400
        least = population.error(population.optimum()) / population.error(np.zeros((40, 100)))
        assert found["floor"] == pytest.approx(least * (1 - 100 / 600), rel=0.05)


def test_effective_positions_of_one_stretch_twice_know_no_bound():
    x = torch.from_numpy(np.random.default_rng(0).normal(size=(60, 20)))
    matrix = torch.eye(20, dtype=torch.float64)[:3]
    assert donor_moments.effective_positions(x.T @ x, x.T @ x, matrix, torch.arange(9, 20))["effective"] is None


def test_a_donors_moments_measured(donor, target, tmp_path, monkeypatch):
    monkeypatch.setattr(donor_moments, "STORE", tmp_path)
    maps = donor.maps("scored", shape_of(target))
    rows = {(row["block"], row["role"]): row for row in donor_moments.measured(donor, maps, sequences=12)}
    assert set(rows) == {(block, role) for block in (0, 1) for role in ("O", "MLP_DOWN")}
    kept, seen = kept_inputs(donor.wiring, maps), {}
    module = donor.model.get_submodule("gpt_neox.layers.1.mlp.dense_4h_to_h")
    handle = module.register_forward_pre_hook(lambda _, inputs: seen.update(x=inputs[0].detach()))
    stretches = []
    for start in (0, 12):
        with torch.no_grad():
            donor.model(torch.as_tensor(donor.frozen[start : start + 12]))
        x = seen["x"].reshape(120, 48).double()
        stretches.append(x.T @ x)
    handle.remove()
    row, index, matrix = rows[1, "MLP_DOWN"], kept[1, "MLP_DOWN"], donor.weights[1, "MLP_DOWN"].double()
    both = stretches[0] + stretches[1]
    values = torch.linalg.eigvalsh(both[index][:, index]).numpy()
    assert (row["width"], row["positions"]) == (20, 120)
    assert row["largest"] == pytest.approx(values[-1] / values.sum(), rel=1e-4)
    assert row["effective"] == pytest.approx(
        donor_moments.effective_positions(*stretches, matrix, index)["effective"], rel=1e-3)
    fitted = matrix @ both[:, index] @ torch.linalg.inv(both[index][:, index] + 1e-3 * values.mean() * torch.eye(20))
    assert row["norm_ratio"] == pytest.approx((fitted.norm() / matrix[:, index].norm()).item(), rel=1e-4)
    assert row["norm_random"] != pytest.approx(row["norm_ratio"], rel=1e-3)
    monkeypatch.setattr(donor_moments, "second_moments", None)  # nothing is measured twice
    assert {(row["block"], row["role"]): row for row in donor_moments.measured(donor, maps, sequences=12)} == rows

"""Ridge rules against slow references: direct inverses, brute-force grids, and planted cases with a known best."""

import math

import numpy as np
import pytest
import torch

from scaleop.ridge import GRID, RULES, HeldOut, clamp_rows, effective_rank, holdout_errors, noise_floor
from scaleop.shrink import compensate


def planted(samples, seed=0, n=40, steep=3.0):
    """Inputs with a power-law spectrum in a random basis: (samples, n); the population is the same for every seed."""
    population = np.random.default_rng(99)
    basis = np.linalg.qr(population.normal(size=(n, n)))[0]
    scale = np.arange(1, n + 1) ** (-steep / 2)
    return (np.random.default_rng(seed).normal(size=(samples, n)) * scale) @ basis.T


def moments(x, kept):
    return torch.from_numpy((x.T @ x)[:, kept])


def test_effective_rank_of_known_spectra():
    assert effective_rank(torch.full((7,), 0.3)) == pytest.approx(7)
    assert effective_rank(torch.tensor([4.0, 0.0, 0.0])) == pytest.approx(1)
    p = np.array([0.5, 0.25, 0.25])
    assert effective_rank(torch.tensor([8.0, 4.0, 4.0])) == pytest.approx(math.exp(-(p * np.log(p)).sum()))


def test_the_noise_floor_is_the_mean_beyond_the_effective_rank():
    spectrum = torch.tensor([0.1, 100.0, 0.3, 100.0, 0.2])  # effective rank just above 2: three lie beyond two
    assert 2 < effective_rank(spectrum) < 3
    assert noise_floor(spectrum) == pytest.approx(0.15)  # ceil: three are kept, 0.1 and 0.2 are noise
    assert noise_floor(torch.ones(5)) == 0.0


def test_holdout_errors_are_those_of_each_fit_on_the_held_out_positions():
    x, y = planted(60, 1), planted(50, 2)
    matrix, kept = np.random.default_rng(3).normal(size=(5, 40)), [1, 4, 8, 17, 20, 33]
    found = holdout_errors(torch.from_numpy(matrix), HeldOut(moments(x, kept), moments(y, kept)), torch.tensor(kept))
    square = (x.T @ x)[np.ix_(kept, kept)]
    energy = np.square(y @ matrix.T).sum()
    assert len(found) == len(GRID) == 30
    for multiple, error in zip(GRID.tolist(), found.tolist(), strict=True):
        damped = square + multiple * np.diag(square).mean() * np.eye(len(kept))
        fitted = matrix @ (x.T @ x)[:, kept] @ np.linalg.inv(damped)
        assert error + energy == pytest.approx(np.square(y @ matrix.T - y[:, kept] @ fitted.T).sum(), rel=1e-6)


def test_holdout_takes_the_best_of_the_grid_and_never_errs_more_than_the_papers_ridge_there():
    unseen = dict.fromkeys(("mean_diagonal", "holdout"), 0.0)
    for seed in range(5):  # hardly more positions than kept inputs: a weak ridge fits their noise
        fit, error, fresh = planted(24, 10 + seed), planted(400, 20 + seed), planted(4000, 30 + seed)
        kept = torch.arange(0, 40, 2)
        matrix = torch.from_numpy(np.random.default_rng(seed).normal(size=(6, 40)))
        held = HeldOut(moments(fit, kept), moments(error, kept))
        errors = holdout_errors(matrix, held, kept)
        assert GRID[15].item() == pytest.approx(1e-3)
        assert errors.min() <= errors[15]  # the paper's ridge is one of the thirty
        for rule in unseen:
            fitted, solve = compensate(matrix, held.fit, kept, rule, held)
            unseen[rule] += np.square(fresh @ matrix.numpy().T - fresh[:, kept] @ fitted.numpy().T).sum()
        assert solve.ridge == pytest.approx(GRID[errors.argmin()].item() * held.fit[kept].diagonal().mean().item())
    assert unseen["holdout"] < 0.98 * unseen["mean_diagonal"]


def test_the_spectrum_rule_solves_with_the_noise_floor():
    x = planted(200)
    matrix, kept = torch.randn(3, 40, dtype=torch.float64), torch.arange(12)
    sigma = moments(x, kept)
    fitted, solve = compensate(matrix, sigma, kept, "spectrum")
    eigenvalues = torch.linalg.eigvalsh(sigma[kept])
    assert solve.ridge == pytest.approx(noise_floor(eigenvalues))
    damped = sigma[kept] + solve.ridge * torch.eye(12, dtype=torch.float64)
    assert torch.allclose(fitted, matrix @ sigma @ torch.linalg.inv(damped), rtol=1e-8)
    assert solve.condition == pytest.approx(torch.linalg.cond(damped).item(), rel=1e-6)
    assert solve.effective_rank == pytest.approx(effective_rank(eigenvalues))


def test_the_spectrum_rule_survives_moments_that_are_exactly_singular():
    x = np.zeros((10, 6))
    x[:, :2] = np.random.default_rng(0).normal(size=(10, 2))
    fitted, _ = compensate(torch.eye(6, dtype=torch.float64), moments(x, [0, 1, 2, 3]), torch.arange(4), "spectrum")
    assert torch.isfinite(fitted).all() and torch.allclose(fitted[:2, :2], torch.eye(2, dtype=torch.float64), atol=1e-6)


def test_clamp_bounds_every_row_by_the_donors_and_keeps_its_direction():
    matrix = torch.tensor([[3.0, 4.0, 0.0], [1.0, 0.0, 0.0], [0.0, 0.0, 0.0]])
    fitted = torch.tensor([[6.0, 8.0], [0.5, 0.0], [0.0, 0.0]])
    clamped = clamp_rows(fitted, matrix)
    assert torch.allclose(clamped, torch.tensor([[3.0, 4.0], [0.5, 0.0], [0.0, 0.0]]))

    x = planted(30)  # few positions: a weak ridge makes long rows
    kept, rows = torch.arange(20), torch.from_numpy(np.random.default_rng(5).normal(size=(8, 40)))
    rows[:, 20:] *= 30  # what is dropped is large
    free, bounded = (compensate(rows, moments(x, kept), kept, rule)[0] for rule in ("mean_diagonal", "clamp"))
    longer = free.norm(dim=1) > rows.norm(dim=1)
    assert (bounded.norm(dim=1) <= rows.norm(dim=1) * (1 + 1e-12)).all()
    assert torch.equal(bounded[~longer], free[~longer])


def test_unknown_rules_and_missing_moments_are_refused():
    sigma, kept = moments(planted(50), [0, 1]), torch.tensor([0, 1])
    with pytest.raises(ValueError, match="unknown ridge rule 'mean'"):
        compensate(torch.ones(1, 40), sigma, kept, "mean")
    with pytest.raises(ValueError, match="needs moments in two stretches"):
        compensate(torch.ones(1, 40), sigma, kept, "holdout")
    assert len(RULES) == 4

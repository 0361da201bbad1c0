"""Regressions from Gram matrices, against numpy's least squares on the stacked rows."""

import numpy as np
import pytest
import torch

from scaleop.regression import Gram, gains
from scaleop.ridge import GRID

K, M, SEQUENCES, LENGTH = 6, 4, 20, 9


@pytest.fixture(scope="module")
def rows():
    """x and y of 20 sequences of 9 positions, neither centred, y not quite linear in x; fp64."""
    draw = np.random.default_rng(0)
    x = draw.normal(size=(SEQUENCES, LENGTH, K)) * np.geomspace(0.1, 5, K) + 1.5
    y = x @ draw.normal(size=(K, M)) + 0.3 * np.sin(3 * x[..., :M]) - 2
    return torch.from_numpy(x), torch.from_numpy(y)


def gram_of(x, y, batch=7, start=0):
    gram = Gram(x.shape[-1], y.shape[-1], len(x))
    for first in range(start, len(x), batch):
        gram.add(first, x[first : first + batch], y[first : first + batch])
    return gram


def stacked(tensor, rows=slice(None)):
    return tensor[rows].flatten(0, 1).numpy()


def by_numpy(x, y, intercept, damping=0.0):
    """(matrix, offset): least squares on stacked rows, the ridge as further rows that the intercept does not see."""
    k = x.shape[1]
    design = np.hstack([x, np.ones((len(x), 1))]) if intercept else x
    extra = np.sqrt(damping) * np.eye(k, design.shape[1])
    found = np.linalg.lstsq(np.vstack([design, extra]), np.vstack([y, np.zeros((k, y.shape[1]))]), rcond=None)[0]
    return found[:k].T, found[k] if intercept else np.zeros(y.shape[1])


@pytest.mark.parametrize("intercept", [False, True])
@pytest.mark.parametrize("rule", [0.0, 0.3])
def test_a_fit_is_numpys_least_squares(rows, intercept, rule):
    fit = gram_of(*rows).fit(rule, intercept)
    x, y = map(stacked, rows)
    about = x - x.mean(axis=0) if intercept else x
    damping = rule * (about**2).sum() / K  # so many times the mean diagonal of x'x
    matrix, offset = by_numpy(x, y, intercept, damping)
    assert np.allclose(fit.matrix, matrix, rtol=1e-9, atol=1e-10) and np.allclose(fit.intercept, offset, atol=1e-9)
    assert fit.ridge == pytest.approx(damping)
    values = np.linalg.eigvalsh(about.T @ about)
    assert fit.condition == pytest.approx((values[-1] + damping) / (values[0] + damping), rel=1e-6)


@pytest.mark.parametrize("intercept", [False, True])
def test_r2_is_that_of_the_fit_to_the_first_four_fifths_on_the_last(rows, intercept):
    gram, weight = gram_of(*rows), torch.from_numpy(np.random.default_rng(1).normal(size=(3, M)))
    assert gram.cut == 16
    (x, held), (y, target) = ((stacked(side, slice(16)), stacked(side, slice(16, None))) for side in rows)
    matrix, offset = by_numpy(x, y, intercept)
    for given, reader in ((None, np.eye(M)), (weight, weight.numpy())):
        error = (target - held @ matrix.T - offset) @ reader.T
        spread = (target - target.mean(axis=0)) @ reader.T
        assert gram.r2(0.0, intercept, given) == pytest.approx(1 - (error**2).sum() / (spread**2).sum(), rel=1e-8)


def test_batches_do_not_matter_and_all_positions_count_in_the_fit(rows):
    whole, parts = gram_of(*rows, batch=SEQUENCES), gram_of(*rows, batch=3)
    assert torch.allclose(whole.early, parts.early, rtol=1e-12) and torch.allclose(whole.late, parts.late, rtol=1e-12)
    assert whole.total[0, 0] == SEQUENCES * LENGTH and whole.late[0, 0] == 4 * LENGTH
    early = Gram(K, M, 10**6)  # a set so large that none of these sequences is held out
    early.add(0, *rows)
    assert early.r2(0.0, True) is None
    assert torch.allclose(early.fit(0.0, True).matrix, whole.fit(0.0, True).matrix, rtol=1e-9)


def test_the_rule_holdout_takes_the_lambda_that_errs_least_on_the_last_fifth():
    draw = torch.Generator().manual_seed(2)
    x = torch.randn(10, 4, 30, generator=draw, dtype=torch.float64)  # 32 positions to fit 30 features: overfits
    y = x[..., :2] + torch.randn(10, 4, 2, generator=draw, dtype=torch.float64)
    gram = gram_of(x, y)
    early, late = stacked(x, slice(8)), stacked(x, slice(8, None))
    errors = []
    for multiple in GRID.numpy():
        matrix, _ = by_numpy(early, stacked(y, slice(8)), False, multiple * (early**2).sum() / 30)
        errors.append(((late @ matrix.T - stacked(y, slice(8, None)))**2).sum())
    assert 0 < int(np.argmin(errors)) < len(GRID) - 1
    chosen = gram.fit("holdout", False).ridge / (stacked(x)**2).sum() * 30
    assert chosen == pytest.approx(GRID[int(np.argmin(errors))].item())


def test_fewer_positions_than_features_give_the_regularised_fit():
    draw = np.random.default_rng(3)
    x, y = (torch.from_numpy(draw.normal(size=(3, 4, n))) for n in (40, 2))
    for rule in (0.0, 1e-3):
        fit = gram_of(x, y).fit(rule, False)
        matrix, _ = by_numpy(stacked(x), stacked(y), False, rule * (stacked(x)**2).sum() / 40)
        assert np.allclose(fit.matrix, matrix, atol=1e-5) and np.isfinite(fit.condition)  # 0.0: of least norm


def test_what_cannot_be_fitted_is_refused(rows):
    x, y = rows
    broken = x.clone()
    broken[3, 2, 1] = float("nan")
    with pytest.raises(FloatingPointError, match="not finite"):
        gram_of(broken, y).fit(0.1, True)
    with pytest.raises(ValueError, match="all features are zero"):
        gram_of(torch.zeros_like(x), y).fit(0.1, False)
    with pytest.raises(ValueError, match="no feature varies"):
        gram_of(torch.zeros_like(x), y).fit(0.1, True)


@pytest.mark.parametrize("bias", [False, True])
def test_gains_are_least_squares_on_the_logits(rows, bias):
    """Unknowns: a gain a coordinate (and a bias). Design: the logits that each would add, less their mean over tokens,
    which softmax does not see."""
    x, y = rows
    draw = np.random.default_rng(4)
    small, large = draw.normal(size=(11, K)), draw.normal(size=(11, M))
    small[:, :M] += large  # related, as cut embeddings are
    fit, r2 = gains(gram_of(x, y), torch.from_numpy(small), torch.from_numpy(large), bias)

    def logits(vectors, table):
        found = vectors @ table.T
        return found - found.mean(axis=1, keepdims=True)

    def design(x):
        each = [logits(x * np.eye(K)[i], small).ravel() for i in range(K)]
        each += [logits(np.ones_like(x) * np.eye(K)[i], small).ravel() for i in range(K) if bias]
        return np.stack(each, axis=1)

    def solved(rows):
        x_, y_ = stacked(x, rows), stacked(y, rows)
        return np.linalg.lstsq(design(x_), logits(y_, large).ravel(), rcond=None)[0]

    found = solved(slice(None))
    assert np.allclose(fit.matrix.diagonal(), found[:K], rtol=1e-3, atol=1e-4)
    assert np.allclose(fit.matrix - fit.matrix.diagonal().diag(), 0)
    assert np.allclose(fit.intercept, found[K:] if bias else 0, atol=1e-3)
    held, target = stacked(x, slice(16, None)), stacked(y, slice(16, None))
    error = logits(target, large).ravel() - design(held) @ solved(slice(16))
    spread = logits(target - target.mean(axis=0), large)
    assert r2 == pytest.approx(1 - (error**2).sum() / (spread**2).sum(), abs=1e-3)

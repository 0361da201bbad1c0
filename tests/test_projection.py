"""Operators of section 5 against planted answers, against numpy, and against Adam; maps mixed by axis."""

from itertools import pairwise

import numpy as np
import pytest
import torch

from scaleop.projection import (
    Operator,
    authors_start,
    block_errors,
    fit_adam,
    fit_als,
    free_share,
    matrix_types,
    operator_outputs,
    pooled_error,
    residuals,
    shuffled,
    stack,
)
from scaleop.weights import pythia_init
from scaleop.wiring import GPT_NEOX
from tests.conftest import neox_config

BLOCKS, P, Q, M, N = 24, 14, 10, 7, 5  # donor matrices (14, 10), targets (7, 5)


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def gaussian(*size, seed=0):
    return torch.randn(*size, generator=generator(seed), dtype=torch.float64)


@pytest.fixture(scope="module")
def planted():
    """(donor, A, B, target = A W B')."""
    donor, left, right = gaussian(BLOCKS, P, Q), gaussian(M, P, seed=1), gaussian(N, Q, seed=2)
    return donor, left, right, operator_outputs(Operator(left, right), donor)


@pytest.fixture(scope="module")
def noisy(planted):
    """A target that no operator explains: the planted one under as much noise."""
    donor, _, _, target = planted
    return donor, target + target.std() * gaussian(*target.shape, seed=3), authors_start(donor, M, N, generator())


def never_rises(errors):
    return all(after <= before for before, after in pairwise(errors))


def test_the_types_are_table_4s():
    assert matrix_types(GPT_NEOX) == ("Q", "K", "V", "O", "MLP_UP", "MLP_DOWN")


def test_a_stack_holds_the_named_blocks_in_order():
    weights = pythia_init(neox_config(layers=3), generator())
    found = stack(weights, "MLP_UP", (2, 0))
    assert found.shape == (2, 40, 16) and torch.equal(found[1], weights[0, "MLP_UP"])


def test_errors_are_numpys():
    predicted, actual = gaussian(3, 4, 5), gaussian(3, 4, 5, seed=1)
    expected = [np.linalg.norm(p - a) / np.linalg.norm(a) for p, a in
                zip(predicted.numpy(), actual.numpy(), strict=True)]
    np.testing.assert_allclose(block_errors(predicted, actual).numpy(), expected, rtol=1e-12)
    whole = np.linalg.norm((predicted - actual).numpy()) / np.linalg.norm(actual.numpy())
    assert pooled_error(predicted, actual) == pytest.approx(whole, rel=1e-12)
    assert block_errors(torch.zeros_like(actual), actual).tolist() == pytest.approx([1, 1, 1])


def test_outputs_and_residuals_are_equation_2():
    donor, operator, target = gaussian(2, P, Q), Operator(gaussian(M, P), gaussian(N, Q)), gaussian(2, M, N, seed=5)
    for block in range(2):
        expected = operator.left.numpy() @ donor[block].numpy() @ operator.right.numpy().T
        np.testing.assert_allclose(operator_outputs(operator, donor)[block].numpy(), expected, rtol=1e-12)
        np.testing.assert_allclose(residuals(operator, donor, target)[block].numpy(), target[block].numpy() - expected,
                                   rtol=1e-12)


def test_the_start_is_the_mean_blocks_singular_vectors_where_they_reach():
    donor = gaussian(BLOCKS, P, Q)
    start = authors_start(donor, M, N, generator())
    u, _, vh = np.linalg.svd(donor.mean(0).numpy())
    np.testing.assert_allclose(np.abs((start.left.numpy() * u[:, :M].T).sum(1)), 1, rtol=1e-9)
    np.testing.assert_allclose(np.abs((start.right.numpy() * vh[:N]).sum(1)), 1, rtol=1e-9)


def test_a_target_wider_than_the_donors_rank_starts_from_orthonormal_draws():
    donor = gaussian(BLOCKS, 30, 8)  # rank 8 < 15
    start, again = authors_start(donor, 15, 4, generator(7)), authors_start(donor, 15, 4, generator(7))
    assert start.left.shape == (15, 30) and start.right.shape == (4, 8)
    for side in (start.left, start.right):
        assert torch.allclose(side @ side.T, torch.eye(len(side), dtype=torch.float64), atol=1e-12)
    assert torch.equal(start.left, again.left) and torch.equal(start.right, again.right)


@pytest.mark.parametrize("memory", [0, 10])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_als_never_increases_the_error(noisy, memory, dtype):
    donor, target, start = noisy
    fit = fit_als(donor, target, start, memory=memory, dtype=dtype)
    assert never_rises(fit.errors) and fit.errors[-1] < 0.8 * fit.errors[0]
    assert len(fit.errors) == len(fit.seconds) and never_rises([-s for s in fit.seconds])
    found = pooled_error(operator_outputs(fit.operator, donor), target)
    assert fit.errors[-1] == pytest.approx(found, rel=1e-5)
    assert fit.errors[0] == pytest.approx(pooled_error(operator_outputs(start, donor), target), rel=1e-5)


def test_als_recovers_a_planted_operator_up_to_its_gauge(planted):
    donor, left, right, target = planted
    fit = fit_als(donor, target, authors_start(donor, M, N, generator()), sweeps=500, dtype=torch.float64)
    assert fit.errors[-1] < 1e-4
    for found, truth in ((fit.operator.left, left), (fit.operator.right, right)):
        scale = (found * truth).sum() / truth.square().sum()
        assert torch.allclose(found, scale * truth, rtol=0, atol=2e-3 * found.abs().max())
    assert fit.operator.left.norm() == pytest.approx(fit.operator.right.norm())


def test_als_ends_at_a_stationary_point(noisy):
    """Each factor is the ordinary regression given the other one (numpy's, on the problem written out)."""
    donor, target, start = noisy
    operator = fit_als(donor, target, start, sweeps=2000, tolerance=1e-12, dtype=torch.float64).operator
    seen = np.concatenate([(w @ operator.right.T).numpy() for w in donor], axis=1)  # (p, blocks n)
    best = np.linalg.lstsq(seen.T, np.concatenate(list(target.numpy()), axis=1).T, rcond=None)[0].T
    np.testing.assert_allclose(operator.left.numpy(), best, atol=1e-3 * np.abs(best).max())
    seen = np.concatenate([(operator.left @ w).numpy() for w in donor])  # (blocks m, q)
    best = np.linalg.lstsq(seen, np.concatenate(list(target.numpy())), rcond=None)[0].T
    np.testing.assert_allclose(operator.right.numpy(), best, atol=1e-3 * np.abs(best).max())


def test_als_is_no_worse_than_adams_1500_steps(noisy):
    donor, target, start = noisy
    adam, als = fit_adam(donor, target, start), fit_als(donor, target, start)
    assert len(adam.errors) == 1501 and adam.errors[0] == pytest.approx(als.errors[0], rel=1e-5)
    assert als.errors[-1] <= adam.errors[-1] * (1 + 1e-4)
    assert adam.errors[-1] == pytest.approx(pooled_error(operator_outputs(adam.operator, donor), target), rel=1e-4)


def test_adam_is_the_authors_loop_written_out(noisy):
    donor, target, start = noisy
    left, right = (side.float().clone().requires_grad_() for side in (start.left, start.right))
    optimizer = torch.optim.Adam([left, right], lr=5e-3)
    for _ in range(20):
        loss = sum((left @ w @ right.T - t).square().sum() for w, t in
                   zip(donor.float(), target.float(), strict=True)) / target.float().square().sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    found = fit_adam(donor, target, start, steps=20).operator
    assert torch.allclose(found.left, left, atol=1e-5) and torch.allclose(found.right, right, atol=1e-5)


def test_a_fit_with_more_free_numbers_than_targets_interpolates():
    donor, target = gaussian(1, P, Q), gaussian(1, M, N, seed=1)  # a single block: the degenerate per-layer fit
    assert free_share(donor, target) > 1
    assert fit_als(donor, target, authors_start(donor, M, N, generator())).errors[-1] < 1e-3


def test_adam_ends_early_only_where_it_reproduces_its_target():
    donor, target = gaussian(1, P, Q), gaussian(1, M, N, seed=1)
    errors = fit_adam(donor, target, authors_start(donor, M, N, generator())).errors
    assert len(errors) < 1501 and errors[-1] < 1e-3 <= errors[-2]


def test_a_donor_without_full_rank_is_no_obstacle():
    donor = gaussian(BLOCKS, P, 2) @ gaussian(2, Q, seed=1)  # rank 2 for target sides of 7 and 5
    fit = fit_als(donor, gaussian(BLOCKS, M, N), authors_start(donor, M, N, generator()))
    assert never_rises(fit.errors) and torch.isfinite(fit.operator.left).all()


def test_shuffling_keeps_each_blocks_histogram_and_nothing_else():
    target = gaussian(3, 4, 5)
    mixed = shuffled(target, generator())
    assert torch.equal(mixed.flatten(1).sort().values, target.flatten(1).sort().values)
    assert not torch.equal(mixed, target) and torch.equal(mixed, shuffled(target, generator()))


@pytest.mark.parametrize("spoil", [lambda t: t * float("nan"), torch.zeros_like, lambda t: t / 0])
def test_what_cannot_be_fitted_is_refused(planted, spoil):
    donor, left, right, target = planted
    with pytest.raises(ValueError, match="finite matrices and a target that is not zero"):
        fit_als(donor, spoil(target), Operator(left, right))

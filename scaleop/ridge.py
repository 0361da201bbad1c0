"""How hard to regularise a compensation solve: the paper's ridge, and the cures it leaves to future work (section 7.6).

Every rule is about the moments Sigma[K, K] of the kept inputs, (k, k), of which only the eigenvalues matter:

    mean_diagonal   lambda = 1e-3 x their mean, which is the mean diagonal (the paper's choice)
    spectrum        lambda = the mean of the eigenvalues beyond the effective rank: what probabilistic PCA would call
                    noise, had it as many components as the spectrum has effective dimensions
    holdout         of 30 multiples of the mean, the one whose fit errs least on held-out moments
    clamp           the paper's lambda; then no row may be longer than the donor's row it stands for
"""

import math
from dataclasses import dataclass

import torch

RULES = ("mean_diagonal", "spectrum", "holdout", "clamp")
RIDGE = 1e-3  # times the mean diagonal of the kept-kept moments (the paper's choice)
GRID = 10 ** (torch.arange(30, dtype=torch.float64) / 3 - 8)  # times the mean diagonal: 1e-8 to 46, RIDGE among them


@dataclass(frozen=True)
class HeldOut:
    """Two independent stretches of moments, (n, k) fp64 columns Sigma[:, K] each: one to fit on, one to err on."""

    fit: torch.Tensor
    error: torch.Tensor


def effective_rank(eigenvalues: torch.Tensor) -> float:
    """exp of the Shannon entropy of the eigenvalues over their sum: k for a flat spectrum, 1 for a single direction."""
    shares = eigenvalues.clamp(min=0) / eigenvalues.clamp(min=0).sum()
    return math.exp(-torch.special.xlogy(shares, shares).sum().item())


def noise_floor(eigenvalues: torch.Tensor) -> float:
    """The mean of the eigenvalues (any order) beyond the effective rank; 0 when nothing lies beyond it."""
    tail = eigenvalues.sort(descending=True).values[math.ceil(effective_rank(eigenvalues)) :]
    return max(tail.mean().item(), 0.0) if len(tail) else 0.0


def holdout_errors(matrix: torch.Tensor, moments: HeldOut, kept: torch.Tensor,
                   grid: torch.Tensor = GRID) -> torch.Tensor:
    """(len(grid),) held-out errors E|Mx - M'x_K|^2 of the fits at each multiple of the mean diagonal, up to a constant.

    From one eigendecomposition Sigma[K, K] = U diag(s) U': in U's coordinates a fit is C = M Sigma[:, K] U divided
    column by column by s + lambda, and the error is -2 <C', H> + <C' G, C'>, H and G being the held-out moments there.
    The constant, E|Mx|^2, is the same for every lambda. matrix: (out, n) fp64.
    """
    values, basis = torch.linalg.eigh(moments.fit[kept])
    cross, target = matrix @ moments.fit @ basis, matrix @ moments.error @ basis  # (out, k)
    square = basis.T @ moments.error[kept] @ basis
    errors = []
    for multiple in grid.tolist():
        fitted = cross / (values + multiple * values.mean())
        errors.append(((fitted @ square - 2 * target) * fitted).sum())
    return torch.stack(errors)


def strength(rule: str | float, eigenvalues: torch.Tensor, matrix: torch.Tensor, kept: torch.Tensor,
             held: HeldOut | None = None) -> float:
    """lambda itself by the rule of that name (a number: so many times the mean diagonal), given Sigma[K, K]'s
    `eigenvalues` (k,). Raises ValueError for an unknown rule and for `holdout` without held-out moments.
    """
    mean = eigenvalues.mean().item()
    if isinstance(rule, float):
        return rule * mean
    if rule == "spectrum":  # never so little that the solve could fail
        rounding = len(eigenvalues) * torch.finfo(torch.float64).eps * eigenvalues.max().item()
        return max(noise_floor(eigenvalues), rounding)
    if rule == "holdout":
        if held is None:
            raise ValueError("ridge rule 'holdout' needs moments in two stretches (HeldOut): to fit on, and to err on")
        return GRID[holdout_errors(matrix, held, kept).argmin()].item() * mean
    if rule not in RULES:
        raise ValueError(f"unknown ridge rule {rule!r}; there are: {', '.join(RULES)}")
    return RIDGE * mean


def clamp_rows(fitted: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
    """`fitted` (out, k) with every row no longer than `matrix`'s (out, n); the row's direction stays."""
    return fitted * (matrix.norm(dim=1) / fitted.norm(dim=1)).clamp(max=1).nan_to_num(1.0)[:, None]

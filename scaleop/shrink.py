"""Apply maps to every tensor, then pull the two levers: compensate (function) and rescale (dynamics)."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from scaleop.maps import Maps, Selection
from scaleop.ridge import HeldOut, clamp_rows, effective_rank, strength
from scaleop.weights import Weights, keys
from scaleop.wiring import READ_OUT, RESIDUAL, Shape, Wiring


@dataclass(frozen=True)
class Solve:
    """Diagnostics of one compensation solve."""

    rule: str | float  # how lambda was chosen
    ridge: float  # lambda itself
    condition: float | None  # of Sigma_KK + lambda I; None where the spectrum was not wanted
    effective_rank: float | None  # of Sigma_KK; likewise
    norm_ratio: float  # Frobenius norm of the compensated rows over that of the selected ones


def shrink(weights: Weights, wiring: Wiring, maps: Maps, neutral_norms: bool = False) -> Weights:
    """The target's tensors: the donor's in `weights`, with each named axis mapped (Eq. 1 for bases, a slice for
    selections). `weights` may be a part of the donor's (one block, say): `assemble` is what refuses a gap.

    Biases and norms ride along on their axis. `neutral_norms` sets all norms to gain 1 and bias 0 instead, as the
    paper does for dense projection, whose blended stream no diagonal gain fits.
    """
    small: Weights = {}
    for (b, name), role in keys(wiring, len(maps.blocks)):
        source = (None if b is None else maps.blocks[b], name)
        if source not in weights:
            continue
        tensor = weights[source]
        for dim, axis in enumerate(role.axes):
            tensor = maps(b, axis).apply(tensor, dim)
        if neutral_norms and role.neutral is not None:
            tensor = torch.full_like(tensor, role.neutral)
        small[b, name] = tensor.contiguous()
    return small


def compensate(matrix: torch.Tensor, moments: torch.Tensor, kept: torch.Tensor, ridge: str | float = "mean_diagonal",
               held: HeldOut | None = None, spectrum: bool = True) -> tuple[torch.Tensor, Solve]:
    """Re-fit a read-out so that the kept inputs absorb what the dropped ones contributed (Eq. 3).

    M' = M Sigma[:, K] (Sigma[K, K] + lambda I)^-1; lambda by one of `ridge.RULES`, or so many times the mean diagonal.
    matrix: (out, n) donor read-out; moments: (n, k) columns Sigma[:, K] of the second moments (any positive multiple:
    the result is scale free); kept: (k,) K; held: two stretches of moments, for the rule `holdout`. Returns M' (out, k)
    in the matrix's dtype, solved in fp64. Plain selection is the special case of dropped inputs uncorrelated with kept
    ones, and ridge 0. Raises ValueError for moments that are not finite or all zero.

    Costs a solve and all eigenvalues of Sigma[K, K], as much again at thousands of inputs; without `spectrum` (rules
    that need none) a Cholesky factorisation alone, and the diagnostics that hang on eigenvalues are None.
    """
    sigma = moments.double()
    square = sigma[kept]  # (k, k)
    mean = square.diagonal().mean().item()
    if not math.isfinite(square.sum().item()) or mean <= 0:
        raise ValueError("second moments are not finite and positive: were they gathered from a working donor?")
    spectrum = spectrum or ridge == "spectrum"
    eigenvalues = torch.linalg.eigvalsh(square) if spectrum else square.diagonal().clone()  # of the same mean
    damping = strength(ridge, eigenvalues, matrix.double(), kept, held)
    square.diagonal().add_(damping)
    right = (matrix.double() @ sigma).T
    if spectrum:
        fitted = torch.linalg.solve(square, right).T  # symmetric
        condition = ((eigenvalues[-1] + damping) / (eigenvalues[0] + damping)).item()
        rank = effective_rank(eigenvalues)
    else:
        fitted, condition, rank = torch.cholesky_solve(right, torch.linalg.cholesky(square)).T, None, None
    if ridge == "clamp":
        fitted = clamp_rows(fitted, matrix.double())
    norms = fitted.norm() / matrix[:, kept].double().norm()
    return fitted.to(matrix.dtype), Solve(ridge, damping, condition, rank, norms.item())


def centred(moments: torch.Tensor, mean: torch.Tensor, kept: torch.Tensor, positions: int) -> torch.Tensor:
    """(n, k) sums of x x_K' over `positions` -> the same about the mean (n,): what a fit with a free bias sees."""
    return moments - positions * torch.outer(mean, mean[kept])


def absorb_mean(bias: torch.Tensor, matrix: torch.Tensor, fitted: torch.Tensor, mean: torch.Tensor,
                kept: torch.Tensor) -> torch.Tensor:
    """The bias that leaves the read-out's mean output as the donor's: b + M mu - M' mu_K, as FLAP compensates.

    For a plain selection that is the mean of what the dropped inputs contributed; for a fit to centred moments it is
    the intercept of the least-squares problem. bias: (out,); mean: (n,) mean input of the donor's read-out.
    """
    shift = matrix.double() @ mean.double() - fitted.double() @ mean[kept].double()
    return (bias.double() + shift).to(bias.dtype)


def kept_inputs(wiring: Wiring, maps: Maps) -> dict[tuple[int, str], torch.Tensor]:
    """{(donor block, read-out role): kept input coordinates}: the columns of Sigma that compensation needs."""
    return {(maps.blocks[b], role.name): maps(b, role.axes[1]).index
            for b in range(len(maps.blocks)) for role in wiring.lever(READ_OUT)}


@dataclass(frozen=True)
class Inputs:
    """What the donor's read-outs read, each by (donor block, role): `moments` (n, k) summed columns Sigma[:, K] over
    `positions`, `means` (n,), and `held`, two further stretches of moments for the ridge rule `holdout`."""

    moments: Mapping[tuple[int, str], torch.Tensor]
    means: Mapping[tuple[int, str], torch.Tensor] | None = None
    positions: int = 0
    held: Mapping[tuple[int, str], HeldOut] | None = None


def compensate_all(small: Weights, donor: Weights, wiring: Wiring, maps: Maps, inputs: Inputs, fit: bool = True,
                   bias: bool = False, ridge: str | float = "mean_diagonal",
                   spectrum: bool = True) -> tuple[Weights, dict[str, Solve]]:
    """`small` with every read-out repaired from the donor's. Needs selections on all axes.

    `fit` re-fits the matrices (Eq. 3: uncentred moments, biases stay). `bias` puts the mean of what was dropped into
    the biases; together they are the least-squares fit with an intercept, on centred moments. Raises ValueError when
    an architecture has no bias to put it into.
    """
    repaired, solves = dict(small), {}
    rows = maps(None, RESIDUAL)
    for (block, name), kept in kept_inputs(wiring, maps).items():
        b, key = maps.blocks.index(block), (block, name)
        matrix, fitted = rows.apply(donor[key], 0), small[b, name]
        if fit:
            moments = inputs.moments[key]
            if bias:
                moments = centred(moments, inputs.means[key], kept, inputs.positions)
            fitted, solves[f"{b}.{name}"] = compensate(matrix, moments, kept, ridge,
                                                       inputs.held and inputs.held[key], spectrum)
        if bias:
            if (b, f"{name}_BIAS") not in small:
                raise ValueError(f"{wiring.family} has no {name}_BIAS: the mean of dropped inputs has nowhere to go")
            repaired[b, f"{name}_BIAS"] = absorb_mean(small[b, f"{name}_BIAS"], matrix, fitted, inputs.means[key], kept)
        repaired[b, name] = fitted
    return repaired, solves


def rescale(small: Weights, wiring: Wiring, donor: Shape, target: Shape, levers: tuple[str, ...]) -> Weights:
    """Multiply the matrices of the named levers by sqrt(donor inputs / target inputs), so that the variance of what
    they compute survives the cut of their input axis. Biases, norms and the input embedding are left alone, except that
    a tied head's factor goes to the final norm (`roles.Wiring.tied`)."""
    scaled = dict(small)
    for (b, name), tensor in small.items():
        if wiring[name].lever in levers:
            axis = wiring[name].axes[-1]  # what it reads (of a norm: what it norms)
            scaled[b, name] = tensor * math.sqrt(donor.size(axis) / target.size(axis))
    return scaled


def is_selection(maps: Maps) -> bool:
    """Whether every axis is selected rather than blended (compensation needs kept coordinates)."""
    return all(isinstance(map_, Selection) for map_ in maps.axes.values())

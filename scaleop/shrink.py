"""Apply maps to every tensor, then pull the two levers: compensate (function) and rescale (dynamics)."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from scaleop.maps import Maps, Selection
from scaleop.weights import Weights, keys
from scaleop.wiring import READ_OUT, RESIDUAL, Shape, Wiring

RIDGE = 1e-3  # times the mean diagonal of the kept-kept moments (the paper's choice)


@dataclass(frozen=True)
class Solve:
    """Diagnostics of one compensation solve."""

    ridge: float  # lambda itself
    condition: float  # of Sigma_KK + lambda I
    norm_ratio: float  # Frobenius norm of the compensated rows over that of the selected ones


def shrink(weights: Weights, wiring: Wiring, maps: Maps, neutral_norms: bool = False) -> Weights:
    """Every tensor of the target: the donor's, with each named axis mapped (Eq. 1 for bases, a slice for selections).

    Biases and norms ride along on their axis. `neutral_norms` sets all norms to gain 1 and bias 0 instead, as the
    paper does for dense projection, whose blended stream no diagonal gain fits.
    """
    small: Weights = {}
    for (b, name), role in keys(wiring, len(maps.blocks)):
        tensor = weights[None if b is None else maps.blocks[b], name]
        for dim, axis in enumerate(role.axes):
            tensor = maps(b, axis).apply(tensor, dim)
        if neutral_norms and role.neutral is not None:
            tensor = torch.full_like(tensor, role.neutral)
        small[b, name] = tensor.contiguous()
    return small


def compensate(matrix: torch.Tensor, moments: torch.Tensor, kept: torch.Tensor,
               ridge: float = RIDGE) -> tuple[torch.Tensor, Solve]:
    """Re-fit a read-out so that the kept inputs absorb what the dropped ones contributed (Eq. 3).

    M' = M Sigma[:, K] (Sigma[K, K] + lambda I)^-1, lambda = ridge x mean diagonal of Sigma[K, K].
    matrix: (out, n) donor read-out; moments: (n, k) columns Sigma[:, K] of the uncentred second moments (any
    positive multiple: the result is scale free); kept: (k,) K. Returns M' (out, k) in the matrix's dtype, solved in
    fp64. Plain selection is the special case of dropped inputs uncorrelated with kept ones, and ridge 0.
    Raises ValueError for moments that are not finite or all zero.
    """
    sigma = moments.double()
    square = sigma[kept]  # (k, k)
    mean = square.diagonal().mean().item()
    if not math.isfinite(square.sum().item()) or mean <= 0:
        raise ValueError("second moments are not finite and positive: were they gathered from a working donor?")
    damped = square + ridge * mean * torch.eye(len(kept), dtype=torch.float64)
    fitted = torch.linalg.solve(damped, (matrix.double() @ sigma).T).T  # damped is symmetric
    eigenvalues = torch.linalg.eigvalsh(damped)
    norms = fitted.norm() / matrix[:, kept].double().norm()
    return fitted.to(matrix.dtype), Solve(ridge * mean, (eigenvalues[-1] / eigenvalues[0]).item(), norms.item())


def kept_inputs(wiring: Wiring, maps: Maps) -> dict[tuple[int, str], torch.Tensor]:
    """{(donor block, read-out role): kept input coordinates}: the columns of Sigma that compensation needs."""
    return {(maps.blocks[b], role.name): maps(b, role.axes[1]).index
            for b in range(len(maps.blocks)) for role in wiring.lever(READ_OUT)}


def compensate_all(small: Weights, donor: Weights, wiring: Wiring, maps: Maps,
                   moments: Mapping[tuple[int, str], torch.Tensor]) -> tuple[Weights, dict[str, Solve]]:
    """`small` with every read-out re-fitted from the donor's; biases stay. Needs selections on all axes."""
    fitted, solves = dict(small), {}
    rows = maps(None, RESIDUAL)
    for (block, name), kept in kept_inputs(wiring, maps).items():
        b = maps.blocks.index(block)
        matrix, solves[f"{b}.{name}"] = compensate(rows.apply(donor[block, name], 0), moments[block, name], kept)
        fitted[b, name] = matrix
    return fitted, solves


def rescale(small: Weights, wiring: Wiring, donor: Shape, target: Shape, levers: tuple[str, ...]) -> Weights:
    """Multiply the matrices of the named levers by sqrt(donor inputs / target inputs), so that the variance of what
    they compute survives the cut of their input axis. Biases, norms and the input embedding are left alone."""
    scaled = dict(small)
    for (b, name), role in keys(wiring, target.layers):
        if role.lever in levers:
            axis = role.axes[1]
            scaled[b, name] = small[b, name] * math.sqrt(donor.size(axis) / target.size(axis))
    return scaled


def is_selection(maps: Maps) -> bool:
    """Whether every axis is selected rather than blended (compensation needs kept coordinates)."""
    return all(isinstance(map_, Selection) for map_ in maps.axes.values())

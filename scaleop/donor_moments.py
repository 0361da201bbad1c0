"""What a donor's own moments say about its solves (section 7.6): how steep their spectra are, and how many independent
positions its text amounts to. `scaleop.conditioning` takes both to the paper's widths."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from scaleop.activations import second_moments
from scaleop.donor import Donor
from scaleop.maps import Maps
from scaleop.paths import STORE
from scaleop.ridge import effective_rank
from scaleop.shrink import compensate, kept_inputs
from scaleop.store import cached_values, digest

PROTOCOL = 1  # raise it when a change of code changes what `measured` computes: older results are then not reused
FITTED = (1 / 16, 1 / 2)  # of the ranks: beyond the mean's direction, before the spectrum's end bends down

Row = dict[str, Any]


def spectra(moments: Mapping[tuple[int, str], torch.Tensor],
            kept: Mapping[tuple[int, str], torch.Tensor]) -> dict[tuple[int, str], torch.Tensor]:
    """{(block, role): (k,) descending eigenvalues of Sigma[K, K]}, from a donor's columns Sigma[:, K] (n, k)."""
    return {place: torch.linalg.eigvalsh(sigma[kept[place]]).flip(0) for place, sigma in moments.items()}


def exponents(found: Mapping[tuple[int, str], torch.Tensor]) -> list[Row]:
    """Of descending spectra by (block, role): `exponent` a of the power law rank^-a fitted to the logarithms over the
    ranks `FITTED`, share of the `largest` eigenvalue, `effective_rank`, and `smallest` over their mean."""
    rows = []
    for (block, role), values in found.items():
        k = len(values)
        ranks = torch.arange(max(1, round(FITTED[0] * k)), round(FITTED[1] * k) + 1)
        slope = np.polyfit(ranks.double().log().numpy(), values[ranks - 1].log().numpy(), 1)[0]
        rows.append({"block": block, "role": role, "width": k, "exponent": -float(slope),
                     "largest": (values[0] / values.sum()).item(), "effective_rank": effective_rank(values),
                     "smallest": (values[-1] / values.mean()).item()})
    return rows


def effective_positions(first: torch.Tensor, second: torch.Tensor, matrix: torch.Tensor, kept: torch.Tensor) -> Row:
    """How many independent Gaussian positions would overfit as much as these, of which two stretches are given.

    Neighbouring positions resemble one another, so a stretch of N counts for fewer. Without a ridge, k / N of the least
    error is missing from the error of a fit to N independent positions on those positions, and k / (N - k) is added
    elsewhere: out / in = (1 - k / N)^-2, here over both directions (`effective` is None where out is no larger).
    `first`, `second`: (n, n) fp64 second moments of equally many positions, any multiple; matrix: (out, n); kept: (k,).
    Also `floor`: the error on the fit's own positions, relative.
    """
    def fit(moments: torch.Tensor) -> torch.Tensor:
        return torch.linalg.solve(moments[kept][:, kept], (matrix @ moments[:, kept]).T).T

    def error(fitted: torch.Tensor, moments: torch.Tensor) -> float:
        off = matrix.clone()
        off[:, kept] -= fitted
        return ((off @ moments) * off).sum().item()

    fits = fit(first), fit(second)
    inside, outside = error(fits[0], first) + error(fits[1], second), error(fits[0], second) + error(fits[1], first)
    whole = sum(((matrix @ moments) * matrix).sum().item() for moments in (first, second))
    effective = len(kept) / (1 - math.sqrt(inside / outside)) if outside > inside else None
    return {"effective": effective, "floor": inside / whole}


def measured(donor: Donor, maps: Maps, sequences: int = 100) -> list[Row]:
    """Of every read-out that `maps` keeps, from two stretches of that many frozen sequences: its row of `exponents`,
    its `effective_positions` (of the `positions` of one stretch), and the norm ratio of the paper's solve for the
    donor's own weights beside that for independent ones (`norm_random`).

    Found again in the store. Holds the moments of all inputs; seconds at nano size. ValueError when fewer sequences are
    frozen than two stretches take.
    """
    if len(donor.frozen) < 2 * sequences:
        raise ValueError(f"two stretches of sequences = {sequences} need {2 * sequences} frozen ones, but there are "
                         f"{len(donor.frozen)}: measure fewer, or raise corpus.frozen.sequences")
    kept = kept_inputs(donor.wiring, maps)
    facts = [PROTOCOL, donor.key, list(donor.frozen.shape), sequences,
             {str(place): index.tolist() for place, index in kept.items()}]
    path = STORE / "conditioning" / f"donor-{digest(facts)}" / "rows.json"
    return cached_values(path, lambda: _measure(donor, kept, sequences), donor=donor.key, sequences=sequences)


def _measure(donor: Donor, kept: Mapping[tuple[int, str], torch.Tensor], sequences: int) -> list[Row]:
    inputs = {place: torch.arange(donor.weights[place].shape[1]) for place in kept}
    first, second = (second_moments(donor.model, donor.frozen[start : start + sequences], inputs)
                     for start in (0, sequences))
    both = {place: first[place] + second[place] for place in kept}
    draw, rows = torch.Generator().manual_seed(0), []
    for row in exponents(spectra({place: both[place][:, kept[place]] for place in kept}, kept)):
        place = row["block"], row["role"]
        matrix, columns = donor.weights[place].double(), both[place][:, kept[place]]
        random = torch.randn(matrix.shape, generator=draw, dtype=torch.float64)
        found = effective_positions(first[place], second[place], matrix, kept[place])
        rows.append({**row, **found, "positions": sequences * donor.frozen.shape[1],
                     **{name: compensate(weights, columns, kept[place])[1].norm_ratio
                        for name, weights in (("norm_ratio", matrix), ("norm_random", random))}})
    return rows

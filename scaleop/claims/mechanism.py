"""How the levers are said to work: the construction of 7.4, and two sentences of 7.2 that a race's numbers decide."""

import math
from typing import Any

import torch

from scaleop.claims.core import Claim
from scaleop.claims.measured import Measured
from scaleop.claims.paired import factor
from scaleop.claims.standings import show
from scaleop.donor import Donor
from scaleop.maps import Maps
from scaleop.shrink import compensate, kept_inputs
from scaleop.wiring import QK, RESIDUAL, Shape, shape_of

CANCELS = 0.01  # relative: less than this a start has not changed
SAME = 2.0  # two gains this close, as logarithms of factors, are the same effect


def construction_evidence(donor: Donor, target: Any) -> Measured:
    """What the scored selection and its compensation do to this pair; `target` is a config.

    `frequencies`: the largest relative difference between the frequency of a kept rotary dimension in the donor and
    in the target. `gains`: {"<block>.<role>": by how much Eq. 3 lowers the squared error on the moments it is fitted
    to, over the power of what the plain selection writes}.
    """
    shape = shape_of(target)
    maps = donor.maps("scored", shape)
    rows, moments = maps(None, RESIDUAL), donor.moments(maps)
    gains = {}
    for place, kept in kept_inputs(donor.wiring, maps).items():
        matrix, sigma = rows.apply(donor.weights[place], 0).double(), moments[place].double()
        fitted, _ = compensate(matrix, sigma, kept)
        selected = matrix[:, kept]
        power = ((selected @ sigma[kept]) * selected).sum()
        errors = [((each @ sigma[kept] - 2 * matrix @ sigma) * each).sum() for each in (selected, fitted)]
        gains[f"{maps.blocks.index(place[0])}.{place[1]}"] = ((errors[0] - errors[1]) / power).item()
    return Measured({"frequencies": frequency_gap(maps, donor.shape, shape), "gains": gains})


def frequency_gap(maps: Maps, donor: Shape, target: Shape) -> float:
    """The largest |donor's frequency / target's - 1| over the rotary dimensions of all heads and blocks; infinite
    where a dimension that turns comes from one that does not."""
    theirs, mine = (torch.tensor(shape.frequencies() * 2, dtype=torch.float64) for shape in (donor, target))
    gaps = []
    for b in range(len(maps.blocks)):
        by_head = maps(b, QK).index.unflatten(0, (target.heads, target.head_dim))
        within = by_head[:, : target.rotary_dims] % donor.head_dim
        if (within >= donor.rotary_dims).any():
            return float("inf")
        gaps.append((theirs[within] / mine - 1).abs().max().item())
    return max(gaps, default=0.0)


def _start_change(race: Any) -> float:
    return race.value("start", "subclone_rs") / race.value("start", "subclone") - 1


def _effects(race: Any) -> tuple[float, float]:
    """What compensation is worth at the end: without rescale, and with it."""
    return factor(race, "subclone", "hybrid"), factor(race, "subclone_rs", "hybrid_rs")


def _independent(race: Any) -> bool | None:
    """None where compensation alone gains nothing that could be the same."""
    without, beside = map(math.log, _effects(race))
    return 1 / SAME < beside / without < SAME if without > 0 else None


CLAIMS = [
    Claim("rescale-cancels", "7.2",
          f"The rescale's scalar cancels in the forward pass: subclone_rs starts within {CANCELS:.0%} of subclone",
          ("subclone", "subclone_rs"), lambda race: abs(_start_change(race)) < CANCELS,
          lambda race: f"{show(race.value('start', 'subclone'))} → {show(race.value('start', 'subclone_rs'))}",
          paper="[ladder.subclone.zero_shot] → [ladder.subclone_rs.zero_shot]"),
    Claim("levers-independent", "ours",
          "The levers are independent in effect: compensation lowers the logarithm of the end by as much with rescale "
          f"as without it, within a factor {SAME:g}", ("subclone", "hybrid", "subclone_rs", "hybrid_rs"),
          _independent,
          lambda race: "{:.3g}x without, {:.3g}x with".format(*_effects(race)),
          paper="[ladder.subclone.final] / [ladder.hybrid.final] without, "
                "[ladder.subclone_rs.final] / [ladder.hybrid_rs.final] with"),
]

CONSTRUCTION = [
    Claim("frequencies-match", "7.4",
          "The small model's rotary frequencies all occur in the donor's: every kept pair turns as fast as the "
          "place it takes", ("frequencies",), lambda measured: measured["frequencies"] < 1e-9,
          lambda measured: f"largest relative difference {measured['frequencies']:.2g}", paper="exactly, by stride 2"),
    Claim("compensation-fits", "7.4",
          "Eq. 3 fits better than plain selection at every read-out, on the moments it is fitted to", ("gains",),
          lambda measured: min(measured["gains"].values()) > 0,
          lambda measured: "error lower by {:.3g} to {:.3g} of the power that selection writes".format(
              min(measured["gains"].values()), max(measured["gains"].values())), paper="by construction"),
]

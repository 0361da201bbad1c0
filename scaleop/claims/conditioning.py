"""Sections 7.6 and 9: why the stack inverts at scale, says the paper, asked of a study of the solves' conditioning.

The evidence is a `Measured` of mappings {kept width: number}: `condition`, the condition number of the moments
Sigma[K, K] that are inverted; `error_growth`, the held-out error of a fit with the paper's ridge over that with the
best one; `best_ridge`, the best multiple of the mean diagonal on held-out moments.
"""

from itertools import pairwise
from typing import Any

from scaleop.claims.core import Claim
from scaleop.claims.measured import Measured
from scaleop.ridge import RIDGE  # the paper's, times the mean diagonal


def _by_width(measured: Measured, name: str) -> list[tuple[int, float]]:
    """A measured {kept width: value} as (width, value), narrowest first (widths may be text, as JSON has them)."""
    return sorted((int(width), value) for width, value in measured[name].items())


def _along(name: str, least: int = 2) -> dict[str, Any]:
    """A {kept width: value} rises from each width to the next; fewer than `least` widths say nothing."""
    def holds(measured: Measured) -> bool | None:
        values = [value for _, value in _by_width(measured, name)]
        return all(a < b for a, b in pairwise(values)) if len(values) >= least else None

    return {"needs": (name,), "holds": holds, "ours": lambda measured: ", ".join(
        f"{value:.3g} at {width:,}" for width, value in _by_width(measured, name))}


def _widest(measured: Measured) -> float:
    return _by_width(measured, "best_ridge")[-1][1]


CLAIMS = [
    Claim("conditioning-worsens", "9", "The moments' condition number grows with the kept width, at every step",
          **_along("condition"), paper="says the text, no numbers"),
    Claim("error-growth", "9",
          "The paper's ridge suits wide inputs less: its held-out error over the best ridge's grows with the kept "
          "width, at every step", **_along("error_growth"), paper="says the text, no numbers"),
    Claim("wide-under-regularised", "7.6",
          "At the widest input the best multiple of the mean diagonal is larger than the paper's 0.001",
          ("best_ridge",),
          lambda measured: _widest(measured) > RIDGE, lambda measured: f"{_widest(measured):.3g}",
          paper="says the text, no numbers"),
    Claim("best-ridge-grows", "9",
          "The cure is dimension-aware: the best multiple of the mean diagonal grows with the kept width, at every "
          "step",
          **_along("best_ridge"), paper="says the text, no numbers"),
]

"""Sections 7.6 and 9: why the stack over-corrects at scale. The paper blames the conditioning of the solve, untested;
here its account is asked of a study of that solve (`scaleop.conditioning`), and a rival one of what the arms write.

The evidence is a `Measured`. By kept width, {width: number}, with the paper's ridge unless it says otherwise:
`condition`, the condition number of the damped moments; `error_growth`, the held-out error of the fit over the least
any fit can have; `against_selection`, that error over plain selection's; `ridge_cost`, that error over the one with
the ridge that does best on held-out positions; `best_ridge`, the latter as a multiple of the mean diagonal;
`precision`, the error of the authors' fp32 over that of fp64. And `variances`, {arm: {"<block>.<role>": variance its
read-out writes over the donor's}}.
"""

from collections.abc import Callable, Iterable, Mapping
from itertools import pairwise
from statistics import mean, median
from typing import Any

from scaleop.claims.core import Claim
from scaleop.claims.measured import Measured
from scaleop.ridge import RIDGE  # the paper's, times the mean diagonal
from scaleop.solves import SINGLE

RULE, CHOSEN = "mean_diagonal", "holdout"  # the paper's ridge, and the one of least error on held-out positions
NOTICEABLE = 1.01  # a factor between two errors


def conditioning_evidence(rows: Iterable[Mapping[str, Any]],
                          variances: Mapping[str, Mapping[str, float]] | None = None) -> Measured:
    """A study's rows (of one kind of inputs: one exponent, one share of the mean, one number of positions) as evidence,
    each number the mean over the draws of a width. `variances`: by arm, as `suspects.variance_ratios` gives them."""
    by: dict[tuple[str, int], list[Mapping[str, Any]]] = {}
    for row in rows:
        by.setdefault((row["rule"], row["width"]), []).append(row)

    def along(rule: str, value: Callable[[Mapping[str, Any]], float]) -> dict[int, float] | None:
        return {width: mean(map(value, found)) for (name, width), found in sorted(by.items()) if name == rule} or None

    def over(rule: str, other: str) -> dict[int, float] | None:
        above, below = (along(name, lambda row: row["error"]) or {} for name in (rule, other))
        return {width: error / below[width] for width, error in above.items() if width in below} or None

    return Measured({
        "condition": along(RULE, lambda row: row["condition"]),
        "error_growth": along(RULE, lambda row: row["error"] / row["floor"]),
        "against_selection": along(RULE, lambda row: row["error"] / row["selected"]),
        "ridge_cost": over(RULE, CHOSEN),
        "best_ridge": along(CHOSEN, lambda row: row["lambda"]),
        "precision": over(SINGLE, RULE),
        "variances": variances})


def _by_width(measured: Measured, name: str) -> list[tuple[int, float]]:
    """A measured {kept width: value} as (width, value), narrowest first (widths may be text, as JSON has them)."""
    return sorted((int(width), value) for width, value in measured[name].items())


def _shown(measured: Measured, name: str) -> str:
    return ", ".join(f"{value:.4g} at {width:,}" for width, value in _by_width(measured, name))


def along(name: str) -> dict[str, Any]:
    """A {kept width: value} rises from each width to the next; one width says nothing."""
    def holds(measured: Measured) -> bool | None:
        values = [value for _, value in _by_width(measured, name)]
        return all(narrow < wide for narrow, wide in pairwise(values)) if len(values) > 1 else None

    return {"needs": (name,), "holds": holds, "ours": lambda measured: _shown(measured, name)}


def widest_above(name: str, bar: float) -> dict[str, Any]:
    """A {kept width: value} is above `bar` at the widest."""
    return {"needs": (name,), "holds": lambda measured: _by_width(measured, name)[-1][1] > bar,
            "ours": lambda measured: _shown(measured, name)}


STACK = ("subclone_rs", "hybrid", "hybrid_rs")


def _written(measured: Measured) -> list[float] | None:
    """By arm of STACK, the median over places of the variance written, over the donor's; None if an arm is missing."""
    found = measured["variances"]
    return [median(found[arm].values()) for arm in STACK] if all(arm in found for arm in STACK) else None


def _writes_most(measured: Measured) -> bool | None:
    written = _written(measured)
    return None if written is None else written[-1] > max(1.0, *written[:-1])


UNTESTED = "says the text, no numbers"

CLAIMS = [
    Claim("conditioning-worsens", "9", "The solve's condition number grows with the kept width, at every step",
          **along("condition"), paper=UNTESTED),
    Claim("ridge-cost-grows", "9",
          "The paper's ridge suits wide inputs less: its held-out error over that of the ridge chosen on held-out "
          "positions grows with the kept width, at every step", **along("ridge_cost"), paper=UNTESTED),
    Claim("error-growth", "ours",
          "Eq. 3's fit overfits more as the kept width grows at a fixed number of positions: its held-out error over "
          "the least possible grows, at every step", **along("error_growth")),
    Claim("wide-over-corrects", "7.6",
          "At the widest input compensation over-corrects: its held-out error is above plain selection's",
          **widest_above("against_selection", 1.0), paper=UNTESTED),
    Claim("wide-under-regularised", "7.6",
          "At the widest input the paper's ridge under-regularises: the multiple of the mean diagonal that does best "
          "on held-out positions is larger than its 0.001", **widest_above("best_ridge", RIDGE), paper=UNTESTED),
    Claim("best-ridge-grows", "9",
          "The cure is dimension-aware: the best multiple of the mean diagonal grows with the kept width, at every "
          "step", **along("best_ridge"), paper=UNTESTED),
    Claim("precision-matters", "ours",
          f"The authors' fp32 is part of it: at the widest input it errs over {NOTICEABLE:g}x as much as fp64",
          **widest_above("precision", NOTICEABLE)),
    Claim("stack-writes-too-much", "ours",
          "The levers count the variance twice: hybrid_rs's read-outs write more than the donor's, and more than those "
          "of hybrid and subclone_rs, by the median over blocks and roles", ("variances",), _writes_most,
          lambda measured: ", ".join(f"{arm} {value:.3g}x" for arm, value in zip(
              STACK, _written(measured), strict=True))),
]

"""The claims of section 6 (post-operator residuals are noise) and of appendix B.2, and questions of our own.

The evidence is `residual_study.ResidualStudy(...).measured()`. Verdicts concern the weight types whose operator has
fewer free numbers than weights to explain: where it has more it reproduces any target and leaves nothing to test.
"""

import math
from collections.abc import Iterable
from typing import Any

from scaleop.claims.core import Claim
from scaleop.claims.measured import Measured
from scaleop.claims.section6_tables import (
    PREDICTORS,
    deficit,
    interval,
    norms_deficit,
    outcome,
    p_value,
    percent,
    signed,
)
from scaleop.claims.standings import show
from scaleop.published import published
from scaleop.residuals import LEVEL, critical


def _tested(measured: Measured, errors: str = "operator") -> dict[str, float]:
    """Relative errors of the types that are tested."""
    return {role: measured[errors][role] for role in measured["spectral"]}


def _range(values: Iterable[float], form: str = ".3f") -> str:
    low, high = min(values := list(values)), max(values)
    return f"{low:{form}} to {high:{form}}"


def _left_out(measured: Measured) -> str:
    names = [role for role in measured["operator"] if role not in measured["spectral"]]
    return f"; not tested, reproduced outright: {', '.join(names)}" if names else ""


def _each(measured: Measured, says: Any) -> bool:
    return all(says(test) for test in measured["spectral"].values())


def _largest_in_paper() -> float:
    return published("res.erank.deficit_max")["value"] / 100


def _largest_cosine(measured: Measured) -> float:
    return max(abs(test["delta"]) / test["sd"] for test in measured["cosine"].values())


def _both(measured: Measured, where: str, says: Any) -> bool:
    return all(says(outcome(measured, where, name)) for name in PREDICTORS)


def _line(measured: Measured, where: str, says: Any) -> str:
    return "; ".join(f"{name} {says(outcome(measured, where, name))}" for name in PREDICTORS)


def _nearer_random(measured: Measured, variant: str) -> bool:
    found = measured["behaviour"]
    return found[variant] ** 2 > found["reference"] * found["random"]


def _move(measured: Measured, variant: str = "corrected") -> float:
    return measured["behaviour"][variant] / measured["behaviour"]["operator"] - 1


def _smallest(measured: Measured, kind: str = "patch") -> dict[str, float | None]:
    return {row["test"]: row["smallest"] for row in measured["power"]["table"] if row["kind"] == kind}


def _one_sided(measured: Measured) -> dict[str, float | None]:
    return {test: share for test, share in _smallest(measured).items() if test.endswith("one-sided")}


def _false_alarms(measured: Measured) -> tuple[int, int]:
    """Two-sided alarms of the patch bootstrap on pure noise, in either direction, and the number of tries."""
    ps = [row["p"] for row in measured["power"]["rows"] if row["kind"] == "none" and row["test"].endswith("two-sided")]
    return sum(p < LEVEL for p in ps), len(ps)


def _chance(alarms: int, tries: int) -> float:
    """Probability of so many alarms or more among `tries` tests that keep their level."""
    return sum(math.comb(tries, k) * LEVEL**k * (1 - LEVEL) ** (tries - k) for k in range(alarms, tries + 1))


CLAIMS = [
    Claim("most-is-left", "6", "The best shared linear operator leaves the larger part of each weight: relative "
          "error above one half in every type tested", ("operator", "spectral"),
          lambda m: min(_tested(m).values()) > 0.5, lambda m: _range(_tested(m).values()) + _left_out(m),
          paper="[oper.err.Q] to [oper.err.V]"),
    Claim("most-variance-left", "ours", "Read as variance (squared relative error) it leaves more than half in every "
          "type tested", ("operator", "spectral"), lambda m: min(_tested(m).values()) ** 2 > 0.5,
          lambda m: _range(error**2 for error in _tested(m).values()), paper="squares of [oper.err.Q] to [oper.err.V]"),
    Claim("below-controls", "6", "Test 1: the residual's effective rank lies below both controls in every type",
          ("spectral",), lambda m: _each(m, lambda t: t["delta"] < min(t["shuffled"], t["gaussian"])),
          lambda m: "deficits " + _range(map(deficit, m["spectral"].values()), ".1%"),
          paper="deficits [res.erank.deficit_min] to [res.erank.deficit_max]"),
    Claim("faint", "6", "The concentration is faint: in no type is the deficit over twice the paper's largest",
          ("spectral",), lambda m: _each(m, lambda t: deficit(t) <= 2 * _largest_in_paper()),
          lambda m: "largest " + percent(max(map(deficit, m["spectral"].values()))),
          paper="largest [res.erank.deficit_max]"),
    Claim("norms-explain", "B.2", "It is mild heterogeneity of row and column norms: a control with the same norms "
          "shows more than half of the deficit in every type", ("spectral",),
          lambda m: _each(m, lambda t: norms_deficit(t) > deficit(t) / 2),
          lambda m: "; ".join(f"{role} {percent(norms_deficit(t))} of {percent(deficit(t))}"
                              for role, t in m["spectral"].items())),
    Claim("not-the-fit", "ours", "It is not made by fitting: operators fitted to shuffled weights leave less than "
          "half of the deficit in every type", ("spectral",),
          lambda m: _each(m, lambda t: deficit(t["noise"]) < deficit(t) / 2),
          lambda m: "; ".join(f"{role} {percent(deficit(t['noise']))} of {percent(deficit(t))}"
                              for role, t in m["spectral"].items())),
    Claim("no-direction", "6", "Test 2: no direction is shared across blocks: every type's mean cosine is within "
          "chance", ("cosine",), lambda m: _largest_cosine(m) < critical(len(m["cosine"])),
          lambda m: f"largest |cosine| {max(abs(t['delta']) for t in m['cosine'].values()):.4f} "
                    f"(control {max(abs(t['control']) for t in m['cosine'].values()):.4f}), "
                    f"{_largest_cosine(m):.1f} times chance", paper="[res.xlayer_cos], as the control"),
    Claim("beats-nothing", "6", "Test 3: on held-out blocks neither predictor beats predicting zero", ("learnability",),
          lambda m: _both(m, "held-out blocks", lambda t: t["reduction"] <= 0),
          lambda m: _line(m, "held-out blocks", lambda t: signed(t["reduction"])),
          paper="linear [res.pred.linear.reduction]; mlp512 [res.pred.mlp512.reduction]"),
    Claim("not-above-control", "6", "Test 3: neither predictor beats its control (one-sided bootstrap over patches)",
          ("learnability",), lambda m: _both(m, "held-out blocks", lambda t: t["patches"]["p_one"] >= LEVEL),
          lambda m: _line(m, "held-out blocks", lambda t: f"p {p_value(t['patches']['p_one'])}"),
          paper="linear p [res.pred.linear.p]; mlp512 p [res.pred.mlp512.p]"),
    Claim("indistinguishable", "6", "Real and control are indistinguishable: the 95 % interval of the gap holds zero "
          "for both predictors", ("learnability",),
          lambda m: _both(m, "held-out blocks", lambda t: t["patches"]["low"] <= 0 <= t["patches"]["high"]),
          lambda m: _line(m, "held-out blocks", lambda t: interval(t["patches"])),
          paper="linear [res.pred.linear.gap_ci_lo] to [res.pred.linear.gap_ci_hi]; their audit puts both predictors' "
                "intervals just below zero"),
    Claim("not-by-block", "ours", "With every block held out once, the gaps of the blocks have no common sign",
          ("learnability",), lambda m: _both(m, "all blocks, in turn", lambda t: t["p_sign"] >= LEVEL),
          lambda m: _line(m, "all blocks, in turn", lambda t: f"p {p_value(t['p_sign'])}, "
                                                              f"{sum(gap > 0 for gap in t['gaps'])} of "
                                                              f"{len(t['gaps'])} blocks above control")),
    Claim("not-among-repairings", "ours", "The real pairing is not the best-predicted among re-pairings of the blocks",
          ("learnability",), lambda m: _both(m, "held-out blocks", lambda t: t["p_rank"] > LEVEL),
          lambda m: _line(m, "held-out blocks",
                          lambda t: f"p {p_value(t['p_rank'])} among {t['repairings']}")),
    Claim("depth-fits-better", "6", "Test 4: on the depth pair operators fit better: the least and the largest "
          "relative error are both lower", ("operator", "spectral", "depth_operator"),
          lambda m: all(end(_tested(m, "depth_operator").values()) < end(_tested(m).values()) for end in (min, max)),
          lambda m: f"{_range(_tested(m).values())}, then {_range(_tested(m, 'depth_operator').values())}",
          paper="[oper.err.Q] to [oper.err.V], then [res.pairB.oper_err_lo] to [res.pairB.oper_err_hi]"),
    Claim("nothing-transfers", "6", "Test 4: learned on the width pair, neither predictor beats predicting zero on the "
          "depth pair", ("transfer",), lambda m: _both(m, "depth pair", lambda t: t["reduction"] <= 0),
          lambda m: _line(m, "depth pair", lambda t: signed(t["reduction"])),
          paper="linear [res.xfer.linear.reduction]; mlp512 [res.xfer.mlp512.reduction]"),
    Claim("transfer-as-control", "6", "Test 4: nor does either beat its control there (one-sided)", ("transfer",),
          lambda m: _both(m, "depth pair", lambda t: t["patches"]["p_one"] >= LEVEL),
          lambda m: _line(m, "depth pair", lambda t: f"p {p_value(t['patches']['p_one'])}"),
          paper="linear p [res.xfer.linear.p]; mlp512 p [res.xfer.mlp512.p]"),
    Claim("stays-broken", "B.2", "With operator outputs for its matrices, corrected or not, the sibling is not "
          "functional: on a log scale nearer to random weights than to itself", ("behaviour",),
          lambda m: _nearer_random(m, "operator") and _nearer_random(m, "corrected"),
          lambda m: ", ".join(f"{name} {show(m['behaviour'][name])}"
                              for name in ("operator", "corrected", "reference", "random")),
          paper="operator [res.behav.operator], corrected [res.behav.operator_plus_R], reference [anchor.real_410m], "
                "random [anchor.random_410m]"),
    Claim("correction-moves-little", "B.2", "The learned correction moves its perplexity by less than a tenth",
          ("behaviour",), lambda m: abs(_move(m)) < 0.1, lambda m: f"{_move(m):+.1%}",
          paper="[res.behav.operator] → [res.behav.operator_plus_R] ([res.behav.change])"),
    Claim("operator-beats-random", "B.2", "Operator outputs alone beat random weights once the rest is real",
          ("behaviour",), lambda m: m["behaviour"]["operator"] < m["behaviour"]["random"],
          lambda m: f"{show(m['behaviour']['operator'])} against {show(m['behaviour']['random'])}",
          paper="[res.behav.operator] against [anchor.random_410m]"),
    Claim("memorised", "B.2", "What the correction gains is memorised: predictions for unseen blocks gain less",
          ("behaviour",), lambda m: _move(m, "cross-fitted") > _move(m),
          lambda m: f"{_move(m):+.1%}, for unseen blocks {_move(m, 'cross-fitted'):+.1%}"),
    Claim("has-power", "ours", "Test 3 has the power to say so: each predictor finds a planted signal that makes "
          "up a tenth of the residual's variance", ("power",),
          lambda m: all(share is not None and share <= 0.1 for share in _one_sided(m).values()),
          lambda m: "least share found: " + "; ".join(
              f"{test.split(':')[0]} {'none' if share is None else format(share, '.1%')}"
              for test, share in _one_sided(m).items())),
    Claim("keeps-level", "ours", "The authors' bootstrap keeps its level: on pure noise its two-sided form raises "
          "no more alarms than chance allows", ("power",), lambda m: _chance(*_false_alarms(m)) >= LEVEL,
          lambda m: "{} alarms in {} tries at 5 %".format(*_false_alarms(m))),
]

"""What a pretrained donor's own moments and the zero-shot tasks say, as claims: over `scaleop.starts` and
`scaleop.hardening`."""

from collections.abc import Iterable, Mapping
from itertools import pairwise
from statistics import median
from typing import Any

import pandas as pd

from scaleop.claims.core import Claim
from scaleop.claims.measured import Measured
from scaleop.ridge import RULES
from scaleop.tasks import FLOORS

NOTICEABLE = 1.01  # a factor between two errors
ERRORS = 2  # standard errors


def typical(measured: Mapping[str, Iterable[Mapping[str, Any]]]) -> pd.DataFrame:
    """`donor_moments.measured`'s rows by donor: a row a donor and read-out, medians over its blocks. `counts` is the
    share of the positions that the independent ones amount to; `own` and `random` are the norm ratio of the paper's
    solve for the donor's weights and for independent ones."""
    rows = []
    for donor, found in measured.items():
        by_role: dict[str, list[Mapping[str, Any]]] = {}
        for row in found:
            by_role.setdefault(row["role"], []).append(row)
        for role, mine in by_role.items():
            counts = [row["effective"] / row["positions"] for row in mine if row["effective"]]
            rows.append({"donor": donor, "role": role, "blocks": len(mine), "kept inputs": mine[0]["width"],
                         "exponent": median(row["exponent"] for row in mine),
                         "largest": median(row["largest"] for row in mine),
                         "effective rank": median(row["effective_rank"] for row in mine),
                         "counts": median(counts) if counts else float("nan"),
                         "own": median(row["norm_ratio"] for row in mine),
                         "random": median(row["norm_random"] for row in mine)})
    return pd.DataFrame(rows)


def ridge_rules(fits: Iterable[Mapping[str, Any]], starts: Iterable[Mapping[str, Any]]) -> pd.DataFrame:
    """A row a ridge rule, from `starts.compensated` with all moments: medians over read-outs of lambda over the mean
    diagonal, of the condition number, of the norm ratio, and by role of the error on unseen text over plain
    selection's; then the starts of hybrid and hybrid_rs. Numbers as text."""
    return _table([row for row in fits if row["share"] == 1], [row for row in starts if row["share"] == 1], "rule")


def probe_sizes(fits: Iterable[Mapping[str, Any]], starts: Iterable[Mapping[str, Any]]) -> pd.DataFrame:
    """The same for the paper's rule, a row a number of positions that the moments are from."""
    return _table([row for row in fits if row["rule"] == RULES[0]],
                  [row for row in starts if row["rule"] == RULES[0]], "positions")


def _table(fits: list[Mapping[str, Any]], starts: list[Mapping[str, Any]], by: str) -> pd.DataFrame:
    rows = []
    for which in dict.fromkeys(row[by] for row in fits):
        mine = [row for row in fits if row[by] == which]
        row = {by: f"{which:,}" if isinstance(which, int) else which.replace("_", " "),
               "lambda": f"{median(row['ridge'] for row in mine):.2g}",
               "condition": f"{median(row['condition'] for row in mine):,.3g}",
               "norm ratio": f"{median(row['norm_ratio'] for row in mine):.3g}"}
        for role in dict.fromkeys(one["role"] for one in mine):
            errors = [one["error"] / one["selected"] for one in mine if one["role"] == role]
            row[f"error of {role}"] = f"{median(errors):.3g}"
        rows.append(row | {f"{one['arm']} starts at": _short(one["ppl"]) for one in starts if one[by] == which})
    return pd.DataFrame(rows)


def _short(value: float) -> str:
    """Three digits are plenty to compare starts by."""
    return f"{float(f'{value:.3g}'):,.10g}" if value < 1e9 else f"{value:.3g}"


def moments_evidence(fits: Iterable[Mapping[str, Any]], starts: Iterable[Mapping[str, Any]]) -> Measured:
    """The rows of `starts.compensated` as evidence.

    `against_selection`: {"<block>.<role>": the error of the paper's fit on unseen text over plain selection's};
    `ridge_cost`: that error over the one with the ridge that was chosen on held-out moments; `by_share`: {arm: {share
    of the moments: start}} with the paper's ridge; `by_rule`: {arm: {rule: start}} with all moments.
    """
    errors = {(row["rule"], f"{row['block']}.{row['role']}"): row for row in fits if row["share"] == 1}
    paper = {place: row for (rule, place), row in errors.items() if rule == RULES[0]}
    by_share: dict[str, dict[float, float]] = {}
    by_rule: dict[str, dict[str, float]] = {}
    for row in starts:
        if row["rule"] == RULES[0]:
            by_share.setdefault(row["arm"], {})[row["share"]] = row["ppl"]
        if row["share"] == 1:
            by_rule.setdefault(row["arm"], {})[row["rule"]] = row["ppl"]
    return Measured({
        "against_selection": {place: row["error"] / row["selected"] for place, row in paper.items()} or None,
        "ridge_cost": {place: row["error"] / errors["holdout", place]["error"] for place, row in paper.items()
                       if ("holdout", place) in errors} or None,
        "by_share": by_share or None, "by_rule": by_rule or None})


def _knows(evidence: Measured, name: str) -> dict[str, float]:
    """By task, how many standard errors a model's accuracy is above guessing."""
    return {task: (found["acc"] - found["floor"]) / max(found["stderr"], 1e-9)
            for task in FLOORS if (found := evidence[name].get(task))}


def _listed(values: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {value:+.1f}" for name, value in values.items())


def _shares(evidence: Measured, arm: str) -> list[float]:
    return [value for _, value in sorted(evidence["by_share"][arm].items())]


def _rules(evidence: Measured, arm: str) -> tuple[float, str, float]:
    """The start with the paper's ridge, and the best other rule with its."""
    others = {rule: value for rule, value in evidence["by_rule"][arm].items() if rule != RULES[0]}
    best = min(others, key=others.get)
    return evidence["by_rule"][arm][RULES[0]], best, others[best]


def _other_rule(arm: str) -> Claim:
    def holds(evidence: Measured) -> bool:
        paper, _, other = _rules(evidence, arm)
        return other < paper

    return Claim(f"other-ridge-{arm.replace('_', '-')}", "9",
                 f"Some other ridge rule (spectrum, holdout, clamp) starts {arm} lower than the paper's", ("by_rule",),
                 holds, lambda e: "{:.3g}, with {} {:.3g}".format(*_rules(e, arm)), paper="untested")


def _more_probes(arm: str) -> Claim:
    return Claim(f"more-probes-{arm.replace('_', '-')}", "ours",
                 f"More probes make a better start: {arm}'s falls with every larger share of the moments",
                 ("by_share",),
                 lambda e: all(few > many for few, many in pairwise(_shares(e, arm))),
                 lambda e: " → ".join(f"{value:.3g}" for value in _shares(e, arm)))


MOMENTS = [
    Claim("fits-unseen-text", "7.2",
          "Eq. 3 does better than plain selection on text that no fit has seen, at every read-out",
          ("against_selection",), lambda e: max(e["against_selection"].values()) < 1,
          lambda e: "its error over selection's: median {:.3g}, worst {:.3g}, above 1 at {} of {}".format(
              median(e["against_selection"].values()), max(e["against_selection"].values()),
              sum(value >= 1 for value in e["against_selection"].values()), len(e["against_selection"])),
          paper="on the fitted moments, by construction"),
    Claim("paper-ridge-near-best", "9",
          f"The paper's ridge is as good as one chosen on held-out moments: by the median over read-outs it errs "
          f"less than {NOTICEABLE:g}x as much on unseen text", ("ridge_cost",),
          lambda e: median(e["ridge_cost"].values()) < NOTICEABLE,
          lambda e: "median {:.4g}x, worst {:.4g}x".format(
              median(e["ridge_cost"].values()), max(e["ridge_cost"].values())), paper="suspects it is not"),
    *(_other_rule(arm) for arm in ("hybrid", "hybrid_rs")),
    *(_more_probes(arm) for arm in ("hybrid", "hybrid_rs")),
]
"""Over `moments_evidence`."""

TASKS = [
    Claim("donor-knows", "ours", f"The donor beats guessing on every task, by more than {ERRORS} standard errors",
          ("donor",), lambda e: min(_knows(e, "donor").values()) > ERRORS, lambda e: _listed(_knows(e, "donor"))),
    *(Claim(f"{arm.replace('_', '-')}-guesses", "7.5",
            f"At this budget {arm} guesses at every multiple-choice task: within {ERRORS} standard errors", (arm,),
            lambda e, arm=arm: max(abs(value) for task, value in _knows(e, arm).items() if FLOORS[task]) <= ERRORS,
            lambda e, arm=arm: _listed(_knows(e, arm)), paper="near their floors")
      for arm in ("random", "subclone", "hybrid")),
]
"""Over {model: what `hardening.extended` gives}."""

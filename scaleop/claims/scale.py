"""Section 7.6 (scale, and the method's boundary): Table 10, the stack's inversion, its explanation by conditioning, and
the cures that the paper leaves to future work. Role "scale"."""

from collections.abc import Iterable
from statistics import median
from typing import Any

import pandas as pd

from scaleop.claims.core import Claim
from scaleop.claims.paired import factor, mean_and_sd, on_shared_seeds
from scaleop.claims.paper import TABLE_10, printed
from scaleop.claims.section7 import CONVERTED, all_below, falling, lowest
from scaleop.claims.standings import Standings, show

RIDGES = {"spectrum": "A ridge read off the spectrum", "holdout": "A ridge chosen on held-out moments",
          "clamp": "Clamping the compensated rows"}
CURES = tuple(f"scale.hybrid_rs_{rule}" for rule in RIDGES)  # the stack with other ridges
CONSTRUCTIONS = {"random": "from scratch", "subclone": "selection only", "hybrid": "compensation only",
                 "subclone_rs": "rescale only", "hybrid_rs": "compensation + rescale"}
LEVERS = ("scale.subclone_rs", "scale.hybrid", "scale.hybrid_rs")


def scale(results: Iterable[dict[str, Any]]) -> pd.DataFrame:
    """Table 10, ours beside the paper's: starts (the paper prints none) and ends of the scale pair, numbers as text.

    The paper's four arms come first, in its order; arms of ours follow, marked, with what they add.
    """
    race = Standings(results)
    rows = []
    for arm in (*TABLE_10, *(arm for arm in race.arms if arm not in TABLE_10)):
        seeds, base = len(race.seeds_of(arm)), next(name for name in (
            *sorted(CONSTRUCTIONS, key=len, reverse=True), arm) if arm == name or arm.startswith(f"{name}_"))
        added = arm.removeprefix(base).strip("_")
        rows.append({"arm": arm if arm in TABLE_10 else f"{arm} (not in the paper)",
                     "construction": CONSTRUCTIONS.get(base, "-") + (f", {added}" if added else ""),
                     "zero-shot, ours": show(race.value("start", arm)) if seeds else "-",
                     "final, paper": printed(f"scale.{arm}.final"),
                     "final, ours": mean_and_sd(race, arm) if seeds else "-", "seeds, ours": str(seeds or "-")})
    return pd.DataFrame(rows)


def _solves(race: Any, arm: str, what: str) -> list[float]:
    """One diagnostic of an arm's compensation solves on its first seed, by place; empty where none are recorded."""
    solves = race.results(arm)[0].get("made", {}).get("solves", {})
    return [solves[place][what] for place in sorted(solves)]


def _larger(what: str, base: str, arm: str) -> dict[str, Any]:
    """The median over places of a diagnostic of the solves is larger for `arm` than for `base`."""
    def medians(race: Any) -> list[float]:
        found = [_solves(race, name, what) for name in (base, arm)]
        return [median(values) for values in found] if all(found) else []

    return {"needs": (base, arm), "holds": lambda race: medians(race)[1] > medians(race)[0] if medians(race) else None,
            "ours": lambda race: "median {:.3g} → {:.3g}".format(*medians(race))}


def any_below(axis: str, bar: str, *arms: str) -> dict[str, Any]:
    """At least one of `arms` is below `bar`."""
    def best(race: Any) -> str:
        return min(arms, key=lambda arm: race.value(axis, arm))

    return {"needs": (*arms, bar), "holds": lambda race: race.value(axis, best(race)) < race.value(axis, bar),
            "ours": lambda race: f"{bar.removeprefix('scale.')} {show(race.value(axis, bar))}, lowest of the others "
                                 f"{best(race).removeprefix('scale.')} {show(race.value(axis, best(race)))}"}


def where_inverted(predicate: dict[str, Any]) -> dict[str, Any]:
    """A predicate asked only where the stack inverts, hybrid_rs above subclone_rs on the scale pair: None elsewhere, as
    there is nothing to cure or to explain."""
    pair = ("scale.subclone_rs", "scale.hybrid_rs")

    def holds(race: Any) -> bool | None:
        plain, stack = (race.value("end", arm) for arm in pair)
        return predicate["holds"](race) if stack > plain else None

    return predicate | {"needs": tuple(dict.fromkeys((*predicate["needs"], *pair))), "holds": holds}


def _other_ridge(rule: str, axis: str) -> Claim:
    return Claim(f"ridge-{rule}-{axis}", "ours", f"{RIDGES[rule]} {axis}s the stack lower: hybrid_rs_{rule} below "
                 "hybrid_rs", **falling(axis, "scale.hybrid_rs", f"scale.hybrid_rs_{rule}"))


def _edge(race: Any, role: str) -> float:
    return factor(race, f"{role}subclone_rs", f"{role}hybrid_rs")


def _margins(race: Any) -> tuple[float, float]:
    """random over the best of the paper's converted arms: width pair, scale pair."""
    def best(role: str) -> str:
        return min((f"{role}{arm}" for arm in ("subclone_rs", "hybrid", "hybrid_rs")),
                   key=lambda arm: race.value("end", arm))

    return tuple(factor(race, f"{role}random", best(role)) for role in ("", "scale."))


PAIRS = {"width": "", "depth": "depth.", "scale": "scale."}
SCRATCH = {"": CONVERTED, "depth.": ("subclone", "hybrid", "subclone_rs", "hybrid_rs"),
           "convergence.": ("subclone_rs", "hybrid_rs"), "scale.": ("hybrid", "subclone_rs", "hybrid_rs")}
"""By race, the converted arms that the abstract's "always beats" is about."""


def _scratch_margins(race: Any) -> dict[str, float]:
    """By race, how many times higher random ends than the worst converted arm."""
    return {role: race.value("end", f"{role}random") / max(race.value("end", f"{role}{arm}") for arm in arms)
            for role, arms in SCRATCH.items()}  # 0 where one diverged


CLAIMS = [
    Claim("scale-rescale-best", "7.6",
          "On the scale pair rescale alone ends lowest: subclone_rs below hybrid and hybrid_rs",
          **lowest("end", "scale.subclone_rs", LEVERS),
          paper="[scale.subclone_rs.final], next hybrid [scale.hybrid.final]"),
    Claim("scale-order", "7.6",
          "Compensation alone comes next, the stack last: hybrid_rs, hybrid, subclone_rs fall in this order",
          **falling("end", *reversed(LEVERS)),
          paper="[scale.hybrid_rs.final] → [scale.hybrid.final] → [scale.subclone_rs.final]"),
    Claim("scale-stack-inverts", "7.6", "The stack inverts: hybrid_rs ends highest of the three converted arms",
          **all_below(LEVERS[:2], LEVERS[2]),
          paper="hybrid_rs [scale.hybrid_rs.final], next hybrid [scale.hybrid.final]"),
    Claim("scale-only-there", "7.6",
          "The levers over-correct only at this scale: hybrid_rs ends above subclone_rs on the scale pair, below it on "
          "the other two pairs",
          tuple(f"{role}{arm}" for role in PAIRS.values() for arm in ("subclone_rs", "hybrid_rs")),
          lambda race: _edge(race, "scale.") < 1 < min(_edge(race, ""), _edge(race, "depth.")),
          lambda race: "; ".join(f"{pair} {show(race.value('end', f'{role}subclone_rs'))} → "
                                 f"{show(race.value('end', f'{role}hybrid_rs'))}" for pair, role in PAIRS.items()),
          paper="width [seeds.subclone_rs.mean] → [seeds.hybrid_rs.mean]; depth [pairB.subclone_rs.mean] → "
                "[pairB.hybrid_rs.mean]; scale [scale.subclone_rs.final] → [scale.hybrid_rs.final]"),
    Claim("scale-levers-safe", "7.6",
          "Each lever alone is safe there: hybrid and subclone_rs end lower than bare selection (not run by the paper)",
          **all_below(LEVERS[:2], "scale.subclone")),
    Claim("scale-beats-scratch", "7.6",
          "Each of the paper's converted arms still ends lower than from scratch on the scale pair",
          **all_below(LEVERS, "scale.random"), paper="random [scale.random.final], highest of the others hybrid_rs "
                                                     "[scale.hybrid_rs.final]"),
    Claim("transfer-always-beats-scratch", "abstract",
          "Transfer always beats from scratch: in every race (width, depth, scale, 33 times the budget) each of the "
          "paper's converted arms ends lower than random",
          tuple(f"{role}{arm}" for role, arms in SCRATCH.items() for arm in (*arms, "random")),
          lambda race: all(margin > 1 for margin in _scratch_margins(race).values()),
          lambda race: "random over the worst: " + ", ".join(
              f"{role.strip('.') or 'width'} {margin:.3g}x" for role, margin in _scratch_margins(race).items()),
          paper="[ladder.random.final] / [ladder.projection.final], [pairB.ratio_vs_random], "
                "[scale.random.final] / [scale.hybrid_rs.final], [b1000.ratio_vs_random]"),
    Claim("margin-narrows-at-scale", "abstract",
          "The margin over from scratch narrows at the largest scale: random over the best converted arm is a smaller "
          "factor than on the width pair", **on_shared_seeds({
              "needs": tuple(f"{role}{arm}" for role in ("", "scale.") for arm in (
                  "random", "subclone_rs", "hybrid", "hybrid_rs")),
              "holds": lambda race: _margins(race)[1] < _margins(race)[0],
              "ours": lambda race: "{:.3g}x → {:.3g}x".format(*_margins(race))}),
          paper="[ladder.ratio.hybrid_rs_vs_random] → [scale.random.final] / [scale.subclone_rs.final]"),
    Claim("scale-small-donor", "7.6",
          "It is absolute scale, not the geometry: where the stack inverts on the scale pair, from a smaller donor at "
          "the same reduction ratios it does not (hybrid_rs ends lower than subclone_rs)",
          **where_inverted(falling("end", "scale_control.subclone_rs", "scale_control.hybrid_rs")),
          paper="preliminary, no numbers"),
    Claim("scale-worse-conditioned", "7.6",
          "The solves are worse conditioned on the scale pair than on the width pair, by the median condition number",
          **_larger("condition", "hybrid", "scale.hybrid"), paper="says the text, no numbers"),
    Claim("scale-under-regularised", "7.6",
          "The paper's ridge under-regularises the scale pair: the ridge that does best on held-out moments is larger, "
          "by the median over the solves",
          **_larger("ridge", "scale.hybrid_rs", "scale.hybrid_rs_holdout"), paper="says the text, no numbers"),
    Claim("spectrum-damps-more", "9",
          "On the scale pair a ridge read off the spectrum is larger than the paper's, by the median over the solves",
          **_larger("ridge", "scale.hybrid_rs", "scale.hybrid_rs_spectrum"), paper="untested"),
    Claim("remedy-spectrum", "9",
          "A ridge read off the spectrum is the cure: where the stack inverts, with it it ends lower than subclone_rs",
          **where_inverted(falling("end", "scale.subclone_rs", "scale.hybrid_rs_spectrum")), paper="untested"),
    Claim("remedy-clamp", "9",
          "Clamping the compensated rows is the cure: where the stack inverts, with it it ends lower than subclone_rs",
          **where_inverted(falling("end", "scale.subclone_rs", "scale.hybrid_rs_clamp")), paper="untested"),
    Claim("remedy-any", "ours",
          "Where the stack inverts, some ridge rule (spectrum, holdout, clamp) brings its end below subclone_rs's",
          **where_inverted(any_below("end", "scale.subclone_rs", *CURES))),
    Claim("remedy-start", "ours", "Some ridge rule starts the stack lower than the paper's ridge does",
          **any_below("start", "scale.hybrid_rs", *CURES)),
    Claim("remedy-end", "ours", "Some ridge rule ends the stack lower than the paper's ridge does",
          **any_below("end", "scale.hybrid_rs", *CURES)),
    *(_other_ridge(rule, axis) for rule in RIDGES for axis in ("start", "end")),
    Claim("own-inputs-start", "ours",
          "Compensating on the small model's own inputs starts the stack lower: hybrid_rs_own below hybrid_rs",
          **falling("start", "scale.hybrid_rs", "scale.hybrid_rs_own")),
    Claim("own-inputs-end", "ours",
          "Compensating on the small model's own inputs ends the stack lower: hybrid_rs_own below hybrid_rs",
          **falling("end", "scale.hybrid_rs", "scale.hybrid_rs_own")),
]

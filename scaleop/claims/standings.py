"""The results of a race as evidence, and Table 2 with our numbers beside the paper's."""

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pandas as pd

from scaleop.published import PAPER_ARMS, published
from scaleop.published import anchors as published_anchors

ORDER = ("random", "random_pythia", "projection", "stride", "subclone", "subclone_iso", "hybrid", "subclone_rs",
         "hybrid_rs")
"""Table 2's rungs, with our additions beside their nearest relative."""

ANCHORS = ("donor", "reference", "vocabulary")


class Standings:
    """Matched-budget results of one experiment, by arm and seed, and the anchors they are read against.

    `results`: one dict an (arm, seed) with `zero_shot`, `final["value"]` and `curve` (points with `tokens` and `ppl`);
    a result without `final` is unfinished and left out. `anchors`: `donor` and `reference`, dicts with `name` and
    `ppl`, and `vocabulary`, a number of tokens; each may be missing. A perplexity that is null, NaN or infinite
    belongs to a diverged run and counts as infinite: worse than any number. Raises ValueError when an (arm, seed)
    comes twice, or when experiments or budgets are mixed.
    """

    def __init__(self, results: Iterable[dict[str, Any]], anchors: dict[str, Any] | None = None) -> None:
        self.anchors = {name: anchor for name, anchor in (anchors or {}).items() if anchor}
        self.runs: dict[tuple[str, int], dict[str, Any]] = {}
        for result in results:
            key = (result["arm"], result["seed"])
            if key in self.runs:
                raise ValueError(f"arm {key[0]!r} has two results for seed {key[1]}: keep one of them")
            if "final" in result:
                self.runs[key] = result
        _same("experiments", {run.get("experiment") for run in self.runs.values()})
        _same("budgets (tokens)", {run["curve"][-1]["tokens"] for run in self.runs.values() if run["curve"]})

    @property
    def arms(self) -> list[str]:
        """Arms with at least one finished run, Table 2's order first."""
        there = list(dict.fromkeys(arm for arm, _ in self.runs))
        return [arm for arm in ORDER if arm in there] + [arm for arm in there if arm not in ORDER]

    @property
    def seeds(self) -> list[int]:
        """The seeds that every arm has."""
        return self._shared(self.arms)

    def seeds_of(self, arm: str) -> list[int]:
        """The seeds of one arm."""
        return sorted(seed for name, seed in self.runs if name == arm)

    def _shared(self, arms: Sequence[str]) -> list[int]:
        return sorted(set.intersection(*(set(self.seeds_of(arm)) for arm in arms))) if arms else []

    def only(self, needs: Sequence[str], seeds: Sequence[int] | None = None) -> "Standings | None":
        """The arms in `needs` on the seeds they share (of those, `seeds`): comparisons are paired, never over different
        seeds. `needs` may name anchors too. None if anything is missing."""
        arms = [need for need in needs if need not in ANCHORS]
        missing = [need for need in needs if need in ANCHORS and need not in self.anchors]
        shared = [seed for seed in self._shared(arms) if seeds is None or seed in seeds]
        if missing or not shared:
            return None
        return Standings([self.runs[arm, seed] for arm in arms for seed in shared], self.anchors)

    def values(self, axis: str, arm: str) -> list[float]:
        """Perplexities of an arm, one a seed; `axis` is "start" (quick, before training) or "end" (full, after it)."""
        return [_number(run["zero_shot"] if axis == "start" else run["final"]["value"]) for run in self.results(arm)]

    def value(self, axis: str, arm: str) -> float:
        """Mean of `values` over the seeds."""
        values = self.values(axis, arm)
        return sum(values) / len(values)

    def results(self, arm: str) -> list[dict[str, Any]]:
        """The results themselves, one a seed."""
        return [self.runs[arm, seed] for seed in self.seeds_of(arm)]

    def curve(self, arm: str) -> dict[int, float]:
        """Quick perplexity by tokens seen, mean over the seeds, at the points that all seeds have."""
        curves = [{point["tokens"]: _number(point["ppl"]) for point in run["curve"]} for run in self.results(arm)]
        return {tokens: sum(curve[tokens] for curve in curves) / len(curves)
                for tokens in sorted(set.intersection(*map(set, curves)))}


def _number(value: float | None) -> float:
    return float(value) if value is not None and math.isfinite(value) else math.inf


def _same(what: str, found: set[Any]) -> None:
    if len(found) > 1:
        raise ValueError(f"one race cannot mix {what}, these results have {', '.join(sorted(map(str, found)))}")


def ladder(results: Iterable[dict[str, Any]], anchors: dict[str, Any] | None = None) -> pd.DataFrame:
    """Table 2, the paper's numbers and ours in one row an arm (perplexities; NaN where there is none).

    Columns: arm, in_paper, paper_zero_shot, zero_shot, zero_shot_sd, paper_final, final, final_sd, seeds. Ours are
    means over each arm's own seeds with their sample standard deviation; the paper's cells are single-seed. All seven
    rungs are there, run or not; our own arms stand among them with in_paper False. The anchors come last, ours with
    their quick perplexity as zero_shot and their full one as final; the paper's are Pythia's.
    """
    race = Standings(results, anchors)
    rows = []
    for arm in [*ORDER, *(arm for arm in race.arms if arm not in ORDER)]:
        seeds, paper = len(race.seeds_of(arm)), arm in PAPER_ARMS
        if not (seeds or paper):
            continue
        row: dict[str, Any] = {"arm": arm, "in_paper": paper, "seeds": seeds}
        for axis, name in (("start", "zero_shot"), ("end", "final")):
            values = np.array(race.values(axis, arm)) if seeds else np.array([np.nan])
            row[f"paper_{name}"] = published(f"ladder.{arm}.{name}")["value"] if paper else np.nan
            row[name] = values.mean()
            row[f"{name}_sd"] = values.std(ddof=1) if seeds > 1 and np.isfinite(values).all() else np.nan
        rows.append(row)
    for role, theirs in published_anchors().items():
        mine = race.anchors.get(role, {})
        rows.append({"arm": f"{role}: {mine.get('name', 'none')} / {theirs['name']}", "in_paper": True, "seeds": 0,
                     "zero_shot": mine.get("quick_ppl", np.nan), "paper_final": theirs["ppl"],
                     "final": mine.get("ppl", np.nan)})
    columns = ["zero_shot", "zero_shot_sd", "paper_final", "final", "final_sd", "seeds"]
    return pd.DataFrame(rows, columns=["arm", "in_paper", "paper_zero_shot", *columns])


def readable(frame: pd.DataFrame) -> pd.DataFrame:
    """A `ladder` for the eye: the paper's numbers as printed, ours as mean ± sd, arms the paper lacks marked."""
    def paper(row: Any, name: str) -> str:
        rung = row["arm"] in PAPER_ARMS
        return published(f"ladder.{row['arm']}.{name}")["printed"] if rung else show(row[f"paper_{name}"])

    def ours(row: Any, name: str) -> str:
        spread = row[f"{name}_sd"]
        return show(row[name]) + ("" if math.isnan(spread) else f" ± {show(spread)}")

    rows = [(row["arm"] if row["in_paper"] else f"{row['arm']} (not in the paper)", paper(row, "zero_shot"),
             ours(row, "zero_shot"), paper(row, "final"), ours(row, "final"), row["seeds"] or "-")
            for _, row in frame.iterrows()]
    return pd.DataFrame(rows, columns=["arm", "zero-shot, paper", "zero-shot, ours", "final, paper", "final, ours",
                                       "seeds, ours"])


def show(value: float) -> str:
    """A perplexity as Table 2 spells it: 83.0, 1,519.0, 61,912; ∞ for a diverged run, - for none."""
    if math.isnan(value):
        return "-"
    return "∞" if math.isinf(value) else f"{value:,.0f}" if value >= 2_000 else f"{value:,.1f}"

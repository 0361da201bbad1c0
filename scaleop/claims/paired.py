"""Two arms on the same seeds: paired differences, what three seeds can and cannot say, and how far seeds spread."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from scipy import stats

from scaleop.claims.standings import Standings, show

CONFIDENCE = 0.95
STATISTICS = ("second lower", "difference [95 %]", "sign test p", "ranges")  # columns of `versus`


@dataclass(frozen=True)
class Paired:
    """Two arms' ends on the seeds both have. Differences are first minus second: positive where the second is lower.

    `p` is the exact two-sided sign test's. It knows only who won, so with n seeds it is at least 2^(1-n): 0.25 for
    three, whatever the margin. The t interval leans on three differences being a normal sample instead.
    """

    first: str
    second: str
    seeds: tuple[int, ...]
    wins: int  # seeds on which the second is lower
    mean: float  # of the differences, in perplexity
    low: float  # the paired t interval's ends (95 %); NaN for one seed, or where a run diverged
    high: float
    p: float
    overlap: bool  # do the two ranges, least to most, meet?


def paired(results: Iterable[dict[str, Any]], first: str, second: str) -> Paired:
    """`first` against `second` by their full perplexities at the budget. Raises ValueError when they share no seed."""
    found = _paired(results, first, second)
    if found is None:
        raise ValueError(f"arms {first!r} and {second!r} have no finished seed in common: run both on one")
    return found


def _paired(results: Iterable[dict[str, Any]], first: str, second: str) -> Paired | None:
    race = Standings([result for result in results if result["arm"] in (first, second)]).only((first, second))
    return None if race is None else compare(race, first, second)


def compare(race: Any, first: str, second: str) -> Paired:
    """`paired` on evidence that is already restricted to the seeds both arms have."""
    a, b = (np.array(race.values("end", arm)) for arm in (first, second))
    with np.errstate(invalid="ignore"):  # two diverged runs: their difference is NaN
        differences = a - b
    count, mean = len(differences), differences.mean().item()
    half = math.nan
    if count > 1 and np.isfinite(differences).all():
        half = (stats.t.ppf((1 + CONFIDENCE) / 2, count - 1) * stats.sem(differences)).item()
    wins, losses = int((b < a).sum()), int((a < b).sum())
    p = stats.binomtest(wins, wins + losses).pvalue if wins + losses else 1.0
    overlap = max(a.min(), b.min()) <= min(a.max(), b.max())
    return Paired(first, second, tuple(race.seeds_of(first)), wins, mean, mean - half, mean + half, float(p),
                  bool(overlap))


def versus(results: Iterable[dict[str, Any]], pairs: Sequence[tuple[str, str]],
           paper: Iterable[dict[str, Any]] = ()) -> pd.DataFrame:
    """Comparisons (first, second) as a table, ours beside the same statistics of the paper's printed numbers.

    A difference is first minus second, in perplexity, with its 95 % paired t interval. Mind the sign test: with three
    seeds p cannot be below 0.25, so a clean sweep is not significant by it.
    """
    sources = {"paper": list(paper), "ours": list(results)}
    rows = []
    for first, second in pairs:
        row = {"": f"{first} - {second}"}
        for source, given in sources.items():
            found = _paired(given, first, second)
            cells = ("-",) * 4 if found is None else (
                f"{found.wins}/{len(found.seeds)}", f"{found.mean:.1f}{_interval(found)}", f"{found.p:.3g}",
                "meet" if found.overlap else "apart")
            row |= {f"{column}, {source}": cell for column, cell in zip(STATISTICS, cells, strict=True)}
        rows.append(row)
    return pd.DataFrame(rows, columns=["", *(f"{column}, {source}" for column in STATISTICS for source in sources)])


def _interval(found: Paired) -> str:
    return "" if math.isnan(found.low) else f" [{found.low:.1f}, {found.high:.1f}]"


def spread(race: Any, arm: str) -> float:
    """Sample standard deviation (n - 1) of an arm's ends over its seeds; NaN for one seed or a diverged run."""
    values = np.array(race.values("end", arm))
    return values.std(ddof=1).item() if len(values) > 1 and np.isfinite(values).all() else math.nan


def seed_noise(race: Any, *arms: str) -> float | None:
    """The largest relative seed spread (standard deviation over mean) of `arms`; None unless all have two seeds."""
    if any(len(race.seeds_of(arm)) < 2 for arm in arms):
        return None
    return max(spread(race, arm) / race.value("end", arm) for arm in arms)


def factor(race: Any, high: str, low: str) -> float:
    """How many times higher one arm ends than another; NaN where the other diverged, so that no comparison holds."""
    below = race.value("end", low)
    return race.value("end", high) / below if math.isfinite(below) else math.nan


def relative_gap(race: Any, first: str, second: str) -> float:
    """How far apart two arms end, relative to their mean; NaN where a run diverged."""
    a, b = race.value("end", first), race.value("end", second)
    return 2 * abs(a - b) / (a + b) if math.isfinite(a + b) else math.nan


def mean_and_sd(race: Any, arm: str) -> str:
    """An arm's end as the tables print it: 84.0 ± 1.8; without a spread for one seed."""
    sd = spread(race, arm)
    return show(race.value("end", arm)) + ("" if math.isnan(sd) else f" ± {sd:,.1f}")


# Predicates over seeds, each with the arms it needs and the numbers it shows; `**` puts one into a Claim.

def on_every_seed(*pairs: tuple[str, str], axes: Sequence[str] = ("end",)) -> dict[str, Any]:
    """Of each pair (higher, lower) the second is lower than the first on every seed, on every one of `axes`."""
    def won(race: Any, axis: str, high: str, low: str) -> list[bool]:
        return [b < a for a, b in zip(race.values(axis, high), race.values(axis, low), strict=True)]

    def line(race: Any, axis: str, high: str, low: str) -> str:
        wins, below = won(race, axis, high, low), show(race.value(axis, low))
        return f"{low} {below} < {show(race.value(axis, high))} {high} on {sum(wins)}/{len(wins)}" + (
            " at the start" if axis == "start" else "")

    cases = [(axis, *pair) for pair in pairs for axis in axes]
    return {"needs": tuple(dict.fromkeys(arm for pair in pairs for arm in pair)),
            "holds": lambda race: all(all(won(race, *case)) for case in cases),
            "ours": lambda race: "; ".join(line(race, *case) for case in cases)}


def on_shared_seeds(predicate: dict[str, Any]) -> dict[str, Any]:
    """A predicate over several races, asked on the seeds that all of them have: each keeps its own otherwise, and the
    main race's three would be held against a long one's single one."""
    def same(race: Any) -> Any:
        return race.only(predicate["needs"], race.seeds)

    return predicate | {"holds": lambda race: predicate["holds"](same(race)),
                        "ours": lambda race: predicate["ours"](same(race))}


def apart(high: str, low: str) -> dict[str, Any]:
    """The worst seed of `low` ends below the best of `high`; one seed says nothing about it."""
    def holds(race: Any) -> bool | None:
        return None if len(race.seeds_of(low)) < 2 else max(race.values("end", low)) < min(race.values("end", high))

    return {"needs": (high, low), "holds": holds,
            "ours": lambda race: f"worst {low} {show(max(race.values('end', low)))}, best {high} "
                                 f"{show(min(race.values('end', high)))}"}

"""The paper's claims as predicates over results, beside the numbers it printed.

A `Claim` states in a sentence what has to be true and holds the predicate that decides it; `evaluate` runs a list of
claims against evidence and gives findings: "holds", "does not hold", or "not run" when an arm it needs has no run.
A claim compares arms on the seeds that all of them have, by the mean over those seeds, as the paper does.

Evidence is any object with `only(needs, seeds=None)` (itself, restricted to what a claim needs; None if something is
missing) and `seeds`. `Race` is that object for section 7; other sections bring their own and a list of claims.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from scaleop.published import PAPER_ARMS, anchors as published_anchors, in_print, published

HOLDS, FAILS, NOT_RUN = "holds", "does not hold", "not run"
CONVERTED = PAPER_ARMS[1:]
ORDER = ("random", "random_pythia", "projection", "stride", "subclone", "subclone_iso", "hybrid", "subclone_rs", "hybrid_rs")
"""Table 2's rungs with our additions beside their nearest relative."""

PYTHIA_VOCABULARY = 50_304  # rows of the embedding, up to Pythia-2.8B


# ---------------------------------------------------------------------------------------------------- evidence
class Race:
    """Matched-budget results of one experiment, by arm and seed, and the anchors they are read against.

    `results`: one dict an (arm, seed) with `zero_shot`, `final["value"]` and `curve` (points with `tokens` and `ppl`);
    a result without `final` is unfinished and left out. `anchors`: `donor` and `reference`, dicts with `name` and
    `ppl`, and `vocabulary`, the number of tokens; each may be missing. A perplexity that is null, NaN or infinite
    belongs to a diverged run and counts as infinite: worse than any number. Raises ValueError when an (arm, seed)
    comes twice, or when experiments or budgets are mixed.
    """

    def __init__(self, results: Iterable[dict[str, Any]], anchors: dict[str, Any] | None = None) -> None:
        self.anchors = anchors or {}
        self.runs: dict[tuple[str, int], dict[str, Any]] = {}
        for result in results:
            if "final" not in result:
                continue
            key = (result["arm"], result["seed"])
            if key in self.runs:
                raise ValueError(f"arm {key[0]!r} has two results for seed {key[1]}: pass the results of one experiment")
            self.runs[key] = result
        for what, found in (("experiments", {run.get("experiment") for run in self.runs.values()}),
                            ("budgets (tokens)", {run["curve"][-1]["tokens"] for run in self.runs.values() if run["curve"]})):
            if len(found) > 1:
                raise ValueError(f"one race cannot mix {what}: {', '.join(map(str, sorted(found, key=str)))}")

    @property
    def arms(self) -> list[str]:
        """Arms with at least one finished run, Table 2's order first."""
        there = list(dict.fromkeys(arm for arm, _ in self.runs))
        return [arm for arm in ORDER if arm in there] + [arm for arm in there if arm not in ORDER]

    @property
    def seeds(self) -> list[int]:
        """The seeds that every arm has."""
        return sorted(set.intersection(*(set(self.seeds_of(arm)) for arm in self.arms))) if self.runs else []

    def seeds_of(self, arm: str) -> list[int]:
        """The seeds of one arm."""
        return sorted(seed for name, seed in self.runs if name == arm)

    def only(self, needs: Sequence[str], seeds: Sequence[int] | None = None) -> "Race | None":
        """The race between the arms in `needs`, on the seeds they share (or on `seeds`); None if that is empty.

        `needs` may also name anchors.
        """
        arms = [need for need in needs if need not in ("donor", "reference", "vocabulary")]
        if any(need not in self.anchors for need in needs if need not in arms):
            return None
        shared = set.intersection(*(set(self.seeds_of(arm)) for arm in arms)) & set(self.all_seeds if seeds is None else seeds)
        return Race([self.runs[arm, seed] for arm in arms for seed in sorted(shared)], self.anchors) if shared else None

    @property
    def all_seeds(self) -> set[int]:
        """Every seed that some arm has."""
        return {seed for _, seed in self.runs}

    def values(self, axis: str, arm: str) -> list[float]:
        """Perplexities of an arm, one a seed: `axis` is "start" (quick, before training) or "end" (full, after it)."""
        runs = [self.runs[arm, seed] for seed in self.seeds_of(arm)]
        return [_number(run["zero_shot"] if axis == "start" else run["final"]["value"]) for run in runs]

    def value(self, axis: str, arm: str) -> float:
        """Mean over the seeds of `values`."""
        return sum(self.values(axis, arm)) / len(self.seeds_of(arm))

    def curve(self, arm: str) -> dict[int, float]:
        """Quick perplexity by tokens seen, mean over the seeds, where all seeds were evaluated."""
        curves = [{point["tokens"]: _number(point["ppl"]) for point in self.runs[arm, seed]["curve"]}
                  for seed in self.seeds_of(arm)]
        return {tokens: sum(curve[tokens] for curve in curves) / len(curves)
                for tokens in sorted(set.intersection(*map(set, curves)))}


def _number(value: float | None) -> float:
    return float(value) if value is not None and math.isfinite(value) else math.inf


# ------------------------------------------------------------------------------------------ claims and verdicts
@dataclass(frozen=True)
class Claim:
    """One sentence that results can contradict.

    `section` is the paper's, or "ours" for a question the paper does not ask. `needs` names what has to have been
    run. `holds` maps the evidence to True, False or None (cannot be said); `ours` maps it to the numbers behind that.
    `paper` is a template for the published numbers, `[id]` standing for one.
    """

    id: str
    section: str
    statement: str
    needs: tuple[str, ...]
    holds: Callable[[Any], bool | None]
    ours: Callable[[Any], str]
    paper: str = "-"


@dataclass(frozen=True)
class Finding:
    """A claim and what the evidence says: over all shared seeds, and seed by seed (`agree`: seeds it holds on)."""

    claim: Claim
    verdict: str
    ours: str
    seeds: tuple[int, ...]
    agree: tuple[int, ...]

    def record(self) -> dict[str, Any]:
        """The finding as a JSON-able dict."""
        claim = self.claim
        return {"id": claim.id, "section": claim.section, "statement": claim.statement, "paper": in_print(claim.paper),
                "ours": self.ours, "seeds": list(self.seeds), "holds_on": list(self.agree), "verdict": self.verdict}


def evaluate(claims: Iterable[Claim], evidence: Any) -> list[Finding]:
    """What `evidence` says about each claim, in order."""
    findings = []
    for claim in claims:
        part = evidence.only(claim.needs)
        said = None if part is None else claim.holds(part)
        if said is None:
            findings.append(Finding(claim, NOT_RUN, "-", (), ()))
            continue
        agree = tuple(seed for seed in part.seeds if claim.holds(part.only(claim.needs, [seed])))
        findings.append(Finding(claim, HOLDS if said else FAILS, claim.ours(part), tuple(part.seeds), agree))
    return findings


def to_records(findings: Iterable[Finding]) -> list[dict[str, Any]]:
    """Findings as JSON-able dicts, for the ledger of claims."""
    return [finding.record() for finding in findings]


def tabulate(findings: Iterable[Finding]) -> pd.DataFrame:
    """Findings as a table: claim, section, paper, ours, seeds, holds on (seeds it holds on, alone), verdict."""
    rows = [(f.claim.statement, f.claim.section, in_print(f.claim.paper), f.ours, len(f.seeds),
             f"{len(f.agree)}/{len(f.seeds)}" if f.seeds else "-", f.verdict) for f in findings]
    return pd.DataFrame(rows, columns=["claim", "section", "paper", "ours", "seeds", "holds on", "verdict"])


def table(results: Iterable[dict[str, Any]], anchors: dict[str, Any] | None = None,
          claims: Iterable[Claim] | None = None) -> pd.DataFrame:
    """The claims of sections 7.1 and 7.2 (or `claims`) on race results, as `tabulate` shows them."""
    return tabulate(evaluate(LADDER if claims is None else claims, Race(results, anchors)))


# --------------------------------------------------------------------------------------------- the ladder table
def ladder(results: Iterable[dict[str, Any]], anchors: dict[str, Any] | None = None) -> pd.DataFrame:
    """Table 2, the paper's numbers and ours in one row an arm (perplexities; NaN where there is none).

    Columns: arm, in_paper, paper_zero_shot, zero_shot, zero_shot_sd, paper_final, final, final_sd, seeds. Ours are
    means over each arm's own seeds with their sample standard deviation; the paper's cells are single-seed. All seven
    rungs are there whether run or not; our own arms stand among them with in_paper False. The anchors come last:
    quick perplexity as zero_shot, full as final; the paper's are of Pythia.
    """
    race, rows = Race(results, anchors), []
    for arm in [*ORDER, *race.arms]:
        paper, n = arm in PAPER_ARMS, len(race.seeds_of(arm))
        if arm in [row["arm"] for row in rows] or not (paper or n):
            continue
        row: dict[str, Any] = {"arm": arm, "in_paper": paper, "seeds": n}
        for axis, name in (("start", "zero_shot"), ("end", "final")):
            values = np.array(race.values(axis, arm)) if n else np.array([np.nan])
            row[f"paper_{name}"] = published(f"ladder.{arm}.{name}")["value"] if paper else np.nan
            row[name] = values.mean()
            row[f"{name}_sd"] = values.std(ddof=1) if n > 1 and np.isfinite(values).all() else np.nan
        rows.append(row)
    for role, theirs in published_anchors().items():
        mine = race.anchors.get(role, {})
        rows.append({"arm": f"{role}: {mine.get('name', 'not there')} (paper: {theirs['name']})", "in_paper": True,
                     "zero_shot": mine.get("quick_ppl", np.nan), "paper_final": theirs["printed"],
                     "final": mine.get("ppl", np.nan), "seeds": 0})
    columns = ["arm", "in_paper", "paper_zero_shot", "zero_shot", "zero_shot_sd", "paper_final", "final", "final_sd", "seeds"]
    return pd.DataFrame(rows, columns=columns)


def readable(frame: pd.DataFrame) -> pd.DataFrame:
    """A `ladder` as people read it: the paper's numbers as printed, ours as mean ± sd, our own arms marked."""
    def cell(row: Any, name: str) -> str:
        spread = row[f"{name}_sd"]
        return show(row[name]) + (f" ± {show(spread)}" if spread == spread else "")

    def print_of(row: Any, name: str) -> str:
        known = row["arm"] in PAPER_ARMS
        return published(f"ladder.{row['arm']}.{name}")["printed"] if known else show(row[f"paper_{name}"])

    rows = [(row["arm"] + ("" if row["in_paper"] else " (ours)"), print_of(row, "zero_shot"), cell(row, "zero_shot"),
             print_of(row, "final"), cell(row, "final"), row["seeds"] or "-") for _, row in frame.iterrows()]
    return pd.DataFrame(rows, columns=["arm", "zero-shot, paper", "zero-shot, ours", "final, paper", "final, ours", "seeds, ours"])


def show(value: float) -> str:
    """A perplexity the way Table 2 spells them: 83.0, 1,519.0, 61,912; ∞ for a diverged run, - for none."""
    if value != value:
        return "-"
    return "∞" if math.isinf(value) else f"{value:,.0f}" if value >= 10_000 else f"{value:,.1f}"


# ------------------------------------------------------------------------------------ sections 7.1 and 7.2, one by one
def _ordered(axis: str, *arms: str, rising: bool = False) -> dict[str, Any]:
    """Perplexities fall (or rise) strictly along `arms`."""
    def values(race: Race) -> list[float]:
        return [race.value(axis, arm) for arm in arms]

    def holds(race: Race) -> bool:
        pairs = zip(values(race), values(race)[1:], strict=False)
        return all(a < b if rising else a > b for a, b in pairs)

    def ours(race: Race) -> str:
        first, last = values(race)[0], values(race)[-1]
        factor = last / first if rising else first / last
        return " → ".join(map(show, values(race))) + (f" ({factor:.3g}x)" if math.isfinite(factor) else "")

    return {"needs": arms, "holds": holds, "ours": ours}


def _best(axis: str, arm: str) -> dict[str, Any]:
    """`arm` has the lowest perplexity of the seven."""
    def others(race: Race) -> tuple[float, str]:
        return min((race.value(axis, other), other) for other in PAPER_ARMS if other != arm)

    return {"needs": PAPER_ARMS, "holds": lambda race: race.value(axis, arm) < others(race)[0],
            "ours": lambda race: f"{arm} {show(race.value(axis, arm))}, best other {others(race)[1]} {show(others(race)[0])}"}


def _all_lower(arms: tuple[str, ...], than: str) -> dict[str, Any]:
    """Every one of `arms` ends lower than the arm `than`."""
    def worst(race: Race) -> tuple[float, str]:
        return max((race.value("end", arm), arm) for arm in arms)

    return {"needs": (*arms, than), "holds": lambda race: worst(race)[0] < race.value("end", than),
            "ours": lambda race: f"{than} {show(race.value('end', than))}, worst converted {worst(race)[1]} {show(worst(race)[0])}"}


def _both(*parts: dict[str, Any]) -> dict[str, Any]:
    """All of the parts' predicates, over the arms of any."""
    return {"needs": tuple(dict.fromkeys(need for part in parts for need in part["needs"])),
            "holds": lambda race: all(part["holds"](race) for part in parts),
            "ours": lambda race: "; ".join(f"{name} {part['ours'](race)}" for name, part in zip(("start", "end"), parts, strict=True))}


def _rises(race: Race) -> list[str]:
    """Rungs that start worse than the rung above them."""
    return [arm for above, arm in zip(PAPER_ARMS, CONVERTED, strict=False) if race.value("start", arm) > race.value("start", above)]


def _gap(race: Race) -> list[float]:
    """projection / subclone along the curve, from the start on; empty when nothing was evaluated after the start."""
    slow, fast = race.curve("projection"), race.curve("subclone")
    gap = [slow[tokens] / fast[tokens] for tokens in sorted(slow.keys() & fast.keys())]
    return gap if len(gap) > 1 else []

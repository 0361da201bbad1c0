"""Which findings of section 7 carry over to another pair: those that its arms can decide, with the verdicts that other
pages of the book have for the same sentences.

The evidence is `Experiments` with a width pair (role "") and a depth pair ("depth") on one seed each, and what was run
of them at the donor's own pretraining rate ("own_rate", "depth_own_rate"); the paper's rule is the target's. There is
neither `subclone_iso` nor a trained sibling: sentences about those, or about several seeds, are restated for what is.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import pandas as pd

from scaleop.claims.core import Claim, Finding, tabulate
from scaleop.claims.depth import CLAIMS as DEPTH
from scaleop.claims.hardening import TIE
from scaleop.claims.mechanism import CLAIMS as MECHANISM
from scaleop.claims.paired import relative_gap
from scaleop.claims.section7 import CLAIMS as LADDER
from scaleop.claims.section7 import all_below, falling, lowest, rising
from scaleop.claims.standings import ORDER, Standings, show
from scaleop.published import PAPER_ARMS

ARMS = tuple(arm for arm in PAPER_ARMS if arm != "subclone_iso")
CONVERTED, SELECTED = ARMS[1:], ARMS[2:]

RESTATED = {
    "start-below-guess": None, "projection-starts-higher": None, "rescale-improves-end": "more-rescale-better-end",
    "best-start-of-these": "best-start", "best-end-of-these": "best-end", "all-beat-scratch": "transfer-beats-scratch",
    "depth-all-beat-scratch": "depth-beats-scratch", "depth-wiring-beats-blending": None,
    "depth-tie-one-seed": "depth-tie", "depth-stack-one-seed": "depth-stack", "depth-best-end": None,
    "all-beat-scratch-at-its-rate": None, "stack-at-the-papers-rate": None}
"""{id: the id of the sentence that it restates}; None where the other pages ask none like it."""


def _guesses(race: Any, arms: tuple[str, ...]) -> list[str]:
    return [arm for arm in arms if race.value("start", arm) < race.anchors["vocabulary"]]


def _gap(race: Any) -> float:
    return relative_gap(race, "depth.subclone", "depth.hybrid")


def _depth(arms: Iterable[str]) -> tuple[str, ...]:
    return tuple(f"depth.{arm}" for arm in arms)


def _same(*names: str) -> list[Claim]:
    """Claims of sections 7.1, 7.2 and 7.5 as they are, by id."""
    known = {claim.id: claim for claim in (*LADDER, *MECHANISM, *DEPTH)}
    return [known[name] for name in names]


CLAIMS = [
    *_same("scratch-guesses"),
    Claim("start-below-guess", "ours", "Every selected start is better than guessing: below the vocabulary's size",
          (*SELECTED, "vocabulary"), lambda race: len(_guesses(race, SELECTED)) == len(SELECTED),
          lambda race: f"of {race.anchors['vocabulary']:,}: " + ", ".join(
              f"{arm} {show(race.value('start', arm))}" for arm in SELECTED)),
    Claim("projection-starts-higher", "7.1", "Blending spoils the start more: projection starts higher than subclone",
          **rising("start", "subclone", "projection"),
          paper="[ladder.subclone.zero_shot] → [ladder.projection.zero_shot]"),
    Claim("all-beat-scratch", "7.1", "Every converted arm of these ends lower than the arm from scratch",
          **all_below(CONVERTED, "random"),
          paper="random [ladder.random.final], highest of the others projection [ladder.projection.final]"),
    *_same("projection-beats-scratch", "selection-beats-scratch", "wiring-beats-blending", "selection-ahead-at-once",
           "selection-gap-widens", "scores-matter", "compensation-start", "compensation-end", "fewer-tokens",
           "rescale-cancels", "rescale-collapses-start"),
    Claim("rescale-improves-end", "7.2", "Rescale improves the end: subclone_rs ends lower than subclone",
          **falling("end", "subclone", "subclone_rs"),
          paper="[ladder.subclone.final] → [ladder.subclone_rs.final]"),
    *_same("rescale-passes-compensation", "rescale-on-compensation", "levers-stack", "levers-independent",
           "whole-ladder"),
    Claim("best-start-of-these", "7.1", "hybrid starts lowest of these arms", **lowest("start", "hybrid", ARMS),
          paper="[ladder.hybrid.zero_shot], next subclone [ladder.subclone.zero_shot]"),
    Claim("best-end-of-these", "7.1", "The stack is best: hybrid_rs ends lowest of these arms",
          **lowest("end", "hybrid_rs", ARMS),
          paper="[ladder.hybrid_rs.final], next subclone_rs [ladder.subclone_rs.final]"),
    Claim("depth-all-beat-scratch", "7.5",
          "Where depth is halved too, every converted arm ends lower than from scratch",
          **all_below(_depth(CONVERTED), "depth.random"),
          paper="random [pairB.random.mean], subclone [pairB.subclone.mean], hybrid [pairB.hybrid.mean]"),
    Claim("depth-wiring-beats-blending", "ours", "There, too, selection ends lower than dense projection",
          **falling("end", "depth.projection", "depth.subclone")),
    *_same("depth-below-throughout", "depth-starts-higher", "depth-compensation-worth-less"),
    Claim("depth-tie-one-seed", "7.5",
          f"Compensation alone is neutral where depth is lost: hybrid and subclone end within {TIE:.0%} of each other, "
          "which is how far the paper's seeds spread",
          ("depth.subclone", "depth.hybrid"), lambda race: _gap(race) <= TIE,
          lambda race: f"{show(race.value('end', 'depth.subclone'))} and {show(race.value('end', 'depth.hybrid'))}: "
                       f"{_gap(race):.1%} apart",
          paper="[pairB.subclone.mean] ± [pairB.subclone.std] and [pairB.hybrid.mean] ± [pairB.hybrid.std]"),
    *_same("depth-rescale-helps"),
    Claim("depth-stack-one-seed", "7.5", "The stack keeps its edge there: hybrid_rs ends lower than subclone_rs",
          **falling("end", "depth.subclone_rs", "depth.hybrid_rs"),
          paper="[pairB.subclone_rs.mean] → [pairB.hybrid_rs.mean], [pairB.paired_wins_rs]"),
    Claim("depth-best-end", "ours", "There, too, hybrid_rs ends lowest of these arms",
          **lowest("end", "depth.hybrid_rs", _depth(ARMS))),
    Claim("all-beat-scratch-at-its-rate", "ours",
          "On the width pair every converted arm also ends lower than from scratch at the donor's own pretraining rate",
          **all_below(CONVERTED, "own_rate.random")),
    Claim("stack-at-the-papers-rate", "7.5",
          "At the donor's own pretraining rate, nearest to the paper's rule, hybrid_rs beats scratch on the depth pair",
          **falling("end", "depth_own_rate.random", "depth_own_rate.hybrid_rs"),
          paper="[pairB.random.mean] → [pairB.hybrid_rs.mean]"),
]


def verdicts(records: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """{claim's id: verdict} of stored findings (`to_records`)."""
    return {record["id"]: record["verdict"] for record in records}


def carried(findings: Iterable[Finding], elsewhere: Mapping[str, Mapping[str, str]]) -> pd.DataFrame:
    """Findings as `tabulate` lays them out, seeds aside, with the verdict on the same sentence, or on the one that is
    restated, in each ladder of `elsewhere`: {its name: `verdicts`}; "-" where it was not asked."""
    findings = list(findings)
    table = tabulate(findings).drop(columns=["seeds", "holds on"])
    for name, found in elsewhere.items():
        table[name] = [found.get(finding.claim.id) or found.get(RESTATED.get(finding.claim.id) or "", "-")
                       for finding in findings]
    return table


def side_by_side(races: Mapping[str, Iterable[dict[str, Any]]], anchors: Mapping[str, Mapping[str, Any]],
                 before: Mapping[str, Mapping[str, float]] | None = None) -> pd.DataFrame:
    """A row an arm, a start and an end a race, means over its seeds; with `anchors`, each race's donor below, whose
    start is its quick perplexity and whose end the full one. `before`: {title: {arm: a start that no race trained}}.
    Numbers as text."""
    found = {title: Standings(results) for title, results in races.items()}
    arms = dict.fromkeys([*ORDER, *(arm for race in found.values() for arm in race.arms)])
    rows = []
    for arm in (arm for arm in arms if any(arm in race.arms for race in found.values())):
        row = {"arm": arm}
        for title, race in found.items():
            row |= {f"{title}: {label}": show(race.value(axis, arm)) if arm in race.arms else "-"
                    for axis, label in (("start", "zero-shot"), ("end", "final"))}
        rows.append(row | {title: show(values[arm]) if arm in values else "-"
                           for title, values in (before or {}).items()})
    donor = {"arm": "the donor itself"}
    for title in found:
        scores = anchors.get(title, {}).get("donor", {})
        donor |= {f"{title}: {label}": show(scores[key]) if key in scores else "-"
                  for label, key in (("zero-shot", "quick_ppl"), ("final", "ppl"))}
    return pd.DataFrame([*rows, *([donor] if anchors else [])]).fillna("-")

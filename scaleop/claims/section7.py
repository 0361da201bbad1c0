"""The claims of sections 7.1 (the ablation ladder) and 7.2 (two levers), and questions of our own on the same race.

"Starts" are quick perplexities before training, "ends" full perplexities at the budget; lower is better. Factors (4.3x,
18x, ...) depend on size, budget and text, so a claim asks for their direction and shows both sizes beside each other.
"""

import math
from collections.abc import Iterable
from typing import Any

import pandas as pd

from scaleop.claims.core import Claim, evaluate, tabulate
from scaleop.claims.standings import Standings, show
from scaleop.published import PAPER_ARMS, published

CONVERTED = PAPER_ARMS[1:]
PYTHIA_VOCABULARY = 50_304  # rows of Pythia's embedding, up to 2.8B


def table(results: Iterable[dict[str, Any]], anchors: dict[str, Any] | None = None,
          claims: Iterable[Claim] | None = None) -> pd.DataFrame:
    """What race results say about the claims of 7.1 and 7.2 (or `claims`), as `tabulate` lays it out."""
    return tabulate(evaluate(CLAIMS if claims is None else claims, Standings(results, anchors)))


# Predicates, each with the arms it needs and the numbers it shows; `**` puts one into a Claim.

def falling(axis: str, *arms: str) -> dict[str, Any]:
    """Perplexity falls strictly along `arms`."""
    def values(race: Standings) -> list[float]:
        return [race.value(axis, arm) for arm in arms]

    def holds(race: Standings) -> bool:
        return all(above > below for above, below in zip(values(race), values(race)[1:], strict=False))

    return {"needs": arms, "holds": holds, "ours": lambda race: _chain(values(race))}


def rising(axis: str, *arms: str) -> dict[str, Any]:
    """Perplexity rises strictly along `arms`."""
    mirror = falling(axis, *reversed(arms))
    return {**mirror, "ours": lambda race: _chain([race.value(axis, arm) for arm in arms])}


def _chain(values: list[float]) -> str:
    low, high = sorted((values[0], values[-1]))
    return " → ".join(map(show, values)) + (f" ({high / low:.3g}x)" if math.isfinite(high) else "")


def both(start: dict[str, Any], end: dict[str, Any]) -> dict[str, Any]:
    """A predicate on the starts and one on the ends."""
    return {"needs": tuple(dict.fromkeys((*start["needs"], *end["needs"]))),
            "holds": lambda race: start["holds"](race) and end["holds"](race),
            "ours": lambda race: f"start {start['ours'](race)}; end {end['ours'](race)}"}


def lowest(axis: str, arm: str, among: tuple[str, ...] = PAPER_ARMS) -> dict[str, Any]:
    """`arm` has the lowest perplexity of the arms `among` (the seven)."""
    def rival(race: Standings) -> str:
        return min((other for other in among if other != arm), key=lambda other: race.value(axis, other))

    return {"needs": among, "holds": lambda race: race.value(axis, arm) < race.value(axis, rival(race)),
            "ours": lambda race: f"{arm} {show(race.value(axis, arm))}, next {rival(race)} "
                                 f"{show(race.value(axis, rival(race)))}"}


def all_below(arms: tuple[str, ...], bar: str) -> dict[str, Any]:
    """Every one of `arms` ends lower than the arm `bar`."""
    def worst(race: Standings) -> str:
        return max(arms, key=lambda arm: race.value("end", arm))

    return {"needs": (*arms, bar), "holds": lambda race: race.value("end", worst(race)) < race.value("end", bar),
            "ours": lambda race: f"{bar} {show(race.value('end', bar))}, highest of the others {worst(race)} "
                                 f"{show(race.value('end', worst(race)))}"}


def _worse_starts(race: Standings) -> list[str]:
    return [arm for above, arm in zip(PAPER_ARMS, CONVERTED, strict=False)
            if race.value("start", arm) > race.value("start", above)]


def _gap(race: Standings) -> list[float]:
    """projection / subclone at every evaluation, the start first; empty when nothing was evaluated after the start."""
    slow, fast = race.curve("projection"), race.curve("subclone")
    ratios = [slow[tokens] / fast[tokens] for tokens in sorted(slow.keys() & fast.keys())]
    return ratios if len(ratios) > 1 else []


def _ahead_at_once(race: Standings) -> bool | None:
    return all(ratio > 1 for ratio in _gap(race)[1:]) if _gap(race) else None


def _widens(race: Standings) -> bool | None:
    return _growths(race) == len(_gap(race)) - 1 if _gap(race) else None


def _growths(race: Standings) -> int:
    return sum(after > before for before, after in zip(_gap(race), _gap(race)[1:], strict=False))


def _gap_line(race: Standings) -> str:
    gap = _gap(race)
    return (f"projection/subclone {gap[0]:.3g}x at the start, {gap[1]:.3g}x at the first evaluation, {gap[-1]:.3g}x at "
            f"the last; above 1 at {sum(ratio > 1 for ratio in gap[1:])}, wider than before at {_growths(race)} of "
            f"{len(gap) - 1} evaluations")


def _overtaking(race: Standings) -> tuple[int | None, int, float] | None:
    """(tokens by which hybrid's curve is down to subclone's last point, or None; all tokens; that point)."""
    hybrid, subclone = race.curve("hybrid"), race.curve("subclone")
    if len(subclone) < 2:
        return None
    budget, target = list(subclone.items())[-1]
    return next((tokens for tokens, ppl in hybrid.items() if ppl <= target), None), budget, target


def _overtakes(race: Standings) -> bool | None:
    found = _overtaking(race)
    return None if found is None else found[0] is not None and found[0] < found[1]


def _overtaking_line(race: Standings) -> str:
    tokens, budget, target = _overtaking(race)
    when = "never" if tokens is None else f"by {tokens:,} of {budget:,} tokens"
    return f"down to subclone's last {show(target)} {when}"


def _gain(race: Standings) -> float:
    """How many times lower than from scratch the full method ends."""
    return race.value("end", "random") / race.value("end", "hybrid_rs")


def _gain_in_paper() -> float:
    return published("ladder.ratio.hybrid_rs_vs_random")["value"]


def _uniform(race: Standings) -> float:
    return race.value("start", "random") / race.anchors["vocabulary"]


def _reference(race: Standings) -> float:
    return race.anchors["reference"]["ppl"]


def _column(axis: str) -> str:
    return " → ".join(f"[ladder.{arm}.{axis}]" for arm in PAPER_ARMS)


GAP_IN_PAPER = ("no stored curve; [ladder.projection.zero_shot] against [ladder.subclone.zero_shot] at the start, "
                "[ladder.projection.final] against [ladder.subclone.final] at the end")

CLAIMS = [
    Claim("endpoint-monotone", "7.1", "Down the seven rungs every arm ends lower than the one above it",
          **falling("end", *PAPER_ARMS), paper=_column("final")),
    Claim("start-not-monotone", "7.1", "The starts do not follow: some arm starts higher than the one above it",
          PAPER_ARMS, lambda race: bool(_worse_starts(race)),
          lambda race: "higher than the one above: " + (", ".join(f"{arm} {show(race.value('start', arm))}"
                                                                 for arm in _worse_starts(race)) or "none"),
          paper=_column("zero_shot")),
    Claim("best-end", "7.1", "hybrid_rs ends lowest of the seven", **lowest("end", "hybrid_rs"),
          paper="[ladder.hybrid_rs.final], next subclone_rs [ladder.subclone_rs.final]"),
    Claim("best-start", "7.1", "hybrid starts lowest of the seven", **lowest("start", "hybrid"),
          paper="[ladder.hybrid.zero_shot], next subclone [ladder.subclone.zero_shot]"),
    Claim("transfer-beats-scratch", "7.1", "Every converted arm ends lower than the arm from scratch",
          **all_below(CONVERTED, "random"),
          paper="random [ladder.random.final], highest of the others projection [ladder.projection.final]"),
    Claim("projection-beats-scratch", "7.1", "Dense projection, scrambled as it is, ends lower than from scratch",
          **falling("end", "random", "projection"),
          paper="[ladder.random.final] → [ladder.projection.final] ([ladder.ratio.projection_vs_random])"),
    Claim("selection-beats-scratch", "7.1", "Bare selection (subclone) ends lower than from scratch",
          **falling("end", "random", "subclone"),
          paper="[ladder.random.final] → [ladder.subclone.final] ([ladder.ratio.subclone_vs_random])"),
    Claim("wiring-beats-blending", "7.1", "Selection ends lower than dense projection",
          **falling("end", "projection", "subclone"), paper="[ladder.projection.final] → [ladder.subclone.final]"),
    Claim("selection-ahead-at-once", "7.1",
          "subclone is below projection at the first evaluation after the start and at every later one",
          ("projection", "subclone"), _ahead_at_once, _gap_line, paper=GAP_IN_PAPER),
    Claim("selection-gap-widens", "7.1",
          "The factor between projection and subclone grows from each evaluation to the next, the start included",
          ("projection", "subclone"), _widens, _gap_line, paper=GAP_IN_PAPER),
    Claim("whole-ladder", "7.1",
          "The levers multiply what selection gains over scratch: random to subclone to hybrid_rs falls at both steps",
          **falling("end", "random", "subclone", "hybrid_rs"),
          paper="[ladder.random.final] → [ladder.subclone.final] → [ladder.hybrid_rs.final] "
                "([ladder.ratio.hybrid_rs_vs_random])"),
    Claim("short-of-reference", "7.1", "Within the budget no arm gets down to the trained sibling",
          (*PAPER_ARMS, "reference"),
          lambda race: all(race.value("end", arm) > _reference(race) for arm in PAPER_ARMS),
          lambda race: f"lowest {show(min(race.value('end', arm) for arm in PAPER_ARMS))}, "
                       f"sibling {show(_reference(race))}",
          paper="lowest [ladder.hybrid_rs.final], sibling [anchor.real_410m]"),
    Claim("compensation-start", "7.2", "Compensation improves the start: hybrid starts lower than subclone",
          **falling("start", "subclone", "hybrid"), paper="[ladder.subclone.zero_shot] → [ladder.hybrid.zero_shot]"),
    Claim("compensation-end", "7.2", "Compensation improves the end: hybrid ends lower than subclone",
          **falling("end", "subclone", "hybrid"),
          paper="[ladder.subclone.final] → [ladder.hybrid.final] ([ladder.ratio.hybrid_vs_subclone])"),
    Claim("iso-start", "7.2",
          "Rescaling the read-outs alone worsens the start: subclone_iso starts higher than subclone",
          **rising("start", "subclone", "subclone_iso"),
          paper="[ladder.subclone.zero_shot] → [ladder.subclone_iso.zero_shot]"),
    Claim("iso-end", "7.2", "Rescaling the read-outs alone improves the end: subclone_iso ends lower than subclone",
          **falling("end", "subclone", "subclone_iso"), paper="[ladder.subclone.final] → [ladder.subclone_iso.final]"),
    Claim("rescale-collapses-start", "7.2",
          "Rescaling every cut path spoils the start: subclone_rs starts higher than subclone",
          **rising("start", "subclone", "subclone_rs"),
          paper="[ladder.subclone.zero_shot] → [ladder.subclone_rs.zero_shot] ([ladder.ratio.rs_zero_shot])"),
    Claim("rescale-passes-compensation", "7.2", "For all that, subclone_rs ends lower than hybrid",
          **falling("end", "hybrid", "subclone_rs"), paper="[ladder.hybrid.final] → [ladder.subclone_rs.final]"),
    Claim("more-rescale-worse-start", "7.2",
          "More rescale, worse start: subclone, subclone_iso, subclone_rs rise in this order",
          **rising("start", "subclone", "subclone_iso", "subclone_rs"),
          paper="[ladder.subclone.zero_shot] → [ladder.subclone_iso.zero_shot] → [ladder.subclone_rs.zero_shot]"),
    Claim("more-rescale-better-end", "7.2",
          "More rescale, better end: subclone, subclone_iso, subclone_rs fall in this order",
          **falling("end", "subclone", "subclone_iso", "subclone_rs"),
          paper="[ladder.subclone.final] → [ladder.subclone_iso.final] → [ladder.subclone_rs.final]"),
    Claim("rescale-on-compensation", "7.2",
          "Rescale trades the same way on the compensated base: hybrid_rs starts higher than hybrid and ends lower",
          **both(rising("start", "hybrid", "hybrid_rs"), falling("end", "hybrid", "hybrid_rs")),
          paper="start [ladder.hybrid.zero_shot] → [ladder.hybrid_rs.zero_shot]; "
                "end [ladder.hybrid.final] → [ladder.hybrid_rs.final]"),
    Claim("levers-stack", "7.2", "The levers stack: hybrid_rs both starts and ends lower than subclone_rs",
          **both(falling("start", "subclone_rs", "hybrid_rs"), falling("end", "subclone_rs", "hybrid_rs")),
          paper="start [ladder.subclone_rs.zero_shot] → [ladder.hybrid_rs.zero_shot]; "
                "end [ladder.subclone_rs.final] → [ladder.hybrid_rs.final]"),
    Claim("fewer-tokens", "abstract",
          "Compensation saves tokens: hybrid gets to where subclone ends before the budget is used up",
          ("subclone", "hybrid"), _overtakes, _overtaking_line,
          paper="[ladder.hybrid.reach_subclone_final] of 30M tokens, says the authors' report"),
    Claim("gain-carries-over", "ours",
          "The size of the gain carries over: random / hybrid_rs is within a factor 2 of the paper's",
          ("random", "hybrid_rs"), lambda race: 0.5 < _gain(race) / _gain_in_paper() < 2,
          lambda race: f"{_gain(race):.3g}x", paper="[ladder.ratio.hybrid_rs_vs_random]"),
    Claim("scratch-guesses", "ours",
          "From scratch starts as a uniform guess would: perplexity within a factor 2 of the vocabulary size",
          ("random", "vocabulary"), lambda race: 0.5 < _uniform(race) < 2,
          lambda race: f"{show(race.value('start', 'random'))} for {race.anchors['vocabulary']:,} tokens "
                       f"({_uniform(race):.3g}x)",
          paper=f"[ladder.random.zero_shot] for {PYTHIA_VOCABULARY:,} tokens"),
    Claim("scratch-handicapped", "ours",
          "The paper's arm from scratch is handicapped: with Pythia's own initialisation it ends lower",
          **falling("end", "random", "random_pythia")),
    Claim("transfer-beats-better-scratch", "ours",
          "Every converted arm also ends lower than from scratch with Pythia's own initialisation",
          **all_below(CONVERTED, "random_pythia")),
    Claim("scores-matter", "ours", "Scored selection (subclone) ends lower than uniform selection (stride)",
          **falling("end", "stride", "subclone")),
]

"""Section 7.5, second part: longer budgets (Figure 1's arms at 3.3 and 33 times the tokens), and what the abstract
says of them. Roles: "long" (3.3x) and "convergence" (33x), beside the main race."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pandas as pd

from scaleop.claims.core import Claim
from scaleop.claims.paired import factor, on_shared_seeds, relative_gap, seed_noise
from scaleop.claims.paper import printed
from scaleop.claims.section7 import all_below, falling
from scaleop.claims.standings import show


@dataclass(frozen=True)
class Crossing:
    """When one arm's quick curve comes down to `level`, where another ends: after `tokens` of `budget`; None: never."""

    tokens: float | None
    budget: int
    level: float

    @property
    def gain(self) -> float:
        """Token efficiency: how many times fewer tokens than the budget; 0 where it never comes down."""
        return self.budget / self.tokens if self.tokens else math.inf if self.tokens == 0 else 0.0


def crossing(curve: Mapping[int, float], level: float) -> float | None:
    """Tokens at which a curve {tokens: perplexity} first comes down to `level`; None if it never does.

    Between two evaluations the logarithm of perplexity is taken as linear in tokens.
    """
    points = sorted(curve.items())
    for (before, high), (after, low) in zip([points[0], *points], points, strict=False):
        if low <= level:
            if after == before or not math.isfinite(high):
                return float(after)
            return before + (after - before) * math.log(high / level) / math.log(high / low)
    return None


def overtaking(race: Any, slow: str, fast: str, like_with_like: bool = False) -> Crossing | None:
    """When `fast` gets to where `slow` ends. The paper holds fast's *quick* curve against slow's *full* perplexity;
    `like_with_like` takes the last point of slow's quick curve instead. None without curves."""
    curve, other = race.curve(fast), race.curve(slow)
    if len(curve) < 2 or len(other) < 2:
        return None
    budget = max(other)
    level = other[budget] if like_with_like else race.value("end", slow)
    return Crossing(crossing(curve, level), budget, level)


def crossings(race: Any, role: str = "long", slow: str = "subclone", fast: str = "hybrid") -> pd.DataFrame:
    """When `fast` gets to where `slow` ends in the race of `role`, as the paper compares and like with like; the
    paper's own (its 100M-token race) beside the first. Numbers as text."""
    prefix = f"{role}." if role else ""
    part = race.only((f"{prefix}{slow}", f"{prefix}{fast}"))
    rows = []
    for like_with_like, label in ((False, "quick against full, as in the paper"), (True, "quick against quick")):
        found = None if part is None else overtaking(part, f"{prefix}{slow}", f"{prefix}{fast}", like_with_like)
        theirs = ["-"] * 3 if like_with_like else [
            printed(f"b100.{name}") for name in (f"{slow}.final", "crossing_tokens", "token_efficiency")]
        mine = ["-"] * 3 if found is None else [
            show(found.level), "never" if found.tokens is None else f"{found.tokens:,.0f} of {found.budget:,}",
            f"{found.gain:.2g}x" if found.gain else "-"]
        row = {f"{fast} down to {slow}'s end": label}
        for column, paper, ours in zip(("level", "tokens", "token efficiency"), theirs, mine, strict=True):
            row |= {f"{column}, paper": paper, f"{column}, ours": ours}
        rows.append(row)
    return pd.DataFrame(rows)


def reaches(slow: str, fast: str, like_with_like: bool = False) -> dict[str, Any]:
    """`fast` gets to where `slow` ends before the budget is used up."""
    def holds(race: Any) -> bool | None:
        found = overtaking(race, slow, fast, like_with_like)
        return None if found is None else found.tokens is not None and found.tokens < found.budget

    def ours(race: Any) -> str:
        found = overtaking(race, slow, fast, like_with_like)
        if found.tokens is None:
            return f"never down to {show(found.level)}"
        return f"down to {show(found.level)} at {found.tokens:,.0f} of {found.budget:,} tokens ({found.gain:.2g}x)"

    return {"needs": (slow, fast), "holds": holds, "ours": ours}


def shrinks(above: str, below: str, role: str) -> dict[str, Any]:
    """The factor between two arms' ends is smaller in the race of `role` than in the main one, on the seeds of both."""
    names = (above, below), (f"{role}.{above}", f"{role}.{below}")

    def factors(race: Any) -> list[float]:
        return [factor(race, *pair) for pair in names]

    return on_shared_seeds({"needs": (*names[0], *names[1]), "holds": lambda race: factors(race)[1] < factors(race)[0],
                            "ours": lambda race: "{:.3g}x → {:.3g}x".format(*factors(race))})


PARITY = ("convergence.subclone_rs", "convergence.hybrid_rs")
LONG = ("long.subclone_rs", "long.hybrid_rs")


def parity(leaders: tuple[str, str]) -> dict[str, Any]:
    """The two end closer together, relatively, than one of the short race's leaders spreads over its seeds."""
    def noise(race: Any) -> float | None:
        return seed_noise(race, "subclone_rs", "hybrid_rs")

    def holds(race: Any) -> bool | None:
        return None if noise(race) is None else relative_gap(race, *leaders) <= noise(race)

    return {"needs": ("subclone_rs", "hybrid_rs", *leaders), "holds": holds,
            "ours": lambda race: " and ".join(show(race.value("end", arm)) for arm in leaders)
            + f": {relative_gap(race, *leaders):.2%} apart, seeds spread {noise(race):.2%}"}


def _to_reference(race: Any) -> tuple[float, float]:
    """hybrid_rs over the trained sibling, at the short budget and at convergence."""
    return tuple(race.value("end", arm) / race.anchors[f"{arm.removesuffix('hybrid_rs')}reference"]["ppl"]
                 for arm in ("hybrid_rs", "convergence.hybrid_rs"))


def _late_reference(race: Any) -> float:
    return race.anchors["convergence.reference"]["ppl"]


CLAIMS = [
    Claim("long-lead", "7.5", "The lead persists: at 3.3 times the budget hybrid still ends lower than subclone",
          **falling("end", "long.subclone", "long.hybrid"),
          paper="[b100.subclone.final] → [b100.hybrid.final] ([b100.ratio])"),
    Claim("long-crossing", "7.5",
          "Compensation saves tokens: at 3.3 times the budget hybrid's quick perplexity is down to subclone's final "
          "one before the budget is used up", **reaches("long.subclone", "long.hybrid"),
          paper="at [b100.crossing_tokens] of 100M tokens ([b100.token_efficiency])"),
    Claim("long-crossing-like-with-like", "ours", "The same with quick perplexity held against quick",
          **reaches("long.subclone", "long.hybrid", like_with_like=True)),
    Claim("stack-saves-tokens", "abstract",
          "The stack reaches a given quality with fewer tokens: hybrid_rs's quick perplexity is down to where "
          "subclone_rs's ends before the budget is used up",
          **reaches("subclone_rs", "hybrid_rs", like_with_like=True)),
    Claim("compensation-low-budget", "7.5",
          "Compensation is a low-budget effect: subclone over hybrid is a smaller factor at 3.3 times the budget",
          **shrinks("subclone", "hybrid", "long"), paper="[ladder.ratio.hybrid_vs_subclone] → [b100.ratio]"),
    Claim("long-parity", "ours",
          "The edge closes on the way there: at 3.3 times the budget the two leaders end closer together, relatively, "
          "than one of them spreads over seeds at the short one", **parity(LONG)),
    Claim("long-edge-shrinks", "ours", "subclone_rs over hybrid_rs is a smaller factor at 3.3 times the budget",
          **shrinks("subclone_rs", "hybrid_rs", "long")),
    Claim("long-ahead", "ours", "At 3.3 times the budget both leaders end lower than from scratch",
          **all_below(LONG, "long.random")),
    Claim("long-margin-narrows", "ours", "Random over hybrid_rs is a smaller factor at 3.3 times the budget",
          **shrinks("random", "hybrid_rs", "long")),
    Claim("convergence-parity", "7.5",
          "At convergence the edge closes: at 33 times the budget the two leaders end closer together, relatively, "
          "than one of them spreads over seeds at the short one",
          **parity(PARITY), paper="[b1000.subclone_rs.s0.final] and [b1000.hybrid_rs.s0.final]"),
    Claim("convergence-edge-shrinks", "7.5", "subclone_rs over hybrid_rs is a smaller factor at 33 times the budget",
          **shrinks("subclone_rs", "hybrid_rs", "convergence"),
          paper="[seeds.subclone_rs.s0] / [seeds.hybrid_rs.s0] → [b1000.subclone_rs.s0.final] / "
                "[b1000.hybrid_rs.s0.final]"),
    Claim("convergence-ahead", "7.5", "At 33 times the budget both leaders still end lower than from scratch",
          **all_below(PARITY, "convergence.random"),
          paper="[b1000.random.s0.final] → [b1000.hybrid_rs.s0.final] ([b1000.ratio_vs_random])"),
    Claim("margin-narrows-at-convergence", "abstract",
          "The margin over from scratch narrows: random over hybrid_rs is a smaller factor at 33 times the budget",
          **shrinks("random", "hybrid_rs", "convergence"),
          paper="[ladder.ratio.hybrid_rs_vs_random] → [b1000.ratio_vs_random]"),
    Claim("convergence-nearer-sibling", "7.5",
          "Nearer the trained sibling: hybrid_rs over the sibling is a smaller factor at 33 times the budget",
          **on_shared_seeds({"needs": ("hybrid_rs", "reference", "convergence.hybrid_rs", "convergence.reference"),
                             "holds": lambda race: _to_reference(race)[1] < _to_reference(race)[0],
                             "ours": lambda race: "{:.3g}x → {:.3g}x".format(*_to_reference(race))}),
          paper="[ladder.hybrid_rs.final] → [b1000.hybrid_rs.s0.final], sibling [anchor.real_410m]"),
    Claim("convergence-short-of-sibling", "9", "At 33 times the budget both are still short of the trained sibling",
          (*PARITY, "convergence.reference"),
          lambda race: min(race.value("end", arm) for arm in PARITY) > _late_reference(race),
          lambda race: f"{show(min(race.value('end', arm) for arm in PARITY))}, sibling {show(_late_reference(race))}",
          paper="[b1000.hybrid_rs.s0.final], sibling [anchor.real_410m]"),
]

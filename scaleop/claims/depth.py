"""Section 7.5, last part: the held-out pair, whose damage is mostly lost depth, and what
the abstract says of both pairs. Role "depth"; "depth_long" is the pair
at 3.3 times the budget."""

from typing import Any

from scaleop.claims.core import Claim
from scaleop.claims.paired import factor, mean_and_sd, on_every_seed, on_shared_seeds, relative_gap, seed_noise, spread
from scaleop.claims.section7 import falling, rising
from scaleop.claims.standings import show
from scaleop.published import published

SELECTIONS = ("depth.subclone", "depth.hybrid")
PAIR = (*SELECTIONS, "depth.random")
LONG = ("depth_long.subclone", "depth_long.hybrid")


def _gains(race: Any) -> list[float]:
    """By seed, how many times higher random ends than the worse of the two selections."""
    worse = map(max, *(race.values("end", arm) for arm in SELECTIONS))
    return [scratch / arm for scratch, arm in zip(race.values("end", "depth.random"), worse, strict=True)]


def _gain_carries(race: Any) -> bool:
    paper = published("pairB.ratio_vs_random")["value"]
    return all(0.5 < gain / paper < 2 for gain in _gains(race))


def _tie(race: Any) -> bool | None:
    """The two means' bars of one standard deviation overlap; None for one seed."""
    if len(race.seeds_of(SELECTIONS[0])) < 2:
        return None
    first, second = (race.value("end", arm) for arm in SELECTIONS)
    return abs(first - second) <= sum(spread(race, arm) for arm in SELECTIONS)


def _worth_less(race: Any) -> bool:
    return _worth(race, "depth.") < _worth(race, "")


def _worth(race: Any, role: str) -> float:
    """What compensation is worth: subclone over hybrid."""
    return factor(race, f"{role}subclone", f"{role}hybrid")


def _below_throughout(race: Any) -> bool | None:
    random, *selections = (race.curve(arm) for arm in ("depth.random", *SELECTIONS))
    points = sorted(set.intersection(*map(set, (random, *selections))))[1:]
    return all(curve[tokens] < random[tokens] for curve in selections for tokens in points) if points else None


def _least_factor(race: Any) -> float:
    random, *selections = (race.curve(arm) for arm in ("depth.random", *SELECTIONS))
    points = sorted(set.intersection(*map(set, (random, *selections))))[1:]
    return min(random[tokens] / curve[tokens] for curve in selections for tokens in points)


def _tie_at_long(race: Any) -> bool | None:
    noise = seed_noise(race, *SELECTIONS)
    return None if noise is None else relative_gap(race, *LONG) <= noise


CLAIMS = [
    Claim("depth-beats-scratch", "7.5",
          "The core claim generalises: on the depth pair subclone and hybrid end lower than from scratch on every seed",
          **on_every_seed(*(("depth.random", arm) for arm in SELECTIONS)), seeds=3,
          paper="random [pairB.random.mean] ± [pairB.random.std], subclone [pairB.subclone.mean] ± "
                "[pairB.subclone.std], hybrid [pairB.hybrid.mean] ± [pairB.hybrid.std] ([pairB.ratio_vs_random])"),
    Claim("depth-gain-carries-over", "ours",
          "By as much: random over the worse of the two is within a factor 2 of the paper's on every seed", PAIR,
          _gain_carries, lambda race: ", ".join(f"{gain:.3g}x" for gain in _gains(race)),
          paper="[pairB.ratio_vs_random] on every seed"),
    Claim("depth-below-throughout", "7.5",
          "They are below from scratch at every evaluation after the start (the paper's Figure 4)", PAIR,
          _below_throughout, lambda race: f"at least {_least_factor(race):.3g}x below", paper="an order of magnitude"),
    Claim("depth-tie", "7.5",
          "Compensation alone is neutral where depth is lost: hybrid and subclone tie, their means ± one standard "
          "deviation overlap",
          SELECTIONS, _tie, lambda race: " and ".join(mean_and_sd(race, arm) for arm in SELECTIONS),
          paper="[pairB.subclone.mean] ± [pairB.subclone.std] and [pairB.hybrid.mean] ± [pairB.hybrid.std]", seeds=2),
    Claim("depth-compensation-worth-less", "7.5",
          "Unlike on the width pair: subclone over hybrid is a smaller factor on the depth pair",
          **on_shared_seeds({"needs": ("subclone", "hybrid", *SELECTIONS), "holds": _worth_less, "ours": lambda race: (
              f"{_worth(race, ''):.3g}x, on the depth pair {_worth(race, 'depth.'):.3g}x")}),
          paper="[ladder.ratio.hybrid_vs_subclone], on the depth pair [pairB.subclone.s0] / [pairB.hybrid.s0]"),
    Claim("depth-starts-higher", "7.5", "hybrid starts higher on the depth pair than on the width pair",
          **on_shared_seeds(rising("start", "hybrid", "depth.hybrid")),
          paper="[ladder.hybrid.zero_shot] → [pairB.hybrid.zero_shot]"),
    Claim("depth-stack", "7.5", "The stack keeps its edge: hybrid_rs beats subclone_rs on every seed of the depth pair",
          **on_every_seed(("depth.subclone_rs", "depth.hybrid_rs")), seeds=3,
          paper="[pairB.subclone_rs.mean] → [pairB.hybrid_rs.mean], [pairB.paired_wins_rs]"),
    Claim("stack-on-both-pairs", "abstract",
          "At the short budget hybrid_rs beats subclone_rs on every seed of the width pair and of the depth pair",
          **on_every_seed(("subclone_rs", "hybrid_rs"), ("depth.subclone_rs", "depth.hybrid_rs")), seeds=3,
          paper="width [seeds.subclone_rs.mean] → [seeds.hybrid_rs.mean], [seeds.paired_wins]; depth "
                "[pairB.subclone_rs.mean] → [pairB.hybrid_rs.mean], [pairB.paired_wins_rs]"),
    Claim("depth-rescale-helps", "ours", "Rescale helps there too: subclone_rs ends lower than subclone",
          **falling("end", "depth.subclone", "depth.subclone_rs"),
          paper="[pairB.subclone.mean] → [pairB.subclone_rs.mean]"),
    Claim("depth-tie-longer", "7.5",
          "The tie holds at 3.3 times the budget: hybrid and subclone are no further apart than seeds spread",
          (*SELECTIONS, *LONG), _tie_at_long,
          lambda race: " and ".join(show(race.value("end", arm)) for arm in LONG) + (
              f": {relative_gap(race, *LONG):.1%} apart, seeds spread {seed_noise(race, *SELECTIONS):.1%}"),
          paper="[pairB.b100.subclone] and [pairB.b100.hybrid]: [pairB.b100.gap] apart"),
]

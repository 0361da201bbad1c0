"""Section 7.3 (the seeded verdict): Tables 8 and 9, and the claims about seeds."""

from collections.abc import Iterable, Mapping
from typing import Any

import pandas as pd

from scaleop.claims.core import Claim
from scaleop.claims.paired import Paired, apart, compare, mean_and_sd, on_every_seed, paired
from scaleop.claims.paper import DISTILLED, SEEDS, TABLE_8, TABLE_9, printed, seeds_in_paper
from scaleop.claims.section7 import falling
from scaleop.claims.standings import Standings, show


def seeded(results: Iterable[dict[str, Any]]) -> pd.DataFrame:
    """Table 8, ours beside the paper's: ends of the two leaders on each seed, mean ± sample standard deviation.

    The activation-scored pair (the paper's later revision) follows. Numbers as text; results of other arms are ignored.
    """
    return seed_table(results, TABLE_8)


def depth(results: Iterable[dict[str, Any]]) -> pd.DataFrame:
    """Table 9, ours beside the paper's: the depth pair's ends on each seed. Of the two rescaled arms the paper prints
    means only."""
    return seed_table(results, TABLE_9)


def distilled(results: Iterable[dict[str, Any]]) -> pd.DataFrame:
    """The later revision's distillation table, ours beside it, arms in pairs: without and with the donor as teacher."""
    return seed_table(results, DISTILLED)


def seed_table(results: Iterable[dict[str, Any]], where: Mapping[str, str]) -> pd.DataFrame:
    """A row an arm of `where` ({arm: id prefix of its published numbers}): each seed's end and their mean ± sd."""
    race = Standings([result for result in results if result["arm"] in where])
    rows = []
    for arm, name in where.items():
        mine = dict(zip(race.seeds_of(arm), race.values("end", arm), strict=True))
        row = {"arm": arm}
        for seed in SEEDS:
            row |= {f"seed {seed}, paper": printed(f"{name}.s{seed}"),
                    f"seed {seed}, ours": show(mine[seed]) if seed in mine else "-"}
        theirs = [printed(f"{name}.{what}") for what in ("mean", "std")]
        row |= {"mean ± sd, paper": " ± ".join(cell for cell in theirs if cell != "-") or "-",
                "mean ± sd, ours": mean_and_sd(race, arm) if mine else "-", "seeds, ours": str(len(mine) or "-")}
        rows.append(row)
    return pd.DataFrame(rows)


LEADERS = ("subclone_rs", "hybrid_rs")


def _interval_excludes_zero(race: Any) -> bool | None:
    found = compare(race, *LEADERS)
    return None if len(found.seeds) < 2 else found.low > 0 or found.high < 0


def _interval_line(found: Paired) -> str:
    return f"{found.mean:.1f} [{found.low:.1f}, {found.high:.1f}]; sign test p {found.p:.3g}"


_MEANS = "[seeds.subclone_rs.mean] ± [seeds.subclone_rs.std] → [seeds.hybrid_rs.mean] ± [seeds.hybrid_rs.std]"

CLAIMS = [
    Claim("seeds-paired-wins", "7.3",
          "hybrid_rs wins every paired comparison with subclone_rs, over three seeds or more",
          **on_every_seed(LEADERS), paper=f"{_MEANS}, [seeds.paired_wins]", seeds=3),
    Claim("seeds-mean", "7.3", "Averaged over the seeds hybrid_rs ends lower than subclone_rs",
          **falling("end", *LEADERS), paper=_MEANS, seeds=2),
    Claim("seeds-apart", "7.3", "The seeds do not overlap: hybrid_rs's worst seed ends lower than subclone_rs's best",
          **apart(*LEADERS), paper="worst hybrid_rs [seeds.hybrid_rs.s1], best subclone_rs [seeds.subclone_rs.s0]",
          seeds=2),
    Claim("stack-on-both-axes", "1",
          "The stack dominates the strongest single lever in every seed: hybrid_rs starts and ends lower than "
          "subclone_rs", **on_every_seed(LEADERS, axes=("start", "end")),
          paper=f"start [ladder.subclone_rs.zero_shot] → [ladder.hybrid_rs.zero_shot]; end {_MEANS}", seeds=3),
    Claim("seeds-interval", "ours",
          "The seeds tell the leaders apart: the 95 % paired t interval of the difference of their ends excludes zero",
          LEADERS, _interval_excludes_zero, lambda race: _interval_line(compare(race, *LEADERS)), seeds=2,
          paper=f"{_interval_line(paired(seeds_in_paper(TABLE_8), *LEADERS))} (computed from Table 8)"),
]

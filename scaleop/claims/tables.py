"""Tables that any race can have: what a change of an arm does to its start and end, and where each number is from."""

from collections.abc import Iterable, Sequence
from typing import Any

import pandas as pd

from scaleop.claims.standings import Standings, show


def changes(results: Iterable[dict[str, Any]], pairs: Sequence[tuple[str, str]]) -> pd.DataFrame:
    """A row a pair (arm, the arm with one change): start and end of both, means over the seeds that both have, and what
    the change multiplies them by (below 1 is better). Pairs that were not run are left out. Numbers as text."""
    race, rows = Standings(results), []
    for base, changed in pairs:
        both = race.only((base, changed))
        if both is None:
            continue
        row = {"arm": base, "with the change": changed, "seeds": len(both.seeds)}
        for axis in ("start", "end"):
            before, after = both.value(axis, base), both.value(axis, changed)
            row |= {f"{axis}s": f"{show(before)} → {show(after)}", f"{axis} x": f"{after / before:.3f}"}
        rows.append(row)
    return pd.DataFrame(rows, columns=["arm", "with the change", "seeds", "starts", "start x", "ends", "end x"])


def runs_behind(results: Iterable[dict[str, Any]]) -> pd.DataFrame:
    """Where the numbers are from: a row a run with its key in the store, seconds, threads, commit and time of start."""
    return pd.DataFrame([{
        "arm": result["arm"], "seed": result["seed"], "run": result["key"],
        **{f"{name}, s": value for name, value in result["seconds"].items()}, "threads": result["hardware"]["threads"],
        "commit": result["commit"][:12], "started": result["started"]} for result in results])

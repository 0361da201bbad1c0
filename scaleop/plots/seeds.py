"""Two arms on the same seeds: a thin line a seed, between where the one and the other end."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from scaleop.plots.base import OTHER, finish, panels, spread, style, title_of
from scaleop.plots.race import COLOURS

SEED_SIZE = 10.5  # points
GAP = 0.45  # between two pairs, in units of the distance within one


def paired_seeds(results: Iterable[dict[str, Any]], pairs: Sequence[tuple[str, str]] = (("subclone_rs", "hybrid_rs"),),
                 published: Iterable[dict[str, Any]] | None = None) -> Figure:
    """Full perplexity at the budget of both arms of each of `pairs`, a line a seed; a short bar at each arm's mean.

    `published` (`scaleop.claims.seeds_in_paper`) draws the paper's printed ends the same way in a second panel. A pair
    shows the seeds that both its arms have finished; runs that diverged are left out.
    """
    with mpl.rc_context(style()):
        figure, axes = panels(1 if published is None else 2)
        names = [_pairs(axes[0], results, pairs, "Seed by seed")]
        if published is not None:
            names.append(_pairs(axes[1], published, pairs, "The same in the paper"))
        return finish(figure, names)


def _pairs(axis: Axes, results: Iterable[dict[str, Any]], pairs: Sequence[tuple[str, str]],
           title: str) -> Callable[[], None]:
    """Lines between the arms of each pair. Returns what names the seeds."""
    ends = {(result["arm"], result["seed"]): result["final"]["value"] for result in results if "final" in result}
    ends = {run: end for run, end in ends.items() if end is not None and np.isfinite(end)}
    places: list[float] = []
    names: list[tuple[float, list[int], list[float]]] = []  # by pair: where, which seeds, their ends
    for number, pair in enumerate(pairs):
        x = [number * (2 + GAP), number * (2 + GAP) + 1]
        places += x
        shared = sorted({seed for arm, seed in ends if arm == pair[0]} & {seed for arm, seed in ends if arm == pair[1]})
        for seed in shared:
            y = [ends[arm, seed] for arm in pair]
            axis.plot(x, y, color="#8A8A8A", linewidth=1.2, label=f"_{pair[0]} {pair[1]} {seed}", zorder=1)
        names.append((x[1], shared, [ends[pair[1], seed] for seed in shared]))
        for where, arm in zip(x, pair, strict=True):
            values = [ends[arm, seed] for seed in shared]
            colour = COLOURS.get(arm, OTHER)
            axis.scatter([where] * len(values), values, s=55, color=colour, edgecolor="white", zorder=3, gid=arm)
            if values:
                axis.hlines(np.mean(values), where - 0.11, where + 0.11, color=colour, linewidth=3, zorder=2)
    axis.set_xticks(places, [_folded(arm) for pair in pairs for arm in pair])
    axis.set_xlim(-0.35, (places or [0])[-1] + 0.55)
    axis.set_ylabel("perplexity at the budget")
    axis.yaxis.set_major_locator(MaxNLocator(6))
    title_of(axis, title, ("a line a seed, a bar at each mean", OTHER))
    return lambda: _name_seeds(axis, names)


def _name_seeds(axis: Axes, names: Sequence[tuple[float, list[int], list[float]]]) -> None:
    """Write each seed right of its line, as near to the line's end as its neighbours allow."""
    to_axes = (axis.transData - axis.transAxes).transform
    height = 1.2 * SEED_SIZE * axis.figure.dpi / 72 / axis.get_window_extent().height
    for where, seeds, ends in names:
        wanted = np.array([to_axes((where, end))[1] for end in ends])
        for seed, there in zip(seeds, spread(wanted, height), strict=True):
            axis.annotate(f"seed {seed}", (where, there), (12, 0), xycoords=axis.get_xaxis_transform(),
                          textcoords="offset points", va="center", fontsize=SEED_SIZE, color="#555555", gid="seed")


def _folded(arm: str) -> str:
    """An arm's name, its last part on a second line where it has three."""
    head, _, tail = arm.rpartition("_")
    return f"{head}\n_{tail}" if "_" in head else arm

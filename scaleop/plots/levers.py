"""The plane of starts and ends, and what moves an arm in it."""

from collections.abc import Callable, Iterable
from typing import Any

import matplotlib as mpl
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from scaleop.plots.base import OTHER, finish, name_points, panels, plain_log, style, title_of
from scaleop.plots.race import COLOURS, NOT_IN_PAPER

LEVERS = (  # (from, to, what was done)
    ("subclone", "hybrid", "compensation"), ("subclone", "subclone_iso", "rescale"),
    ("subclone_iso", "subclone_rs", "rescale"), ("hybrid", "hybrid_rs", "rescale"),
    ("subclone_rs", "hybrid_rs", "compensation"))  # in this one the fit takes the place of the read-outs' rescale
CORNERS = ("subclone", "hybrid", "subclone_rs", "hybrid_rs")
CHANGES = (  # the same for arms outside the paper's Table 2 (from scratch stands too far off to be drawn with them)
    *((arm, f"{arm}_bias", "bias") for arm in ("subclone", "hybrid", "hybrid_rs")),
    *((arm, f"{arm}_act", "activation scores") for arm in ("subclone_rs", "hybrid_rs")),
    *((arm, f"{arm}_distill", "distillation") for arm in ("subclone_rs", "hybrid_rs")),
    *((arm, f"{arm}_{rule}", "ridge rule")
      for arm in ("hybrid", "hybrid_rs") for rule in ("spectrum", "holdout", "clamp")),
    *((arm, f"{arm}_own", "own inputs") for arm in ("hybrid", "hybrid_rs")))
LEVER_COLOURS = {"compensation": "#007A59", "rescale": "#9A5F00", "bias": "#6A3D9A", "activation scores": "#1F5FA8",
                 "distillation": "#A63D6B", "ridge rule": "#444444", "own inputs": "#7A1F1F"}  # dark enough for words


def levers(results: Iterable[dict[str, Any]], published: Iterable[dict[str, Any]] | None = None) -> Figure:
    """Where each arm starts (quick perplexity, across) and ends (full perplexity, up), and which lever moves it.

    One point an arm, the mean over its seeds, hollow for arms outside the paper's Table 2; arrows follow LEVERS. With
    arms that CHANGES lead to there is a panel a kind of change instead, of the four corners of the two levers and what
    became of them. `published` (`scaleop.published.race()`) draws Table 2 the same way in a last panel. Runs without a
    finite start and end are left out.
    """
    given = list(results)
    planes = {kind.capitalize(): [result for result in given if result["arm"] in kept]
              for kind, kept in _changed({result["arm"] for result in given}).items()}
    planes = planes or {"Where each arm starts and ends": given}
    planes |= {} if published is None else {"The same in the paper: Table 2": list(published)}
    with mpl.rc_context(style()):
        figure, axes = panels(len(planes))
        return finish(figure, [_plane(axis, *plane) for axis, plane in zip(axes, planes.items(), strict=True)])


def _changed(arms: set[str]) -> dict[str, set[str]]:
    """{kind of change: the arms to draw with it} for the kinds of which `arms` has any."""
    made: dict[str, set[str]] = {}
    for base, changed, kind in CHANGES:
        if changed in arms:
            made.setdefault(kind, set(CORNERS)).update((base, changed))
    return made


def _plane(axis: Axes, title: str, results: Iterable[dict[str, Any]]) -> Callable[[], None]:
    """Starts against ends with the levers' arrows. Returns what names the points."""
    runs = pd.DataFrame([{"arm": result["arm"], "start": result["zero_shot"], "end": result["final"]["value"]}
                         for result in results if "final" in result], columns=["arm", "start", "end"])
    runs = runs.astype({"start": float, "end": float})
    means = runs[np.isfinite(runs[["start", "end"]]).all(axis=1)].groupby("arm", sort=False)[["start", "end"]].mean()
    axis.set(xscale="log", yscale="log", xlabel="start: perplexity before training (log)",
             ylabel="end: perplexity at the budget (log)")
    arrows = [lever for lever in (*LEVERS, *CHANGES) if lever[0] in means.index and lever[1] in means.index]
    for source, target, lever in arrows:
        axis.annotate("", means.loc[target], means.loc[source], gid=f"{source} to {target}",
                      arrowprops={"arrowstyle": "-|>", "shrinkA": 7, "shrinkB": 7, "mutation_scale": 16, "alpha": 0.85,
                                  "color": LEVER_COLOURS[lever], "linewidth": 1.8,
                                  "linestyle": (0, (4, 2)) if lever == "rescale" else "-"})
    colours = [COLOURS.get(arm, OTHER) for arm in means.index]
    ours = [arm in NOT_IN_PAPER for arm in means.index]
    axis.scatter(means["start"], means["end"], s=[70 if own else 120 for own in ours], gid=" ".join(means.index),
                 facecolor=["white" if own else colour for own, colour in zip(ours, colours, strict=True)],
                 edgecolor=[colour if own else "white" for own, colour in zip(ours, colours, strict=True)],
                 linewidth=[2.2 if own else 1.2 for own in ours], zorder=3)
    drawn = {lever for _, _, lever in arrows}
    key = [(f"{'╌╌' if lever == 'rescale' else '──'}▸ {lever}", colour)
           for lever, colour in LEVER_COLOURS.items() if lever in drawn]
    title_of(axis, title, *key, row=3)
    axis.margins(0.16, 0.14)
    plain_log(axis.xaxis, crowding=1.4)
    points = {arm: tuple(row) for arm, row in means.iterrows()}
    return lambda: name_points(axis, points, [(points[source], points[target]) for source, target, _ in arrows])

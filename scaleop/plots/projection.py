"""Figures of section 5: how two fits of the shared operator converge, and which blending hurts."""

from collections.abc import Iterable, Mapping
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullLocator

from scaleop.plots.base import OTHER, panels, plain_log, style, title_of
from scaleop.published import published

FIT_COLOURS = {"Adam": "#0072B2", "ALS": "#D55E00"}  # of Okabe and Ito's set, as in the race
DIRECTIONS = {"blend": ("selection, blended on this axis alone", "#D55E00", "o"),
              "keep": ("projection, selected on this axis alone", "#0072B2", "D")}
AXIS_NAMES = {"norms": "norms", "residual": "residual", "qk": "Q/K", "vo": "V/O", "mlp": "MLP"}


def convergence(fits: Mapping[str, Mapping[str, Any]]) -> Figure:
    """Pooled relative error against seconds (log), a small panel a weight type; Adam and ALS from the same start.

    `fits` is `Diagnosis.fits()`. Dotted is what the authors print for Pythia (a mean over blocks after their 1,500
    steps, at other sizes: a mark to read the level by).
    """
    with mpl.rc_context(style()):
        figure = Figure(figsize=(5.8, 2.5 * ((len(fits) + 1) // 2) + 0.4), layout="constrained")
        axes = figure.subplots((len(fits) + 1) // 2, 2, squeeze=False, sharey=True).ravel()
        for axis, (role, row) in zip(axes, fits.items(), strict=False):
            first = min(seconds for name in ("adam", "als") for seconds, _ in row[name]["curve"] if seconds > 0)
            for name, colour in FIT_COLOURS.items():
                points = [(max(seconds, first), error) for seconds, error in row[name.lower()]["curve"]]
                axis.plot(*zip(*points, strict=True), color=colour, label=name, linewidth=2)
                axis.plot(*points[-1], marker="o", color=colour, markersize=6, label="_end")
            axis.axhline(published(f"oper.err.{role}")["value"], color="#777777", linestyle=":", linewidth=1.4,
                         label="_paper")
            axis.set(xscale="log", ylim=(0, None), title=role)
            axis.xaxis.set_minor_locator(NullLocator())
            axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        for axis in axes[len(fits):]:
            axis.set_visible(False)
        figure.supxlabel("seconds (log)", fontsize=12)
        figure.supylabel("relative error over all blocks", fontsize=12)
        handles = [line for line in axes[0].lines if not line.get_label().startswith("_")]
        figure.legend(handles=handles, loc="outside upper right", ncols=2, frameon=False)
        return figure


def blending(factors: Iterable[Mapping[str, Any]]) -> Figure:
    """Factors of perplexity by swapped axis, before training and after it: right of 1 is worse, left is better.

    `factors` is tidy: {axis, direction, stage, factor}, as `claims.section5_tables.factors` makes it.
    """
    rows = list(factors)
    stages = {"start": "before training", "end": "after the short budget"}
    with mpl.rc_context(style()):
        figure, axes = panels(len(stages))
        for number, (axis, (stage, title)) in enumerate(zip(axes, stages.items(), strict=True)):
            here = [row for row in rows if row["stage"] == stage]
            names = [name for name in AXIS_NAMES if any(row["axis"] == name for row in here)]
            for row in here:
                _, colour, marker = DIRECTIONS[row["direction"]]
                y = names.index(row["axis"]) + (-0.13 if row["direction"] == "blend" else 0.13)
                axis.plot((1, row["factor"]), (y, y), color=colour, linewidth=2.4, label="_stem")
                axis.plot(row["factor"], y, marker=marker, color=colour, markersize=9, linestyle="",
                          gid=f"{row['direction']} {row['axis']}", label="_point")
                axis.annotate(f"{row['factor']:.3g}x", (row["factor"], y), textcoords="offset points", va="center",
                              xytext=(9 if row["factor"] >= 1 else -9, 0), ha="left" if row["factor"] >= 1 else "right",
                              fontsize=10.5, color=colour, gid="value")
            axis.axvline(1, color="#222222", linewidth=1.2)
            axis.set(xscale="log", yticks=range(len(names)), yticklabels=[AXIS_NAMES[name] for name in names],
                     ylim=(len(names) - 0.5, -0.5), xlabel="perplexity over the corner's (log)")
            axis.margins(x=0.28)
            axis.grid(axis="y", visible=False)
            plain_log(axis.xaxis, crowding=1.4)
            key = "\n".join(f"{sign} {DIRECTIONS[name][0]}" for name, sign in (("blend", "●"), ("keep", "◆")))
            title_of(axis, title, *([(key, OTHER)] if number == 0 else []))
        figure.draw_without_rendering()
        return figure

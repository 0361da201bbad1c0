"""Figures of section 7.6's controlled study: what each ridge rule does as the kept width grows, and as positions do."""

from collections.abc import Callable, Iterable
from typing import Any

import matplotlib as mpl
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullLocator

from scaleop.conditioning import POSITIONS, summary
from scaleop.plots.base import OTHER, RULE_COLOURS, finish, name_lines, panels, plain_log, style, title_of
from scaleop.solves import SINGLE

RULE_LINES = {"mean_diagonal": "-", "spectrum": "-", "holdout": "-", "clamp": (0, (2, 2)), SINGLE: (0, (1, 2))}
RULE_MARKERS = {"mean_diagonal": "o", "spectrum": "s", "holdout": "D", "clamp": "", SINGLE: ""}  # "": on another line
WIDTH_COLOURS = "viridis"


def by_width(rows: Iterable[dict[str, Any]], exponent: float, mean_share: float = 0.0,
             positions: int = POSITIONS) -> Figure:
    """Condition number, held-out error above the least possible, and norm ratio against kept width, one line a rule.

    `rows` is `conditioning.study()`. In the second panel the dotted line is what overfitting alone costs a fit without
    a ridge, in the third it is the norm ratio of the fit of least error. Raises ValueError when nothing matches.
    """
    table = summary(list(rows))
    table = table[(table["exponent"] == exponent) & (table["positions"] == positions)
                  & np.isclose(table["mean_share"], mean_share)]
    if table.empty:
        raise ValueError(f"no rows with exponent {exponent}, mean_share {mean_share} and {positions} positions: "
                         "pass what `study` was run with")
    mean = f", a mean of {mean_share:.0%} of the energy" if mean_share else ""
    note = f"spectrum rank^-{exponent:g}{mean}\n{positions:,} positions"
    with mpl.rc_context(style()):
        figure, axes = panels(3)
        names = [_rules(axes[0], table, "condition", "condition number, damped (log)", "Conditioning", note),
                 _rules(axes[1], table, "excess", "held-out error over the least, less 1 (log)",
                        "Held-out error", "dotted: no ridge, k / (N - k - 1)", "noise"),
                 _rules(axes[2], table, "norm_ratio", "norm of M′ over that of M[:, K] (log)", "Weight norm",
                        "dotted: the fit of least error", "floor_norm")]
        return finish(figure, names)


def _rules(axis: Axes, table: pd.DataFrame, column: str, label: str, title: str, note: str,
           dotted: str | None = None) -> Callable[[], None]:
    for rule, colour in RULE_COLOURS.items():
        mine = table[table["rule"] == rule].sort_values("width")
        axis.plot(mine["width"], mine[column], color=colour, linestyle=RULE_LINES[rule], marker=RULE_MARKERS[rule],
                  markersize=6, label=rule.replace("_", " "), zorder=3 if RULE_MARKERS[rule] else 4)
    if dotted:
        line = table.drop_duplicates("width").sort_values("width")
        axis.plot(line["width"], line[dotted], color="#777777", linestyle=":", linewidth=1.4, label=f"_{dotted}")
    axis.set(xscale="log", yscale="log", xlabel="kept width k (of 2k)", ylabel=label)
    axis.xaxis.set_major_locator(mpl.ticker.FixedLocator(sorted(table["width"].unique())))
    axis.xaxis.set_minor_locator(NullLocator())
    axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    title_of(axis, title, (note, OTHER))
    return name_lines(axis)


def by_share(rows: Iterable[dict[str, Any]], rule: str = "mean_diagonal") -> Figure:
    """Held-out error of one rule above the least possible, against k / N, one line a width: does width itself count?

    A panel for each `exponent` and `mean_share` of `rows` (`conditioning.study()`). Where all widths lie on one line,
    only the share of kept inputs in positions counts; dotted is that share's own cost, k / (N - k - 1).
    """
    table = summary(list(rows))
    table = table[table["rule"] == rule].assign(share=lambda each: each["width"] / each["positions"])
    groups = list(table.groupby(["exponent", "mean_share"]))
    widths = sorted(table["width"].unique())
    colours = dict(zip(widths, mpl.colormaps[WIDTH_COLOURS](np.linspace(0, 0.85, len(widths))), strict=True))
    with mpl.rc_context(style()):
        figure, axes = panels(len(groups))
        names = []
        for axis, ((exponent, mean_share), here) in zip(axes, groups, strict=True):
            for width, mine in here.groupby("width"):
                mine = mine.sort_values("share")
                axis.plot(mine["share"], mine["excess"], color=colours[width], marker="o", markersize=6,
                          label=f"{width:,} inputs")
            shares = np.geomspace(here["share"].min(), here["share"].max(), 50)
            axis.plot(shares, shares / (1 - shares), color="#777777", linestyle=":", linewidth=1.4, label="_noise")
            axis.set(xscale="log", yscale="log", xlabel="kept inputs over positions, k / N (log)",
                     ylabel="held-out error over the least, less 1 (log)")
            plain_log(axis.xaxis)
            mean = f", a mean of {mean_share:.0%} of the energy" if mean_share else ""
            title_of(axis, f"Width or k / N? {rule.replace('_', ' ')}",
                     (f"spectrum rank^-{exponent:g}{mean}\ndotted: no ridge, k / (N - k - 1)", OTHER))
            names.append(name_lines(axis))
        return finish(figure, names)

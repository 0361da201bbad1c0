"""Figures of a real donor: what its moments look like along the depth, beside another donor's, and how its fits err."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from scaleop.plots.base import OTHER, RULE_COLOURS, finish, name_lines, panels, style, title_of
from scaleop.plots.scale import MARKERS, STYLES

DONOR_COLOURS = ("#D55E00", "#0072B2", "#009E73", "#CC79A7")  # of Okabe and Ito's set, in the order of the donors
QUANTITIES = {  # title: axis label, value of a row, log axis?
    "Largest direction": ("share of all power", lambda row: row["largest"], False),
    "Effective rank over the kept inputs": ("share", lambda row: row["effective_rank"] / row["width"], False),
    "Positions that count": ("independent over given (log)",
                             lambda row: row["effective"] and row["effective"] / row["positions"], True),
    "Fitted rows over selected rows": ("ratio of norms (log)", lambda row: row["norm_ratio"], True)}


def moments(measured: Mapping[str, Sequence[Mapping[str, Any]]]) -> Figure:
    """Along the depth, what the moments of each donor's kept inputs look like, a panel a quantity.

    `measured`: {donor: rows of `donor_moments.measured`}, drawn against the block's place from the first (0) to the
    last (1); a colour a donor, a line style a read-out. A row without a value (no bound on its positions) has no point.
    """
    colours = dict(zip(measured, DONOR_COLOURS, strict=False))
    roles = list(dict.fromkeys(row["role"] for rows in measured.values() for row in rows))
    with mpl.rc_context(style()):
        figure, axes = panels(len(QUANTITIES))
        figure.set_size_inches(5.8, 3.6 * len(QUANTITIES))
        names = []
        for axis, (title, (label, value, log)) in zip(axes, QUANTITIES.items(), strict=True):
            for donor, rows in measured.items():
                last = max((row["block"] for row in rows), default=0) or 1
                for number, role in enumerate(roles):
                    points = sorted((row["block"] / last, value(row)) for row in rows
                                    if row["role"] == role and value(row) is not None)
                    if points:
                        axis.plot(*zip(*points, strict=True), color=colours.get(donor, OTHER), markersize=4.5,
                                  linestyle=STYLES[number % 3], marker=MARKERS[number % 3], linewidth=2,
                                  label=donor if number == len(roles) - 1 else f"_{donor} {role}")
            axis.set(xlabel="depth: first block 0, last block 1", ylabel=label, xlim=(-0.03, 1.03),
                     yscale="log" if log else "linear")
            title_of(axis, title, *_key(roles))
            names.append(name_lines(axis))
        return finish(figure, names)


def held_out(fits: Iterable[Mapping[str, Any]]) -> Figure:
    """By block, the error of the compensated read-outs on unseen text over plain selection's, a panel a read-out and a
    line a ridge rule; below 1 (dashed) the fit is better than selecting.

    `fits`: rows of `starts.compensated` with all moments.
    """
    rows = [row for row in fits if row["share"] == 1]
    roles = list(dict.fromkeys(row["role"] for row in rows)) or [""]
    with mpl.rc_context(style()):
        figure, axes = panels(len(roles))
        names = [_errors(axis, [row for row in rows if row["role"] == role], role)
                 for axis, role in zip(axes, roles, strict=True)]
        return finish(figure, names)


def _errors(axis: Axes, rows: Sequence[Mapping[str, Any]], role: str) -> Callable[[], None]:
    axis.axhline(1, color="#222222", linestyle=(0, (5, 3)), linewidth=1.2, label="_selection")
    for rule in dict.fromkeys(row["rule"] for row in rows):
        points = sorted((row["block"], row["error"] / row["selected"]) for row in rows if row["rule"] == rule)
        axis.plot(*zip(*points, strict=True), color=RULE_COLOURS.get(rule, OTHER), marker="o", markersize=4,
                  linestyle=(0, (2, 2)) if rule == "clamp" else "-", label=rule.replace("_", " "),
                  zorder=4 if rule == "clamp" else 3)  # it often lies on the paper's line
    last = max((row["block"] for row in rows), default=1)
    axis.set(xlabel="block of the donor", ylabel="error over selection's (log)", yscale="log", xlim=(-0.5, last + 0.5))
    axis.xaxis.set_major_locator(MaxNLocator(8, integer=True))
    title_of(axis, f"Error of {role} on unseen text", ("dashed: plain selection", OTHER))
    return name_lines(axis)


def _key(roles: Sequence[str]) -> list[tuple[str, str]]:
    """What the line styles mean, where there is more than one."""
    marks = zip(("─●─", "╌■╌", "·▲·"), roles, strict=False)
    return [(f"{mark} {role}", OTHER) for mark, role in marks] if len(roles) > 1 else []

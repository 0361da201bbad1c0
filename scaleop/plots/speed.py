"""How many times better than the plain way, benchmark by benchmark."""

from collections.abc import Sequence

import matplotlib as mpl
from matplotlib.figure import Figure

from scaleop.benchmarks import Comparison
from scaleop.plots.base import OTHER, finish, plain_log, style, title_of

OURS, SHORT, AIM = "#0072B2", "#E69F00", "#333333"  # an aim that is reached or was not set; one that is missed; the aim


def ratios(rows: Sequence[Comparison]) -> Figure:
    """A bar a comparison that has a plain way, from 1 to its ratio on a log scale; a tick where the aim is a ratio."""
    shown = [row for row in rows if row.ratio is not None]
    with mpl.rc_context(style()):
        figure = Figure(figsize=(5.8, 1.4 + 0.62 * len(shown)), layout="constrained")
        axis = figure.subplots()
        for place, row in enumerate(shown):
            colour = SHORT if row.met is False else OURS
            axis.barh(place, row.ratio - 1, left=1, height=0.3, color=colour, gid="bar")
            axis.annotate(f"{row.ratio:.2f}x", (max(row.ratio, row.least or 1, 1), place), (7, 0), va="center",
                          textcoords="offset points", color=colour, fontsize=10.5, gid="ratio")
            axis.annotate(row.what, (0, place - 0.42), xycoords=axis.get_yaxis_transform(), va="center", fontsize=10.5,
                          color=OTHER, gid="what", bbox={"facecolor": "white", "edgecolor": "none", "pad": 1})
            if row.least:
                axis.plot([row.least] * 2, [place - 0.22, place + 0.22], color=AIM, linewidth=2, label="_aim")
        axis.set(xscale="log", yticks=[], ylim=(len(shown) - 0.6, -0.8), xlabel="times better than the plain way")
        axis.axvline(1, color=OTHER, linewidth=1)
        low, high = min([0.8, *(row.ratio for row in shown)]), max([2, *(row.ratio for row in shown)])
        axis.set_xlim(low * 0.95, high * 1.35)
        axis.grid(axis="x")
        axis.grid(visible=False, axis="y")
        axis.spines["left"].set_visible(False)
        plain_log(axis.xaxis)
        title_of(axis, "Against the plain way", ("a tick: the aim", AIM), ("missed", SHORT))
        return finish(figure, [])

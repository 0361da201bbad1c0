"""What all figures share: one style, panels, names beside lines and points, log axes in plain numbers.

Lines and points carry their names beside them instead of in a legend, and log axes are labelled in plain numbers.
Figures are a column wide with type that survives a phone; their ground is white and padded, so they also stand on a
dark page. Tidy data in, a matplotlib Figure out, nothing read or written.
"""

import math
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import matplotlib as mpl
import numpy as np
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator
from scipy.optimize import isotonic_regression

from scaleop.solves import SINGLE

OTHER = "#333333"  # what has no colour of its own
RULE_COLOURS = {"mean_diagonal": "#D55E00", "spectrum": "#0072B2", "holdout": "#009E73", "clamp": "#CC79A7",
                SINGLE: "#555555"}  # by ridge rule; of Okabe and Ito's set, as in the race
LOG_STEPS = {0.8: (1, 1.5, 2, 3, 4, 5, 7), 2.3: (1, 2, 5), 4: (1, 3)}  # up to so many decades: ticks in each


def style() -> dict[str, Any]:
    """The one look, as matplotlib settings: `with mpl.rc_context(style()): ...`."""
    return {**sns.axes_style("ticks"), **sns.plotting_context("notebook"),
            "figure.facecolor": "white", "axes.facecolor": "white", "savefig.facecolor": "white",
            "font.family": ["sans-serif"], "font.sans-serif": ["DejaVu Sans"], "font.size": 12, "axes.labelsize": 12,
            "axes.titlesize": 13, "axes.titlelocation": "left", "axes.titleweight": "bold", "axes.titlepad": 10,
            "xtick.labelsize": 11.5, "ytick.labelsize": 11.5, "axes.spines.top": False, "axes.spines.right": False,
            "axes.grid": True, "axes.grid.axis": "y", "grid.color": "#E3E3E3", "grid.linewidth": 0.8,
            "axes.axisbelow": True, "lines.linewidth": 2.2, "lines.solid_capstyle": "round",
            "figure.constrained_layout.h_pad": 0.15, "figure.constrained_layout.w_pad": 0.15}


def notebook() -> None:
    """Have Jupyter show figures as SVG: sharp at any size, padded, and byte-identical from run to run."""
    from matplotlib_inline.backend_inline import set_matplotlib_formats

    mpl.rcParams.update({"svg.fonttype": "path", "svg.hashsalt": "scaleop"})  # these count when a figure is written
    set_matplotlib_formats("svg", bbox_inches="tight", pad_inches=0.15, metadata={"Date": None})


def panels(panels: int) -> tuple[Figure, list[Axes]]:
    """A column of panels. Made without pyplot, so that nothing stays open and no notebook shows a figure twice."""
    figure = Figure(figsize=(5.8, 4.6 * panels), layout="constrained")
    return figure, list(figure.subplots(panels, 1, squeeze=False)[:, 0])


def finish(figure: Figure, names: list[Callable[[], None]]) -> Figure:
    """Plain ticks up a log side; then lay the figure out, and place the names where they don't touch each other."""
    for axis in figure.axes:
        if axis.get_yscale() == "log":
            plain_log(axis.yaxis)
    figure.align_ylabels()
    figure.draw_without_rendering()
    for name in names:
        name()
    return figure


def title_of(axis: Axes, title: str, *notes: tuple[str, str], row: int = 99) -> None:
    """A title, and under it notes (text, colour) one after the other, at most `row` beside each other."""
    rows = -(-len(notes) // row)
    axis.set_title(title, pad=10 + 16 * max((rows + text.count("\n") for text, _ in notes), default=0))
    where: Any = None
    for count, (text, colour) in enumerate(notes):
        first, line = count % row == 0, rows - 1 - count // row
        where = axis.annotate(text, (0, 1) if first else (1, 0), (0, 8 + 16 * line) if first else (14, 0),
                              xycoords="axes fraction" if first else where, textcoords="offset points", va="bottom",
                              color=colour, gid="note")


def name_lines(axis: Axes) -> Callable[[], None]:
    """Write each line's label right of the axes, as near to the line's end as its neighbours allow.

    The layout needs the names to make room for them, and they need the layout to know their heights: they are made
    here, and put in place by the function returned.
    """
    lines = [line for line in axis.lines if not line.get_label().startswith("_")]
    texts = [axis.text(1.06, 0.5, line.get_label(), transform=axis.transAxes, va="center", gid="name",
                       weight="bold" if line.get_label() == "hybrid_rs" else "normal") for line in lines]

    def place() -> None:
        to_axes = (axis.transData - axis.transAxes).transform
        lasts = np.array([to_axes((axis.get_xlim()[1], line.get_ydata()[-1]))[1] for line in lines])
        line_height = 1.35 * mpl.rcParams["font.size"] * axis.figure.dpi / 72 / axis.get_window_extent().height
        for line, text, last, there in zip(lines, texts, lasts, spread(lasts, line_height), strict=True):
            text.set_y(there)
            axis.plot((1, 1.05), (last, there), transform=axis.transAxes, color=line.get_color(), linewidth=1.2,
                      clip_on=False, label="_leader", in_layout=False)

    return place


def spread(wanted: np.ndarray, gap: float) -> np.ndarray:
    """The places nearest to `wanted` (least squares, order kept) that are `gap` apart and within 0 to 1."""
    if not len(wanted):
        return wanted
    order = np.argsort(wanted, kind="stable")
    steps = gap * np.arange(len(wanted))
    free = isotonic_regression(wanted[order] - steps).x
    places = np.empty_like(wanted)
    places[order] = np.clip(free, gap / 2, max(gap / 2, 1 - steps[-1])) + steps
    return places


def name_points(axis: Axes, points: dict[str, tuple[float, float]], arrows: Sequence[tuple[Any, Any]]) -> None:
    """Write each point's name beside it, on the side where it covers least of other names, points and arrows."""
    pixel, scale = axis.transData.transform, axis.figure.dpi / 72
    dots = [pixel(point) for point in points.values()]
    ink = [pixel(a) + share * (pixel(b) - pixel(a)) for a, b in arrows for share in np.linspace(0, 1, 40)]
    frame, taken = axis.get_window_extent(), [text.get_window_extent() for text in axis.texts if text.get_text()]
    for name, point in points.items():
        least, best, joint = math.inf, None, None
        for far, (dx, dy) in product((10, 26), ((1, 0), (-1, 0), (0, 1), (0, -1), (1, 1), (-1, 1), (1, -1), (-1, -1))):
            text = axis.annotate(name, point, (far * dx, far * dy), textcoords="offset points", in_layout=False,
                                 ha={1: "left", 0: "center", -1: "right"}[dx], gid="name",
                                 va={1: "bottom", 0: "center", -1: "top"}[dy],
                                 weight="bold" if name == "hybrid_rs" else "normal")
            box = text.get_window_extent()
            cost = (100 * sum(box.padded(2 * scale).overlaps(other) for other in taken)
                    + 100 * (box.x0 < frame.x0 or box.x1 > frame.x1 or box.y0 < frame.y0 or box.y1 > frame.y1)
                    + 20 * sum(box.padded(5 * scale).contains(*dot) for dot in dots)
                    + sum(box.padded(3 * scale).contains(*spot) for spot in ink) + 3 * (far > 10))
            loser = text
            if cost < least:
                loser, best, least, joint = best, text, cost, (far * dx, far * dy) if far > 10 else None
            if loser is not None:
                loser.remove()
        taken.append(best.get_window_extent())
        if joint:  # a name further off is joined to its point
            axis.annotate("", point, joint, textcoords="offset points", in_layout=False,
                          arrowprops={"arrowstyle": "-", "color": "#777777", "linewidth": 0.9, "shrinkA": 0})


def plain_log(axis: Any, crowding: float = 1.0) -> None:
    """Ticks of a log axis at round numbers, the fewer the more decades it spans, written out: 50, 1,000, 20,000."""
    low, high = axis.get_view_interval()
    decades = crowding * math.log10(high / low)
    steps = next((steps for most, steps in LOG_STEPS.items() if decades < most), (1,))
    axis.set_major_locator(LogLocator(subs=steps, numticks=99))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))


def tokens(value: float, _: Any = None) -> str:
    """A count of tokens in short: 0, 200k, 30M, 1B."""
    for size, letter in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:g}{letter}"
    return f"{value:g}"

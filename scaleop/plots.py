"""Every figure of the book: tidy data in, a matplotlib Figure out, nothing read or written.

One style, one table of colours. Lines and points carry their names beside them instead of in a legend, and log axes are
labelled in plain numbers. Figures are a column wide with type that survives a phone; their ground is white and padded,
so they also stand on a dark page.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from itertools import product
from typing import Any

import matplotlib as mpl
import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator
from scipy.optimize import isotonic_regression

COLOURS = {  # Okabe and Ito's set, which colour-blind readers tell apart; greys for what learns nothing from the donor
    "random": "#555555", "random_pythia": "#999999", "projection": "#CC79A7", "stride": "#8C6D31",
    "subclone": "#56B4E9", "subclone_iso": "#0072B2", "hybrid": "#009E73", "subclone_rs": "#E69F00",
    "hybrid_rs": "#D55E00"}
OTHER = "#333333"  # an arm without a colour of its own
NOT_IN_PAPER = ("random_pythia", "stride")  # drawn dotted

LEVERS = (  # (from, to, what was done)
    ("subclone", "hybrid", "compensation"), ("subclone", "subclone_iso", "rescale"),
    ("subclone_iso", "subclone_rs", "rescale"), ("hybrid", "hybrid_rs", "rescale"),
    ("subclone_rs", "hybrid_rs", "compensation"))  # in this one the fit takes the place of the read-outs' rescale
LOG_STEPS = {0.8: (1, 1.5, 2, 3, 4, 5, 7), 2.3: (1, 2, 5), 4: (1, 3)}  # up to so many decades: ticks in each
LEVER_COLOURS = {"compensation": "#007A59", "rescale": "#9A5F00"}  # dark enough for words

PUBLISHED_RUNS = ("30m_random_b16_s0", "30m_subclone_rs_b16_s0", "30m_hybrid_rs_b16_s0",
                  "1b_random_s0", "1b_subclone_rs_s0", "1b_hybrid_rs_s0")
"""The authors' stored runs that share arms, pair and batch (16) at two budgets."""


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


def recovery(results: Iterable[dict[str, Any]], anchors: dict[str, Any] | None = None,
             published_curves: Iterable[dict[str, Any]] | None = None,
             published_anchors: dict[str, Any] | None = None) -> Figure:
    """Quick perplexity against tokens, one line an arm; several seeds give their mean in a band from least to most.

    `results` and `anchors` are the race's own; the reference, if there is one, is a dashed line. With the stored curves
    of the authors (`scaleop.published.curves()`) a second panel shows PUBLISHED_RUNS: 1B-token runs solid, from their
    first evaluation on, 30M-token runs dotted, and `published_anchors` (`scaleop.published.anchors()`) as reference.
    """
    ours = pd.DataFrame([{"name": result["arm"], "seed": result["seed"], **point}
                         for result in results for point in result["curve"]],
                        columns=["name", "seed", "tokens", "ppl"])
    with mpl.rc_context(style()):
        figure, axes = _figure(1 if published_curves is None else 2)
        names = [_curves(axes[0], ours, "Recovery of each arm", reference=(anchors or {}).get("reference"))]
        if published_curves is not None:
            names.append(_published(axes[1], published_curves, (published_anchors or {}).get("reference")))
        return _finish(figure, names)


def pretraining(curves: dict[str, Sequence[dict[str, Any]]]) -> Figure:
    """Quick perplexity against tokens for models trained from scratch: `{name: [{"tokens", "ppl"}, ...]}`."""
    data = pd.DataFrame([{"name": name, "seed": 0, **point} for name, curve in curves.items() for point in curve],
                        columns=["name", "seed", "tokens", "ppl"])
    palette = dict(zip(curves, sns.color_palette("viridis", len(curves) + 1).as_hex(), strict=False))
    with mpl.rc_context(style()):
        figure, (axis,) = _figure(1)
        return _finish(figure, [_curves(axis, data, "Pretraining the ladder", palette)])


def levers(results: Iterable[dict[str, Any]], published: Iterable[dict[str, Any]] | None = None) -> Figure:
    """Where each arm starts (quick perplexity, across) and ends (full perplexity, up), and which lever moves it.

    One point an arm, the mean over its seeds; arrows follow LEVERS. `published` (`scaleop.published.race()`) draws the
    paper's Table 2 the same way in a second panel. Runs without a finite start and end are left out.
    """
    with mpl.rc_context(style()):
        figure, axes = _figure(1 if published is None else 2)
        names = [_plane(axes[0], results, "Where each arm starts and ends")]
        if published is not None:
            names.append(_plane(axes[1], published, "The same in the paper: Table 2"))
        return _finish(figure, names)


# ------------------------------------------------------------------------------------------------------- panels
def _figure(panels: int) -> tuple[Figure, list[Axes]]:
    """A column of panels. Made without pyplot, so that nothing stays open and no notebook shows a figure twice."""
    figure = Figure(figsize=(5.8, 4.6 * panels), layout="constrained")
    return figure, list(figure.subplots(panels, 1, squeeze=False)[:, 0])


def _curves(axis: Axes, data: pd.DataFrame, title: str, palette: dict[str, str] = COLOURS,
            reference: dict[str, Any] | None = None) -> Callable[[], None]:
    """Lines of `data` (name, seed, tokens, ppl), and the reference as a dashed line. Returns what names them."""
    data = data[np.isfinite(data["ppl"].astype(float))]  # where a run diverged it has no point
    there = list(dict.fromkeys(data["name"]))
    order = [name for name in palette if name in there] + [name for name in there if name not in palette]
    for name in order:  # one call a line, so that each can be found again by its label
        rows = data[data["name"] == name]
        sns.lineplot(rows, x="tokens", y="ppl", color=palette.get(name, OTHER), ax=axis, label=name, legend=False,
                     errorbar=("pi", 100) if rows["seed"].nunique() > 1 else None,
                     err_kws={"alpha": 0.2, "linewidth": 0}, linestyle=":" if name in NOT_IN_PAPER else "-",
                     linewidth=3.0 if name == "hybrid_rs" else 2.2)
    end = max(data["tokens"], default=0) or 1
    axis.set(yscale="log", xlim=(-0.02 * end, end), xlabel="training tokens", ylabel="held-out perplexity (log)")
    axis.xaxis.set_major_locator(MaxNLocator(5, steps=(1, 2, 4, 5, 10)))
    axis.xaxis.set_major_formatter(FuncFormatter(_tokens))
    _title(axis, title, *([(_dashed(axis, reference), OTHER)] if reference else []))
    return _name_lines(axis)


def _published(axis: Axes, curves: Iterable[dict[str, Any]], reference: dict[str, Any] | None) -> Callable[[], None]:
    """The authors' stored runs: two budgets over one logarithmic token axis that still has its zero."""
    runs = {curve["run"]: curve for curve in curves}
    for name in PUBLISHED_RUNS:
        if name in runs:
            run, long = runs[name], runs[name]["budget_tokens"] == 1_000_000_000
            # 1B runs were evaluated every 20M tokens: a line from their start would show a speed nobody measured
            points = np.array(run["points"][1:] if long else run["points"])
            axis.plot(*points.T, color=COLOURS.get(run["arm"], OTHER), linewidth=2.4,
                      linestyle="-" if long else (0, (0.8, 1.4)), label=run["arm"] if long else f"_{name}")
    axis.set_xscale("symlog", linthresh=2e6, linscale=0.5)
    axis.set(yscale="log", xlim=(-6e4, 1e9), xticks=[0, 2e6, 1e7, 1e8, 1e9], xlabel="training tokens (log)",
             ylabel="WikiText-103 perplexity (log)")
    axis.xaxis.set_minor_locator(NullLocator())
    axis.xaxis.set_major_formatter(FuncFormatter(_tokens))
    notes = ["batch 16; 1B tokens solid, 30M tokens dotted", *([_dashed(axis, reference)] if reference else [])]
    _title(axis, "The authors' stored Pythia runs", ("\n".join(notes), OTHER))
    return _name_lines(axis)


def _dashed(axis: Axes, reference: dict[str, Any]) -> str:
    """Draw the trained sibling's perplexity, quick like the curves where it is known, and say what the line is."""
    axis.axhline(reference.get("quick_ppl") or reference["ppl"], color="#222222", linestyle=(0, (5, 3)), linewidth=1.4,
                 label=reference["name"])
    return f"dashed: {reference['name']}, trained as usual"


def _plane(axis: Axes, results: Iterable[dict[str, Any]], title: str) -> Callable[[], None]:
    """Starts against ends with the levers' arrows. Returns what names the points."""
    runs = pd.DataFrame([{"arm": result["arm"], "start": result["zero_shot"], "end": result["final"]["value"]}
                         for result in results if "final" in result], columns=["arm", "start", "end"])
    runs = runs.astype({"start": float, "end": float})
    means = runs[np.isfinite(runs[["start", "end"]]).all(axis=1)].groupby("arm", sort=False)[["start", "end"]].mean()
    axis.set(xscale="log", yscale="log", xlabel="start: perplexity before training (log)",
             ylabel="end: perplexity at the budget (log)")
    arrows = [lever for lever in LEVERS if lever[0] in means.index and lever[1] in means.index]
    for source, target, lever in arrows:
        axis.annotate("", means.loc[target], means.loc[source], gid=f"{source} to {target}",
                      arrowprops={"arrowstyle": "-|>", "shrinkA": 7, "shrinkB": 7, "mutation_scale": 16, "alpha": 0.85,
                                  "color": LEVER_COLOURS[lever], "linewidth": 1.8,
                                  "linestyle": "-" if lever == "compensation" else (0, (4, 2))})
    axis.scatter(means["start"], means["end"], s=120, color=[COLOURS.get(arm, OTHER) for arm in means.index],
                 edgecolor="white", linewidth=1.2, zorder=3, gid=" ".join(means.index))
    drawn = {lever for _, _, lever in arrows}
    key = {"compensation": "──▸ compensation", "rescale": "╌╌▸ rescale"}
    _title(axis, title, *((text, LEVER_COLOURS[lever]) for lever, text in key.items() if lever in drawn))
    axis.margins(0.16, 0.14)
    _plain_log(axis.xaxis, crowding=1.4)
    points = {arm: tuple(row) for arm, row in means.iterrows()}
    return lambda: _name_points(axis, points, [(points[source], points[target]) for source, target, _ in arrows])


# --------------------------------------------------------------------------------------------- names and ticks
def _finish(figure: Figure, names: list[Callable[[], None]]) -> Figure:
    """Plain ticks up the side; then lay the figure out, and place the names where they don't touch each other."""
    for axis in figure.axes:
        _plain_log(axis.yaxis)
    figure.align_ylabels()
    figure.draw_without_rendering()
    for name in names:
        name()
    return figure


def _title(axis: Axes, title: str, *notes: tuple[str, str]) -> None:
    """A title, and under it notes (text, colour) one after the other."""
    axis.set_title(title, pad=10 + 16 * max((1 + text.count("\n") for text, _ in notes), default=0))
    where: Any = "axes fraction"
    for text, colour in notes:
        first = where == "axes fraction"
        where = axis.annotate(text, (0, 1) if first else (1, 0), (0, 8) if first else (14, 0), xycoords=where,
                              textcoords="offset points", va="bottom", color=colour, gid="note")


def _name_lines(axis: Axes) -> Callable[[], None]:
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
        for line, text, last, there in zip(lines, texts, lasts, _spread(lasts, line_height), strict=True):
            text.set_y(there)
            axis.plot((1, 1.05), (last, there), transform=axis.transAxes, color=line.get_color(), linewidth=1.2,
                      clip_on=False, label="_leader", in_layout=False)

    return place


def _spread(wanted: np.ndarray, gap: float) -> np.ndarray:
    """The places nearest to `wanted` (least squares, order kept) that are `gap` apart and within 0 to 1."""
    if not len(wanted):
        return wanted
    order = np.argsort(wanted, kind="stable")
    steps = gap * np.arange(len(wanted))
    free = isotonic_regression(wanted[order] - steps).x
    places = np.empty_like(wanted)
    places[order] = np.clip(free, gap / 2, max(gap / 2, 1 - steps[-1])) + steps
    return places


def _name_points(axis: Axes, points: dict[str, tuple[float, float]], arrows: Sequence[tuple[Any, Any]]) -> None:
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


def _plain_log(axis: Any, crowding: float = 1.0) -> None:
    """Ticks of a log axis at round numbers, the fewer the more decades it spans, written out: 50, 1,000, 20,000."""
    low, high = axis.get_view_interval()
    decades = crowding * math.log10(high / low)
    steps = next((steps for most, steps in LOG_STEPS.items() if decades < most), (1,))
    axis.set_major_locator(LogLocator(subs=steps, numticks=99))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))


def _tokens(value: float, _: Any = None) -> str:
    """A count of tokens in short: 0, 200k, 30M, 1B."""
    for size, letter in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:g}{letter}"
    return f"{value:g}"

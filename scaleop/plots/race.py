"""Figures of section 7 and of the ladder: recovery curves, the plane of the two levers, pretraining."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import matplotlib as mpl
import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullLocator

from scaleop.plots.base import OTHER, finish, name_lines, name_points, panels, plain_log, style, title_of, tokens

COLOURS = {  # Okabe and Ito's set, which colour-blind readers tell apart; greys for what learns nothing from the donor
    "random": "#555555", "random_pythia": "#999999", "projection": "#CC79A7", "stride": "#8C6D31",
    "subclone": "#56B4E9", "subclone_iso": "#0072B2", "hybrid": "#009E73", "subclone_rs": "#E69F00",
    "hybrid_rs": "#D55E00"}
NOT_IN_PAPER = ("random_pythia", "stride")  # drawn dotted

LEVERS = (  # (from, to, what was done)
    ("subclone", "hybrid", "compensation"), ("subclone", "subclone_iso", "rescale"),
    ("subclone_iso", "subclone_rs", "rescale"), ("hybrid", "hybrid_rs", "rescale"),
    ("subclone_rs", "hybrid_rs", "compensation"))  # in this one the fit takes the place of the read-outs' rescale
LEVER_COLOURS = {"compensation": "#007A59", "rescale": "#9A5F00"}  # dark enough for words

PUBLISHED_RUNS = ("30m_random_b16_s0", "30m_subclone_rs_b16_s0", "30m_hybrid_rs_b16_s0",
                  "1b_random_s0", "1b_subclone_rs_s0", "1b_hybrid_rs_s0")
"""The authors' stored runs that share arms, pair and batch (16) at two budgets."""


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
        figure, axes = panels(1 if published_curves is None else 2)
        names = [_curves(axes[0], ours, "Recovery of each arm", reference=(anchors or {}).get("reference"))]
        if published_curves is not None:
            names.append(_published(axes[1], published_curves, (published_anchors or {}).get("reference")))
        return finish(figure, names)


def pretraining(curves: dict[str, Sequence[dict[str, Any]]]) -> Figure:
    """Quick perplexity against tokens for models trained from scratch: `{name: [{"tokens", "ppl"}, ...]}`."""
    data = pd.DataFrame([{"name": name, "seed": 0, **point} for name, curve in curves.items() for point in curve],
                        columns=["name", "seed", "tokens", "ppl"])
    palette = dict(zip(curves, sns.color_palette("viridis", len(curves) + 1).as_hex(), strict=False))
    with mpl.rc_context(style()):
        figure, (axis,) = panels(1)
        return finish(figure, [_curves(axis, data, "Pretraining the ladder", palette)])


def levers(results: Iterable[dict[str, Any]], published: Iterable[dict[str, Any]] | None = None) -> Figure:
    """Where each arm starts (quick perplexity, across) and ends (full perplexity, up), and which lever moves it.

    One point an arm, the mean over its seeds; arrows follow LEVERS. `published` (`scaleop.published.race()`) draws the
    paper's Table 2 the same way in a second panel. Runs without a finite start and end are left out.
    """
    with mpl.rc_context(style()):
        figure, axes = panels(1 if published is None else 2)
        names = [_plane(axes[0], results, "Where each arm starts and ends")]
        if published is not None:
            names.append(_plane(axes[1], published, "The same in the paper: Table 2"))
        return finish(figure, names)


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
    axis.xaxis.set_major_formatter(FuncFormatter(tokens))
    title_of(axis, title, *([(_dashed(axis, reference), OTHER)] if reference else []))
    return name_lines(axis)


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
    axis.xaxis.set_major_formatter(FuncFormatter(tokens))
    notes = ["batch 16; 1B tokens solid, 30M tokens dotted", *([_dashed(axis, reference)] if reference else [])]
    title_of(axis, "The authors' stored Pythia runs", ("\n".join(notes), OTHER))
    return name_lines(axis)


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
    title_of(axis, title, *((text, LEVER_COLOURS[lever]) for lever, text in key.items() if lever in drawn))
    axis.margins(0.16, 0.14)
    plain_log(axis.xaxis, crowding=1.4)
    points = {arm: tuple(row) for arm, row in means.iterrows()}
    return lambda: name_points(axis, points, [(points[source], points[target]) for source, target, _ in arrows])

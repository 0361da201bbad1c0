"""Curves over tokens: the recovery of each arm, the same at several budgets, and the ladder's pretraining."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import matplotlib as mpl
import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullLocator

from scaleop.plots.base import OTHER, finish, name_lines, panels, style, title_of, tokens
from scaleop.published import PAPER_ARMS

COLOURS = {  # Okabe and Ito's set, which colour-blind readers tell apart; greys for what learns nothing from the donor
    "random": "#555555", "random_pythia": "#999999", "projection": "#CC79A7", "stride": "#8C6D31",
    "subclone": "#56B4E9", "subclone_iso": "#0072B2", "hybrid": "#009E73", "subclone_rs": "#E69F00",
    "hybrid_rs": "#D55E00"}
SHADES = {"act": -0.35, "distill": 0.35, "bias": 0.55, "spectrum": -0.5, "holdout": 0.2, "clamp": -0.2, "own": 0.45}
"""What a change of an arm makes of its colour: so far towards black (below 0) or white."""


def _shade(colour: str, by: float) -> str:
    towards = np.ones(3) if by > 0 else np.zeros(3)
    return to_hex(np.array(to_rgb(colour)) + abs(by) * (towards - to_rgb(colour)))


COLOURS |= {f"{arm}_{change}": _shade(COLOURS[arm], by) for change, by in SHADES.items()
            for arm in ("random", "subclone", "hybrid", "subclone_rs", "hybrid_rs")}
NOT_IN_PAPER = tuple(arm for arm in COLOURS if arm not in PAPER_ARMS)  # drawn dotted, or hollow

BUDGETS = {"": ("dotted", (0, (0.8, 1.4))), "long": ("dashed", (0, (4, 2))), "convergence": ("solid", "-")}
"""Of `budgets`: how the race of each role is drawn, in words and as a line style."""

PUBLISHED_RUNS = ("30m_random_b16_s0", "30m_subclone_rs_b16_s0", "30m_hybrid_rs_b16_s0",
                  "1b_random_s0", "1b_subclone_rs_s0", "1b_hybrid_rs_s0")
"""The authors' stored runs that share arms, pair and batch (16) at two budgets."""


def recovery(results: Iterable[dict[str, Any]], anchors: dict[str, Any] | None = None,
             published_curves: Iterable[dict[str, Any]] | None = None,
             published_anchors: dict[str, Any] | None = None, title: str = "Recovery of each arm") -> Figure:
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
        names = [_curves(axes[0], ours, title, reference=(anchors or {}).get("reference"))]
        if published_curves is not None:
            names.append(_published(axes[1], published_curves, (published_anchors or {}).get("reference")))
        return finish(figure, names)


def budgets(races: Mapping[str, Iterable[dict[str, Any]]], anchors: dict[str, Any] | None = None,
            published_curves: Iterable[dict[str, Any]] | None = None,
            published_anchors: dict[str, Any] | None = None) -> Figure:
    """Quick perplexity against tokens of the arms that ran at several budgets; the log axis still has its zero.

    `races`: {role: results}; those of BUDGETS are drawn, every arm's seeds as their mean. A race that is evaluated less
    often than another is drawn from its first evaluation on: a line from its start would show a speed nobody measured.
    `anchors` and the published ones as in `recovery`.
    """
    chosen = {role: list(races[role]) for role in BUDGETS if races.get(role)}
    with mpl.rc_context(style()):
        figure, axes = panels(1 if published_curves is None else 2)
        names = [_budgets(axes[0], chosen, (anchors or {}).get("reference"))]
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
    notes = [_dashed(axis, reference)] if reference else []
    notes += ["bands: from the least to the most of the seeds"] if data["seed"].nunique() > 1 else []
    title_of(axis, title, *([("\n".join(notes), OTHER)] if notes else []))
    return name_lines(axis)


def _budgets(axis: Axes, races: dict[str, list[dict[str, Any]]],
             reference: dict[str, Any] | None) -> Callable[[], None]:
    """A line an arm and budget, of arms with more than one; named at the longest. Returns what names them."""
    points = pd.DataFrame([{"role": role, "arm": result["arm"], **point} for role, results in races.items()
                           for result in results for point in result["curve"]],
                          columns=["role", "arm", "tokens", "ppl"])
    points = points[np.isfinite(points["ppl"].astype(float))]
    means = points.groupby(["role", "arm", "tokens"])["ppl"].mean()
    ends = points.groupby("role")["tokens"].max().reindex(list(races)).dropna()
    steps = points[points["tokens"] > 0].groupby("role")["tokens"].min()
    finest, last = steps.min() if len(steps) else 1, ends.max() if len(ends) else 1
    several = {arm for arm, roles in points.groupby("arm")["role"].nunique().items() if roles > 1 or len(races) < 2}
    for arm in [arm for arm in COLOURS if arm in several] + sorted(several - set(COLOURS)):
        *shorter, longest = [role for role in ends.index if (role, arm) in means.index]
        for role in (*shorter, longest):
            curve = means[role, arm]
            curve = curve[curve.index > 0] if steps.get(role, finest) > finest else curve
            axis.plot(curve.index, curve, color=COLOURS.get(arm, OTHER), linestyle=BUDGETS[role][1], linewidth=2.4,
                      label=arm if role == longest else f"_{arm} {role}")
        if curve.index[-1] < last:  # from where it ends to its name
            axis.hlines(curve.iloc[-1], curve.index[-1], last, color=COLOURS.get(arm, OTHER), linewidth=0.8, alpha=0.5)
    axis.set_xscale("symlog", linthresh=finest, linscale=0.5)
    axis.set(yscale="log", xlim=(-0.03 * finest, last), xticks=[0, finest, *ends], xlabel="training tokens (log)",
             ylabel="held-out perplexity (log)")
    axis.xaxis.set_minor_locator(NullLocator())
    axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: tokens(float(f"{value:.2g}"))))
    drawn = "tokens: " + ", ".join(f"{tokens(float(f'{end:.2g}'))} {BUDGETS[role][0]}" for role, end in ends.items())
    title_of(axis, "At longer budgets", ("\n".join([drawn] + ([_dashed(axis, reference)] if reference else [])), OTHER))
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

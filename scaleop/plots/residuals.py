"""Figures of section 6: the residual's spectrum beside its controls, and which planted signals the tests find."""

from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, NullLocator

from scaleop.planted import ideal
from scaleop.plots.base import OTHER, name_lines, panels, style, title_of

SPECTRA = {"residual": "#D55E00", "shuffled": "#0072B2", "fit to noise": "#777777"}  # Okabe and Ito's set
KINDS = {"patch": "#009E73", "shared": "#CC79A7", "low rank": "#E69F00"}


def spectra(values: Mapping[str, Mapping[str, Sequence[float]]], block: int) -> Figure:
    """Figure 3: singular values of one block's residual, a small panel a type, beside those of its controls.

    `values` is `residual_study.ResidualStudy.spectra(block)`. The paper shows block 12 of 24, so show the middle one.
    """
    rows = -(-len(values) // 2)
    with mpl.rc_context(style()):
        figure = Figure(figsize=(5.8, 1.2 + 2.5 * rows), layout="constrained")
        axes = figure.subplots(rows, 2, squeeze=False)
        for axis, (role, lines) in zip(axes.flat, values.items(), strict=False):
            for kind, singular in lines.items():
                axis.plot(np.arange(1, len(singular) + 1), singular, color=SPECTRA.get(kind, OTHER), label=kind,
                          linestyle=":" if kind == "fit to noise" else "-")
            axis.set(title=role, ylim=(0, None))
            axis.xaxis.set_major_locator(MaxNLocator(4, integer=True))
            axis.yaxis.set_major_locator(MaxNLocator(4))
        for spare in axes.flat[len(values):]:
            spare.remove()
        figure.supxlabel("index", fontsize=12)
        figure.supylabel(f"singular value, block {block}", fontsize=12)
        handles, labels = axes.flat[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside upper left", ncols=len(labels), frameon=False, fontsize=11.5,
                      handlelength=1.4, columnspacing=1.2)
        figure.draw_without_rendering()
        return figure


def power(rows: Sequence[Mapping[str, Any]]) -> Figure:
    """The positive control (`ResidualStudy.power()["rows"]`) in two panels.

    Above, what predictors gain over their controls on held-out blocks against the share of variance planted, with the
    95 % interval over patches, and dashed what a predictor that knows the signal would gain. Below, a dot for every
    test and share: filled where the test finds the signal.
    """
    with mpl.rc_context(style()):
        figure, axes = panels(2)
        tests = list(dict.fromkeys((row["kind"], row["test"]) for row in rows if row["kind"] != "none"))
        figure.set_size_inches(5.8, 4.6 + 1.6 + 0.36 * len(tests))
        figure.get_layout_engine().set(hspace=0.04)
        names = _gains(axes[0], [row for row in rows if row["kind"] == "patch"])
        _found(axes[1], rows, tests)
        figure.draw_without_rendering()
        names()
        return figure


def _gains(axis: Axes, rows: Sequence[Mapping[str, Any]]) -> Any:
    """Gap between real and control against the planted share, a line a predictor."""
    palette = iter(("#0072B2", "#D55E00"))
    for test in dict.fromkeys(row["test"] for row in rows if row["test"].endswith("one-sided")):
        mine = sorted((row["share"], row["size"], row["low"], row["high"]) for row in rows if row["test"] == test)
        share, size, low, high = np.array(mine).T
        colour = next(palette)
        axis.plot(share, size, color=colour, marker="o", markersize=5, label=test.split(":")[0])
        axis.fill_between(share, low, high, color=colour, alpha=0.2, linewidth=0, gid="interval")
    shares = sorted({row["share"] for row in rows})
    fine = np.geomspace(shares[0], shares[-1], 100)
    axis.plot(fine, [ideal(share) for share in fine], color=OTHER, linestyle="--", linewidth=1.6, label="all of it")
    axis.set(ylabel="reduction, real − control")
    _planted(axis, shares)
    title_of(axis, "What predictors recover")
    return name_lines(axis)


def _found(axis: Axes, rows: Sequence[Mapping[str, Any]], tests: Sequence[tuple[str, str]]) -> None:
    """One line of dots for each kind of signal and test; filled: found."""
    for height, (kind, test) in enumerate(tests):
        mine = [row for row in rows if (row["kind"], row["test"]) == (kind, test)]
        for found in (True, False):
            shares = [row["share"] for row in mine if row["found"] is found]
            axis.plot(shares, [height] * len(shares), "o", color=KINDS.get(kind, OTHER), markersize=8,
                      fillstyle="full" if found else "none", linestyle="", gid="found" if found else "missed")
    axis.set_yticks(range(len(tests)), [test for _, test in tests])
    axis.yaxis.set_minor_locator(NullLocator())
    axis.set(ylim=(len(tests) - 0.5, -0.5))
    axis.tick_params(axis="y", labelsize=10)
    _planted(axis, sorted({row["share"] for row in rows if row["kind"] != "none"}))
    kinds = dict.fromkeys(kind for kind, _ in tests)
    title_of(axis, "Which tests find it (filled)", *((kind, KINDS.get(kind, OTHER)) for kind in kinds))


def _planted(axis: Axes, shares: Sequence[float]) -> None:
    """A log axis of planted shares in per cent, ticked at those that were planted."""
    axis.set(xscale="log", xlabel="share of variance planted, % (log)")
    axis.set_xticks(shares, [f"{100 * share:g}" for share in shares])
    axis.xaxis.set_minor_locator(NullLocator())

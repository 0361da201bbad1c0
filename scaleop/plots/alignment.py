"""Figures of section 4: the similarity of all pairs of blocks, and how much of each block a linear map explains."""

from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib as mpl
import numpy as np
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import MaxNLocator

from scaleop.plots.base import OTHER, name_lines, panels, style, title_of
from scaleop.published import published

MAP_COLOURS = {"ridge": "#0072B2", "Procrustes": "#D55E00"}  # of Okabe and Ito's set, as in the race
FRAME = "#D55E00"  # stands out on all of viridis


def similarity(cka: Any, blocks: Sequence[int], donor: str = "donor", reference: str = "reference") -> Figure:
    """Heat map of an (L, l) CKA matrix: rows are the donor's blocks, columns the reference's, block 0 top left.

    `blocks[b]` is the donor block matched with block b: those cells are framed. A dot marks each row's best match.
    """
    cka = np.asarray(cka, dtype=float)
    with mpl.rc_context(style()):
        figure, (axis,) = panels(1)
        sns.heatmap(cka, ax=axis, vmin=0, vmax=1, cmap="viridis", square=True, linewidths=0.4, linecolor="white",
                    cbar_kws={"label": "linear CKA", "shrink": 0.8})
        for column, row in enumerate(blocks):
            axis.add_patch(Rectangle((column, row), 1, 1, fill=False, edgecolor=FRAME, linewidth=2, gid="matched"))
        best = cka.argmax(axis=1)
        axis.scatter(best + 0.5, np.arange(len(cka)) + 0.5, s=max(12, 480 / len(cka)), color="white",
                     edgecolor="#222222", linewidth=1, zorder=3, gid="best")
        axis.grid(False)
        axis.set(xlabel=f"block of {reference}", ylabel=f"block of {donor}")
        axis.tick_params(length=0, labelrotation=0)
        title_of(axis, "Similarity of all pairs of blocks", ("□ matched blocks   ● best match in its row", OTHER))
        figure.draw_without_rendering()
        return figure


def maps(scores: Mapping[str, Mapping[str, Sequence[float]]], untrained: Mapping[str, Sequence[float]] | None = None,
         paper: bool = True) -> Figure:
    """Held-out R^2 of ridge and Procrustes block by block, a panel for each entry of `scores`, the dips marked.

    `scores` maps a panel's title to `alignment.block_scores`; `untrained`, the same for a model that never saw text,
    is dotted in the first panel. With `paper` a last panel shows what the authors gave of theirs: both means
    (dashed) and the values at the dip.
    """
    with mpl.rc_context(style()):
        figure, axes = panels(len(scores) + paper)
        names = []
        for number, (axis, (title, found)) in enumerate(zip(axes, scores.items(), strict=False)):
            names.append(_two_lines(axis, title, found, untrained if number == 0 else None))
        if paper:
            names.append(_published(axes[-1]))
        figure.align_ylabels()
        figure.draw_without_rendering()
        for name in names:
            name()
        return figure


def _two_lines(axis: Axes, title: str, found: Mapping[str, Sequence[float]],
               untrained: Mapping[str, Sequence[float]] | None) -> Any:
    notes = []
    for key, label in (("ridge", "ridge"), ("procrustes", "Procrustes")):
        values, colour = np.asarray(found[key], dtype=float), MAP_COLOURS[label]
        axis.plot(values, color=colour, marker="o", markersize=5, label=label, clip_on=False)
        dip = int(values.argmin())
        axis.plot(dip, values[dip], color=colour, marker="v", markersize=13, markeredgecolor="white", linestyle="none",
                  zorder=4, clip_on=False, label=f"_dip of {label}")
        if untrained is not None:
            axis.plot(untrained[key], color=colour, linestyle=":", linewidth=1.8, label=f"_untrained {label}")
    notes.append("▼ lowest block" + ("" if untrained is None else "   dotted: an untrained sibling"))
    _finish(axis, title, len(found["ridge"]), "\n".join(notes))
    return name_lines(axis)


def _published(axis: Axes) -> Any:
    """The paper's means and its stored values at the dip; the curves themselves were not stored."""
    points = {"ridge": {block: f"ridge_r2_layer{block}" for block in (3, 4, 5)},
              "Procrustes": {3: "procrustes_r2_layer3"}}
    for label, ids in points.items():
        mean = published(f"align.act.{label.lower()}_r2_mean")["value"]
        axis.plot([0, 23], [mean, mean], color=MAP_COLOURS[label], linestyle=(0, (5, 3)), linewidth=1.6, label=label)
        axis.plot(list(ids), [published(f"align.act.{name}")["value"] for name in ids.values()], marker="v",
                  color=MAP_COLOURS[label], linestyle="none", markersize=11, markeredgecolor="white",
                  label=f"_dip of {label}")
    _finish(axis, "The paper: Pythia-1.4B to 410M", 24, "▼ its values at the dip   dashed: its means over 24 blocks")
    return name_lines(axis)


def _finish(axis: Axes, title: str, blocks: int, note: str) -> None:
    low = min(0.0, *(np.nanmin(line.get_ydata()) for line in axis.lines))
    axis.set(xlabel="block", ylabel="held-out R²", ylim=(low - 0.05 * (low < 0), 1.02),
             xlim=(-0.3, max(blocks - 1, 0.5)))
    axis.xaxis.set_major_locator(MaxNLocator(8, integer=True))
    title_of(axis, title, (note, OTHER))

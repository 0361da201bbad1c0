"""Figures: the right lines, points and names with the right numbers, nothing on top of anything else."""

import io
import math
from itertools import combinations

import nbformat
import numpy as np
import pytest
from matplotlib import pyplot as plt
from matplotlib.colors import to_hex
from nbclient import NotebookClient

from scaleop import plots
from scaleop import published as paper
from scaleop.claims import ORDER, PAPER_ARMS
from scaleop.plots import base

ENDS = dict(zip(ORDER, (228.0, 205.0, 172.0, 75.0, 65.9, 65.8, 64.6, 58.1, 57.5), strict=True))
STARTS = dict(zip(ORDER, (4220.0, 4160.0, 2100.0, 1500.0, 640.0, 1300.0, 410.0, 3300.0, 1200.0), strict=True))
ANCHORS = {"donor": {"name": "big", "ppl": 38.6}, "reference": {"name": "sibling", "ppl": 45.0, "quick_ppl": 44.0}}


def run(arm: str, seed: int = 0, factor: float = 1.0) -> dict:
    """A result with four points; `factor` raises all of a seed's perplexities."""
    curve = [{"step": i, "tokens": 100_000 * i, "ppl": factor * ENDS[arm] * (STARTS[arm] / ENDS[arm]) ** ((3 - i) / 3)}
             for i in range(4)]
    return {"arm": arm, "seed": seed, "curve": curve, "zero_shot": factor * STARTS[arm],
            "final": {"value": factor * ENDS[arm]}}


RACE = [run(arm) for arm in ORDER]


def lines(axis) -> dict:
    """The named lines of a panel."""
    return {line.get_label(): line for line in axis.lines if not line.get_label().startswith("_")}


def names(axis) -> dict:
    """The names written beside lines or points."""
    return {text.get_text(): text for text in axis.texts if text.get_gid() == "name"}


def drawn(figure) -> bytes:
    """The figure as an SVG, as a notebook stores it."""
    file = io.BytesIO()
    figure.savefig(file, format="svg", metadata={"Date": None})
    return file.getvalue()


def test_recovery_draws_one_line_an_arm_with_its_curve():
    (axis,) = plots.recovery(RACE, ANCHORS).axes
    found = lines(axis)
    assert set(found) == {*ORDER, "sibling"}
    for result in RACE:
        line = found[result["arm"]]
        np.testing.assert_allclose(line.get_xydata(), [(p["tokens"], p["ppl"]) for p in result["curve"]])
        assert to_hex(line.get_color()).upper() == plots.COLOURS[result["arm"]].upper()
    assert list(found["sibling"].get_ydata()) == [44.0, 44.0]  # quick, like the curves
    assert axis.get_yscale() == "log" and axis.get_xscale() == "linear"


def test_recovery_uses_the_full_perplexity_where_the_quick_one_is_missing():
    (axis,) = plots.recovery(RACE, {"reference": {"name": "sibling", "ppl": 45.0}}).axes
    assert list(lines(axis)["sibling"].get_ydata()) == [45.0, 45.0]


def test_without_a_reference_there_is_no_dashed_line():
    (axis,) = plots.recovery(RACE, {"donor": ANCHORS["donor"]}).axes
    assert set(lines(axis)) == set(ORDER)


def test_several_seeds_are_a_mean_in_a_band_from_least_to_most():
    (axis,) = plots.recovery([run("hybrid_rs", 0, 1.0), run("hybrid_rs", 1, 1.1), run("hybrid_rs", 2, 1.5)]).axes
    np.testing.assert_allclose(lines(axis)["hybrid_rs"].get_ydata()[-1], 1.2 * ENDS["hybrid_rs"])
    (band,) = axis.collections
    last = [y for x, y in band.get_paths()[0].vertices if x == 300_000]
    assert (min(last), max(last)) == pytest.approx((ENDS["hybrid_rs"], 1.5 * ENDS["hybrid_rs"]))


def test_one_seed_has_no_band():
    (axis,) = plots.recovery(RACE).axes
    assert not axis.collections


def test_the_second_panel_shows_the_authors_runs():
    _, axis = plots.recovery(RACE, ANCHORS, paper.curves(), paper.anchors()).axes
    assert set(lines(axis)) == {"random", "subclone_rs", "hybrid_rs", "Pythia-410M"}
    assert list(lines(axis)["Pythia-410M"].get_ydata()) == [15.5695, 15.5695]
    curves = {curve["run"]: curve["points"] for curve in paper.curves()}
    long = lines(axis)["hybrid_rs"].get_xydata()
    np.testing.assert_allclose(long, curves["1b_hybrid_rs_s0"][1:])
    short = {line.get_label(): line for line in axis.lines if line.get_label().startswith("_30m")}
    assert set(short) == {f"_{name}" for name in plots.PUBLISHED_RUNS if name.startswith("30m")}
    np.testing.assert_allclose(short["_30m_random_b16_s0"].get_xydata(), curves["30m_random_b16_s0"])
    said = " ".join(text.get_text() for text in axis.texts)
    assert "batch 16" in said and "30M tokens dotted" in said
    assert all(curve["batch_size"] == 16 and not curve["distill"] for curve in paper.curves()
               if curve["run"] in plots.PUBLISHED_RUNS)


def test_levers_draws_one_point_an_arm_and_its_arrows():
    ours, theirs = plots.levers([*RACE, run("hybrid", 1, 1.2)], paper.race()).axes
    points = dict(zip(ours.collections[0].get_gid().split(), ours.collections[0].get_offsets(), strict=True))
    assert set(points) == set(ORDER)
    assert tuple(points["subclone"]) == (640.0, 65.9)
    assert tuple(points["hybrid"]) == pytest.approx((410.0 * 1.1, 64.6 * 1.1))  # the mean of two seeds
    arrows = {text.get_gid(): text for text in ours.texts if text.get_gid() and " to " in text.get_gid()}
    assert set(arrows) == {f"{source} to {target}" for source, target, _ in plots.LEVERS}
    arrow = arrows["subclone to subclone_iso"]
    assert tuple(arrow.xyann) == (640.0, 65.9) and tuple(arrow.xy) == (1300.0, 65.8)
    assert set(theirs.collections[0].get_gid().split()) == set(PAPER_ARMS)
    assert np.asarray(theirs.collections[0].get_offsets()).min() == pytest.approx(83.017)


def test_levers_leaves_out_what_was_not_run_or_diverged():
    results = [run("subclone"), run("hybrid"), run("hybrid_rs"), run("subclone_rs"), run("random")]
    results[3]["final"] = {"value": math.nan}
    del results[4]["final"]
    (axis,) = plots.levers(results).axes
    assert axis.collections[0].get_gid().split() == ["subclone", "hybrid", "hybrid_rs"]
    assert {text.get_gid() for text in axis.texts if " to " in (text.get_gid() or "")} == {
        "subclone to hybrid", "hybrid to hybrid_rs"}


def test_pretraining_draws_each_model():
    curves = {name: [{"tokens": 1e6 * i, "ppl": 4096 / (i + 1) + low} for i in range(5)]
              for name, low in (("nano-l", 30.0), ("nano-m", 40.0), ("nano-s", 50.0))}
    (axis,) = plots.pretraining(curves).axes
    assert list(lines(axis)) == list(names(axis)) == ["nano-l", "nano-m", "nano-s"]
    for name, curve in curves.items():
        np.testing.assert_allclose(lines(axis)[name].get_ydata(), [point["ppl"] for point in curve])
    assert len({line.get_color() for line in axis.lines if line.get_label() in curves}) == 3


@pytest.mark.parametrize("figure", [
    lambda: plots.recovery(RACE, ANCHORS, paper.curves(), paper.anchors()),
    lambda: plots.levers(RACE, paper.race()),
    lambda: plots.levers([{**run(arm), "final": {"value": 60.0 + i}} for i, arm in enumerate(ORDER)]),
])
def test_every_name_is_there_inside_the_figure_and_on_no_other(figure):
    figure = figure()
    figure.canvas.draw_idle()
    whole = figure.bbox
    for axis in figure.axes:
        named = names(axis)
        assert set(named) == (set(lines(axis)) or set(axis.collections[0].get_gid().split()))
        boxes = {name: text.get_window_extent() for name, text in named.items()}
        for name, box in boxes.items():
            assert whole.x0 <= box.x0 and box.x1 <= whole.x1 and whole.y0 <= box.y0 and box.y1 <= whole.y1, name
        assert not [pair for pair in combinations(boxes, 2) if boxes[pair[0]].overlaps(boxes[pair[1]])]


def test_log_axes_read_in_plain_numbers():
    figure = plots.recovery(RACE, ANCHORS)
    low, high = figure.axes[0].get_ylim()
    ticks = figure.axes[0].yaxis.get_major_ticks()
    labels = [tick.label1.get_text() for tick in ticks if low <= tick.get_loc() <= high]
    assert labels == ["50", "100", "200", "500", "1,000", "2,000", "5,000"][:len(labels)] and len(labels) >= 6
    ticks = [tick.label1.get_text() for tick in figure.axes[0].xaxis.get_major_ticks()]
    assert {"0", "100k", "200k", "300k"} <= set(ticks)
    assert [base.tokens(value) for value in (0, 40_960, 3e7, 1e9)] == ["0", "40.96k", "30M", "1B"]


@pytest.mark.parametrize("figure", [
    lambda: plots.recovery([], None), lambda: plots.levers([]), lambda: plots.pretraining({}),
    lambda: plots.recovery([run("hybrid_rs")], ANCHORS), lambda: plots.levers([run("subclone")]),
    lambda: plots.recovery([{"arm": "mine", "seed": 0,
                             "curve": [{"tokens": 0, "ppl": 9.0}, {"tokens": 5, "ppl": None}]}]),
])
def test_little_or_broken_data_still_gives_a_figure(figure):
    assert drawn(figure()).startswith(b"<?xml")


def test_figures_leave_nothing_open_and_no_setting_changed():
    before = plt.get_fignums(), dict(plt.rcParams)
    drawn(plots.levers(RACE))
    assert (plt.get_fignums(), dict(plt.rcParams)) == before


def test_a_notebook_shows_each_figure_once_as_the_same_svg_every_time():
    code = """
from scaleop import plots
plots.notebook()
race = [{"arm": arm, "seed": 0, "zero_shot": 9.0 + i, "final": {"value": 5.0 + i}, "curve": []}
        for i, arm in enumerate(("subclone", "hybrid"))]
"""
    cells = [nbformat.v4.new_code_cell(text) for text in (code, "plots.levers(race)", "plots.levers(race)")]
    book = nbformat.v4.new_notebook(cells=cells)
    NotebookClient(book, kernel_name="python3").execute()
    (first,), (second,) = book.cells[1].outputs, book.cells[2].outputs
    assert first.data["image/svg+xml"].startswith("<?xml") and "image/png" not in first.data
    assert first.data["image/svg+xml"] == second.data["image/svg+xml"]


def test_spread_keeps_order_gaps_and_bounds():
    wanted = np.array([0.5, 0.1, 0.51, 0.52])
    places = base.spread(wanted, 0.1)
    assert list(np.argsort(places)) == list(np.argsort(wanted))
    assert np.diff(np.sort(places)).min() >= 0.1 - 1e-9
    assert places[1] == pytest.approx(0.1)  # far from the others: where it wants to be
    assert places[[0, 2, 3]].mean() == pytest.approx(0.51)  # the crowd spreads about its middle
    assert base.spread(np.array([0.99, 1.0]), 0.1).max() <= 1


def test_every_arm_of_the_ladder_has_a_colour_of_its_own():
    assert set(ORDER) <= set(plots.COLOURS) and len(set(plots.COLOURS.values())) == len(plots.COLOURS)

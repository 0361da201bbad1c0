"""Figures of sections 7.3 to 7.6: the right lines and points with the right numbers, names where they belong."""

import io
import math
from itertools import combinations

import numpy as np
import pytest
from matplotlib.colors import to_hex

from scaleop import plots
from scaleop import published as paper
from scaleop.claims import PAPER_ARMS, TABLE_8, seeds_in_paper
from tests.races import WORLD, results, run
from tests.test_plots import drawn, lines, names

ANCHORS = {"reference": {"name": "sibling", "ppl": 25.0, "quick_ppl": 24.0}}
CHANGED = [run(arm, 0, *WORLD[arm]) for arm in WORLD if "." not in arm]


def budget(arm: str, tokens: int, every: int, end: float, seed: int = 0) -> dict:
    """A run of `tokens` that is evaluated every `every`."""
    curve = [{"tokens": seen, "ppl": 1000.0 * (end / 1000) ** (seen / tokens)} for seen in range(0, tokens + 1, every)]
    return {"arm": arm, "seed": seed, "curve": curve, "zero_shot": 1000.0, "final": {"value": end}}


BUDGETS = {"": [budget("random", 4000, 1000, 300.0), budget("hybrid_rs", 4000, 1000, 60.0),
                budget("hybrid_rs", 4000, 1000, 80.0, 1), budget("hybrid", 4000, 1000, 90.0),
                budget("stride", 4000, 1000, 99.0)],
           "long": [budget("hybrid", 13_000, 1000, 70.0)],
           "convergence": [budget("random", 130_000, 26_000, 57.0), budget("hybrid_rs", 130_000, 26_000, 40.0)],
           "depth": [budget("subclone", 4000, 1000, 200.0), budget("hybrid", 4000, 1000, 190.0)]}


def test_figure_4_is_recovery_with_bands_that_say_what_they_are():
    depth = results()["depth"]
    (axis,) = plots.recovery(depth, ANCHORS, title="The depth pair").axes
    assert axis.get_title("left") == "The depth pair" and len(axis.collections) == 5
    np.testing.assert_allclose(lines(axis)["hybrid"].get_ydata()[-1], 117)  # the mean of three
    said = [text.get_text() for text in axis.texts if text.get_gid() == "note"]
    assert said == ["dashed: sibling, trained as usual\nbands: from the least to the most of the seeds"]
    (alone,) = plots.recovery([depth[0]]).axes
    assert not [text for text in alone.texts if text.get_gid() == "note"]


def test_changed_arms_have_colours_of_their_own_and_are_dotted():
    (axis,) = plots.recovery([run("hybrid_rs"), run("hybrid_rs_act"), run("hybrid_rs_distill")]).axes
    found = lines(axis)
    assert found["hybrid_rs"].get_linestyle() == "-" and found["hybrid_rs_act"].get_linestyle() == ":"
    assert len({line.get_color() for line in found.values()}) == 3
    assert set(TABLE_8) < set(plots.COLOURS)


def test_budgets_draws_each_arm_that_ran_at_several():
    (axis,) = plots.budgets(BUDGETS, ANCHORS).axes
    found = lines(axis)
    assert set(found) == {"random", "hybrid", "hybrid_rs", "sibling"} == set(names(axis))  # stride ran once
    assert list(found["hybrid_rs"].get_xdata()) == [26_000 * i for i in range(1, 6)]  # no line from an unmeasured start
    assert found["hybrid_rs"].get_ydata()[-1] == pytest.approx(40)
    assert list(found["hybrid"].get_xdata()[:2]) == [0, 1000] and found["hybrid"].get_xdata()[-1] == 13_000
    short = {line.get_label(): line for line in axis.lines}["_hybrid_rs "]
    assert short.get_ydata()[-1] == pytest.approx(70) and short.get_xdata()[-1] == 4000  # the mean of two seeds
    assert (axis.get_xscale(), axis.get_yscale()) == ("symlog", "log")
    said = " ".join(text.get_text() for text in axis.texts)
    assert "tokens: 4k dotted, 13k dashed, 130k solid" in said
    end = next(each for each in axis.collections if to_hex(each.get_color()[0]).upper() == plots.COLOURS["hybrid"])
    assert end.get_segments()[0][:, 0].tolist() == [13_000, 130_000]  # joins the line's end to its name


def test_budgets_sets_the_authors_runs_below():
    _, axis = plots.budgets(BUDGETS, ANCHORS, paper.curves(), paper.anchors()).axes
    assert set(lines(axis)) == {"random", "subclone_rs", "hybrid_rs", "Pythia-410M"}


def test_one_budget_alone_shows_all_its_arms():
    (axis,) = plots.budgets({"": BUDGETS[""], "long": []}).axes
    assert set(lines(axis)) == {"random", "hybrid_rs", "hybrid", "stride"}


def test_paired_seeds_joins_what_shares_a_seed():
    ours = [run("subclone_rs", seed, end=80.0 + seed) for seed in (0, 1, 2)]
    ours += [run("hybrid_rs", seed, end=60.0 + 5 * seed) for seed in (0, 1)] + [run("hybrid_rs", 7, end=1.0)]
    axis, theirs = plots.paired_seeds(ours, (("subclone_rs", "hybrid_rs"),), seeds_in_paper(TABLE_8)).axes
    joined = {line.get_label(): list(line.get_ydata()) for line in axis.lines}
    assert joined == {"_subclone_rs hybrid_rs 0": [80.0, 60.0], "_subclone_rs hybrid_rs 1": [81.0, 65.0]}
    bars = [each.get_segments()[0] for each in axis.collections if hasattr(each, "get_segments")]
    assert [bar[0][1] for bar in bars] == [80.5, 62.5]  # means over the shared seeds
    assert [line.get_ydata().tolist() for line in theirs.lines] == [[86.37, 83.02], [93.71, 86.03], [88.94, 82.82]]
    assert axis.get_yscale() == "linear" and [text.get_text() for text in axis.get_xticklabels()] == [
        "subclone_rs", "hybrid_rs"]
    labels = {text.get_text(): text for text in theirs.texts if text.get_gid() == "seed"}
    assert set(labels) == {"seed 0", "seed 1", "seed 2"}
    boxes = [text.get_window_extent() for text in labels.values()]
    assert not [pair for pair in combinations(boxes, 2) if pair[0].overlaps(pair[1])]  # 83.02 and 82.82 lie close


def test_paired_seeds_sets_pairs_side_by_side_and_leaves_out_what_diverged():
    pairs = (("subclone_rs", "hybrid_rs"), ("subclone_rs_act", "hybrid_rs_act"))
    (axis,) = plots.paired_seeds(results()[""], pairs).axes
    assert len(axis.lines) == 6 and [text.get_text() for text in axis.get_xticklabels()][2:] == [
        "subclone_rs\n_act", "hybrid_rs\n_act"]
    ends = [run("subclone_rs", 0, end=80.0), {**run("hybrid_rs"), "final": {"value": math.nan}}]
    (axis,) = plots.paired_seeds(ends).axes
    assert not axis.lines


def test_levers_has_a_panel_a_kind_of_change():
    figure = plots.levers(CHANGED, paper.race())
    titles = [axis.get_title("left") for axis in figure.axes]
    assert titles == ["Bias", "Activation scores", "Distillation", "The same in the paper: Table 2"]
    bias, scores, distillation, theirs = figure.axes
    corners = {"subclone", "hybrid", "subclone_rs", "hybrid_rs"}
    assert set(names(bias)) == corners | {"subclone_bias", "hybrid_bias", "hybrid_rs_bias"}
    assert set(names(scores)) == corners | {"subclone_rs_act", "hybrid_rs_act"}
    assert set(names(distillation)) == corners | {"subclone_rs_distill", "hybrid_rs_distill"}
    assert set(names(theirs)) == set(PAPER_ARMS)
    arrow = next(text for text in scores.texts if text.get_gid() == "hybrid_rs to hybrid_rs_act")
    assert tuple(arrow.xyann) == WORLD["hybrid_rs"] and tuple(arrow.xy) == WORLD["hybrid_rs_act"]
    points = scores.collections[0]
    order = points.get_gid().split()
    fill = {arm: to_hex(points.get_facecolors()[i]) for i, arm in enumerate(order)}
    edge = {arm: to_hex(points.get_edgecolors()[i]) for i, arm in enumerate(order)}
    assert fill["hybrid_rs_act"] == "#ffffff" and edge["hybrid_rs_act"] == plots.COLOURS["hybrid_rs_act"].lower()
    assert fill["hybrid_rs"] == plots.COLOURS["hybrid_rs"].lower()
    for axis in figure.axes:
        boxes = [text.get_window_extent() for text in names(axis).values()]
        assert not [pair for pair in combinations(boxes, 2) if pair[0].overlaps(pair[1])]


def test_notes_are_set_in_rows():
    arms = [*(run(arm) for arm in ("subclone", "hybrid", "subclone_rs")), run("hybrid_rs", 0, 800.0, 90.0),
            run("hybrid_rs_own", 0, 700.0, 80.0)]
    (axis,) = plots.levers(arms).axes
    notes = [text for text in axis.texts if text.get_gid() == "note"]
    assert [text.get_text().partition(" ")[2] for text in notes] == ["compensation", "rescale", "own inputs"]
    heights = {round(text.get_window_extent().y0) for text in notes}
    assert len(heights) == 1 and axis.get_window_extent().y1 < min(heights)


def solve(rule: str, ridge: float, **more: float) -> dict:
    return {"rule": rule, "ridge": ridge, "condition": 100 * ridge, "effective_rank": 30.0, "norm_ratio": 1.5, **more}


def solved(arm: str, rule: str, ridge: float) -> dict:
    """A result with the solves of two blocks."""
    return {"arm": arm, "seed": 0, "made": {"solves": {
        f"{block}.{role}": solve(rule, ridge * (block + 1) * (2 if role == "O" else 3))
        for block in (0, 1) for role in ("O", "MLP_DOWN")}}}


def test_solves_draws_each_diagnostic_by_block_rule_and_readout():
    given = [solved("hybrid", "mean_diagonal", 1.0), solved("hybrid_rs", "mean_diagonal", 1.0),  # the same again
             solved("hybrid_rs_spectrum", "spectrum", 5.0), solved("hybrid_rs_own", "mean_diagonal", 2.0),
             {"arm": "random", "seed": 0, "made": {}}]
    figure = plots.solves(given)
    ridge, condition, rank, norms = figure.axes
    assert set(names(ridge)) == {"mean_diagonal", "spectrum", "hybrid_rs_own"}
    all_lines = {line.get_label(): line.get_xydata().tolist() for line in ridge.lines if " " in line.get_label()
                 or not line.get_label().startswith("_")}
    assert all_lines == {"_mean_diagonal O": [[0, 2], [1, 4]], "mean_diagonal": [[0, 3], [1, 6]],
                         "_spectrum O": [[0, 10], [1, 20]], "spectrum": [[0, 15], [1, 30]],
                         "_hybrid_rs_own O": [[0, 4], [1, 8]], "hybrid_rs_own": [[0, 6], [1, 12]]}
    assert lines(condition)["spectrum"].get_ydata().tolist() == [1500, 3000] and condition.get_yscale() == "log"
    assert lines(rank)["all"].get_ydata().tolist() == [30, 30]  # the same for all of them: one line
    assert norms.get_yscale() == "linear"
    assert len({line.get_color() for line in lines(ridge).values()}) == 3
    assert [text.get_text() for text in ridge.texts if text.get_gid() == "note"] == ["─●─ O", "╌■╌ MLP_DOWN"]
    given[3]["made"]["solves"]["0.O"]["effective_rank"] = 20.0  # its own moments
    rank = plots.solves(given).axes[2]
    assert set(lines(rank)) == {"mean_diagonal, …", "hybrid_rs_own"}
    assert lines(rank)["mean_diagonal, …"].get_color() == lines(ridge)["mean_diagonal"].get_color()


def test_solves_of_older_results_show_what_they_recorded():
    old = {"arm": "hybrid", "seed": 0, "made": {"solves": {"0.O": {"ridge": 2.0, "condition": 9.0, "norm_ratio": 1.0}}}}
    figure = plots.solves([old])
    assert [axis.get_title("left") for axis in figure.axes] == [
        "Ridge", "Condition number of the damped moments", "Fitted rows over selected rows"]
    assert set(names(figure.axes[0])) == {"hybrid"}


def test_blocks_are_in_the_order_of_numbers():
    many = {"hybrid": {f"{block}.O": float(block + 1) for block in (10, 2, 0, 1)}}
    (axis,) = plots.variances(many).axes
    assert lines(axis)["hybrid"].get_xydata().tolist() == [[0, 1], [1, 2], [2, 3], [10, 11]]


def test_variances_has_a_panel_a_readout_and_the_donor_at_one():
    figure = plots.variances({"hybrid": {"0.O": 0.9, "0.MLP_DOWN": 1.1, "1.O": 0.8, "1.MLP_DOWN": 1.2},
                              "hybrid_rs": {"0.O": 1.9, "0.MLP_DOWN": 2.1, "1.O": 1.8, "1.MLP_DOWN": 2.2}})
    titles = [axis.get_title("left") for axis in figure.axes]
    assert titles == ["Variance that O writes", "Variance that MLP_DOWN writes"]
    for axis, ends in zip(figure.axes, ([0.8, 1.8], [1.2, 2.2]), strict=True):
        assert [line.get_ydata()[-1] for line in lines(axis).values()] == ends
        assert to_hex(lines(axis)["hybrid_rs"].get_color()).upper() == plots.COLOURS["hybrid_rs"]
        (donor,) = (line for line in axis.lines if line.get_label() == "_donor")
        assert list(donor.get_ydata()) == [1, 1]


@pytest.mark.parametrize("figure", [
    lambda: plots.budgets({}), lambda: plots.budgets({"": []}, ANCHORS), lambda: plots.paired_seeds([]),
    lambda: plots.paired_seeds([], ()), lambda: plots.solves([]), lambda: plots.variances({}),
    lambda: plots.solves([solved("hybrid", "mean_diagonal", 1.0)]),
    lambda: plots.budgets({"": [{"arm": "mine", "seed": 0, "curve": [{"tokens": 0, "ppl": 9.0}]}]}),
])
def test_little_data_still_gives_a_figure(figure):
    assert drawn(figure()).startswith(b"<?xml")


def test_figures_are_the_same_bytes_every_time():
    plots_twice = []
    for _ in range(2):
        file = io.BytesIO()
        plots.solves([solved("hybrid", "mean_diagonal", 1.0)]).savefig(file, format="png", metadata={"Software": None})
        plots_twice.append(file.getvalue())
    assert plots_twice[0] == plots_twice[1]

"""Figures of section 7.6's study: the right lines with the right numbers, and every name beside its line."""

import numpy as np
import pytest

from scaleop.plots.base import RULE_COLOURS
from scaleop.plots.conditioning import by_share, by_width
from scaleop.plots.scale import SPARE, solves
from scaleop.ridge import RULES
from scaleop.solves import SINGLE

LEVEL = {"mean_diagonal": 1.1, "spectrum": 1.6, "holdout": 1.05, "clamp": 1.1, SINGLE: 1.2}


def rows():
    """Two exponents and two shares of the mean; errors grow with k / N, by rule."""
    return [{"exponent": exponent, "mean_share": share, "width": width, "positions": positions, "seed": seed,
             "rule": rule, "lambda": 1e-3, "condition": width * 100.0 * level, "effective_rank": 9.0,
             "error": 0.1 * level * (1 + 100 * width / positions + 0.01 * seed), "floor": 0.1, "selected": 0.5,
             "norm_ratio": 1.5 / level, "floor_norm": 1.4, "row_ratio": 1.6, **({"off": 0.1} if rule == SINGLE else {})}
            for exponent in (1.0, 1.5) for share in (0.0, 0.9) for positions in (12_800, 128_000)
            for width in (512, 1024, 2048) for seed in (0, 1) for rule, level in LEVEL.items()]


def lines(axis):
    return {line.get_label(): line for line in axis.lines if not line.get_label().startswith("_")}


def test_by_width_draws_each_rule_in_three_panels():
    condition, error, norm = by_width(rows(), 1.5, 0.9).axes
    for axis in (condition, error, norm):
        assert set(lines(axis)) == {rule.replace("_", " ") for rule in RULE_COLOURS}
        assert {text.get_text() for text in axis.texts if text.get_gid() == "name"} == set(lines(axis))
        assert axis.get_xscale() == axis.get_yscale() == "log"
        assert [tick.get_text() for tick in axis.get_xticklabels()] == ["512", "1,024", "2,048"]
    widths = np.array([512, 1024, 2048])
    np.testing.assert_allclose(lines(condition)["spectrum"].get_xydata(), np.stack([widths, 160.0 * widths], axis=1))
    np.testing.assert_allclose(lines(error)["holdout"].get_ydata(), 1.05 * (1.005 + widths / 1280) - 1)  # of two seeds
    np.testing.assert_allclose(lines(norm)["mean diagonal, fp32"].get_ydata(), 1.5 / 1.2)
    dotted = {line.get_label(): line for axis in (error, norm) for line in axis.lines}
    np.testing.assert_allclose(dotted["_noise"].get_ydata(), widths / (127_999 - widths))
    np.testing.assert_allclose(dotted["_floor_norm"].get_ydata(), 1.4)
    assert "rank^-1.5, a mean of 90% of the energy" in " ".join(text.get_text() for text in condition.texts)


def test_a_rule_has_one_colour_in_the_study_and_on_the_pair():
    recorded = [{"arm": rule, "made": {"solves": {"0.O": {"rule": rule, "ridge": 1.0 + number}}}}
                for number, rule in enumerate(RULES)]
    (pair,), study = solves(recorded).axes, by_width(rows(), 1.5).axes[0]
    for rule in RULES:
        same = {lines(pair)[rule].get_color(), lines(study)[rule.replace("_", " ")].get_color()}
        assert same == {RULE_COLOURS[rule]}
    assert len({*RULE_COLOURS.values(), *SPARE}) == len(RULE_COLOURS) + len(SPARE)


def test_by_share_draws_each_width_against_its_share_of_positions():
    axes = by_share(rows()).axes
    assert len(axes) == 4
    for axis in axes:
        found = lines(axis)
        assert list(found) == ["512 inputs", "1,024 inputs", "2,048 inputs"]
        np.testing.assert_allclose(found["1,024 inputs"].get_xdata(), [0.008, 0.08])
        np.testing.assert_allclose(found["1,024 inputs"].get_ydata(), 1.1 * (1.005 + 100 * np.array([0.008, 0.08])) - 1)
        (noise,) = (line for line in axis.lines if line.get_label() == "_noise")
        x, y = noise.get_xydata().T
        assert (x[0], x[-1]) == pytest.approx((0.004, 0.16))
        np.testing.assert_allclose(y, x / (1 - x))


def test_settings_that_were_not_run_are_refused():
    with pytest.raises(ValueError, match="no rows with exponent 3"):
        by_width(rows(), 3)

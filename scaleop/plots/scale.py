"""Figures of section 7.6: what the compensation solves looked like block by block, and what the read-outs write."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from scaleop.plots.base import OTHER, RULE_COLOURS, finish, name_lines, panels, style, title_of
from scaleop.plots.race import COLOURS

DIAGNOSTICS = {  # of a solve: title, axis label, log axis?
    "ridge": ("Ridge", "λ (log)", True), "condition": ("Condition number of the damped moments", "ratio (log)", True),
    "effective_rank": ("Effective rank of the moments", "directions", False),
    "norm_ratio": ("Fitted rows over selected rows", "ratio of norms", False)}
SPARE = ("#E69F00", "#56B4E9", "#8C6D31", "#000000")  # for arms whose rule has its colour already
STYLES = ("-", (0, (4, 2)), (0, (1, 1.4)))  # by role
MARKERS = ("o", "s", "^")


def solves(results: Iterable[dict[str, Any]]) -> Figure:
    """By block, what every compensation solve recorded: lambda, condition number, effective rank and norm ratio, a
    panel each; a colour a ridge rule, a line style a read-out.

    `results` as the race gives them; those without `made["solves"]` are left out, and so are repetitions (hybrid_rs's
    solves are hybrid's). A line is named after its rule, or after its arm where another has the rule already.
    """
    series: dict[str, dict[str, dict[str, Any]]] = {}
    for result in results:
        found = result.get("made", {}).get("solves")
        if found and found not in series.values():
            rule = str(next(iter(found.values())).get("rule", result["arm"]))
            series[result["arm"] if rule in series else rule] = found
    colours = RULE_COLOURS | dict(zip((name for name in series if name not in RULE_COLOURS), SPARE, strict=False))
    drawn = {what: {name: values for name, found in series.items() if (values := _values(found, what))}
             for what in DIAGNOSTICS}
    drawn = {what: lines for what, lines in drawn.items() if lines} or {"ridge": {}}
    with mpl.rc_context(style()):
        figure, axes = panels(len(drawn))
        figure.set_size_inches(5.8, 3.4 * len(drawn))
        names = []
        for axis, (what, lines) in zip(axes, drawn.items(), strict=True):
            title, label, log = DIAGNOSTICS[what]
            once, shared = _once(lines)
            palette = colours | {new: colours[old] for new, old in shared.items()}
            names.append(_by_block(axis, once, palette, title, label, log))
        return finish(figure, names)


def variances(measured: Mapping[str, Mapping[str, float]]) -> Figure:
    """By block, the variance that each arm's read-outs write before training over the donor's, a panel a read-out.

    `measured`: {arm: {"<block>.<role>": ratio}}, as `suspects.variance_ratios` gives them. 1 (dashed) is a stream that
    grows as the donor's does.
    """
    roles = list(dict.fromkeys(place.partition(".")[2] for found in measured.values() for place in found)) or [""]
    with mpl.rc_context(style()):
        figure, axes = panels(len(roles))
        figure.set_size_inches(5.8, 3.9 * len(roles))
        names = []
        for axis, role in zip(axes, roles, strict=True):
            lines = {arm: {place: value for place, value in found.items() if place.partition(".")[2] == role}
                     for arm, found in measured.items()}
            axis.axhline(1, color="#222222", linestyle=(0, (5, 3)), linewidth=1.2, label="_donor")
            title = f"Variance that {role} writes"
            names.append(_by_block(axis, lines, COLOURS, title, "over the donor's (log)", True))
        return finish(figure, names)


def _once(lines: Mapping[str, dict[str, float]]) -> tuple[dict[str, dict[str, float]], dict[str, str]]:
    """Lines that coincide drawn once (effective ranks do, whatever the ridge): them by name, and for a shared line
    {its name: the first line's}."""
    groups: dict[tuple[Any, ...], list[str]] = {}
    for name, values in lines.items():
        groups.setdefault(tuple(sorted(values.items())), []).append(name)
    named = {names[0] if len(names) == 1 else "all" if len(groups) == 1 else f"{names[0]}, …": names[0]
             for names in groups.values()}
    return {name: lines[first] for name, first in named.items()}, {
        name: first for name, first in named.items() if name != first}


def _values(found: Mapping[str, Mapping[str, Any]], what: str) -> dict[str, float]:
    return {place: solve[what] for place, solve in found.items() if what in solve}


def _by_block(axis: Axes, lines: Mapping[str, Mapping[str, float]], colours: Mapping[str, str], title: str, label: str,
              log: bool) -> Callable[[], None]:
    """Lines of {name: {"<block>.<role>": value}} over blocks. Returns what names them."""
    roles = list(dict.fromkeys(place.partition(".")[2] for values in lines.values() for place in values))
    last = 0
    for name, values in lines.items():
        for number, role in enumerate(roles):
            points = sorted((int(place.partition(".")[0]), value) for place, value in values.items()
                            if place.partition(".")[2] == role)
            if points:
                axis.plot(*zip(*points, strict=True), color=colours.get(name, OTHER), linestyle=STYLES[number % 3],
                          marker=MARKERS[number % 3], markersize=5, linewidth=2, clip_on=False,
                          label=name if number == len(roles) - 1 else f"_{name} {role}")
                last = max(last, points[-1][0])
    axis.set(xlabel="block", ylabel=label, xlim=(-0.05 * max(last, 1), max(last, 1)),
             yscale="log" if log else "linear")
    axis.xaxis.set_major_locator(MaxNLocator(8, integer=True))
    key = ((f"{mark} {role}", OTHER) for mark, role in zip(("─●─", "╌■╌", "·▲·"), roles, strict=False))
    title_of(axis, title, *(key if len(roles) > 1 else ()))
    return name_lines(axis)

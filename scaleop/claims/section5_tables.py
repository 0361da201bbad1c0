"""Tables 4 and 5 with our numbers beside the paper's, and the two-way table of mixed arms."""

from collections.abc import Iterable, Mapping
from typing import Any

import pandas as pd

from scaleop.claims.standings import show
from scaleop.published import published

AXES = ("residual", "qk", "vo", "mlp")
MODELS = {  # Table 5's rows: what it is, the paper's id
    "donor": ("the donor", "anchor.real_1.4b"), "reference": ("its trained sibling", "anchor.real_410m"),
    "random": ("random weights", "anchor.random_410m"),
    "own": ("projected, the sibling's norms (diagnostic)", "anchor.proj_ln_small"),
    "projected": ("projected, norms projected", "anchor.proj_ln_project"),
    "selected": ("projected, norms selected", None),
    "neutral": ("projected, norms neutral", "anchor.proj_ln_neutral"),
    "subclone": ("full selection, norms selected", "v3.t5.structured_selection")}


def printed(name: str | None) -> str:
    """The paper's spelling of a number, - where there is none."""
    return "-" if name is None else published(name)["printed"]


def large(value: float) -> str:
    """A perplexity as `show` spells it, in powers of ten where that would run to a line."""
    return show(value) if value < 1e9 else f"{value:.2g}"


def table4(fits: Mapping[str, Mapping[str, Any]]) -> pd.DataFrame:
    """Table 4 by weight type: relative Frobenius errors, means over blocks; the paper's in the same row.

    Free share is the fit's free numbers per number it explains; `shuffled` the pooled error of the same fit (ALS) to
    the target's entries in random order.
    """
    return pd.DataFrame([{
        "type": role, "target-free, paper": printed(f"proj.err.{role}"), "target-free, ours": row["target_free"],
        "operator, paper": printed(f"oper.err.{role}"), "Adam, ours": row["adam"]["error"],
        "ALS, ours": row["als"]["error"], "ALS, shuffled target": row["als_shuffled"], "free share": row["free_share"]}
        for role, row in fits.items()])


def passed(row: Mapping[str, Any]) -> float | None:
    """Seconds after which ALS's error was no higher than where Adam ended; None if it never was."""
    return next((seconds for seconds, error in row["als"]["curve"] if error <= row["adam"]["pooled"]), None)


def race_of_fits(fits: Mapping[str, Mapping[str, Any]]) -> pd.DataFrame:
    """Adam and ALS side by side: pooled errors, steps or sweeps, seconds, and when ALS got to where Adam ends."""
    rows = []
    for role, row in fits.items():
        adam, als = row["adam"], row["als"]
        there = passed(row)
        rows.append({"type": role, "start": row["start"], "Adam": adam["pooled"], "ALS": als["pooled"],
                     "Adam, steps": adam["steps"], "ALS, sweeps": als["steps"], "Adam, s": adam["seconds"],
                     "ALS, s": als["seconds"],
                     "ALS at Adam's end after, s": "never" if there is None else f"{there:.2f}",
                     "of Adam's time": "-" if there is None else f"{there / adam['seconds']:.1%}"})
    return pd.DataFrame(rows)


def table5(scores: Mapping[str, Mapping[str, Any]]) -> pd.DataFrame:
    """Table 5: perplexities, the paper's beside ours, with a greedy sample of each model."""
    return pd.DataFrame([
        {"model": what, "paper": printed(name), "ours": large(scores[key]["ppl"]),
         "greedy sample": scores[key]["sample"].replace("\n", " ⏎ ")}
        for key, (what, name) in MODELS.items() if key in scores])


def two_way(runs: Iterable[Mapping[str, Any]]) -> pd.DataFrame:
    """Which blending hurts: perplexity before training and at the shortened budget, by axis and direction.

    One row an axis; under "blend it alone" the full selection with that axis blended, under "keep it alone" the full
    projection with that axis selected. The corners come first.
    """
    by_arm = {run["arm"]: run for run in runs}

    def cells(arm: str | None) -> list[str]:
        run = by_arm.get(arm)
        return ["-", "-"] if run is None else [large(run["zero_shot"]), large(run["final"]["value"])]

    rows = [("random weights", *cells("random"), "-", "-"), ("none (the corners)", *cells("subclone"),
                                                             *cells("projection")),
            ("norms neutral", *cells("subclone_neutral"), "-", "-")]
    rows += [(axis, *cells(f"subclone_blend_{axis}"), *cells(f"projection_keep_{axis}")) for axis in AXES]
    return pd.DataFrame(rows, columns=["axis", "selection, blend it alone: start", "end",
                                       "projection, keep it alone: start", "end "])


def factors(runs: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The two-way table as factors, tidy: {axis, direction, stage, factor} of perplexity against what was swapped.

    "blend" is the selection with the axis blended over the selection, "keep" the projection with the axis selected
    over the projection; "norms" is the selection with neutral norms over the selection, and the residual axis is
    blended from there (a blended stream has neutral norms).
    """
    by_arm = {run["arm"]: run for run in runs}
    pairs = [("norms", "blend", "subclone_neutral", "subclone")]
    for axis in AXES:
        pairs += [(axis, "blend", f"subclone_blend_{axis}", "subclone_neutral" if axis == "residual" else "subclone"),
                  (axis, "keep", f"projection_keep_{axis}", "projection")]
    return [{"axis": axis, "direction": direction, "stage": stage, "factor": value(by_arm[arm]) / value(by_arm[base])}
            for axis, direction, arm, base in pairs if arm in by_arm and base in by_arm
            for stage, value in (("start", lambda run: run["zero_shot"]), ("end", lambda run: run["final"]["value"]))]

"""The paper's printed results in the form of race results, so that its own numbers can be asked its own claims.

Where the paper prints a mean only, or no perplexity before training, there is none here either.
"""

from collections.abc import Mapping
from typing import Any

from scaleop.claims.experiments import Experiments
from scaleop.claims.measured import Measured
from scaleop.claims.standings import Standings
from scaleop.published import anchors, curves, published, race
from scaleop.tasks import FLOORS

SEEDS = (0, 1, 2)
TABLE_8 = {"subclone_rs": "seeds.subclone_rs", "hybrid_rs": "seeds.hybrid_rs",
           "subclone_rs_act": "act.subclone_rs_act", "hybrid_rs_act": "act.hybrid_rs_act"}
"""{arm: where its seeds are in published/results.json}; the activation-scored pair is the later revision's."""
TABLE_9 = {arm: f"pairB.{arm}" for arm in ("random", "subclone", "hybrid", "subclone_rs", "hybrid_rs")}
TABLE_10 = ("random", "hybrid_rs", "hybrid", "subclone_rs")
DISTILLED = {f"{arm}{suffix}": f"distill.{arm}.{kind}" for arm in ("random", "subclone_rs", "hybrid_rs")
             for suffix, kind in (("", "b16"), ("_distill", "d16"))}
"""Of the later revision, all at batch 16: the undistilled runs are other ones than Table 8's."""
THEIRS = {"foreign_ppl": "c4_ppl_200k", "double_context_ppl": "wikitext_ppl_ctx2048_200k",
          "last_word": "lambada_openai_acc", "continuation": "hellaswag_acc", "definition": "arc_easy_acc",
          "two_choices": "piqa_acc"}
"""What `hardening.extended` measures, and the metric of Table 7 that each stands in for."""
ITEMS = {"last_word": 5153, "continuation": 10_042, "definition": 2_376, "two_choices": 1_838}  # of the paper's tasks


def printed(name: str) -> str:
    """A published number as printed; "-" where there is none."""
    try:
        return published(name)["printed"]
    except KeyError:
        return "-"


def number(name: str) -> float | None:
    """A published number with all digits known; None where there is none."""
    try:
        record = published(name)
    except KeyError:
        return None
    return record["value"] if record["more_digits"] is None else record["more_digits"]


def seeds_in_paper(where: Mapping[str, str]) -> list[dict[str, Any]]:
    """Per-seed ends of the arms in `where` (one of the tables above), as results."""
    return [_result(arm, seed, end, number(f"{name}.zero_shot") or number(f"ladder.{arm}.zero_shot"))
            for arm, name in where.items() for seed in SEEDS if (end := number(f"{name}.s{seed}")) is not None]


def in_paper() -> Experiments:
    """The paper's races by role: the primary pair with its seeds, its longer budgets, the depth and the scale pair."""
    seeds = seeds_in_paper(TABLE_8)
    have = {result["arm"] for result in seeds}
    stored = {curve["arm"]: curve["points"] for curve in curves() if curve["run"].startswith("1b")}
    parts = {
        "": [*seeds, *(result for result in race() if result["arm"] not in have)],
        "long": [_result(arm, 0, number(f"b100.{arm}.final")) for arm in ("subclone", "hybrid")],
        "convergence": [_result(arm, 0, number(f"b1000.{arm}.s0.final"), number(f"b1000.{arm}.s0.zero_shot"), points)
                        for arm, points in stored.items()],
        "depth": seeds_in_paper(TABLE_9),
        "depth_long": [_result(arm, 0, number(f"pairB.b100.{arm}")) for arm in ("subclone", "hybrid")],
        "scale": [_result(arm, 0, number(f"scale.{arm}.final")) for arm in TABLE_10]}
    return Experiments({role: Standings(results, anchors() if role in ("", "convergence") else None)
                        for role, results in parts.items()})


def extended_in_paper() -> Measured:
    """Table 7 in the form of `hardening.extended`, and what A.6 prints of the depth pair (no standard errors there)."""
    def cell(arm: str, metric: str) -> Any:
        value = number(f"ext.{arm}.{THEIRS[metric]}")
        return _task(metric, value) if metric in FLOORS else value

    values = {arm: {"heldout_ppl": number(f"ladder.{arm}.final"), **{metric: cell(arm, metric) for metric in THEIRS}}
              for arm in ("random", "projection", "subclone", "hybrid")}
    for arm in ("random", "subclone", "hybrid"):
        kept = {"heldout_ppl": number(f"pairB.{arm}.s0"), "foreign_ppl": number(f"pairB.ext.{arm}.c4"),
                "double_context_ppl": number(f"pairB.ext.{arm}.ctx2048"),
                "last_word": _task("last_word", number(f"pairB.ext.{arm}.lambada"))}
        values[f"depth.{arm}"] = {name: value for name, value in kept.items() if value is not None}
    for arm in ("random", "subclone_rs", "hybrid_rs"):
        which = "s0" if arm == "random" else "mean"
        values[f"convergence.{arm}"] = {"heldout_ppl": number(f"b1000.{arm}.s0.final"),
                                        "double_context_ppl": number(f"ext1b.{arm}.{which}.wikitext_ppl_ctx2048_200k")}
    return Measured(values)


def _task(task: str, accuracy: float) -> dict[str, float]:
    items = ITEMS[task]
    return {"acc": accuracy, "stderr": (accuracy * (1 - accuracy) / (items - 1)) ** 0.5, "items": items,
            "floor": FLOORS[task]}


def _result(arm: str, seed: int, end: float, start: float | None = None, points: Any = ()) -> dict[str, Any]:
    curve = [{"tokens": tokens, "ppl": ppl} for tokens, ppl in points]
    return {"experiment": "paper", "arm": arm, "seed": seed, "zero_shot": start, "curve": curve,
            "final": {"value": end}}

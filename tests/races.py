"""Imagined races in which everything the paper says of races is so, and what changes when a number does."""

from typing import Any

from scaleop.claims import FAILS, RACE_CLAIMS, Experiments, Standings, evaluate

SEEDS = (1.0, 1.02, 0.98)  # what each seed makes of an end
ONE = ("long", "convergence", "depth_long", "scale", "scale_control")  # roles with seed 0 only
ANCHORS = {"donor": {"name": "big", "ppl": 20.0}, "reference": {"name": "sibling", "ppl": 25.0}, "vocabulary": 4096}
WORLD = {  # (start, end) by arm
    "random": (4200, 900), "random_pythia": (4150, 800), "projection": (1900, 500), "stride": (1800, 300),
    "subclone": (1200, 200), "subclone_iso": (1500, 150), "hybrid": (1000, 100), "subclone_rs": (3000, 80),
    "hybrid_rs": (1700, 60), "subclone_rs_act": (5000, 75), "hybrid_rs_act": (2500, 50), "random_distill": (4200, 850),
    "subclone_rs_distill": (3000, 85), "hybrid_rs_distill": (1700, 55), "subclone_bias": (1100, 180),
    "hybrid_bias": (900, 90), "hybrid_rs_bias": (1600, 58),
    "long.subclone": (1200, 90), "long.hybrid": (1000, 60),
    "long.random": (4200, 90), "long.subclone_rs": (3000, 50.2), "long.hybrid_rs": (1700, 50),
    "convergence.random": (4200, 57), "convergence.subclone_rs": (3000, 40.1), "convergence.hybrid_rs": (1700, 40),
    "depth.random": (4200, 1300), "depth.subclone": (5000, 118), "depth.hybrid": (4500, 117),
    "depth.subclone_rs": (6000, 116), "depth.hybrid_rs": (5500, 109),
    "depth_long.subclone": (5000, 75), "depth_long.hybrid": (4500, 76),
    "scale.random": (4200, 1400), "scale.subclone": (2500, 1300), "scale.hybrid": (2000, 776),
    "scale.subclone_rs": (3000, 572), "scale.hybrid_rs": (2500, 1213), "scale.hybrid_rs_spectrum": (2300, 560),
    "scale.hybrid_rs_holdout": (2400, 565), "scale.hybrid_rs_clamp": (2450, 570), "scale.hybrid_rs_own": (2400, 1100),
    "scale_control.subclone_rs": (3000, 80), "scale_control.hybrid_rs": (1700, 70)}
SOLVES = {"hybrid": (1, 500), "scale.hybrid": (1, 900), "scale.hybrid_rs": (1, 900),
          "scale.hybrid_rs_holdout": (2, 600), "scale.hybrid_rs_spectrum": (3, 400)}  # (ridge, condition)


NOT_SO = {"rescale-cancels", "levers-independent"}  # the paper's numbers say otherwise, and so does WORLD


def run(arm: str, seed: int = 0, start: float = 900.0, end: float = 100.0, experiment: str = "toy") -> dict[str, Any]:
    """A result whose curve falls geometrically from start to end in four evaluations."""
    curve = [{"step": 20 * i, "tokens": 1000 * i, "ppl": start * (end / start) ** (i / 4)} for i in range(5)]
    return {"experiment": experiment, "arm": arm, "seed": seed, "curve": curve, "zero_shot": start,
            "final": {"value": end}, "stream": {"sha256": f"stream of seed {seed}"},
            "seconds": {"build": 1.0, "train": 100.0}, "made": {}}


def results(changes: dict[str, Any] | None = None) -> dict[str, list[dict[str, Any]]]:
    """The imagined results by role. `changes`: {arm: (start, end)}, None leaves a number; a list is an end a seed."""
    found: dict[str, list[dict[str, Any]]] = {}
    for name, numbers in WORLD.items():
        role, _, arm = name.rpartition(".")
        start, end = (new if new is not None else old for new, old in zip(
            (changes or {}).get(name, (None, None)), numbers, strict=True))
        for seed, factor in enumerate(SEEDS[:1] if role in ONE else SEEDS):
            one = run(arm, seed, start, end[seed] if isinstance(end, list) else end * factor, f"toy {role}")
            if name in SOLVES:
                ridge, condition = SOLVES[name]
                one["made"]["solves"] = {f"{block}.O": {"ridge": ridge * (block + 1), "condition": condition + block}
                                         for block in range(3)}
            found.setdefault(role, []).append(one)
    return found


def experiments(found: dict[str, list[dict[str, Any]]]) -> Experiments:
    """Results by role as evidence."""
    return Experiments({role: Standings(runs, ANCHORS) for role, runs in found.items()})


def verdicts(evidence: Any) -> dict[str, str]:
    """Verdict by claim id, of all claims about races."""
    return {finding.claim.id: finding.verdict for finding in evaluate(RACE_CLAIMS, evidence)}


def flipped(changes: dict[str, Any]) -> set[str]:
    """The claims that no longer hold when the imagined results change so."""
    return {claim for claim, verdict in verdicts(experiments(results(changes))).items() if verdict == FAILS} - NOT_SO

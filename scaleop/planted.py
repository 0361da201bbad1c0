"""Section 6, positive control: plant a known signal of decreasing size in known noise. Down to where is it found?

The noise is the residual itself with its entries shuffled: same histogram, no structure. A signal of share s makes up
s of each residual's variance, which stays as it was: sqrt(1 - s) noise + sqrt(s) signal. Three kinds of signal:

    patch     the operator's patch under one fixed rotation of its 256 entries a type: what predictors look for
    shared    one matrix for all blocks of a type: what the cross-block cosine looks for
    low rank  a matrix of rank 4 a block: what the effective rank looks for
"""

import math
from collections.abc import Sequence
from typing import Any

import torch

from scaleop.predictors import (
    HIDDEN,
    PATCH,
    Stacks,
    cross_examine,
    examine,
    from_patches,
    held_out,
    inputs,
    repaired,
    targets,
    to_patches,
)
from scaleop.residuals import (
    LEVEL,
    Scores,
    compare,
    cosine_test,
    critical,
    effective_rank,
    rank_test,
    shuffled,
    sign_test,
    spectrum,
)

KINDS = ("patch", "shared", "low rank")
SHARES = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3)
RANK = 4
REPAIRINGS = 19  # controls of a rank test: p is 1 in 20 at best
DRAWS = 20  # of pure noise: how often each test finds something where there is nothing


def signal(kind: str, outputs: Stacks, seed: int = 0) -> dict[str, torch.Tensor]:
    """A signal of that kind, shaped as the operator's `outputs`, each type with standard deviation 1."""
    draw, found = torch.Generator().manual_seed(seed), {}
    for name, stack in outputs.items():
        blocks, out, into = stack.shape
        if kind == "patch":
            rotation = torch.linalg.qr(torch.randn(PATCH**2, PATCH**2, generator=draw)).Q
            planted = from_patches(to_patches(stack) @ rotation.T, (out, into))
        elif kind == "shared":
            planted = torch.randn(1, out, into, generator=draw).expand(blocks, -1, -1)
        elif kind == "low rank":
            left, right = (torch.randn(blocks, side, RANK, generator=draw) for side in (out, into))
            planted = left @ right.transpose(1, 2)
        else:
            raise ValueError(f"no signal of kind {kind!r}; there are: {', '.join(KINDS)}")
        found[name] = planted / planted.std()
    return found


def noise(residuals: Stacks, draw: int = 0) -> dict[str, torch.Tensor]:
    """The residuals with each block's entries shuffled; `draw` numbers the shuffles (none is a control's)."""
    return {name: shuffled(stack, 10_000 * (k + 1) + 1_000 * draw) for k, (name, stack) in enumerate(residuals.items())}


def plant(base: Stacks, signals: Stacks, share: float) -> dict[str, torch.Tensor]:
    """sqrt(1 - share) base + sqrt(share) signal, the signal scaled to the base's standard deviation, type by type."""
    if not 0 <= share <= 1:
        raise ValueError(f"share = {share} of the variance must lie between 0 and 1")
    return {name: math.sqrt(1 - share) * stack + math.sqrt(share) * stack.std() * signals[name]
            for name, stack in base.items()}


def ideal(share: float) -> float:
    """Error reduction of a predictor that knows the signal: 1 - sqrt(1 - share)."""
    return 1 - math.sqrt(1 - share)


def structure(residuals: Stacks) -> dict[str, dict[str, Any]]:
    """Tests 1 and 2 over all types together, as `{test: {"size", "found", ...}}`.

    Effective rank: mean deficit against a shuffle, found when fewer of all (type, block) pairs lie below than chance
    allows (sign test). Cosine: the largest over the types in units of chance, corrected for their number.
    """
    ranks = [(effective_rank(spectrum(stack)), effective_rank(spectrum(shuffled(stack, 500))))
             for stack in residuals.values()]
    gaps = torch.cat([control - real for real, control in ranks]).tolist()
    deficit = torch.cat([1 - real / control for real, control in ranks]).mean().item()
    tests = [cosine_test(stack) for stack in residuals.values()]
    largest = max((test["delta"] / test["sd"] for test in tests), key=abs)
    p = sign_test(gaps)
    return {"effective rank": {"size": deficit, "p": p, "found": p < LEVEL and deficit > 0},
            "cosine": {"size": largest, "p": None, "found": abs(largest) > critical(len(tests))}}


def learned(real: Scores, control: Scores, held: Sequence[int], name: str, folds: bool) -> dict[str, dict[str, Any]]:
    """A predictor's tests on the authors' split, and on all blocks if `folds`, as `{test: {"size", "found", ...}}`."""
    split = compare(real.of(held), control.of(held))
    patches, blocks = split["patches"], split["blocks"]
    size = {"size": patches["gap"], "reduction": split["reduction"], "low": patches["low"], "high": patches["high"]}
    found = {f"{name}: patches, one-sided": {**size, "p": patches["p_one"], "found": patches["p_one"] < LEVEL},
             f"{name}: patches, two-sided": {**size, "p": patches["p_two"],
                                             "found": patches["p_two"] < LEVEL and patches["gap"] > 0},
             f"{name}: reduction above zero": {**size, "p": None, "found": split["reduction"] > 0}}
    if blocks is not None:
        found[f"{name}: held-out blocks"] = {**size, "p": blocks["p_one"], "found": blocks["low"] > 0}
    if folds:
        whole = compare(real, control)
        found[f"{name}: all blocks, sign"] = {
            **size, "p": whole["p_sign"], "found": whole["p_sign"] < LEVEL and whole["patches"]["gap"] > 0}
    return found


def power(outputs: Stacks, residuals: Stacks, shares: Sequence[float] = SHARES,
          draws: int = DRAWS) -> list[dict[str, Any]]:
    """Every test on planted residuals: rows of `kind`, `share`, `draw`, `test`, `size`, `p`, `found`.

    Kind "none" is noise alone, drawn `draws` times: what is found there is a false alarm. Predictors are asked about
    "none" and "patch"; the linear one also in a cross-fit over all blocks, and (planted only: the test is exact) for
    its rank among re-pairings. About a minute at nano size.
    """
    signals = {kind: signal(kind, outputs) for kind in KINDS}
    cases = {("none", 0.0, draw): noise(residuals, draw + 1) for draw in range(draws)}
    base = noise(residuals)
    cases |= {(kind, share, 0): plant(base, signals[kind], share) for kind in KINDS for share in shares}
    tests = {case: structure(stacks) for case, stacks in cases.items()}
    asked = [case for case in cases if case[0] in ("none", "patch")]
    seen, held = inputs(outputs), held_out(len(next(iter(outputs.values()))))
    goals = torch.stack([targets(stacks) for case in asked for stacks in (cases[case], repaired(cases[case]))])
    straight, bent = cross_examine(seen, goals), examine(seen, goals, held, HIDDEN)
    for k, case in enumerate(asked):
        tests[case] |= learned(straight[2 * k], straight[2 * k + 1], held, "linear", folds=True)
        tests[case] |= learned(bent[2 * k], bent[2 * k + 1], held, f"MLP-{HIDDEN}", folds=False)
    planted = [case for case in asked if case[0] == "patch"]
    goals = torch.stack([targets(stacks) for case in planted for stacks in
                         (cases[case], *(repaired(cases[case], seed) for seed in range(REPAIRINGS)))])
    ranked = examine(seen, goals, held)
    for k, case in enumerate(planted):
        real, *controls = (result.reduction for result in ranked[k * (1 + REPAIRINGS) : (k + 1) * (1 + REPAIRINGS)])
        p = rank_test(real, controls)
        tests[case]["linear: among re-pairings"] = {"size": real - controls[0], "p": p, "found": p <= LEVEL}
    return [{"kind": kind, "share": share, "draw": draw, "test": test, **outcome}
            for (kind, share, draw), outcomes in tests.items() for test, outcome in outcomes.items()]


def detection(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """By kind and test: `smallest` share from which on every larger one is found (None: never), and false `alarms`."""
    tests = list(dict.fromkeys(row["test"] for row in rows))
    table = []
    for kind in dict.fromkeys(row["kind"] for row in rows if row["kind"] != "none"):
        for test in tests:
            mine = sorted((row["share"], row["found"]) for row in rows if (row["kind"], row["test"]) == (kind, test))
            nothing = [row["found"] for row in rows if (row["kind"], row["test"]) == ("none", test)]
            if mine:
                least = None
                for share, found in reversed(mine):
                    if not found:
                        break
                    least = share
                table.append({"kind": kind, "test": test, "smallest": least, "alarms": sum(nothing),
                              "draws": len(nothing)})
    return table

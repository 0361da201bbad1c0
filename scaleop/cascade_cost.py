"""What a cascade costs, in floating-point operations, and what training they would have paid for.

A comparison at equal compute gives a cascade's operations back to the other arms as tokens: training takes about
6 operations a weight and token (two for the forward pass, four for the backward pass). A cascade is no free start: on
the nano pair and on SmolLM2's a calibration token costs as much as three training tokens (5.0e7 and 1.1e9 operations),
half of it in the donor's passes and a third in Gram matrices.
"""

import math
from collections.abc import Iterable
from typing import Any

from scaleop.cascade_settings import Cascade
from scaleop.roles import Role, Stage
from scaleop.weights import keys
from scaleop.wiring import Shape, shape_of, wiring_of

EIGEN = 10  # times n^3: about what all eigenvalues and eigenvectors of a symmetric matrix take


def parameters(config: Any) -> int:
    """Weights of a model of that config, a tied embedding once."""
    shape = shape_of(config)
    return sum(math.prod(shape.size(axis) for axis in role.axes) for _, role in keys(wiring_of(config), shape.layers))


def worth_in_tokens(operations: float, target: Any) -> float:
    """Training tokens of the config `target` that as many operations would have paid for: operations / (6 weights)."""
    return operations / (6 * parameters(target))


class _Passes:
    """Operations a position of parts of a block's forward pass, norms and activations aside."""

    def __init__(self, stages: tuple[Stage, ...], shape: Shape, length: int) -> None:
        self.stages, self.shape = stages, shape
        self.attention = 4 * length * shape.heads * shape.head_dim  # scores and their use, for all pairs of positions

    def matrices(self, roles: Iterable[Role]) -> int:
        return sum(2 * math.prod(self.shape.size(axis) for axis in role.axes) for role in roles)

    def inputs(self, i: int) -> int:
        """Up to what the read-outs of stage i read, from the block's start."""
        stage, attends = self.stages[i], any(role.name == "O" for role in self.stages[i].read_outs)
        return self.until(i) + self.matrices(stage.read_ins) + attends * self.attention \
            + self.matrices(stage.read_outs[:-1])

    def until(self, i: int) -> int:
        """Up to the stream that stage i reads; i may be the number of stages: all of the block."""
        return 0 if i == 0 else self.inputs(i - 1) + self.matrices(self.stages[i - 1].read_outs[-1:])


def flops(settings: Cascade, donor: Any, target: Any, sequences: int, length: int) -> dict[str, float]:
    """{"donor", "small", "moments", "solves"}: operations of a cascade between two configs on so many calibration
    tokens: forward passes of either model, Gram matrices and what is mapped for them, eigendecompositions (estimated).

    A multiplication and an addition count as two; fp64 ones (all but the forward passes) as much as others. What is
    chosen before (scores, the second moments of compensation) is not counted, the basis of the stream is.
    """
    large, small, wiring = shape_of(donor), shape_of(target), wiring_of(target)
    stages, kept, positions = wiring.stages(target), small.layers, sequences * length
    theirs, ours = _Passes(stages, large, length), _Passes(stages, small, length)
    blended, last, k, d = settings.stream != "selected", len(stages) - 1, small.width, large.width
    total = {"donor": large.layers * theirs.until(len(stages)), "small": kept * ours.until(len(stages)), "moments": 0}
    fits = []  # features of every one
    for i, stage in enumerate(stages):
        if settings.read_ins:
            total["donor"] += kept * theirs.until(i)
            total["small"] += kept * ours.until(i)
            total["moments"] += kept * len(stage.norms) * 2 * (1 + k + d) ** 2
            fits += [k] * kept * len(stage.norms)
        if settings.read_outs:
            features, plain = sum(small.size(role.axes[1]) for role in stage.read_outs), not settings.correct
            total["donor"] += kept * ((i < last) * theirs.until(i + 1) + plain * theirs.until(i))
            total["small"] += kept * ours.inputs(i)
            total["moments"] += kept * (2 * (1 + features + k) ** 2 + blended * (1 + plain) * 2 * k * d)
            fits += [features] * kept
    if settings.head:
        total["moments"] += 2 * (1 + k + d) ** 2
        fits.append(k)
    if settings.stream in ("pca", "pca_raw"):
        total["donor"] += large.layers * theirs.until(len(stages))
        total["moments"] += (large.layers + 1) * 2 * d**2
    eigen = 2 * sum(n**3 for n in fits) + blended * d**3  # every fit once without the held-out sequences
    return {name: float(each * positions) for name, each in total.items()} | {"solves": float(EIGEN * eigen)}

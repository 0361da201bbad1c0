"""What the fitted operators of a pair make of the large model's weights, and what they leave: section 6's matter.

Fitting needs trained models of both sizes, so this diagnoses; no arm of the race is made from it.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch

from scaleop.maps import block_map
from scaleop.projection import Operator, authors_start, block_errors, fit_als, free_share, operator_outputs, stack
from scaleop.residuals import ResidualError, residual, shuffled
from scaleop.store import cached_tensors
from scaleop.weights import Weights

NOISE_SEED = 300


class Reproduced(ResidualError):
    """Operators reproduce every type of a pair: there is no residual to test."""


@dataclass(frozen=True)
class Fitted:
    """Operators of one pair: stacks (L, out, in) by type, fp32, L blocks of the small model.

    `outputs` and `residuals` add up to its weights. `noise` holds what operators leave that were fitted to the same
    weights with their entries in random order: structure there is the fit's own doing. `errors` are relative errors,
    means over blocks (Table 4); `free` the fit's free numbers per number fitted. Where that is 1 or more an operator
    reproduces any target, its residual is rounding and tests nothing: such types are in `reproduced` (their outputs)
    and in neither of the three.
    """

    outputs: dict[str, torch.Tensor]
    residuals: dict[str, torch.Tensor]
    noise: dict[str, torch.Tensor]
    reproduced: dict[str, torch.Tensor]
    errors: dict[str, float]
    free: dict[str, float]


def depth_of(weights: Weights) -> int:
    """Number of blocks."""
    return 1 + max(block for block, _ in weights if block is not None)


def fit_pair(large: Weights, small: Weights, types: Iterable[str], path: Path, seed: int = 0) -> Fitted:
    """Operators for every type, by alternating least squares from the authors' start; kept in the safetensors `path`.

    Block l of the small model is fitted from the block that selection would take (2l where depth halves). We fit by
    ALS rather than by the authors' 1,500 steps of Adam because it ends lower: what is left is then what no shared
    linear map explains. Raises Reproduced when every type is.
    """
    layers = depth_of(small)
    blocks = block_map(depth_of(large), layers)
    pairs = {role: (stack(large, role, blocks), stack(small, role, range(layers))) for role in types}
    free = {role: free_share(*pair) for role, pair in pairs.items()}
    scrambled = {role: shuffled(goal, NOISE_SEED) for role, (_, goal) in pairs.items() if free[role] < 1}
    if not scrambled:
        raise Reproduced(f"with {layers} blocks an operator has more free numbers than weights to fit, in every "
                         "type: it leaves no residual to test")

    def fits() -> dict[str, torch.Tensor]:
        draw = torch.Generator().manual_seed(seed)
        starts = {role: authors_start(big, *goal.shape[1:], draw) for role, (big, goal) in pairs.items()}
        aims = [("", role, goal) for role, (_, goal) in pairs.items()]
        found = {}
        for kind, role, aim in [*aims, *(("noise.", role, goal) for role, goal in scrambled.items())]:
            operator = fit_als(pairs[role][0], aim, starts[role], name=f"operator {kind}{role}").operator
            found |= {f"{kind}{role}.left": operator.left, f"{kind}{role}.right": operator.right}
        return found

    factors = cached_tensors(path, fits)

    def outputs(role: str, kind: str = "") -> torch.Tensor:
        operator = Operator(factors[f"{kind}{role}.left"], factors[f"{kind}{role}.right"])
        return operator_outputs(operator, pairs[role][0]).float()

    made = {role: outputs(role) for role in pairs}
    return Fitted({role: made[role] for role in scrambled},
                  {role: residual(pairs[role][1], made[role]) for role in scrambled},
                  {role: residual(goal, outputs(role, "noise.")) for role, goal in scrambled.items()},
                  {role: made[role] for role in pairs if role not in scrambled},
                  {role: block_errors(made[role], goal).mean().item() for role, (_, goal) in pairs.items()}, free)

"""Section 6, tests 3 and 4: can a small network predict a patch of the residual from the operator's output there?

Stacks go in by weight type, `{"Q": (L, out, in), ...}`. A patch's input is the operator's 16 x 16 patch, its type, and
where it is; the target is the residual's patch. Several targets over the same inputs (a residual, its re-paired
controls, planted ones) are learned side by side, each exactly as it would be alone.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import nn

from scaleop.progress import progress
from scaleop.residuals import ResidualError, Scores, check, joined

PATCH = 16  # rows and columns
HIDDEN = 512  # units of the MLP
EPOCHS, RATE = 5, 1e-3  # Adam, no weight decay
STEPS = 54  # an epoch, the authors': 884,736 patches in batches of 16,384. We have fewer patches than one of their
# batches, so we keep the number of steps and passes, and the batch is the same share of the patches.
EVERY = 4  # blocks 3, 7, 11, ... are held out

Stacks = Mapping[str, torch.Tensor]


# Patches

def to_patches(stack: torch.Tensor, size: int = PATCH) -> torch.Tensor:
    """(L, out, in) -> (L, rows, columns, size^2). Where `size` does not divide a side, zeros fill the last patch.

    The zeros are marked by `inside` and count neither in the loss nor in a score: every entry of the matrix is in
    exactly one patch, and nothing else is.
    """
    out, into = stack.shape[1:]
    padded = F.pad(stack, (0, -into % size, 0, -out % size))
    return padded.unflatten(2, (-1, size)).unflatten(1, (-1, size)).transpose(2, 3).flatten(3)


def from_patches(patches: torch.Tensor, shape: tuple[int, int]) -> torch.Tensor:
    """(L, rows, columns, size^2) -> (L, *shape): the inverse, which drops the padding."""
    size = math.isqrt(patches.shape[-1])
    whole = patches.unflatten(3, (size, size)).transpose(2, 3).flatten(3).flatten(1, 2)
    return whole[:, : shape[0], : shape[1]].contiguous()


@dataclass(frozen=True)
class Inputs:
    """All patches of all types: `features` (N, 265), `inside` (N, 256) bool, and each patch's `block` (N,).

    Features are the operator's patch over its type's std (256), the type (6, one-hot), and the block, row and column
    as fractions from 0 to 1. `shapes` holds the stacks' sizes by type, in the order of the patches.
    """

    features: torch.Tensor
    inside: torch.Tensor
    block: torch.Tensor
    shapes: dict[str, tuple[int, int, int]]

    def of(self, blocks: Sequence[int]) -> torch.Tensor:
        """(N,) bool: the patches of those blocks."""
        return torch.isin(self.block, torch.tensor(list(blocks)))


def inputs(outputs: Stacks) -> Inputs:
    """What predictors see of the operator's outputs. ResidualError for NaN, and for types of different depth."""
    if len({len(check(stack)) for stack in outputs.values()}) != 1:
        raise ResidualError("every type must have the same number of blocks, got "
                            + ", ".join(f"{name} {len(stack)}" for name, stack in outputs.items()))
    features, inside, block = [], [], []
    for k, stack in enumerate(outputs.values()):
        tiles = to_patches(stack / stack.std())
        place = torch.stack(torch.meshgrid(*(torch.linspace(0, 1, n) if n > 1 else torch.zeros(1)
                                             for n in tiles.shape[:3]), indexing="ij"), dim=-1)  # (L, rows, columns, 3)
        kind = F.one_hot(torch.tensor(k), len(outputs)).float().expand(*tiles.shape[:3], -1)
        features.append(torch.cat([tiles, kind, place], dim=-1).flatten(0, 2))
        inside.append(to_patches(torch.ones_like(stack)).flatten(0, 2) > 0)
        block.append(torch.arange(len(stack)).repeat_interleave(tiles.shape[1] * tiles.shape[2]))
    return Inputs(torch.cat(features), torch.cat(inside), torch.cat(block),
                  {name: tuple(stack.shape) for name, stack in outputs.items()})


def targets(residuals: Stacks) -> torch.Tensor:
    """(N, 256) patches of the residuals, each type over its std, in the order of `inputs`."""
    return torch.cat([to_patches(check(stack) / stack.std()).flatten(0, 2) for stack in residuals.values()])


def as_stacks(patches: torch.Tensor, like: Stacks) -> dict[str, torch.Tensor]:
    """(N, 256) predicted targets -> stacks shaped and scaled as the residuals `like`."""
    found, start = {}, 0
    for name, stack in like.items():
        grid = to_patches(stack).shape
        count = math.prod(grid[:3])
        found[name] = from_patches(patches[start : start + count].reshape(grid), stack.shape[1:]) * stack.std()
        start += count
    return found


def repaired(residuals: Stacks, seed: int = 0) -> dict[str, torch.Tensor]:
    """Control: each type's blocks in one random order, so that operator patches meet another block's residual.

    As the authors draw it: a block may meet itself, and held-out and training blocks may change places.
    """
    draw = torch.Generator().manual_seed(seed)
    return {name: stack[torch.randperm(len(stack), generator=draw)] for name, stack in residuals.items()}


def held_out(blocks: int, offset: int = EVERY - 1) -> list[int]:
    """Every fourth block from `offset` on: 3, 7, ..., 23 of Pythia's 24, 3 and 7 of 8. Four offsets are a cross-fit.

    Raises ResidualError when that leaves none to hold out.
    """
    if blocks < EVERY:
        raise ResidualError(f"holding out every {EVERY}th block needs at least {EVERY} blocks, got {blocks}")
    return list(range(offset, blocks, EVERY))


# Predictors

@dataclass(frozen=True)
class Predictors:
    """E fitted networks of one kind over the same inputs: `weights` are [W, b] or [W1, b1, W2, b2] with E in front."""

    weights: list[torch.Tensor]

    def __call__(self, features: torch.Tensor) -> torch.Tensor:
        """(n, 265) features -> (E, n, 256) predicted targets."""
        first, bias, *second = self.weights
        out = F.linear(features, first.flatten(0, 1), bias.flatten()).unflatten(1, bias.shape).transpose(0, 1)
        return torch.baddbmm(second[1][:, None], F.gelu(out), second[0].transpose(1, 2)) if second else out


def fit(features: torch.Tensor, goals: torch.Tensor, inside: torch.Tensor, hidden: int | None = None,
        seed: int = 0, steps: int = STEPS, epochs: int = EPOCHS) -> Predictors:
    """Fit E predictors, one a target: Adam on the mean squared error over the entries inside, the authors' settings.

    features: (n, f); goals: (E, n, 256); inside: (n, 256); hidden None is a linear map, else GELU units. All E
    start from the same weights and see the same batches (seed), as separate runs with one seed would. Raises
    ResidualError for fewer than two patches, NaN, or a fit that diverges.
    """
    count, members, size = len(features), len(goals), goals.shape[2]
    if count < 2 or not (torch.isfinite(features).all() and torch.isfinite(goals).all()):
        raise ResidualError(f"a predictor needs at least two finite patches to learn from, got {count}"
                            + ("" if count < 2 else ", some of them NaN or infinite"))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        sizes = [features.shape[1], size] if hidden is None else [features.shape[1], hidden, size]
        layers = [nn.Linear(a, b) for a, b in pairwise(sizes)]
    weights = [tensor.detach().repeat(members, *(1 for _ in tensor.shape)).requires_grad_()
               for layer in layers for tensor in (layer.weight, layer.bias)]
    model, optimizer = Predictors(weights), torch.optim.Adam(weights, lr=RATE)
    draw, batch = torch.Generator().manual_seed(seed), math.ceil(count / steps)
    with progress(total=epochs * math.ceil(count / batch), unit=" steps",
                  desc=f"{members} x {'linear' if hidden is None else f'MLP-{hidden}'}") as bar:
        for _ in range(epochs):
            for rows in torch.randperm(count, generator=draw).split(batch):
                seen = inside[rows]
                error = (model(features[rows]) - goals[:, rows]).square() * seen
                (error.sum() / seen.sum()).backward()  # the sum of E separate losses: none feels another
                optimizer.step()
                optimizer.zero_grad()
                bar.update()
    fitted = Predictors([weight.detach() for weight in weights])
    if not all(torch.isfinite(weight).all() for weight in fitted.weights):
        raise ResidualError("the predictors' fit diverged: their weights are not finite")
    return fitted


def scores(predictors: Predictors, inputs: Inputs, goals: torch.Tensor, rows: torch.Tensor) -> list[Scores]:
    """How well each of E predictors does on the patches `rows` ((N,) bool) of its own goals ((E, N, 256))."""
    with torch.no_grad():
        seen = inputs.inside[rows]
        wanted = goals[:, rows] * seen
        errors = ((predictors(inputs.features[rows]) - wanted) * seen).double().square().sum(-1)
    return [Scores(error, size, inputs.block[rows]) for error, size in
            zip(errors, wanted.double().square().sum(-1), strict=True)]


def examine(inputs: Inputs, goals: torch.Tensor, held: Sequence[int], hidden: int | None = None,
            seed: int = 0) -> list[Scores]:
    """Test 3: fit on all blocks but `held`, score on `held`; one result for each of E goals ((E, N, 256))."""
    away = inputs.of(held)
    if not away.any() or away.all():
        raise ResidualError(f"blocks {list(held)} leave nothing to learn from, or nothing to be scored on")
    fitted = fit(inputs.features[~away], goals[:, ~away], inputs.inside[~away], hidden, seed)
    return scores(fitted, inputs, goals, away)


def cross_examine(inputs: Inputs, goals: torch.Tensor, hidden: int | None = None, seed: int = 0) -> list[Scores]:
    """`examine` once for each of the four splits: every block is held out once, and its scores are in the result."""
    blocks = int(inputs.block.max()) + 1
    splits = [examine(inputs, goals, held_out(blocks, offset), hidden, seed) for offset in range(EVERY)]
    return [joined(parts) for parts in zip(*splits, strict=True)]

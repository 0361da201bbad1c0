"""Section 6: is what the fitted operator misses structure or noise? Tests 1 and 2, and the statistics of all four.

A residual (Eq. 2) is a stack (L, out, in): one matrix a block, all of one weight type. Every test looks at it beside a
control that has the same entries in another order. Tensors in, numbers out; `predictors` holds tests 3 and 4.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

import torch

EPSILON = 1e-12  # inside the entropy's logarithm, as the authors have it
SWEEPS, TINY = 20, 1e-30
SAMPLES = 1000  # bootstrap resamples, as the authors draw
LEVEL = 0.05  # a test "detects" below this p


class ResidualError(ValueError):
    """A stack of residuals that no test can use; the message says what is wrong with it."""


def check(stack: torch.Tensor, blocks: int = 1) -> torch.Tensor:
    """`stack` itself, if it is (L >= `blocks`, out, in), finite and not constant zero; ResidualError otherwise."""
    if stack.ndim != 3:
        raise ResidualError(f"a stack of residuals is (blocks, out, in), got shape {tuple(stack.shape)}")
    if len(stack) < blocks:
        raise ResidualError(f"this test compares blocks and needs at least {blocks}, got {len(stack)}")
    if not torch.isfinite(stack).all():
        broken = [b for b, matrix in enumerate(stack) if not torch.isfinite(matrix).all()]
        raise ResidualError(f"residuals of block {', '.join(map(str, broken))} hold NaN or infinity: "
                            "did the operator's fit diverge?")
    if not stack.flatten(1).norm(dim=1).all():
        raise ResidualError("a residual is zero in all its entries: there is nothing to test")
    return stack


def residual(small: torch.Tensor, outputs: torch.Tensor) -> torch.Tensor:
    """Eq. 2: (L, out, in) weights of the sibling minus what the operator makes of the large model's, as fp32.

    (The authors keep it in fp16; we don't round it.) Raises ResidualError for shapes that differ and for NaN.
    """
    if small.shape != outputs.shape:
        raise ResidualError(f"the sibling's weights are {tuple(small.shape)}, the operator's {tuple(outputs.shape)}")
    return check((small.double() - outputs.double()).float())


# Test 1: spectrum

def spectrum(stack: torch.Tensor) -> torch.Tensor:
    """Singular values of each block's matrix, (L, min(out, in)), largest first, in the stack's dtype."""
    return torch.linalg.svdvals(check(stack))


def effective_rank(singular: torch.Tensor) -> torch.Tensor:
    """(..., k) singular values -> (...) the exponential of the entropy of their shares, fp64: k equal values give k.

    Shares of the values themselves, not of their squares, as the authors have it.
    """
    shares = singular.double() / singular.double().sum(dim=-1, keepdim=True)
    return (-(shares * (shares + EPSILON).log()).sum(dim=-1)).exp()


def shuffled(stack: torch.Tensor, first_seed: int = 0) -> torch.Tensor:
    """Control: each block's entries in random order (seed `first_seed` + block), so that only the histogram is left."""
    return torch.stack([matrix.flatten()[torch.randperm(matrix.numel(), generator=_generator(first_seed + b))]
                        .reshape(matrix.shape) for b, matrix in enumerate(stack)])


def gaussian(stack: torch.Tensor) -> torch.Tensor:
    """Control: normal entries with each block's mean and standard deviation (seed: the block's index)."""
    return torch.stack([matrix.mean() + matrix.std() * torch.randn(matrix.shape, generator=_generator(b))
                        for b, matrix in enumerate(stack)])


def norm_matched(stack: torch.Tensor) -> torch.Tensor:
    """Control of ours: normal entries with exactly each block's row and column norms, and nothing else of it.

    The paper puts the residual's faint spectral concentration down to those norms (appendix B.2); if that is all
    there is to it, this control is as concentrated as the residual.
    """
    rows, columns = stack.norm(dim=2, keepdim=True), stack.norm(dim=1, keepdim=True)
    control = torch.stack([torch.randn(matrix.shape, generator=_generator(b)) for b, matrix in enumerate(stack)])
    for _ in range(SWEEPS):  # scaling rows, then columns, converges quickly to both
        control = control * (rows / control.norm(dim=2, keepdim=True).clamp_min(TINY))
        control = control * (columns / control.norm(dim=1, keepdim=True).clamp_min(TINY))
    return control


def spectral_test(stack: torch.Tensor) -> dict[str, float | int]:
    """Test 1 (Table 6): effective ranks, means over the blocks, of the residual and of its controls.

    `below` counts the blocks whose residual lies under both of the paper's controls.
    """
    ranks = {name: effective_rank(spectrum(control)) for name, control in
             (("delta", stack), ("shuffled", shuffled(stack)), ("gaussian", gaussian(stack)),
              ("norm_matched", norm_matched(stack)))}
    under = (ranks["delta"] < ranks["shuffled"]) & (ranks["delta"] < ranks["gaussian"])
    return {**{name: rank.mean().item() for name, rank in ranks.items()},
            "below": int(under.sum()), "blocks": len(stack)}


# Test 2: one direction in all blocks?

def mean_cosine(stack: torch.Tensor) -> float:
    """Mean over ordered pairs of different blocks of the cosine between their flattened residuals."""
    directions = check(stack, 2).flatten(1).double()
    directions = directions / directions.norm(dim=1, keepdim=True)
    blocks = len(stack)
    return ((directions.sum(0).square().sum().item() - blocks) / (blocks * (blocks - 1)))


def cosine_test(stack: torch.Tensor) -> dict[str, float]:
    """Test 2: the mean cosine, that of a shuffled control (seeds 100 + block), and the spread chance alone gives.

    `sd` is the standard deviation of the mean over L (L - 1) / 2 pairs of independent directions of n entries,
    1 / sqrt(n pairs): at our sizes chance gives larger cosines than at Pythia's.
    """
    blocks = len(check(stack, 2))
    pairs = blocks * (blocks - 1) / 2
    return {"delta": mean_cosine(stack), "control": mean_cosine(shuffled(stack, 100)),
            "sd": 1 / math.sqrt(stack[0].numel() * pairs)}


def critical(tests: int, level: float = LEVEL) -> float:
    """How many standard deviations the largest of `tests` normal values exceeds with probability `level`, two-sided."""
    return NormalDist().inv_cdf(1 - level / (2 * tests))


# What predictors' errors say: tests 3 and 4

@dataclass(frozen=True)
class Scores:
    """Squared errors of a predictor and squared sizes of what it predicts, a patch each: (n,) fp64; `block`: (n,)."""

    errors: torch.Tensor
    sizes: torch.Tensor
    block: torch.Tensor

    @property
    def reduction(self) -> float:
        """1 - sqrt(SSE / SS): the share by which error falls below predicting zero; negative when it grows."""
        return float(_reduction(self.errors.sum(), self.sizes.sum()))

    def of(self, blocks: Iterable[int]) -> "Scores":
        """The patches of some blocks only."""
        there = torch.isin(self.block, torch.tensor(list(blocks)))
        return Scores(self.errors[there], self.sizes[there], self.block[there])

    def by_block(self) -> "Scores":
        """The same summed within blocks: what is independent, if anything is."""
        names, index = self.block.unique(return_inverse=True)
        zeros = torch.zeros(len(names), dtype=torch.float64)
        return Scores(zeros.index_add(0, index, self.errors), zeros.index_add(0, index, self.sizes), names)


def joined(parts: Iterable[Scores]) -> Scores:
    """Scores of several splits as one, for instance of all splits of a cross-fit."""
    parts = list(parts)
    return Scores(*(torch.cat([getattr(part, name) for part in parts]) for name in ("errors", "sizes", "block")))


def bootstrap(real: Scores, control: Scores, samples: int = SAMPLES, seed: int = 1) -> dict[str, float | int]:
    """The gap between real and control reductions over resamples of their patches, the same draw for both.

    `low`, `high`: 2.5 and 97.5 percentiles; `p_one`: share of gaps <= 0, as the paper prints it; `p_two`: twice the
    smaller tail, at most 1, with the usual +1 so that it is never 0. Give `by_block()` of both to resample blocks.
    Raises ResidualError for fewer than two units: one unit has no spread.
    """
    units = len(real.errors)
    if units < 2 or len(control.errors) != units:
        raise ResidualError(f"a bootstrap needs at least two units and as many of the control, got {units} and "
                            f"{len(control.errors)}; with one held-out block only patches can be resampled")
    columns = torch.stack([real.errors, real.sizes, control.errors, control.sizes], dim=1)
    draw = _generator(seed)
    sums = torch.stack([columns[torch.randint(units, (units,), generator=draw)].sum(0) for _ in range(samples)])
    gaps = _reduction(sums[:, 0], sums[:, 1]) - _reduction(sums[:, 2], sums[:, 3])
    low, high = torch.quantile(gaps, torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    tails = min(int((gaps <= 0).sum()), int((gaps >= 0).sum()))
    return {"gap": real.reduction - control.reduction, "low": low, "high": high,
            "p_one": (gaps <= 0).double().mean().item(), "p_two": min(1.0, 2 * (tails + 1) / (samples + 1)),
            "units": units}


def compare(real: Scores, control: Scores) -> dict[str, Any]:
    """Everything tests 3 and 4 say about a predictor beside its control.

    `reduction`, `control`; `patches`: the authors' bootstrap with a two-sided p beside it; `blocks`: the same for whole
    blocks, because patches of one block are not independent (None when there is one block only); `gaps`: real minus
    control by block, and `p_sign`, the exact test that they have no common sign.
    """
    rows, others = real.by_block(), control.by_block()
    gaps = (_reduction(rows.errors, rows.sizes) - _reduction(others.errors, others.sizes)).tolist()
    return {"reduction": real.reduction, "control": control.reduction, "patches": bootstrap(real, control),
            "blocks": bootstrap(rows, others) if len(gaps) > 1 else None, "gaps": gaps, "p_sign": sign_test(gaps)}


def sign_test(gaps: Sequence[float]) -> float:
    """Two-sided exact p that independent gaps have no common sign: n gaps of one sign give 2^(1-n). Zeros drop out."""
    signs = [gap > 0 for gap in gaps if gap != 0]
    rarer = min(sum(signs), len(signs) - sum(signs))
    return min(1.0, 2 * sum(math.comb(len(signs), k) for k in range(rarer + 1)) / 2 ** len(signs))


def rank_test(real: float, controls: Sequence[float]) -> float:
    """One-sided p that chance alone puts `real` so high among `controls`: (1 + those not below it) / (1 + all)."""
    return (1 + sum(control >= real for control in controls)) / (1 + len(controls))


def _reduction(errors: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
    return 1 - (errors / sizes).sqrt()


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)

"""How much two models say the same (section 4): linear CKA, and linear maps from the larger to the smaller.

Tensors in, numbers out; everything is computed in fp64. Rows are samples (token positions, sequences, vocabulary
entries), columns are features; "large" and "small" describe the same samples row by row.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

NOTHING = 1e-20  # a share of the sum of squares that is rounding, not variance
CHUNK = 4096  # rows at a time where a sum is streamed


class Similarity:
    """Linear CKA between each of L large and each of l small feature sets, streamed over samples (section 4).

    Feed batches to `add`, then ask for `matrix`. Centred without a second pass: sums are taken about the first
    batch's mean, and what is left of the mean is subtracted at the end. Holds L l D d + L D^2 + l d^2 numbers of 8
    bytes (D, d the numbers of features) and one batch, whatever the number of samples.
    """

    def __init__(self) -> None:
        self.samples = 0

    def add(self, large: torch.Tensor, small: torch.Tensor) -> None:
        """One more batch: (L, n, D) and (l, n, d), the same n samples in every set. ValueError for NaN or infinity."""
        x, y = large.double(), small.double()
        for name, batch in (("large", x), ("small", y)):
            if batch.ndim != 3 or batch.shape[1] != x.shape[1]:
                raise ValueError(f"{name}: expected (sets, {x.shape[1]} samples, features), got {tuple(batch.shape)}")
            for block, values in enumerate(batch):
                _finite(values, f"{name} set {block}")
        if not self.samples:
            self.shift = [batch.mean(dim=1, keepdim=True) for batch in (x, y)]
            (big, _, wide), (little, _, narrow) = x.shape, y.shape
            self.sums = [torch.zeros_like(shift) for shift in self.shift]
            self.grams = [x.new_zeros(big, wide, wide), y.new_zeros(little, narrow, narrow)]
            self.cross = x.new_zeros(big * wide, little * narrow)
        x, y = x - self.shift[0], y - self.shift[1]
        for total, gram, batch in zip(self.sums, self.grams, (x, y), strict=True):
            total += batch.sum(dim=1, keepdim=True)
            gram.baddbmm_(batch.mT, batch)
        self.cross.addmm_(x.mT.flatten(0, 1), y.transpose(0, 1).flatten(1))
        self.samples += x.shape[1]

    def matrix(self) -> torch.Tensor:
        """(L, l) CKA so far: |X'Y|^2 / (|X'X| |Y'Y|) with centred X and Y and Frobenius norms.

        ValueError for fewer than two samples, and for a set that does not vary.
        """
        if self.samples < 2:
            raise ValueError(f"CKA needs at least two samples, got {self.samples}")
        own = []
        for name, shift, total, gram in zip(("large", "small"), self.shift, self.sums, self.grams, strict=True):
            centred = gram - total.mT @ total / self.samples
            varies = centred.diagonal(dim1=1, dim2=2).sum(dim=1)
            raw = varies + self.samples * (shift + total / self.samples).square().sum(dim=(1, 2))
            for block in (varies <= NOTHING * raw).nonzero().flatten().tolist():
                raise ValueError(f"{name} set {block} is constant over all {self.samples} samples: CKA is undefined")
            own.append(centred.square().sum(dim=(1, 2)).sqrt())
        (big, _, wide), (little, _, narrow) = self.sums[0].shape, self.sums[1].shape
        found = torch.empty(big, little, dtype=torch.float64)
        for block in range(big):  # one row of centred copies at a time
            rows = self.cross[block * wide : (block + 1) * wide]
            rows = rows - self.sums[0][block].mT @ self.sums[1].view(1, -1) / self.samples
            found[block] = rows.view(wide, little, narrow).square().sum(dim=(0, 2)) / (own[0][block] * own[1])
        return found


def cka(large: torch.Tensor, small: torch.Tensor) -> float:
    """Linear CKA of (n, D) and (n, d), between 0 and 1; errors as in `Similarity`."""
    sums = Similarity()
    for start in range(0, max(len(large), len(small)), CHUNK):
        sums.add(large[None, start : start + CHUNK], small[None, start : start + CHUNK])
    return sums.matrix().item()


def diagonal(matrix: torch.Tensor, blocks: Sequence[int]) -> tuple[float, float]:
    """(mean CKA of matched blocks, share of them whose best match is their own) of an (L, l) matrix.

    `blocks[b]` is the large model's block that the small one's block b is matched with; best means largest in the
    large block's row, as the authors read it (of equal ones the first).
    """
    rows, own = matrix[list(blocks)], torch.arange(len(blocks), device=matrix.device)
    return rows.diagonal().mean().item(), (rows.argmax(dim=1) == own).double().mean().item()


@dataclass(frozen=True)
class LinearMap:
    """y = (x - x_mean) matrix + y_mean: `matrix` (D, d), means (D,) and (d,) of the training rows; fp64."""

    matrix: torch.Tensor
    x_mean: torch.Tensor
    y_mean: torch.Tensor

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """(n, D) -> (n, d) predictions, fp64."""
        return (x.double() - self.x_mean) @ self.matrix + self.y_mean

    def r2(self, x: torch.Tensor, y: torch.Tensor) -> float:
        """Share of y's variance about the training mean that the map explains, over all features together.

        1 is perfect, 0 no better than the training mean; below 0 is worse than it.
        """
        y = y.double()
        _finite(x, "x")
        _finite(y, "y")
        total = (y - self.y_mean).square().sum()
        if total == 0:
            raise ValueError("y equals the training mean in every row: there is no variance to explain")
        return (1 - (y - self(x)).square().sum() / total).item()


def ridge(x: torch.Tensor, y: torch.Tensor, strength: float = 1e-3) -> LinearMap:
    """The full linear map (n, D) -> (n, d) by ridge regression, centred, one direct solve.

    The penalty is `strength` times the mean diagonal of X'X (the paper's 1e-3). Errors as in `_centred`.
    """
    x, y, x_mean, y_mean = _centred(x, y)
    gram = x.T @ x
    gram.diagonal().add_(strength * gram.diagonal().mean())
    return LinearMap(torch.linalg.solve(gram, x.T @ y), x_mean, y_mean)


def procrustes(x: torch.Tensor, y: torch.Tensor) -> LinearMap:
    """The best rotation with one scale (n, D) -> (n, d): how far a change of basis alone gets.

    X is first reduced to its min(D, d) leading principal directions V; the rotation R is the orthogonal factor of
    (XV)'Y, the scale the sum of its singular values over |XV|^2. Errors as in `_centred`.
    """
    x, y, x_mean, y_mean = _centred(x, y)
    leading = torch.linalg.eigh(x.T @ x).eigenvectors[:, -min(x.shape[1], y.shape[1]):]
    reduced = x @ leading
    left, singular, right = torch.linalg.svd(reduced.T @ y, full_matrices=False)
    scale = singular.sum() / reduced.square().sum()
    return LinearMap(leading @ (left @ right) * scale, x_mean, y_mean)


MAPS: Mapping[str, Callable[[torch.Tensor, torch.Tensor], LinearMap]] = {"ridge": ridge, "procrustes": procrustes}


def in_order(samples: int, share: float = 0.8) -> tuple[torch.Tensor, torch.Tensor]:
    """Row numbers to fit on (the first `share`) and to test on (the rest), as the authors split everything."""
    return torch.arange(int(share * samples)), torch.arange(int(share * samples), samples)


def at_random(samples: int, seed: int, share: float = 0.8) -> tuple[torch.Tensor, torch.Tensor]:
    """The same sizes, rows drawn at random."""
    order = torch.randperm(samples, generator=torch.Generator().manual_seed(seed))
    return order[: int(share * samples)], order[int(share * samples):]


def held_out(large: torch.Tensor, small: torch.Tensor,
             split: tuple[torch.Tensor, torch.Tensor] | None = None) -> dict[str, float]:
    """Held-out R^2 of each of MAPS from (n, D) to (n, d); `split` is `in_order` unless given.

    Needs a test row and more training rows than D: with fewer the score would measure the penalty (ValueError).
    """
    train, test = in_order(len(large)) if split is None else split
    if not len(test):
        raise ValueError(f"none of {len(large)} samples is left to test on: add samples")
    x, y = large[train], small[train]
    return {name: fit(x, y).r2(large[test], small[test]) for name, fit in MAPS.items()}


def block_scores(large: Any, small: Any, blocks: Sequence[int]) -> dict[str, list[float]]:
    """`held_out` of each matched pair of blocks: (L, n, D) and (l, n, d) arrays or memory maps -> l numbers a map.

    Blocks are read one at a time: memory is one block's samples, not all. `blocks` as in `diagonal`; errors name
    the block.
    """
    found: dict[str, list[float]] = {name: [] for name in MAPS}
    for block, source in enumerate(blocks):
        try:
            scores = held_out(*(torch.from_numpy(np.array(side)) for side in (large[source], small[block])))
        except ValueError as error:
            raise ValueError(f"block {block}: {error}") from error
        for name, score in scores.items():
            found[name].append(score)
    return found


def embedding_scores(large: torch.Tensor, small: torch.Tensor, seeds: Sequence[int]) -> dict[str, Any]:
    """CKA and held-out R^2 of two (vocabulary, width) matrices that share their rows' meaning.

    Where one has more rows (padding) the rest is ignored. The maps are scored on the paper's split, which is in
    vocabulary order (`ridge`, `procrustes`: early, frequent tokens predict late, rare ones), and on one random split
    per seed (`ridge_random`, `procrustes_random`: lists).
    """
    rows = min(len(large), len(small))
    large, small = large[:rows].detach(), small[:rows].detach()
    found: dict[str, Any] = {"cka": cka(large, small), **held_out(large, small)}
    draws = [held_out(large, small, at_random(rows, seed)) for seed in seeds]
    return found | {f"{name}_random": [draw[name] for draw in draws] for name in MAPS}


def _centred(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Training rows about their means, fp64, and the means: x (n, D), y (n, d).

    ValueError for unequal lengths, NaN or infinity, too few rows for a map (n must exceed D), constant columns
    throughout.
    """
    if x.ndim != 2 or y.ndim != 2 or len(x) != len(y):
        raise ValueError(f"x and y need the same rows, got shapes {tuple(x.shape)} and {tuple(y.shape)}")
    if len(x) <= x.shape[1]:
        raise ValueError(f"{len(x)} training samples are too few for a map from {x.shape[1]} features: at least "
                         f"{x.shape[1] + 1} are needed; use more sequences (corpus.frozen.sequences)")
    sides = []
    for name, side in (("x", x.double()), ("y", y.double())):
        _finite(side, name)
        mean = side.mean(dim=0)
        centred = side - mean
        if centred.square().sum() <= NOTHING * side.square().sum():
            raise ValueError(f"{name} is constant over all {len(side)} training samples: no map can be fitted")
        sides.append((centred, mean))
    (x, x_mean), (y, y_mean) = sides
    return x, y, x_mean, y_mean


def _finite(values: torch.Tensor, name: str) -> None:
    if not torch.isfinite(values).all():
        raise ValueError(f"{name} holds NaN or infinity: check the model's weights and the dtype it ran in")

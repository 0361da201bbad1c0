"""Maps: how each axis of the donor becomes an axis of the target.

A map is a *selection* (an index set: wiring survives) or a *basis* (a dense matrix: coordinates are blended). Maps
are chosen from donor weights and donor activations only; the target is known by its shape alone.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from scaleop.activations import StreamStatistics
from scaleop.weights import Weights
from scaleop.wiring import MLP, QK, RESIDUAL, VO, VOCAB, Shape, check_pair, match_frequencies


@dataclass(frozen=True)
class Selection:
    """Keep the coordinates `index` ((k,) int64), in that order."""

    index: torch.Tensor

    def apply(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        """`tensor` with axis `dim` cut to the kept coordinates."""
        return tensor.index_select(dim, self.index)


@dataclass(frozen=True)
class Basis:
    """Blend coordinates: `matrix` is (k, n) with orthonormal rows; computed in fp64, applied in the tensor's dtype."""

    matrix: torch.Tensor

    def apply(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        """`tensor` with axis `dim` multiplied by the basis."""
        return torch.tensordot(self.matrix.to(tensor.dtype), tensor, dims=([1], [dim])).movedim(0, dim)


Map = Selection | Basis


@dataclass(frozen=True)
class Maps:
    """A map for every axis of every kept block.

    `blocks[b]` is the donor block that target block b comes from; `axes[b, axis]` its maps, and `axes[None, axis]`
    those that all blocks share (residual stream, vocabulary).
    """

    blocks: tuple[int, ...]
    axes: Mapping[tuple[int | None, str], Map]

    def __call__(self, block: int | None, axis: str) -> Map:
        """The map of an axis in target block `block` (None: outside the blocks)."""
        return self.axes.get((block, axis)) or self.axes[None, axis]


def block_map(donor: int, target: int) -> tuple[int, ...]:
    """Evenly strided donor blocks 0, s, 2s, ... when the depth divides, else round(i (L-1) / (l-1))."""
    if donor % target == 0:
        return tuple(range(0, donor, donor // target))
    return tuple(round(i * (donor - 1) / (target - 1)) for i in range(target)) if target > 1 else (0,)


def top(scores: torch.Tensor, k: int) -> torch.Tensor:
    """Indices of the k largest scores, ascending; of equal scores the first ones win."""
    return scores.argsort(descending=True, stable=True)[:k].sort().values


def uniform(n: int, k: int) -> torch.Tensor:
    """k of n indices at even spacing: floor(i n / k)."""
    return torch.arange(k) * n // k


def row_norms(matrix: torch.Tensor) -> torch.Tensor:
    """(n, m) -> (n,) Euclidean norms of the rows, fp64."""
    return matrix.double().norm(dim=1)


def _in_head(heads: torch.Tensor, dims: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Positions on a head-major axis: (h,) heads and (h, k) dims inside each -> (h k,)."""
    return (heads[:, None] * head_dim + dims).flatten()


def select_heads(scores: torch.Tensor, donor: Shape, target: Shape) -> torch.Tensor:
    """(target heads,) kept heads: all, or those whose V/O dims, scores (heads x head_dim,), sum highest."""
    return top(scores.unflatten(0, (donor.heads, -1)).sum(dim=1), target.heads)


def rotary_first(scores: torch.Tensor, donor: Shape, target: Shape) -> torch.Tensor:
    """Dims kept inside each head for Q and K: scores (heads, head_dim) -> (heads, target head_dim).

    The rotary part keeps frequency-matched pairs, first halves then second halves; the rest keeps its largest scores.
    """
    pairs = torch.tensor(match_frequencies(donor, target), dtype=torch.long)
    rotary = torch.cat([pairs, pairs + donor.rotary_dims // 2])
    rest = target.head_dim - target.rotary_dims
    return torch.stack([torch.cat([rotary, donor.rotary_dims + top(head[donor.rotary_dims :], rest)])
                        for head in scores])


def scored_selection(weights: Weights, donor: Shape, target: Shape, statistics: StreamStatistics,
                     inputs: Mapping[tuple[int, str], torch.Tensor] | None = None) -> Maps:
    """The paper's selection (Algorithm 1, lines 1-5): one residual set for the whole model, per-block inner sets.

    Residual features by activation variance averaged over blocks; rotary pairs by frequency and other Q/K dims by
    q-row norm + k-row norm; V/O dims by V-row x O-column norm; MLP units by up-row x down-column norm; whole heads
    when the head count shrinks, by the sum over their V/O dims. All norms are the uncut donor's. With `inputs`
    (`activations.input_statistics`) the V-row and up-row norms give way to the root mean square of what the read-out
    reads there (the paper's later revision). WiringError for a pair that cannot be.
    """
    check_pair(donor, target)
    blocks = block_map(donor.layers, target.layers)
    axes = residual_selection(statistics, target)
    for b, block in enumerate(blocks):
        inner = block_selection(weights, block, donor, target, inputs)
        axes.update({(b, axis): map_ for axis, map_ in inner.items()})
    return Maps(blocks, axes)


def residual_selection(statistics: StreamStatistics, target: Shape) -> dict[tuple[int | None, str], Map]:
    """The scored selection's shared axes: residual features by activation variance averaged over blocks; vocabulary."""
    return _shared(top(statistics.variance.mean(dim=0), target.width), target)


def block_selection(weights: Weights, block: int, donor: Shape, target: Shape,
                    inputs: Mapping[tuple[int, str], torch.Tensor] | None = None) -> dict[str, Map]:
    """The scored selection's maps of one donor block's inner axes; `weights` need hold no other block's."""
    def scores(read_in: str, read_out: str) -> torch.Tensor:
        source = row_norms(weights[block, read_in]) if inputs is None else inputs[block, read_out][1].sqrt()
        return source * row_norms(weights[block, read_out].T)

    vo_scores, per_head = scores("V", "O"), (donor.heads, donor.head_dim)
    heads = select_heads(vo_scores, donor, target)
    qk_scores = row_norms(weights[block, "Q"]) + row_norms(weights[block, "K"])
    qk = rotary_first(qk_scores.unflatten(0, per_head), donor, target)
    vo = torch.stack([top(head, target.head_dim) for head in vo_scores.unflatten(0, per_head)])
    return {MLP: Selection(top(scores("MLP_UP", "MLP_DOWN"), target.mlp)),
            QK: Selection(_in_head(heads, qk[heads], donor.head_dim)),
            VO: Selection(_in_head(heads, vo[heads], donor.head_dim))}


def uniform_selection(donor: Shape, target: Shape) -> Maps:
    """Evenly spaced coordinates on every axis, rotary pairs frequency-matched: a baseline the paper lacks.

    Uses no weight and no activation, so it shows what the scores are worth.
    """
    check_pair(donor, target)
    blocks = block_map(donor.layers, target.layers)
    heads = uniform(donor.heads, target.heads)
    flat = torch.zeros(donor.heads, donor.head_dim)
    flat[:, donor.rotary_dims + uniform(donor.head_dim - donor.rotary_dims, target.head_dim - target.rotary_dims)] = 1
    qk = Selection(_in_head(heads, rotary_first(flat, donor, target)[heads], donor.head_dim))
    vo = Selection(_in_head(heads, uniform(donor.head_dim, target.head_dim).expand(target.heads, -1), donor.head_dim))
    axes = _shared(uniform(donor.width, target.width), target)
    axes.update({(None, QK): qk, (None, VO): vo, (None, MLP): Selection(uniform(donor.mlp, target.mlp))})
    return Maps(blocks, axes)


def leading(gram: torch.Tensor, k: int) -> torch.Tensor:
    """(n, n) Gram matrix -> (k, n) its leading eigenvectors, largest first, fp64.

    For a matrix A with Gram A A' these are A's leading left singular vectors. Each row's sign is fixed (its largest
    entry is positive), so the same donor gives the same basis everywhere.
    """
    vectors = torch.linalg.eigh(gram.double()).eigenvectors[:, -k:].flip(1).T
    largest = vectors.gather(1, vectors.abs().argmax(dim=1, keepdim=True))
    return (vectors * largest.sign()).contiguous()


def dense_bases(weights: Weights, donor: Shape, target: Shape, statistics: StreamStatistics) -> Maps:
    """The paper's dense projection (Eq. 1): one basis per axis, shared by the weights that meet on it.

    Residual: PCA of the pooled activations of all blocks. Per block: Q/K from the column stack [Q, K], V/O from O's
    input side alone, MLP from [UP, DOWN']. The target only needs to be no larger than the donor.
    """
    blocks = block_map(donor.layers, target.layers)
    axes = residual_basis(statistics, target)
    for b, block in enumerate(blocks):
        axes.update({(b, axis): map_ for axis, map_ in block_bases(weights, block, target).items()})
    return Maps(blocks, axes)


def residual_basis(statistics: StreamStatistics, target: Shape) -> dict[tuple[int | None, str], Map]:
    """The dense projection's shared axes: PCA of the pooled activations of all blocks; the vocabulary is only cut."""
    return {(None, RESIDUAL): Basis(leading(statistics.covariance, target.width)),
            (None, VOCAB): Selection(torch.arange(target.vocab))}


def block_bases(weights: Weights, block: int, target: Shape) -> dict[str, Map]:
    """The dense projection's bases of one donor block's inner axes; `weights` need hold no other block's."""
    q, k, o, up, down = (weights[block, role].double() for role in ("Q", "K", "O", "MLP_UP", "MLP_DOWN"))
    return {QK: Basis(leading(q @ q.T + k @ k.T, target.size(QK))),
            VO: Basis(leading(o.T @ o, target.size(VO))),
            MLP: Basis(leading(up @ up.T + down.T @ down, target.mlp))}


def _shared(residual: torch.Tensor, target: Shape) -> dict[tuple[int | None, str], Map]:
    """The two axes all blocks share: kept residual features, and the target's leading vocabulary rows."""
    return {(None, RESIDUAL): Selection(residual), (None, VOCAB): Selection(torch.arange(target.vocab))}

"""Maps: how each axis of the donor becomes an axis of the target.

A map is a *selection* (an index set: wiring survives) or a *basis* (a dense matrix: coordinates are blended). Maps
are chosen from donor weights and donor activations only; the target is known by its shape alone.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from scaleop.activations import StreamStatistics
from scaleop.heads import grouped, kept_dims, rotary_first, select_heads, spread, top
from scaleop.weights import Weights
from scaleop.wiring import KEYS, MLP, QK, RESIDUAL, VALUES, VO, VOCAB, Shape, check_pair

INNER_ROLES = ("Q", "K", "V", "O", "MLP_GATE", "MLP_UP", "MLP_DOWN")  # what maps of a block's own axes are chosen from


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


def uniform(n: int, k: int) -> torch.Tensor:
    """k of n indices at even spacing: floor(i n / k)."""
    return torch.arange(k) * n // k


def row_norms(matrix: torch.Tensor) -> torch.Tensor:
    """(n, m) -> (n,) Euclidean norms of the rows, fp64."""
    return matrix.double().norm(dim=1)


def scored_selection(weights: Weights, donor: Shape, target: Shape, statistics: StreamStatistics,
                     inputs: Mapping[tuple[int, str], torch.Tensor] | None = None) -> Maps:
    """The paper's selection (Algorithm 1, lines 1-5): one residual set for the whole model, per-block inner sets.

    Residual features by activation variance averaged over blocks; rotary pairs by frequency and other Q/K dims by
    q-row norm + k-row norm; V/O dims by V-row x O-column norm; MLP units by up-row x down-column norm; whole heads
    when the head count shrinks, by the sum over their V/O dims. All norms are the uncut donor's. Beyond the paper:
    query heads that share keys and values share their dims, by the sum of their scores; a gated unit counts gate-row x
    up-row x down-column norm, as what it writes is (nearly) linear in all three: one that is zero silences it. With
    `inputs` (`activations.input_statistics`) the norms of rows give way to the root mean square of what the read-out
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
    def scores(source: torch.Tensor, read_out: str) -> torch.Tensor:
        seen = source if inputs is None else inputs[block, read_out][1].sqrt()
        return seen * row_norms(weights[block, read_out].T)

    vo_scores = scores(spread(row_norms(weights[block, "V"]), donor), "O")  # (heads x head_dim,)
    heads = select_heads(vo_scores, donor, target)
    qk_scores = grouped(row_norms(weights[block, "Q"]), donor).sum(dim=1) \
        + row_norms(weights[block, "K"]).unflatten(0, (donor.groups, -1))  # (groups, head_dim)
    qk = rotary_first(qk_scores, donor, target)
    vo = torch.stack([top(group, target.head_dim) for group in grouped(vo_scores, donor).sum(dim=1)])
    units = row_norms(weights[block, "MLP_UP"])
    if (block, "MLP_GATE") in weights:
        units = units * row_norms(weights[block, "MLP_GATE"])
    kept = {MLP: top(scores(units, "MLP_DOWN"), target.mlp), **kept_dims(heads, qk, vo, donor, target)}
    return {axis: Selection(index) for axis, index in kept.items()}


def uniform_selection(donor: Shape, target: Shape) -> Maps:
    """Evenly spaced coordinates on every axis, rotary pairs frequency-matched: a baseline the paper lacks.

    Uses no weight and no activation, so it shows what the scores are worth.
    """
    check_pair(donor, target)
    blocks = block_map(donor.layers, target.layers)
    groups, within = uniform(donor.groups, target.groups), uniform(donor.sharing, target.sharing)
    flat = torch.zeros(donor.groups, donor.head_dim)
    flat[:, donor.rotary_dims + uniform(donor.head_dim - donor.rotary_dims, target.head_dim - target.rotary_dims)] = 1
    inner = kept_dims((groups[:, None] * donor.sharing + within).flatten(), rotary_first(flat, donor, target),
                      uniform(donor.head_dim, target.head_dim).expand(donor.groups, -1), donor, target)
    axes = _shared(uniform(donor.width, target.width), target)
    inner[MLP] = uniform(donor.mlp, target.mlp)
    axes.update({(None, axis): Selection(index) for axis, index in inner.items()})
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
    input side alone, MLP from [UP, DOWN'] (with GATE beside them where there is one). Where query heads share keys
    and values, one basis is made of what they share, each query head of a group counting as further columns, and serves
    all of them. The target only needs to be no larger than the donor.
    """
    blocks = block_map(donor.layers, target.layers)
    axes = residual_basis(statistics, target)
    for b, block in enumerate(blocks):
        axes.update({(b, axis): map_ for axis, map_ in block_bases(weights, block, donor, target).items()})
    return Maps(blocks, axes)


def residual_basis(statistics: StreamStatistics, target: Shape) -> dict[tuple[int | None, str], Map]:
    """The dense projection's shared axes: PCA of the pooled activations of all blocks; the vocabulary is only cut."""
    return {(None, RESIDUAL): Basis(leading(statistics.covariance, target.width)),
            (None, VOCAB): Selection(torch.arange(target.vocab))}


def block_bases(weights: Weights, block: int, donor: Shape, target: Shape) -> dict[str, Map]:
    """The dense projection's bases of one donor block's inner axes; `weights` need hold no other block's."""
    q, k, o, up, down = (weights[block, role].double() for role in ("Q", "K", "O", "MLP_UP", "MLP_DOWN"))
    q, o = _as_columns(q, donor), _as_columns(o.T, donor)
    units = up @ up.T + down.T @ down
    if (block, "MLP_GATE") in weights:
        gate = weights[block, "MLP_GATE"].double()
        units += gate @ gate.T
    qk, vo = leading(q @ q.T + k @ k.T, target.size(KEYS)), leading(o @ o.T, target.size(VALUES))
    maps: dict[str, Map] = {MLP: Basis(leading(units, target.mlp)), QK: Basis(_for_queries(qk, donor, target)),
                            VO: Basis(_for_queries(vo, donor, target))}
    return maps if donor.kv_heads is None else {**maps, KEYS: Basis(qk), VALUES: Basis(vo)}


def _as_columns(matrix: torch.Tensor, shape: Shape) -> torch.Tensor:
    """(heads x head_dim, n) -> (groups x head_dim, heads of a group x n): the query heads of a group side by side."""
    return matrix if shape.sharing == 1 else grouped(matrix, shape).transpose(1, 2).flatten(2).flatten(0, 1)


def _for_queries(basis: torch.Tensor, donor: Shape, target: Shape) -> torch.Tensor:
    """A basis of what groups share, (k, groups x head_dim), for the query heads' axis: each head of a group by it, and
    evenly spaced ones of them where the target's groups are smaller."""
    wide = torch.zeros(target.groups, target.sharing, target.head_dim, donor.groups, donor.sharing, donor.head_dim,
                       dtype=basis.dtype)
    blocks = basis.view(target.groups, target.head_dim, donor.groups, donor.head_dim)
    for head, source in enumerate(uniform(donor.sharing, target.sharing).tolist()):
        wide[:, head, :, :, source] = blocks
    return wide.view(target.size(QK), donor.size(QK))


def _shared(residual: torch.Tensor, target: Shape) -> dict[tuple[int | None, str], Map]:
    """The two axes all blocks share: kept residual features, and the target's leading vocabulary rows."""
    return {(None, RESIDUAL): Selection(residual), (None, VOCAB): Selection(torch.arange(target.vocab))}

"""Which heads are kept, and which dimensions inside them: indices on the axes of attention.

Everything is by *group*: a key-value head and the query heads that share it. Where every head has keys and values of
its own, groups have one query head each.
"""

import torch

from scaleop.wiring import KEYS, QK, VALUES, VO, Shape, match_frequencies


def top(scores: torch.Tensor, k: int) -> torch.Tensor:
    """Indices of the k largest scores, ascending; of equal scores the first ones win."""
    return scores.argsort(descending=True, stable=True)[:k].sort().values


def in_head(heads: torch.Tensor, dims: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Positions on a head-major axis: (h,) heads and (h, k) dims inside each -> (h k,)."""
    return (heads[:, None] * head_dim + dims).flatten()


def grouped(values: torch.Tensor, shape: Shape) -> torch.Tensor:
    """Of the query heads' dims (heads x head_dim, ...) -> (groups, heads of a group, head_dim, ...)."""
    return values.unflatten(0, (shape.groups, shape.sharing, shape.head_dim))


def spread(values: torch.Tensor, shape: Shape) -> torch.Tensor:
    """What a group shares (groups x head_dim,), once for each of its query heads (heads x head_dim,)."""
    return values.unflatten(0, (shape.groups, 1, shape.head_dim)).expand(-1, shape.sharing, -1).flatten()


def select_heads(scores: torch.Tensor, donor: Shape, target: Shape) -> torch.Tensor:
    """(target heads,) kept query heads: all, or those whose V/O dims, scores (heads x head_dim,), sum highest.

    A key-value head stays or goes with its query heads: first whole groups are ranked, by what would stay of each, then
    the query heads inside a group, where the target has fewer of them. Group by group, ascending.
    """
    heads = grouped(scores, donor).sum(dim=2)  # (groups, heads of a group)
    worth = heads.sort(dim=1, descending=True).values[:, : target.sharing].sum(dim=1)
    return torch.cat([group * donor.sharing + top(heads[group], target.sharing) for group in top(worth, target.groups)])


def kept_dims(heads: torch.Tensor, qk: torch.Tensor, vo: torch.Tensor, donor: Shape, target: Shape
              ) -> dict[str, torch.Tensor]:
    """{axis: kept coordinates} of all axes inside heads, from the kept query heads (h,) and each group's kept dims
    (groups, target head_dim)."""
    group = heads // donor.sharing
    kept = {QK: in_head(heads, qk[group], donor.head_dim), VO: in_head(heads, vo[group], donor.head_dim)}
    if donor.kv_heads is not None:
        groups = group[:: target.sharing]
        kept |= {KEYS: in_head(groups, qk[groups], donor.head_dim), VALUES: in_head(groups, vo[groups], donor.head_dim)}
    return kept


def rotary_first(scores: torch.Tensor, donor: Shape, target: Shape) -> torch.Tensor:
    """Dims kept inside each head for Q and K: scores (heads, head_dim) -> (heads, target head_dim).

    The rotary part keeps frequency-matched pairs, first halves then second halves; the rest keeps its largest scores.
    """
    pairs = torch.tensor(match_frequencies(donor, target), dtype=torch.long)
    rotary = torch.cat([pairs, pairs + donor.rotary_dims // 2])
    rest = target.head_dim - target.rotary_dims
    return torch.stack([torch.cat([rotary, donor.rotary_dims + top(head[donor.rotary_dims :], rest)])
                        for head in scores])

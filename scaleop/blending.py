"""Which blending hurts? (section 5, and beyond it): maps mixed axis by axis, four treatments of norms, and bases.

The paper names four structures that a dense basis breaks: rotary pairs and heads (axes qk and vo), the elementwise
GELU (mlp) and the per-feature LayerNorm (residual). Mixed maps blend exactly one of them, or spare exactly one.
"""

import time
from collections.abc import Collection, Mapping

import torch

from scaleop.maps import Maps, leading
from scaleop.weights import Weights
from scaleop.wiring import MLP, QK, VO, Wiring, together


def mix(base: Maps, other: Maps, axes: Collection[str]) -> Maps:
    """`base` with the maps of the named axes, in every block, taken from `other`.

    Raises ValueError when the two keep different blocks or an axis is not mapped by both.
    """
    if base.blocks != other.blocks:
        raise ValueError(f"maps of different blocks cannot be mixed: {base.blocks} and {other.blocks}")
    for axis in axes:
        if not all(any(key[1] == axis for key in maps.axes) for maps in (base, other)):
            raise ValueError(f"axis {axis!r} is not mapped; there are: {', '.join(sorted({k[1] for k in base.axes}))}")
    taken = {each for axis in axes for each in together(axis)}
    kept = {key: map_ for key, map_ in base.axes.items() if key[1] not in taken}
    return Maps(base.blocks, kept | {key: map_ for key, map_ in other.axes.items() if key[1] in taken})


def with_norms(weights: Weights, norms: Weights, wiring: Wiring) -> Weights:
    """`weights` with every norm parameter (gains and biases, the final norm's too) taken from `norms`."""
    return {key: norms[key] if wiring[key[1]].neutral is not None else tensor for key, tensor in weights.items()}


def treatments(projected: Weights, selected: Weights, target: Weights | None, wiring: Wiring) -> dict[str, Weights]:
    """One set of projected matrices under the four treatments of its norms.

    `projected` and `selected` are a donor shrunk by bases and by a selection, norms mapped along. `target` holds a
    trained target's weights, of which only the norms are used: a diagnostic, never an arm (None leaves it out).
    """
    neutral = {key: torch.full_like(tensor, wiring[key[1]].neutral or 0.0) for key, tensor in projected.items()}
    sources = {"own": target, "projected": projected, "selected": selected, "neutral": neutral}
    return {name: with_norms(projected, norms, wiring) for name, norms in sources.items() if norms is not None}


def subspace_sine(first: torch.Tensor, second: torch.Tensor) -> float:
    """Sine of the largest principal angle between the row spaces of two bases ((k, n), orthonormal rows): 0 when they
    are the same subspace, 1 when some direction of one is foreign to the other. (Not from the cosine: that cannot
    tell angles below 1e-8 from none.)"""
    outside = first.double() - first.double() @ second.double().T @ second.double()
    return torch.linalg.matrix_norm(outside, ord=2).item()


def gram_against_svd(matrix: torch.Tensor, k: int) -> dict[str, float]:
    """A leading left basis of (n, m) `matrix` by its Gram matrix, as maps.py does, and by full SVD, both fp64.

    Squaring a matrix costs half the digits of its small singular values; whether that matters for the leading k is
    measured: `sine` between the two subspaces, `gap` (k-th over next singular value, what the basis hangs on), `energy`
    (share of the squared norm that the basis keeps), and seconds of both.
    """
    matrix, began = matrix.double(), time.perf_counter()
    basis = leading(matrix @ matrix.T, k)
    between = time.perf_counter()
    u, values, _ = torch.linalg.svd(matrix, full_matrices=False)
    done, energy = time.perf_counter(), values.square().cumsum(0)
    following = values[k].item() if k < len(values) else 0.0
    return {"sine": subspace_sine(basis, u[:, :k].T), "gap": values[k - 1].item() / following if following else None,
            "energy": (energy[k - 1] / energy[-1]).item(), "gram, s": between - began, "SVD, s": done - between}


def shared_stacks(block: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The matrix whose leading left singular vectors are each inner axis's basis, for the weights of one block."""
    return {QK: torch.cat([block["Q"], block["K"]], dim=1), VO: block["O"].T,
            MLP: torch.cat([block["MLP_UP"], block["MLP_DOWN"].T], dim=1)}

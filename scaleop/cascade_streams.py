"""The residual map of a cascade: which k directions of the donor's stream the small model's stream holds.

    selected   the coordinates that the arm's maps keep
    pca        the leading directions of the stream's second moment, summed over all places with equal weight: before
               the first block and behind each (a place's moment is divided by its trace, or the loud late ones would
               choose alone)
    pca_raw    the same without that division
    rotation   k random directions: what any basis would do (a control)

About zero, not the mean: the small stream is P h, with no offset that could carry a mean.
"""

from pathlib import Path
from typing import Any

import numpy as np
import torch

from scaleop.cascade_settings import StreamMap
from scaleop.maps import Basis, leading
from scaleop.streaming import SPILL, OneBlock, Run, walk
from scaleop.wiring import shape_of


def stream_moments(source: Any, sequences: np.ndarray, folder: Path, batch: int = 16, spill: int = SPILL,
                   device: str = "cpu") -> dict[str, torch.Tensor]:
    """{"pca", "pca_raw"}: (width, width) fp64 second moments of the residual stream, over all positions of `sequences`
    (n, length), summed over all places with equal weight and with their own.

    `source`: a `shards.Checkpoint` or `blocks.InMemory`. Costs one pass through the donor's blocks, one at a time; the
    stream waits in `folder` where it is larger than `spill` bytes. Raises FloatingPointError for a stream that is not
    finite.
    """
    width, layers = shape_of(source.config).width, shape_of(source.config).layers
    sums = {name: torch.zeros(width, width, dtype=torch.float64) for name in ("pca", "pca_raw")}

    def add(place: str, batches: Any) -> None:
        gram = torch.zeros(width, width, dtype=torch.float64)
        for stream in batches:
            rows = stream.flatten(0, -2).double()
            gram.add_((rows.T @ rows).cpu())
        trace = gram.trace().item()
        if not 0 < trace < float("inf"):
            raise FloatingPointError(f"the donor's residual stream {place} is not finite, or all zero: is it a working "
                                     "model?")
        sums["pca"] += gram / trace
        sums["pca_raw"] += gram

    def visit(block: int, model: OneBlock, run: Run) -> None:
        add(f"behind block {block}", run(keep=block < layers - 1))

    add("before block 0", (source.rows("EMB_IN", torch.as_tensor(sequences[first : first + batch]))
                           for first in range(0, len(sequences), batch)))
    walk(source, sequences, batch, range(layers), visit, folder, what="directions of the stream", spill=spill,
         device=device)
    return sums


def stream_basis(kind: StreamMap, moments: dict[str, torch.Tensor] | None, width: int, k: int) -> Basis:
    """The residual map of that kind but "selected": (k, width) orthonormal rows, from `stream_moments`."""
    if kind == "rotation":
        draw = torch.randn(width, k, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        return Basis(torch.linalg.qr(draw).Q.T.contiguous())
    return Basis(leading(moments[kind], k))

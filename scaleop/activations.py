"""What the donor's activations say: statistics of its residual stream, and second moments before its read-outs.

Everything is streamed: a batch of frozen sequences goes through the donor, hooks update running sums in fp64, and
the activations are dropped. Memory is the sums plus one batch, whatever the number of sequences.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from scaleop.devices import BESIDE, device_of, free_memory, on_best_device
from scaleop.progress import progress
from scaleop.weights import module_of
from scaleop.wiring import READ_OUT, wiring_of

ROWS = 256  # of moments that are added at once: what converts them to the sums' dtype stays small

Place = tuple[int, str]  # (block, role)


@dataclass(frozen=True)
class StreamStatistics:
    """Of the mean-pooled residual stream behind each block: `variance` (blocks, width) over sequences, unbiased;
    `mean` (width,) and `covariance` (width, width) over all blocks and sequences together. fp64."""

    variance: torch.Tensor
    mean: torch.Tensor
    covariance: torch.Tensor


class StreamSums:
    """Running sums of the pooled residual stream behind each block, about its first batch's mean (cancellation).

    `covariance` False leaves that matrix out (the statistics' is then empty). Raises ValueError for fewer than two
    sequences.
    """

    def __init__(self, layers: int, width: int, sequences: int, covariance: bool = True) -> None:
        if sequences < 2:
            raise ValueError(f"a variance needs at least two sequences, got {sequences}")
        self.sequences, self.shift = sequences, {}
        self.total = torch.zeros(layers, width, dtype=torch.float64)
        self.square = torch.zeros(layers, width, dtype=torch.float64)
        self.gram = torch.zeros(width, width, dtype=torch.float64) if covariance else None

    def add(self, block: int, batch: torch.Tensor) -> None:
        """Count in a batch of what `pooled` gives behind a block: (batch, width) fp32."""
        batch = batch.double()
        centred = batch - self.shift.setdefault(block, batch.mean(dim=0))
        self.total[block] += centred.sum(dim=0)
        self.square[block] += centred.square().sum(dim=0)
        if self.gram is not None:
            self.gram.add_(batch.T @ batch)

    def statistics(self) -> StreamStatistics:
        """The statistics of all that was added."""
        layers, n = len(self.total), self.sequences
        means = self.total / n + torch.stack([self.shift[b] for b in range(layers)])
        mean = means.mean(dim=0)
        covariance = torch.zeros(0) if self.gram is None else self.gram / (layers * n) - torch.outer(mean, mean)
        return StreamStatistics((self.square - self.total.square() / n) / (n - 1), mean, covariance)


def pooled(stream: torch.Tensor) -> torch.Tensor:
    """(batch, length, width) residual stream -> (batch, width) fp32 mean over positions, on the CPU."""
    return stream.float().mean(dim=1).cpu()


@contextmanager
def hooked(handles: list[torch.utils.hooks.RemovableHandle]) -> Iterator[None]:
    """Remove the hooks at the end, whatever happens."""
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class _Reached(Exception):
    """Raised inside a forward pass that has shown all it was asked for."""


@torch.no_grad()
def read_by(modules: list[nn.Module], forward: Callable[[], Any]) -> list[torch.Tensor]:
    """What each of the modules reads in a forward pass, which ends before the last of them runs."""
    seen: dict[nn.Module, torch.Tensor] = {}

    def keep(module: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        seen[module] = inputs[0]
        if len(seen) == len(modules):
            raise _Reached

    with hooked([module.register_forward_pre_hook(keep) for module in modules]), suppress(_Reached):
        forward()
    return [seen[module] for module in modules]


@torch.no_grad()
def forward_all(model: nn.Module, sequences: np.ndarray, batch: int, what: str) -> None:
    """Push (n, length) token ids through the model's body, `batch` sequences at a time (no output head).

    The model runs on the best device there is and then returns to where it was: hooks see tensors of either.
    """
    with on_best_device(model):
        device = device_of(model)
        for start in progress(range(0, len(sequences), batch), desc=what, unit=" batches"):
            ids = torch.as_tensor(sequences[start : start + batch], device=device)
            model.base_model(input_ids=ids, use_cache=False)


def stream_statistics(model: nn.Module, sequences: np.ndarray, batch: int = 32) -> StreamStatistics:
    """Pool each block's output over positions (fp32 mean) and gather the statistics of section 7's selection.

    `sequences`: (n, length) frozen set, n >= 2. A block's output is the residual stream behind it (the last one
    before the final norm). Holds blocks x width + width^2 fp64 numbers. Raises ValueError for n < 2.
    """
    layers = model.config.num_hidden_layers
    sums = StreamSums(layers, model.config.hidden_size, len(sequences))

    def hook(block: int) -> Callable[..., None]:
        def pool(module: nn.Module, inputs: tuple, output: torch.Tensor) -> None:
            if not torch.is_tensor(output):
                raise TypeError(f"block {block} returned {type(output).__name__}, not the residual stream")
            sums.add(block, pooled(output))
        return pool

    path = wiring_of(model.config).block
    with hooked([model.get_submodule(path.format(b=b)).register_forward_hook(hook(b)) for b in range(layers)]):
        forward_all(model, sequences, batch, "pooled activations")
    return sums.statistics()


def moment_hook(sums: dict[Place, torch.Tensor], place: Place, index: torch.Tensor | slice,
                dtype: torch.dtype = torch.float64) -> Callable[..., None]:
    """A forward pre-hook that adds x x_K' of what its module reads to `sums[place]`, (n, k) of that dtype; K is
    `index`. The product of a batch is fp32 and joins the sums by rows: no copy of it in their dtype is made. The sums
    are on the module's device, or on the CPU where there is no room for them: who takes them brings them there."""
    def accumulate(module: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        x = inputs[0].flatten(0, -2).float()  # (positions, n)
        product = x.T @ x[:, index if isinstance(index, slice) else index.to(x.device)]
        if place not in sums:
            roomy = free_memory(x.device) > product.numel() * dtype.itemsize + BESIDE
            sums[place] = torch.zeros(product.shape, dtype=dtype, device=x.device if roomy else "cpu")
        for total, part in zip(sums[place].split(ROWS), product.split(ROWS), strict=True):
            total.add_(part.to(total.device))
    return accumulate


def input_hook(sums: dict[Place, torch.Tensor], place: Place) -> Callable[..., None]:
    """A forward pre-hook that adds what its module reads, and its square, to `sums[place]`, (2, n) fp64 on the CPU."""
    def accumulate(module: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        x = inputs[0].flatten(0, -2).double()
        both = torch.stack([x.sum(dim=0), x.square().sum(dim=0)]).cpu()
        sums[place] = both if place not in sums else sums[place].add_(both)
    return accumulate


def second_moments(model: nn.Module, sequences: np.ndarray, kept: dict[tuple[int, str], torch.Tensor],
                   batch: int = 16, dtype: torch.dtype = torch.float64) -> dict[tuple[int, str], torch.Tensor]:
    """Columns Sigma[:, K] of the uncentred second moments of read-out inputs, summed over all positions.

    `kept`: {(donor block, role): (k,) kept input coordinates}. Returns for each the (n, k) sum of x x_K' on the CPU.
    Only these columns are ever formed, never the full square. Positions come from all `sequences` (n, length).
    A batch's products are fp32; their sums have the `dtype`: torch.float32 (the paper's) halves the memory and lets
    the batches' roundings add up.
    """
    wiring, sums = wiring_of(model.config), {}
    handles = [module_of(model, wiring[role], block).register_forward_pre_hook(
        moment_hook(sums, (block, role), index, dtype)) for (block, role), index in kept.items()]
    with hooked(handles):
        forward_all(model, sequences, batch, "second moments")
    return {place: moments.cpu() for place, moments in sums.items()}


def input_statistics(model: nn.Module, sequences: np.ndarray, batch: int = 16) -> dict[tuple[int, str], torch.Tensor]:
    """{(block, role): (2, n) fp64}: mean and mean square of every input of every read-out, over all positions.

    Memory is these sums plus one batch. The first rank inputs by their activations, the second fill biases.
    """
    wiring, sums = wiring_of(model.config), {}
    handles = [module_of(model, role, block).register_forward_pre_hook(input_hook(sums, (block, role.name)))
               for block in range(model.config.num_hidden_layers) for role in wiring.lever(READ_OUT)]
    with hooked(handles):
        forward_all(model, sequences, batch, "inputs of the read-outs")
    return {key: both / sequences.size for key, both in sums.items()}

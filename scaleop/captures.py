"""Activations of a trained pair on the frozen set, streamed and kept in the store for sections 4 to 7.

A *capture* holds, for every block of one model and every frozen sequence, the residual stream behind the block
averaged over positions, and at the last position. It is written to disk batch by batch and read back one block at a
time. The similarity of all positions needs far more than fits (24 blocks x 64,000 positions x 2,048 features are over
12 GB), so only its running sums are ever held.
"""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.lib.format import open_memmap
from torch import nn

from scaleop.activations import forward_all, hooked
from scaleop.alignment import Similarity
from scaleop.devices import device_of, on_best_device
from scaleop.experiment import Experiment, ExperimentError
from scaleop.paths import STORE
from scaleop.progress import progress
from scaleop.store import StoreError, atomic_folder, cached_tensors, digest, locked, provenance, read_json, write_json
from scaleop.weights import load, target_shape
from scaleop.wiring import shape_of, wiring_of

KINDS = ("pooled", "last")  # mean over positions; last position
FORMAT = 1  # raise it when a change of code changes what a capture holds


@dataclass(frozen=True)
class Capture:
    """A capture on disk: `pooled.npy` and `last.npy`, (blocks, sequences, width) fp32, and `manifest.json`."""

    folder: Path

    @cached_property
    def manifest(self) -> dict[str, Any]:
        """Model key, frozen set's hash, shape and provenance."""
        return read_json(self.folder / "manifest.json")

    @cached_property
    def pooled(self) -> np.ndarray:
        """(blocks, sequences, width) memory map: each block's output averaged over positions in fp32."""
        return self._open("pooled")

    @cached_property
    def last(self) -> np.ndarray:
        """(blocks, sequences, width) memory map: each block's output at the last position."""
        return self._open("last")

    def _open(self, kind: str) -> np.ndarray:
        path = self.folder / f"{kind}.npy"
        try:
            found = np.load(path, mmap_mode="r", allow_pickle=False)
        except (OSError, ValueError) as error:
            raise StoreError(f"{path} is damaged ({error}). Delete {self.folder} and run again.") from error
        if list(found.shape) != self.manifest["shape"]:
            raise StoreError(f"{path} is not what its manifest says. Delete {self.folder} and run again.")
        return found


def capture(model: nn.Module, key: str, sequences: np.ndarray, batch: int = 32) -> Capture:
    """The capture of a model on (n, length) token ids, made on first use and found again afterwards.

    `key` names the weights (`scaleop.race.model_key`). Memory is one block's activations of one batch; disk is 2 x
    blocks x n x width fp32 numbers. fp32 rather than the authors' fp16, whose rounding is larger than what a streamed
    and an in-memory score may differ by. Raises ValueError when the model gives NaN or infinity.
    """
    tokens = frozen_hash(sequences)
    folder = STORE / "captures" / digest([FORMAT, key, tokens])
    with locked(folder.parent):
        if not (folder / "manifest.json").exists():
            origin = provenance(model=key, frozen=tokens, format=FORMAT)
            with atomic_folder(folder) as part:
                shape = _write(model, sequences, batch, part)
                write_json(part / "manifest.json", {**origin, "shape": shape})
    return Capture(folder)


def _write(model: nn.Module, sequences: np.ndarray, batch: int, folder: Path) -> list[int]:
    blocks, width = model.config.num_hidden_layers, model.config.hidden_size
    files = {kind: open_memmap(folder / f"{kind}.npy", mode="w+", dtype=np.float32,
                               shape=(blocks, len(sequences), width)) for kind in KINDS}
    at = [0] * blocks  # sequences seen so far by each block

    def keep(block: int, output: torch.Tensor) -> None:
        rows = slice(at[block], at[block] + len(output))
        for kind, values in (("pooled", output.float().mean(dim=1)), ("last", output[:, -1].float())):
            if not torch.isfinite(values).all():
                raise ValueError(f"block {block} gives NaN or infinity: check the model's weights and its dtype")
            files[kind][block, rows] = values.cpu().numpy()
        at[block] = rows.stop

    with watched(model, keep):
        forward_all(model, sequences, batch, "captures")
    for file in files.values():
        file.flush()
    return [blocks, len(sequences), width]


def similarity(large: nn.Module, small: nn.Module, keys: Sequence[str], sequences: np.ndarray, *, batch: int = 16,
               memory: int = 4 * 2**30) -> torch.Tensor:
    """(L, l) linear CKA between all blocks of two models over all positions of (n, length) token ids, cached.

    `keys` name the two models' weights. The sums of a pass over g of the larger model's blocks are g l D d + g D^2
    + l d^2 fp64 numbers (D, d the widths), and g is chosen so that they stay below `memory` bytes, with one batch
    of activations beside them (at least one block a pass). Pythia-1.4B against 410M takes three passes at the
    default; both models run once a pass. ValueError as in `alignment.Similarity`.
    """
    path = STORE / "captures" / f"cka-{digest([FORMAT, *keys, frozen_hash(sequences)])}.safetensors"

    def compute() -> dict[str, torch.Tensor]:
        return {"cka": stream_similarity(large, small, sequences, batch, memory)}
    return cached_tensors(path, compute)["cka"]


@torch.no_grad()
def stream_similarity(large: nn.Module, small: nn.Module, sequences: np.ndarray, batch: int,
                      memory: int) -> torch.Tensor:
    """`similarity`, computed."""
    group = blocks_a_pass(large.config, small.config, memory)
    every = range(large.config.num_hidden_layers)
    passes = [every[start : start + group] for start in range(0, len(every), group)]
    found = []
    bar = progress(total=len(passes) * len(sequences), desc="similarity", unit=" sequences")
    with on_best_device(large, small), bar:
        for blocks in passes:
            sums = Similarity()
            for start in range(0, len(sequences), batch):
                ids = torch.as_tensor(sequences[start : start + batch])
                x, y = outputs(large, ids, blocks), outputs(small, ids, range(small.config.num_hidden_layers))
                sums.add(x, y.to(x.device))
                bar.update(len(ids))
            found.append(sums.matrix().cpu())
    return torch.cat(found)


def blocks_a_pass(large: Any, small: Any, memory: int) -> int:
    """How many of the larger model's blocks fit a pass of `similarity`: two configs, bytes -> at least 1."""
    wide, narrow, little = large.hidden_size, small.hidden_size, small.num_hidden_layers
    left = memory / 8 - little * narrow**2
    return min(max(1, int(left // (little * wide * narrow + wide**2))), large.num_hidden_layers)


def outputs(model: nn.Module, ids: torch.Tensor, blocks: Sequence[int]) -> torch.Tensor:
    """(len(blocks), positions, width) fp32: outputs of these blocks at every position of (n, length) token ids."""
    found: dict[int, torch.Tensor] = {}
    with watched(model, lambda block, output: found.update({block: output.flatten(0, 1).float()}), blocks):
        model.base_model(input_ids=ids.to(device_of(model)), use_cache=False)
    return torch.stack([found[block] for block in blocks])


@contextmanager
def watched(model: nn.Module, see: Callable[[int, torch.Tensor], None],
            blocks: Sequence[int] | None = None) -> Iterator[None]:
    """Call `see(block, output)` with the (n, length, width) residual stream behind each block (or those of `blocks`).

    The last block's is the stream before the final norm. TypeError when a block does not return a tensor.
    """
    def hook(block: int) -> Callable[..., None]:
        def receive(module: nn.Module, inputs: tuple, output: torch.Tensor) -> None:
            if not torch.is_tensor(output):
                raise TypeError(f"block {block} returned {type(output).__name__}, not the residual stream")
            see(block, output)
        return receive

    path = wiring_of(model.config).block
    with hooked([model.get_submodule(path.format(b=block)).register_forward_hook(hook(block))
                 for block in (range(model.config.num_hidden_layers) if blocks is None else blocks)]):
        yield


def frozen_hash(sequences: np.ndarray) -> str:
    """A key for token ids: their shape and values, whatever integer type they come in."""
    ids = np.ascontiguousarray(sequences, dtype=np.int64)
    return digest([list(ids.shape), hashlib.sha256(ids.tobytes()).hexdigest()])


def reference_of(experiment: Experiment) -> nn.Module:
    """The experiment's trained model of the target's shape; sections 4 to 6 compare the donor with it.

    ExperimentError when the experiment names none, or one of another shape.
    """
    pair = experiment.pair
    if pair.reference is None:
        raise ExperimentError(
            f"experiment {experiment.name!r} has no reference, and this section compares the donor with a trained "
            f"model of the target's shape ({target_shape(pair)}): set pair.reference to a checkpoint folder, or use an "
            "experiment that has one (nano)")
    model = load(pair.reference)
    shape = shape_of(model.config)
    for key, wanted in target_shape(pair).model_dump(exclude_none=True).items():
        if getattr(shape, key) != wanted:
            raise ExperimentError(f"pair.reference {pair.reference} has {key}={getattr(shape, key)}, the target "
                                  f"{wanted}: they must have the same shape")
    return model

"""A donor's forward pass one block at a time: the residual stream of all sequences waits between two blocks.

A model of a single block is built from the donor's config, and each block's tensors are copied into it from the
checkpoint. So at any time one block is in memory, and beside it the residual stream, which goes to disk where it is
large. Batches are those of `scaleop.activations`, and so are the numbers, bit by bit.
"""

import math
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

import numpy as np
import torch
from torch import nn

from scaleop.progress import Bar, progress
from scaleop.shards import Checkpoint
from scaleop.store import refusals_as_sentences
from scaleop.weights import empty_model
from scaleop.wiring import config_like, shape_of

SPILL = 10**9  # bytes of residual stream above which it waits on disk


class OneBlock:
    """A model with one block of the donor's shape, no final norm and next to no vocabulary; `load` makes it any block.

    Called with a (batch, length, width) residual stream it returns the stream behind the block. fp32, on `device`.
    """

    def __init__(self, checkpoint: Checkpoint, device: str = "cpu") -> None:
        shape, wiring = shape_of(checkpoint.config), checkpoint.wiring
        special = [getattr(checkpoint.config, f"{name}_token_id", None) for name in ("bos", "eos", "pad")]
        vocab = 1 + max([0, *(token for token in special if isinstance(token, int))])
        config = config_like(checkpoint.config, **shape.sizes() | {"layers": 1, "vocab": vocab})
        config._attn_implementation = "sdpa"  # as `weights.load` has it
        with torch.random.fork_rng(devices=[]):  # the initial values are overwritten: leave the random state alone
            self.model = empty_model(config).eval().to(device)
        norm = wiring["LN_FINAL_GAIN"].path.removesuffix(".weight")
        self.final_norm = self.model.get_submodule(norm)  # set aside as it was initialised
        self.model.set_submodule(norm, nn.Identity())
        self.checkpoint, self.device = checkpoint, device

    def load(self, block: int) -> None:
        """Become block `block` of the donor."""
        self.checkpoint.copy_block(block, self.model.state_dict())

    def __call__(self, stream: torch.Tensor) -> torch.Tensor:
        """The residual stream behind the block, as its own forward pass has it."""
        return self.model.base_model(inputs_embeds=stream.to(self.device), use_cache=False).last_hidden_state


def on_disk(shape: tuple[int, int, int], spill: int) -> int:
    """Bytes that a stream of that shape takes on disk, twice over while a block's outputs are written; 0 up to `spill`
    bytes, in memory."""
    size = 4 * math.prod(shape)
    return 2 * size if size > spill else 0


class Stream:
    """The residual stream of (sequences, length) tokens before block `before`, fp32; in memory up to `spill` bytes,
    else in a file of `folder` that a later process finds again. Raises StoreError when the disk is full."""

    def __init__(self, shape: tuple[int, int, int], folder: Path, spill: int) -> None:
        self.shape, self.row, self.before = shape, math.prod(shape[1:]), 0
        self.folder = folder if on_disk(shape, spill) else None
        self.tensor = torch.empty(shape) if self.folder is None else None

    def _path(self, before: int) -> Path:
        return self.folder / f"before-{before:03d}.bin"

    def resume(self, first: int) -> bool:
        """Take up a file that an earlier process left before block `first` or further in front; False without one."""
        found = [before for before in range(first + 1) if self.folder and self._path(before).exists()]
        self.before = max(found, default=0)
        return bool(found)

    def read(self, rows: slice) -> torch.Tensor:
        """(rows, length, width) of the stream before the present block."""
        if self.tensor is not None:
            return self.tensor[rows]
        count = rows.stop - rows.start
        values = np.fromfile(self._path(self.before), np.float32, count * self.row, offset=4 * rows.start * self.row)
        return torch.from_numpy(values).view(count, *self.shape[1:])

    def write(self, rows: slice, values: torch.Tensor, start: bool = False) -> None:
        """Rows, in order, of the stream behind the present block (`start`: before the first one)."""
        if self.tensor is not None:
            self.tensor[rows] = values
            return
        with refusals_as_sentences(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            with open(self.folder / "next", "wb" if rows.start == 0 else "ab") as file:
                file.write(values.contiguous().numpy().data)
        if rows.stop == self.shape[0] and start:
            (self.folder / "next").replace(self._path(0))

    def advance(self) -> None:
        """Go on to the next block: all rows behind this one have been written."""
        self.before += 1
        if self.folder is not None:
            (self.folder / "next").replace(self._path(self.before))
            self._path(self.before - 1).unlink()

    def drop(self) -> None:
        """Delete what lies on disk."""
        for path in self.folder.glob("*") if self.folder else ():
            path.unlink()


class Run:
    """What a visit to a block may do: push sequences through it, once or more often."""

    def __init__(self, model: OneBlock, stream: Stream, batch: int, bar: Bar) -> None:
        self.model, self.stream, self.batch, self.bar, self.kept = model, stream, batch, bar, False

    def __call__(self, part: slice = slice(None), keep: bool = False) -> Iterator[torch.Tensor]:
        """Outputs (batch, length, width) of the sequences in `part`, batch by batch from its start on.

        `keep`: they are what the next block reads; for all sequences, and after every other run through this block.
        """
        start, stop, _ = part.indices(self.stream.shape[0])
        for first in range(start, stop, self.batch):
            rows = slice(first, min(first + self.batch, stop))
            output = self.model(self.stream.read(rows))
            if keep:
                self.stream.write(rows, output.cpu())
            self.bar.update()
            yield output
        self.kept |= keep


@torch.no_grad()
def walk(checkpoint: Checkpoint, sequences: np.ndarray, batch: int, todo: Collection[int],
         visit: Callable[[int, OneBlock, Run], None], folder: Path, *, what: str, spill: int = SPILL,
         device: str = "cpu", say: Callable[[str], None] = lambda _: None) -> None:
    """Push (n, length) token ids through the blocks, up to the last of `todo`, and `visit` those of `todo`.

    `visit(block, model, run)` may put hooks on the model and consume `run()`. Nothing is done for an empty `todo`. A
    walk that was killed goes on, where the stream is on disk, at the first block of `todo` that is left. `say` is told
    which blocks it goes through.
    """
    if not todo:
        return
    shape = (*sequences.shape, shape_of(checkpoint.config).width)
    stream, model = Stream(shape, folder, spill), OneBlock(checkpoint, device)
    resumed = stream.resume(min(todo))
    say(f"{what}: a pass of {len(sequences):,} sequences through blocks {stream.before} to {max(todo)}")
    if not resumed:
        for first in range(0, len(sequences), batch):
            ids = torch.as_tensor(sequences[first : first + batch])
            stream.write(slice(first, first + len(ids)), checkpoint.rows("EMB_IN", ids), start=True)
    blocks = range(stream.before, max(todo) + 1)
    with progress(total=len(blocks) * math.ceil(len(sequences) / batch), desc=what, unit=" batches") as bar:
        for block in blocks:
            model.load(block)
            run = Run(model, stream, batch, bar)
            if block in todo:
                visit(block, model, run)
            if block < blocks[-1]:
                if not run.kept:
                    for _ in run(keep=True):
                        pass
                stream.advance()
    stream.drop()

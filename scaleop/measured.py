"""What conversions need to know of a donor's activations, gathered block by block and kept in the store.

One folder holds, by block: the pooled residual stream behind it, mean and mean square of what its read-outs read, and
the second moments of that, whole (`full`) or in the columns that one selection keeps (`kept`). What was gathered for
one target or arm serves the next: columns are cut out of any file that has them.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from scaleop.activations import Place, StreamStatistics, StreamSums, hooked, input_hook, moment_hook, pooled
from scaleop.shards import Checkpoint
from scaleop.store import StoreError, atomic, check_room, digest, locked
from scaleop.streaming import SPILL, OneBlock, Run, on_disk, walk
from scaleop.weights import module_of
from scaleop.wiring import READ_OUT, shape_of

STREAM_BATCH, PROBE_BATCH = 32, 16  # sequences at a time, as in `scaleop.activations`: the same numbers come out
MOMENTS = "second moments"
ROWS = 1024  # of moments read from disk at a time
Columns = dict[str, torch.Tensor]  # {read-out role: (k,) kept inputs}
Part = tuple[int, int]  # of the probes: first sequence, and the one behind the last


@dataclass(frozen=True)
class Statistics:
    """Of `checkpoint` on `sequences` (n, length) token ids, the first `moments` of which give second moments.

    `folder` belongs to exactly these. `keep` says what is gathered on the way: everything any arm may ask for
    (`full`), or only what is asked (`kept`). `spill`, `device`: as for `streaming.walk`; `say` is told of each pass.
    """

    checkpoint: Checkpoint
    sequences: np.ndarray
    moments: int
    folder: Path
    keep: Literal["full", "kept"] = "full"
    spill: int = SPILL
    device: str = "cpu"
    say: Callable[[str], None] = print

    @property
    def probes(self) -> np.ndarray:
        """The sequences that give second moments."""
        return self.sequences[: self.moments]

    @property
    def blocks(self) -> range:
        """All blocks of the donor."""
        return range(shape_of(self.checkpoint.config).layers)

    def _path(self, name: str, block: int) -> Path:
        return self.folder / f"{name}-{block:03d}.safetensors"

    def _missing(self, name: str) -> list[int]:
        return [block for block in self.blocks if not self._path(name, block).exists()]

    def _walk(self, sequences: np.ndarray, batch: int, todo: list[int], visit: Callable[[int, OneBlock, Run], None],
              what: str, need: int) -> None:
        """Go through the blocks, after a look at whether the disk has room for `need` bytes and the stream."""
        stream = self.folder / f"stream-{len(sequences)}x{batch}"
        if todo:
            there = sum(path.stat().st_size for path in stream.glob("*"))
            waiting = max(0, on_disk((*sequences.shape, self._width), self.spill) - there)
            full = self.keep == "full" and what == MOMENTS
            thrift = "ask for the kept columns only (--moments kept), " if full else ""
            check_room(self.folder, need + waiting, f"{what}, and hidden states that wait on disk,",
                       f"{thrift}or point SCALEOP_STORE at another disk")
        walk(self.checkpoint, sequences, batch, todo, visit, stream, what=what, spill=self.spill, device=self.device,
             say=self.say)

    def stream(self, covariance: bool) -> StreamStatistics:
        """Statistics of the pooled residual stream over all sequences; `covariance` only where it is wanted."""
        def visit(block: int, model: OneBlock, run: Run) -> None:
            _save(self._path("pooled", block), {"pooled": torch.cat([pooled(out) for out in run(keep=True)])})

        with locked(self.folder):
            todo = self._missing("pooled")
            self._walk(self.sequences, STREAM_BATCH, todo, visit, "pooled activations",
                       need=4 * len(todo) * len(self.sequences) * self._width)
        sums = StreamSums(len(self.blocks), self._width, len(self.sequences), covariance)
        for block in self.blocks:
            for batch in _load(self._path("pooled", block))["pooled"].split(STREAM_BATCH):
                sums.add(block, batch)
        return sums.statistics()

    def inputs(self) -> dict[Place, torch.Tensor]:
        """{(block, role): (2, n) fp64} mean and mean square of what every read-out reads, over the probes."""
        if self._missing("inputs"):
            self._probe({}, [], means=True)
        return {(block, role): values for block in self.blocks
                for role, values in _load(self._path("inputs", block)).items()}

    def gather(self, kept: Mapping[int, Columns], parts: list[Part], means: bool = False) -> None:
        """See to it that `columns` finds the moments of these blocks and columns, of each of the probes' `parts`; and,
        for `means`, in the same pass, that `inputs` finds what it gives."""
        if ((means and self._missing("inputs"))
                or any(self._lacking(block, columns, part) for block, columns in kept.items() for part in parts)):
            self._probe(kept, parts, means)

    def _lacking(self, block: int, columns: Columns, part: Part) -> Columns:
        return {role: index for role, index in columns.items() if self._find(block, role, index, part) is None}

    def _probe(self, kept: Mapping[int, Columns], parts: list[Part], means: bool) -> None:
        """Pass the probes through the donor: for the moments `kept` of `parts`, for `means`, and for all else that
        `full` asks for, as far as it is not there yet."""
        whole = (0, len(self.probes))
        if self.keep == "full":  # one pass for whatever may come
            means, parts = True, list({*parts, whole})
            kept = {block: {role: torch.arange(self._size(role)) for role in self._roles} for block in self.blocks}
        with locked(self.folder):
            jobs = {block: {part: self._lacking(block, kept.get(block, {}), part) for part in parts}
                    for block in self.blocks}
            unread = set(self._missing("inputs") if means else ())
            todo = [block for block in self.blocks if block in unread or any(jobs[block].values())]
            need = sum(8 * self._size(role) * len(index) for block in todo for columns in jobs[block].values()
                       for role, index in columns.items())

            def visit(block: int, model: OneBlock, run: Run) -> None:
                for part in [*(part for part in parts if part != whole), whole]:  # last: its outputs are kept
                    self._visit(block, model, jobs[block].get(part, {}), part, part == whole and block in unread, run)

            self._walk(self.probes, PROBE_BATCH, todo, visit, MOMENTS if parts else "inputs of the read-outs", need)

    def _visit(self, block: int, model: OneBlock, columns: Columns, part: Part, means: bool, run: Run) -> None:
        """Run the probes in `part` through a block; keep the moments of `columns` and, for `means`, of all inputs."""
        moments: dict[Place, torch.Tensor] = {}
        both: dict[Place, torch.Tensor] = {}
        whole = part == (0, len(self.probes))
        hooks = [(role, moment_hook(moments, (block, role), _index(index, self._size(role), self.device)))
                 for role, index in columns.items()]
        hooks += [(role, input_hook(both, (block, role))) for role in self._roles if means]
        if not hooks and not whole:
            return
        with hooked([module_of(model.model, self.checkpoint.wiring[role], 0).register_forward_pre_hook(hook)
                     for role, hook in hooks]):
            for _ in run(slice(*part), keep=whole):
                pass
        for role, index in columns.items():
            name = f"moments-{role}-{part[0]}-{part[1]}-{digest(index.tolist())}"
            _save(self._path(name, block), {"moments": moments.pop((block, role)), "kept": index.sort().values})
        if both:  # last: the block's moments are on disk before it counts as read
            _save(self._path("inputs", block), {role: sums / self.probes.size for (_, role), sums in both.items()})

    def _size(self, role: str) -> int:
        return shape_of(self.checkpoint.config).size(self.checkpoint.wiring[role].axes[1])

    @property
    def _width(self) -> int:
        return shape_of(self.checkpoint.config).width

    @property
    def _roles(self) -> list[str]:
        return [role.name for role in self.checkpoint.wiring.lever(READ_OUT)]

    def _find(self, block: int, role: str, index: torch.Tensor, part: Part) -> Path | None:
        """A file with these columns of the moments, and perhaps others."""
        for path in sorted(self.folder.glob(f"moments-{role}-{part[0]}-{part[1]}-*-{block:03d}.safetensors")):
            if torch.isin(index, _load(path, "kept")["kept"]).all():
                return path
        return None

    def columns(self, block: int, role: str, index: torch.Tensor, part: Part) -> torch.Tensor:
        """(n, k) fp64 columns Sigma[:, index] summed over the positions of the probes in `part`; `gather` them first.

        Read some rows at a time, each time from a newly mapped file: what was read does not stay resident.
        """
        path = self._find(block, role, index, part)
        at = torch.searchsorted(_load(path, "kept")["kept"], index)
        found, first = [], 0
        while True:
            with _opened(path) as stored:
                rows = stored.get_slice("moments")
                if first >= rows.get_shape()[0]:
                    return torch.cat(found)
                found.append(rows[first : first + ROWS][:, at])
            first += ROWS


def _index(index: torch.Tensor, size: int, device: str) -> torch.Tensor | slice:
    """Ascending columns as a hook takes them; all of them are no copy."""
    return slice(None) if len(index) == size else index.sort().values.to(device)


def _save(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    with atomic(path) as part:
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, part)


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """A file of the store, mapped; StoreError names a damaged one and the remedy."""
    try:
        with safe_open(path, "pt") as stored:
            yield stored
    except SafetensorError as error:
        raise StoreError(f"{path} is damaged ({error}). Delete it and run again.") from error


def _load(path: Path, only: str | None = None) -> dict[str, torch.Tensor]:
    """A file's tensors, or one of them."""
    with _opened(path) as stored:
        return {name: stored.get_tensor(name).clone() for name in ([only] if only else stored.keys())}

"""Checkpoints on disk, a few tensors at a time: read from safetensors shards, written to others; never a whole model.

A `Checkpoint` looks at headers when it is opened, so that what is missing, misshapen or unknown is refused before any
work. A file is mapped into memory only while tensors are copied out of it: what has been read does not stay resident.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from scaleop import hub
from scaleop.paths import relative
from scaleop.store import write_json
from scaleop.weights import Table, Weights, WeightsError, keys, load_config, parts_of
from scaleop.wiring import Wiring, shape_of, wiring_of

SHARD = 2**29  # bytes of a written file, unless one tensor is larger: what is waiting to be written stays small


class Checkpoint:
    """A causal language model's folder of safetensors, read by role.

    Raises HubError for a folder without whole safetensors (pickles are refused), WeightsError when its tensors are not
    those of its config. Reads nothing but headers.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = Path(folder)
        self.config = load_config(self.folder)
        self.files: dict[str, tuple[Path, str]] = {}  # path in the state dict: (file, name there)
        shapes = {}
        for file in hub.weight_files(self.folder):
            with safe_open(file, "pt") as stored:
                for name in stored.keys():  # noqa: SIM118 - no mapping
                    if (path := self.wiring.in_model(name)) is not None:
                        self.files[path], shapes[path] = (file, name), tuple(stored.get_slice(name).get_shape())
        self._check(shapes)

    @cached_property
    def wiring(self) -> Wiring:
        """The table of the checkpoint's architecture."""
        return wiring_of(self.config)

    def _check(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        expected: dict[str, tuple[int, ...]] = {}
        shape = shape_of(self.config)
        for (b, _), role in keys(self.wiring, shape.layers):
            first, *rest = (shape.size(axis) for axis in role.axes)
            expected[role.path.format(b=b)] = (first if role.slot is None else first * self.wiring.fused, *rest)
        for second, name in self.wiring.aliases:
            if second in shapes:
                shapes = {path: size for path, size in shapes.items() if path != second}
                self._check_tied(second, name)
        problems = [f"{path} is missing" for path in expected if path not in shapes]
        problems += [f"{path} is not known to the {self.wiring.family} wiring" for path in shapes
                     if path not in expected]
        problems += [f"{path} is {shapes[path]} where the config wants {size}" for path, size in expected.items()
                     if shapes.get(path, size) != size]
        if problems:
            raise WeightsError(f"{relative(self.folder)} is not what its config says: {'; '.join(problems[:5])} "
                               f"({len(problems)} in all)")

    def _check_tied(self, second: str, name: str) -> None:
        """Some files hold a tied tensor under both names; the one that does not count must be the same."""
        found: list[torch.Tensor] = []
        if name in self.files:
            self._visit([name, second], lambda _, tensor: found.append(tensor.clone()))
        if len(found) == 2 and not torch.equal(*found):
            raise WeightsError(f"{relative(self.folder)}: {second} is not {name}, but the config ties them: set "
                               "tie_word_embeddings to false in config.json")

    def copy_block(self, block: int, into: Mapping[str, torch.Tensor]) -> None:
        """Fill the tensors `into` (state dict of a model with one block, by path) with those of that block.

        Cast to their dtype, on their device; costs no memory beside the mapped file. The rest of `into` is left alone.
        """
        paths = {role.path.format(b=block): role.path.format(b=0) for role in self.wiring.roles if role.per_block}
        self._visit(paths, lambda path, tensor: into[paths[path]].copy_(tensor))

    def weights(self, block: int | None, only: Iterable[str] | None = None) -> Weights:
        """Role-keyed fp32 weights of one block (None: what lies outside the blocks), `only` the named roles of it."""
        table = self._table(block, only)
        state: dict[str, torch.Tensor] = {}
        self._visit({role.path.format(b=block) for _, role in table},
                    lambda path, tensor: state.update({path: tensor.to(torch.float32, copy=True)}))
        return parts_of(state, self.config, table)

    def rows(self, role: str, index: torch.Tensor) -> torch.Tensor:
        """(k, n) fp32: the rows `index` (k,) of a matrix outside the blocks (the input embedding of some tokens)."""
        found: list[torch.Tensor] = []
        self._visit({self.wiring[role].path}, lambda _, tensor: found.append(tensor[index].float()))
        return found[0]

    def _table(self, block: int | None, only: Iterable[str] | None) -> Table:
        return [((block, role.name), role) for role in self.wiring.roles
                if role.per_block == (block is not None) and (only is None or role.name in only)]

    def _visit(self, paths: Iterable[str], use: Any) -> None:
        """`use(path, tensor)` for each tensor, file by file; a tensor is a view of the mapped file: copy it."""
        by_file: dict[Path, list[str]] = {}
        for path in paths:
            by_file.setdefault(self.files[path][0], []).append(path)
        for file, wanted in by_file.items():
            with _read(file, self.folder) as stored:
                for path in wanted:
                    use(path, stored.get_tensor(self.files[path][1]))


@contextmanager
def _read(file: Path, folder: Path) -> Iterator[Any]:
    """A donor's file, mapped; HubError when it cannot be read (any more), whatever was being written meanwhile."""
    try:
        with safe_open(file, "pt") as stored:
            yield stored
    except (OSError, SafetensorError) as error:
        raise hub.HubError(f"cannot read {file.name} of {relative(folder)} any more ({error}): it was there and whole "
                           "at the start, and was changed or taken away since. Put it back, or fetch it again, then "
                           "run again: finished work is kept.") from error


def bytes_of(config: Any, dtype: torch.dtype) -> int:
    """What a checkpoint of that config takes on disk in that dtype, headers aside."""
    shape = shape_of(config)
    return dtype.itemsize * sum(math.prod(shape.size(axis) for axis in role.axes)
                                for _, role in keys(wiring_of(config), shape.layers))


class ShardWriter:
    """Writes tensors to a folder as `from_pretrained` expects them: one file if small, else shards and an index.

    Tensors are gathered up to `limit` bytes and then written, so memory is one shard. Call `finish` at the end.
    """

    def __init__(self, folder: Path, wiring: Wiring, dtype: torch.dtype = torch.float32, limit: int = SHARD) -> None:
        self.folder, self.dtype, self.limit = Path(folder), dtype, limit
        self.names = {path: stored for stored, path in wiring.renamed}
        self.waiting: dict[str, torch.Tensor] = {}
        self.written: list[list[str]] = []
        self.bytes = 0

    def add(self, state: Mapping[str, torch.Tensor]) -> None:
        """Take tensors by their path in the state dict."""
        for path, tensor in state.items():
            tensor = tensor.to(self.dtype).contiguous()
            if self.waiting and self._size(self.waiting.values()) + self._size([tensor]) > self.limit:
                self._write()
            self.waiting[self.names.get(path, path)] = tensor

    @staticmethod
    def _size(tensors: Iterable[torch.Tensor]) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    def _write(self) -> None:
        save_file(self.waiting, self.folder / f"part-{len(self.written)}", metadata={"format": "pt"})
        self.bytes += self._size(self.waiting.values())
        self.written.append(list(self.waiting))
        self.waiting = {}

    def finish(self) -> list[Path]:
        """Write what is left and give the files their names, which hold their number; returns the files."""
        if self.waiting:
            self._write()
        count, files = len(self.written), []
        for i, _ in enumerate(self.written):
            name = hub.WHOLE if count == 1 else f"model-{i + 1:05d}-of-{count:05d}.safetensors"
            files.append((self.folder / f"part-{i}").rename(self.folder / name))
            files[-1].chmod(0o644)  # safetensors makes private files
        if count > 1:
            weight_map = {name: file.name for file, names in zip(files, self.written, strict=True) for name in names}
            write_json(self.folder / hub.INDEX, {"metadata": {"total_size": self.bytes}, "weight_map": weight_map})
        return files

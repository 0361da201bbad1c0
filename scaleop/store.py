"""What survives a run: atomic files, content hashes, and the provenance stored beside every number.

A file is either there whole or not there: it is written under a temporary name in the same folder, flushed to
disk, and renamed. A full disk or a killed process therefore leaves the previous version untouched. The same goes for
folders (`scaleop.replacing`).
"""

import hashlib
import json
import os
import platform
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from filelock import FileLock, Timeout
from safetensors import SafetensorError

from scaleop import replacing
from scaleop.paths import ROOT, STORE

if TYPE_CHECKING:
    import torch

VERSIONED = ("torch", "transformers", "accelerate", "tokenizers", "datasets", "numpy", "safetensors")


COMMITS: dict[str, str] = {}
"""The commit that each name of the hub (`owner/model@main`) was found to be in this process; `scaleop.hub` notes it."""


class StoreError(RuntimeError):
    """Something in the store is damaged, locked or cannot be written; the message says what to do."""


@contextmanager
def refusals_as_sentences(path: Path, remedy: str = "point SCALEOP_STORE at another disk") -> Iterator[None]:
    """A full disk, a folder that cannot be written: StoreError with the remedy. (safetensors has its own error.)"""
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise StoreError(f"cannot write {path}: {getattr(error, 'strerror', None) or error}. Free some disk space or "
                         f"{remedy}, then run again: finished work is kept.") from error


def check_room(folder: Path, need: int, what: str, remedy: str) -> None:
    """StoreError when the disk of `folder` (or of the nearest one above that exists) has less than `need` bytes left
    for `what`."""
    there = next(place for place in (folder.absolute(), *folder.absolute().parents) if place.exists())
    if (free := shutil.disk_usage(there).free) < need:
        raise StoreError(f"{what} need {need / 1e9:.1f} GB in {folder}, which has {free / 1e9:.1f} GB left: free some "
                         f"space, {remedy}, then run again")


@contextmanager
def atomic(path: Path) -> Iterator[Path]:
    """Yield a temporary path beside `path`; rename it into place if the block succeeds, delete it if not.

    Raises StoreError when the disk is full or the folder cannot be written; `path` is then as it was before.
    """
    path = Path(path)
    with refusals_as_sentences(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        os.close(handle)
        part = Path(name)
        try:
            yield part
            with open(part, "rb") as file:
                os.fsync(file.fileno())
            part.chmod(0o644)  # mkstemp makes private files; results are for reading
            os.replace(part, path)
        finally:
            part.unlink(missing_ok=True)


@contextmanager
def atomic_folder(path: Path, remedy: str | None = None, last: Callable[[], None] = lambda: None) -> Iterator[Path]:
    """Like `atomic` for a whole folder: fill the yielded folder; it replaces `path` only if the block succeeds.

    `last` is called right before: where it raises, all stays as it was. `remedy`: what a StoreError names instead of
    another SCALEOP_STORE. What a killed process left beside `path` is mended first (`replacing.recover`).
    """
    path = Path(path)
    with refusals_as_sentences(path, *([remedy] if remedy else [])):
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing.room_for(path) as part:
            yield part
            part.chmod(0o755)
            replacing.flush(part)
            last()
            replacing.exchange(part, path)


def write_json(path: Path, value: Any) -> None:
    """Write `value` as indented JSON, atomically. NaN and infinity are refused: no reader agrees on them."""
    with atomic(path) as part:
        part.write_text(json.dumps(value, indent=1, allow_nan=False) + "\n", encoding="utf-8")


def read_json(path: Path) -> Any:
    """Read a JSON file of the store; StoreError names the file and the remedy when it is damaged."""
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise StoreError(f"{path} is damaged ({error}). Delete it (or its folder) and run again.") from error


def sha256(path: Path) -> str:
    """Hex SHA-256 of a file's bytes."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def digest(value: Any, length: int = 12) -> str:
    """A short key for a JSON-able value: equal values give equal keys, whatever the order of dict entries."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()[:length]


def _holder(folder: Path) -> str:
    """Who holds a locked folder, as it wrote itself down."""
    try:
        return (folder / ".holder").read_text(encoding="utf-8")
    except OSError:  # between its lock and its note
        return "another process"


@contextmanager
def locked(folder: Path, wait: bool = True, timeout: float = -1, silent: float = 2.0) -> Iterator[None]:
    """Hold `folder` for one process. Another one that wants it waits `timeout` seconds (-1: for ever), and after
    `silent` of them says for whom; StoreError when they are over, or at once unless it may `wait`.

    The lock is the operating system's: a process that dies, however, holds nothing any more.
    """
    folder.mkdir(parents=True, exist_ok=True)
    lock, limit = FileLock(folder / ".lock"), timeout if wait else 0
    try:
        try:
            lock.acquire(timeout=silent if limit < 0 else min(limit, silent))
        except Timeout:
            if 0 <= limit <= silent:
                raise
            print(f"{folder} is in use by {_holder(folder)}: waiting until it is done. Ctrl-C stops waiting and "
                  "leaves the other alone.", file=sys.stderr, flush=True)
            lock.acquire(timeout=-1 if limit < 0 else limit - silent)
    except Timeout as error:
        raise StoreError(f"{folder} is in use by {_holder(folder)}. Wait for it to finish, or stop it, "
                         "and run again.") from error
    note = folder / ".holder"
    try:
        with suppress(OSError):  # a full disk: the work itself will say so
            note.write_text(f"process {os.getpid()} on {socket.gethostname()}", encoding="utf-8")
        yield
    finally:
        note.unlink(missing_ok=True)
        lock.release()


def cached_json(path: Path, compute: Callable[[], Any]) -> Any:
    """What the JSON file `path` holds; if there is none, `compute()` makes it first, once, as for `cached_tensors`."""
    with locked(path.parent):
        if not path.exists():
            write_json(path, compute())
    return read_json(path)


def cached_values(path: Path, compute: Callable[[], Any], **facts: Any) -> Any:
    """`compute()`'s values, made once and kept in `path` with their provenance (and `facts`) and seconds."""
    def made() -> dict[str, Any]:
        origin, began = provenance(**facts), time.monotonic()
        values = compute()
        return {**origin, "seconds": round(time.monotonic() - began, 1), "values": values}

    return cached_json(path, made)["values"]


def cached_tensors(path: Path, compute: "Callable[[], dict[str, torch.Tensor]]") -> "dict[str, torch.Tensor]":
    """The tensors of the safetensors file `path`; if there is none, `compute()` makes them first, once.

    A second process that wants the same file waits. The name must hold a digest of all that `compute` depends on.
    StoreError names a damaged file and the remedy.
    """
    from safetensors.torch import load_file, save_file

    with locked(path.parent):
        if not path.exists():
            tensors = compute()
            with atomic(path) as part:
                save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, part)
    try:
        return load_file(path)
    except SafetensorError as error:
        raise StoreError(f"{path} is damaged ({error}). Delete it and run again.") from error


def git_commit() -> str:
    """The checked-out commit, with '+dirty' when tracked files differ from it; 'unknown' outside a repository."""
    def git(*arguments: str) -> str:
        return subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True,
                              check=True, timeout=20).stdout.strip()
    try:
        return git("rev-parse", "HEAD") + ("+dirty" if git("status", "--porcelain", "-uno", "scaleop", "params")
                                           else "")
    except (OSError, subprocess.SubprocessError):
        return "unknown"


def provenance(**facts: Any) -> dict[str, Any]:
    """What a stored number needs beside it: commit, versions, hardware, time, and whatever the caller adds.

    Where models of the hub were opened before, `hub_commits` says which commit each of their names is.

    Long work calls this when it starts: the commit is then the code that ran, whatever happened to the checkout since.
    """
    import torch

    return {
        **facts,
        "commit": git_commit(),
        "versions": {"python": platform.python_version(), **{name: version(name) for name in VERSIONED}},
        "hardware": {"machine": platform.machine(), "threads": torch.get_num_threads(),
                     "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"},
        **({"hub_commits": dict(COMMITS)} if COMMITS else {}),
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def record(section: str, **facts: Any) -> Path:
    """Keep what a notebook found as `results/<section>.json` of the store, with provenance; returns the path.

    `scaleop.reproduce` puts the file beside the section's page, so every number of the book exists as data too. A copy
    in `results/<experiment>/` stays when the section is run for another one (`scaleop.training_seeds` gathers those).
    """
    path, found = STORE / "results" / f"{section}.json", provenance(section=section, **facts)
    if "experiment" in facts:
        write_json(path.parent / facts["experiment"] / path.name, found)
    write_json(path, found)
    return path

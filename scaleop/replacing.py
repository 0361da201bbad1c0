"""A folder put in the place of another: whatever kills the process, one of the two is there afterwards.

The new version is filled in a hidden folder beside its place, its room; there the old one waits during the exchange.
A process holds its room by a lock of the operating system, which a dead one loses: so `recover` tells what was left
behind from what is in use, puts an old version back that was set aside, and deletes the rest.
"""

import fcntl
import glob
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

NEW, OLD = "new", "old"


def recover(path: Path) -> None:
    """Mend what a killed process left of `path`: set aside and nothing in its place yet, or half filled beside it."""
    for room in path.parent.glob(f".{glob.escape(path.name)}.????????.part"):  # eight letters: what `mkdtemp` adds
        if (held := _held(room)) is not None:
            _clear(room, path)
            os.close(held)


@contextmanager
def room_for(path: Path) -> Iterator[Path]:
    """An empty folder beside `path` for its new version, NEW in a room of this process's; deleted at the end, and the
    old version back in its place unless `exchange` has put the new one there."""
    recover(path)
    made = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
    held = _held(made)
    room = made.rename(f"{made}.part")  # only now may another process take it for left behind
    try:
        (room / NEW).mkdir()
        yield room / NEW
    finally:
        _clear(room, path)
        if held is not None:
            os.close(held)


def exchange(new: Path, path: Path) -> None:
    """Put the folder `new` of a room in the place of `path`; what was there waits in the room to be deleted."""
    if path.exists():
        os.replace(path, new.with_name(OLD))
    os.replace(new, path)
    _flush(path.parent)


def flush(folder: Path) -> None:
    """See to it that a folder and all files in it are on the disk, and not on their way there."""
    for path in [*folder.rglob("*"), folder]:
        _flush(path)


def _flush(path: Path) -> None:
    opened = os.open(path, os.O_RDONLY)
    try:
        os.fsync(opened)
    except OSError:
        if not path.is_dir():  # not every file system can, for folders
            raise
    finally:
        os.close(opened)


def _held(room: Path) -> int | None:
    """A descriptor that holds a room for this process; None where another process has it, or it is gone."""
    try:
        opened = os.open(room, os.O_RDONLY)
    except OSError:
        return None
    try:
        fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if room.exists():
            return opened
    except OSError:  # held, or a file system without such locks: then nothing there is ever taken for left behind
        pass
    os.close(opened)
    return None


def _clear(room: Path, path: Path) -> None:
    if (room / OLD).exists() and not path.exists():
        os.replace(room / OLD, path)
    shutil.rmtree(room, ignore_errors=True)

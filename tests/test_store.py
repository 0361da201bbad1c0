"""Files are whole or absent, keys ignore order, a folder belongs to one process, and numbers name their origin."""

import errno
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from scaleop import paths
from scaleop.corpus import write_tokens
from scaleop.paths import ROOT
from scaleop.replacing import recover
from scaleop.store import (
    StoreError,
    atomic,
    atomic_folder,
    cached_json,
    cached_values,
    digest,
    git_commit,
    locked,
    provenance,
    read_json,
    sha256,
    write_json,
)
from scaleop.train import Recipe, train
from tests.conftest import neox_config, random_model

# Whole or not there


def test_a_file_appears_only_when_its_block_has_succeeded(tmp_path):
    path = tmp_path / "deep" / "result.txt"
    with atomic(path) as part:
        part.write_text("new")
        assert not path.exists() and part.parent == path.parent  # renaming needs the same file system
    assert path.read_text() == "new"
    assert [file.name for file in path.parent.iterdir()] == ["result.txt"]
    assert path.stat().st_mode & 0o777 == 0o644


@pytest.mark.parametrize("failure", [ValueError("wrong"), KeyboardInterrupt()])
def test_a_failed_write_leaves_the_old_file_and_no_debris(tmp_path, failure):
    path = tmp_path / "result.txt"
    path.write_text("old")
    with pytest.raises(type(failure)), atomic(path) as part:
        part.write_text("half of the n")
        raise failure
    assert path.read_text() == "old"
    assert [file.name for file in tmp_path.iterdir()] == ["result.txt"]


def test_an_operating_system_error_becomes_a_sentence_with_a_remedy(tmp_path):
    path = tmp_path / "result.txt"
    path.write_text("old")
    with pytest.raises(StoreError, match=r"cannot write .*result\.txt: No space left on device\. Free some disk space "
                                         r"or point SCALEOP_STORE at another disk"), atomic(path):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    assert path.read_text() == "old"


@pytest.mark.parametrize("write", [atomic, atomic_folder])
def test_a_place_that_cannot_hold_files_is_a_store_error(tmp_path, write):
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(StoreError, match=r"cannot write .*SCALEOP_STORE"), write(tmp_path / "file" / "result"):
        pass


def test_a_folder_is_replaced_whole(tmp_path):
    folder = tmp_path / "checkpoint"
    for version in ("one", "two"):
        with atomic_folder(folder) as part:
            (part / version).write_text(version)
    assert [file.name for file in folder.iterdir()] == ["two"]  # nothing of the old version is mixed in
    assert [file.name for file in tmp_path.iterdir()] == ["checkpoint"]


def test_a_failed_folder_leaves_the_old_one_and_no_debris(tmp_path):
    folder = tmp_path / "checkpoint"
    with atomic_folder(folder) as part:
        (part / "state").write_text("old")
    with pytest.raises(RuntimeError), atomic_folder(folder) as part:
        (part / "state").write_text("new")
        raise RuntimeError
    assert (folder / "state").read_text() == "old"
    assert [file.name for file in tmp_path.iterdir()] == ["checkpoint"]


KILLED = """
import os, signal, sys
from pathlib import Path
from scaleop.store import atomic_folder

when, replace, done = int(sys.argv[2]), os.replace, []

def replacing(*paths):
    if len(done) == when:
        os.kill(os.getpid(), signal.SIGKILL)
    done.append(replace(*paths))

os.replace = replacing
with atomic_folder(Path(sys.argv[1])) as part:
    (part / "state").write_text("new")
    if when < 0:
        os.kill(os.getpid(), signal.SIGKILL)
"""


def folder_and_killed(tmp_path, when):
    """A folder whose replacing was killed: while it was filled (-1), before the old version was set aside (0), before
    the new one took its place (1)."""
    folder = tmp_path / "checkpoint"
    with atomic_folder(folder) as part:
        (part / "state").write_text("old")
    killed = subprocess.run([sys.executable, "-c", KILLED, str(folder), str(when)], cwd=ROOT, check=False)
    assert killed.returncode == -signal.SIGKILL and len(list(tmp_path.glob(".checkpoint.*"))) == 1
    return folder


@pytest.mark.parametrize("when", [-1, 0, 1])
def test_what_a_killed_process_left_is_mended_and_the_old_version_is_there(tmp_path, when):
    folder = folder_and_killed(tmp_path, when)
    assert folder.exists() == (when < 1)  # between the two it is set aside
    recover(folder)
    assert (folder / "state").read_text() == "old" and [file.name for file in tmp_path.iterdir()] == ["checkpoint"]


def test_the_next_version_mends_first_and_a_failed_one_leaves_what_was_set_aside(tmp_path):
    folder = folder_and_killed(tmp_path, 1)
    with pytest.raises(ZeroDivisionError), atomic_folder(folder):
        assert (folder / "state").read_text() == "old"
        1 / 0  # noqa: B018
    assert (folder / "state").read_text() == "old" and [file.name for file in tmp_path.iterdir()] == ["checkpoint"]


def test_what_is_in_use_or_of_another_name_is_not_taken_for_left_behind(tmp_path):
    for other in ("checkpoint.v2", "check", "heckpoint"):  # what a living process fills, and names that look alike
        (tmp_path / f".{other}.abcdefgh.part" / "new").mkdir(parents=True)
    (tmp_path / ".checkpoint.mine").mkdir()
    with atomic_folder(tmp_path / "checkpoint") as part:
        (part / "state").write_text("one")
        recover(tmp_path / "checkpoint")
        with atomic_folder(tmp_path / "checkpoint") as second:
            (second / "state").write_text("two")
        assert (part / "state").read_text() == "one"
    assert (tmp_path / "checkpoint" / "state").read_text() == "one" and len(list(tmp_path.iterdir())) == 5


def test_an_old_version_comes_back_when_the_new_one_cannot_take_its_place(tmp_path, monkeypatch):
    folder, replace = tmp_path / "checkpoint", os.replace
    folder.mkdir()
    (folder / "state").write_text("old")

    def failing(source, target):
        if Path(source).name == "new":
            raise OSError(errno.EIO, "Input/output error")
        replace(source, target)
    monkeypatch.setattr(os, "replace", failing)
    with pytest.raises(StoreError, match=r"checkpoint: Input/output error\. Free some disk space or buy a disk"), \
            atomic_folder(folder, "buy a disk"):
        pass
    assert (folder / "state").read_text() == "old" and [file.name for file in tmp_path.iterdir()] == ["checkpoint"]


def test_all_of_a_folder_is_flushed_before_it_takes_its_place(tmp_path, monkeypatch):
    flushed, fsync = [], os.fsync

    def noting(opened):
        flushed.append((Path(os.readlink(f"/proc/self/fd/{opened}")).name, (tmp_path / "model").exists()))
        fsync(opened)
    if not Path("/proc/self/fd").exists():
        pytest.skip("this system does not say what a descriptor is of")
    monkeypatch.setattr(os, "fsync", noting)
    with atomic_folder(tmp_path / "model") as part:
        (part / "deep").mkdir()
        (part / "deep" / "file").write_text("whole")
    assert sorted(flushed[:-1]) == [("deep", False), ("file", False), ("new", False)]
    assert flushed[-1] == (tmp_path.name, True)  # the new name, last


# A full disk

@pytest.fixture
def full_disk(tmp_path):
    """A file system of 256 KiB, mounted for one test."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(disk)], capture_output=True,
                             text=True, check=False) if os.geteuid() == 0 else None
    if mounted is None or mounted.returncode:
        pytest.skip("mounting a small file system needs root" + (f": {mounted.stderr.strip()}" if mounted else ""))
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def test_a_full_disk_is_a_store_error_and_leaves_no_half_written_file(full_disk):
    write_json(full_disk / "small.json", {"kept": True})
    with pytest.raises(StoreError, match=r"cannot write .*large\.json: No space left on device.*Free some disk space"):
        write_json(full_disk / "large.json", ["x" * 300_000])
    assert [file.name for file in full_disk.iterdir()] == ["small.json"]
    with pytest.raises(StoreError, match="No space left on device"):
        write_json(full_disk / "small.json", ["x" * 300_000])
    assert read_json(full_disk / "small.json") == {"kept": True}
    write_json(full_disk / "other.json", [1])  # there is room again for what fits


def test_a_token_file_that_does_not_fit_is_not_half_there(full_disk):
    write_tokens(full_disk / "fits", np.zeros(1000, np.uint16), np.array([0]))
    with pytest.raises(StoreError, match=r"cannot write .*stream"):
        write_tokens(full_disk / "stream", np.zeros(200_000, np.uint16), np.array([0]))
    assert [file.name for file in full_disk.iterdir()] == ["fits"]


def test_a_checkpoint_that_does_not_fit_is_a_store_error(full_disk, tmp_path):
    """Training stops with the remedy; a checkpoint that was there before is kept."""
    model = random_model(neox_config(width=32, mlp=128))  # a checkpoint of 350 KB
    stream = write_tokens(tmp_path / "stream", np.arange(200, dtype=np.uint16) % 61, np.array([0]))
    recipe = Recipe(160, 2, 8, 1e-3, 2, 80, "no", checkpoint_every=3)
    with pytest.raises(StoreError, match=r"cannot write .*checkpoint.*SCALEOP_STORE"):
        train(model, stream, recipe, key="key", name="toy", folder=full_disk, evaluate=lambda model: 1.0)
    assert list(full_disk.iterdir()) == []


def test_a_model_that_does_not_fit_is_a_store_error(full_disk):
    with pytest.raises(StoreError, match=r"cannot write .*nano: .*No space left"), \
            atomic_folder(full_disk / "nano") as part:
        save_file({"model": torch.zeros(100_000)}, part / "model.safetensors")
    assert list(full_disk.iterdir()) == []


# Keys and hashes

def test_keys_do_not_depend_on_the_order_of_entries():
    assert digest({"a": 1, "b": {"c": [1, 2], "d": None}}) == digest({"b": {"d": None, "c": [1, 2]}, "a": 1})
    assert digest([1, 2]) != digest([2, 1])  # the order of a list means something
    assert len({digest(value) for value in (1, 1.5, "1", None, [1], {"1": 1}, True)}) == 7
    assert len(digest("x")) == 12 and digest("x", 20).startswith(digest("x"))


def test_sha256_is_that_of_the_standard(tmp_path):
    (tmp_path / "abc").write_bytes(b"abc")
    assert sha256(tmp_path / "abc") == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"  # FIPS 180-2


def test_json_comes_back_as_it_was_and_not_a_number_is_refused(tmp_path):
    value = {"ppl": 57.123456789012345, "text": "naïve — 𝄞", "none": None, "list": [1, 2.0, True]}
    write_json(tmp_path / "value.json", value)
    assert read_json(tmp_path / "value.json") == value
    with pytest.raises(ValueError, match="JSON"):
        write_json(tmp_path / "value.json", {"ppl": float("nan")})
    assert read_json(tmp_path / "value.json") == value


def test_what_is_cached_is_computed_once_and_read_as_it_will_be_again(tmp_path):
    path, calls = tmp_path / "new" / "a.json", []

    def compute():
        assert not path.exists()
        calls.append(1)
        return {"pair": (1, 2)}

    assert cached_json(path, compute) == cached_json(path, compute) == {"pair": [1, 2]}  # JSON's own types at once
    assert calls == [1] and read_json(path) == {"pair": [1, 2]}
    with pytest.raises(ZeroDivisionError):
        cached_json(tmp_path / "new" / "b.json", lambda: 1 / 0)
    assert cached_json(tmp_path / "new" / "b.json", lambda: 7) == 7


def test_values_are_made_once_and_kept_with_where_they_are_from(tmp_path):
    path, calls = tmp_path / "part.json", []
    for _ in range(2):
        assert cached_values(path, lambda: calls.append(1) or {"error": 0.5}, part="fit") == {"error": 0.5}
    kept = read_json(path)
    assert calls == [1] and kept["part"] == "fit" and kept["values"] == {"error": 0.5}
    assert kept["seconds"] >= 0 and {"commit", "versions", "hardware", "started"} <= kept.keys()


@pytest.mark.parametrize("content", [b'{"ppl": 57.1', b"", b"\xff\xfe\x00"])
def test_a_damaged_file_is_named_with_a_remedy(tmp_path, content):
    (tmp_path / "value.json").write_bytes(content)
    with pytest.raises(StoreError, match=r"value\.json is damaged .*Delete it \(or its folder\) and run again"):
        read_json(tmp_path / "value.json")


# One process at a time

HOLD = "import sys, time; from pathlib import Path; from scaleop.store import locked\n" \
       "with locked(Path(sys.argv[1])):\n    print('held', flush=True)\n    time.sleep(60)"


def test_a_second_process_is_refused_until_the_first_is_gone(tmp_path):
    holder = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path / "run")], cwd=ROOT, stdout=subprocess.PIPE,
                              stdin=subprocess.DEVNULL, text=True)
    try:
        assert holder.stdout.readline() == "held\n"
        began = time.monotonic()
        said = rf"run is in use by process {holder.pid} on \S+\. Wait for it to finish, or stop it"
        with pytest.raises(StoreError, match=said), locked(tmp_path / "run", timeout=0.2):
            pass
        assert time.monotonic() - began < 30  # it gave up; the holder would have kept it waiting for a minute
    finally:
        holder.kill()  # a killed process does not leave the folder locked
        holder.wait()
        holder.stdout.close()
    with locked(tmp_path / "run", timeout=5):
        (tmp_path / "run" / "file").write_text("mine now")


TAKE = """
import sys, time
from pathlib import Path
from scaleop.store import StoreError, locked

folder = Path(sys.argv[1])
try:
    with locked(folder, wait=sys.argv[2] == "wait", silent=0.3):
        print("held", flush=True)
        log = folder / "log"
        for _ in range(5):  # nobody else may write meanwhile
            before = log.read_text() if log.exists() else ""
            time.sleep(0.02)
            log.write_text(before + sys.argv[3])
        sys.stdin.readline()
except StoreError as error:
    sys.exit(str(error))
"""


def start(folder, wait, letter):
    return subprocess.Popen([sys.executable, "-c", TAKE, str(folder), wait, letter], cwd=ROOT, stdin=subprocess.PIPE,
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_a_second_process_waits_and_says_for_whom_or_is_refused_and_nothing_is_mixed_up(tmp_path):
    folder = tmp_path / "run"
    first = start(folder, "wait", "a")
    assert first.stdout.readline() == "held\n"
    second, third = start(folder, "wait", "b"), start(folder, "no", "c")
    try:
        holder = f"process {first.pid} on {socket.gethostname()}"
        assert second.stderr.readline() == (f"{folder} is in use by {holder}: waiting until it is done. Ctrl-C stops "
                                            "waiting and leaves the other alone.\n")
        _, refused = third.communicate(timeout=120)
        assert third.returncode == 1 and f"is in use by {holder}. Wait for it to finish" in refused
        first.communicate("done\n", timeout=120)
        assert second.stdout.readline() == "held\n"
        assert (folder / ".holder").read_text() == f"process {second.pid} on {socket.gethostname()}"
        second.communicate("done\n", timeout=120)
        assert (first.returncode, second.returncode) == (0, 0)
        assert (folder / "log").read_text() == "aaaaabbbbb"
        assert not (folder / ".holder").exists()
    finally:
        for process in (first, second, third):
            process.kill()


def test_the_note_of_a_process_that_died_does_not_hold_a_folder(tmp_path):
    dead = start(tmp_path / "run", "wait", "a")
    assert dead.stdout.readline() == "held\n"
    dead.kill()
    dead.communicate()
    assert (tmp_path / "run" / ".holder").read_text().startswith(f"process {dead.pid} on ")
    with locked(tmp_path / "run", wait=False):
        assert (tmp_path / "run" / ".holder").read_text() == f"process {os.getpid()} on {socket.gethostname()}"


# Where a number comes from

def test_provenance_names_commit_versions_and_whatever_is_added():
    facts = provenance(arm="hybrid", seed=2)
    assert (facts["arm"], facts["seed"]) == ("hybrid", 2)
    assert facts["versions"]["torch"] == torch.__version__
    assert facts["hardware"]["threads"] == torch.get_num_threads()
    assert facts["commit"] == git_commit()


def test_the_commit_is_that_of_the_checkout_and_says_when_files_differ(tmp_path, monkeypatch):
    def git(*arguments):
        return subprocess.run(["git", "-C", str(tmp_path), "-c", "user.name=x", "-c", "user.email=x@x", *arguments],
                              capture_output=True, text=True, check=True).stdout.strip()
    monkeypatch.setattr("scaleop.store.ROOT", tmp_path)
    git("init")
    for folder in ("scaleop", "params"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "file").write_text("one")
    git("add", ".")
    git("commit", "-m", "one")
    assert git_commit() == git("rev-parse", "HEAD")
    (tmp_path / "scaleop" / "file").write_text("two")
    assert git_commit() == git("rev-parse", "HEAD") + "+dirty"


def test_outside_a_repository_the_commit_is_unknown(tmp_path, monkeypatch):
    monkeypatch.setattr("scaleop.store.ROOT", tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert git_commit() == "unknown"


def test_provenance_shows_no_path_of_this_machine():
    assert paths.relative(ROOT / "models" / "nano-l") == "models/nano-l"
    assert paths.relative("/somewhere/else/model") == "model"


def test_models_are_found_below_the_root_and_hub_names_are_left_alone(tmp_path):
    assert paths.resolve("scaleop") == ROOT / "scaleop"
    assert paths.resolve("models/not-there") == ROOT / "models/not-there"  # so that the message names the folder
    assert paths.resolve(str(tmp_path)) == tmp_path
    assert paths.resolve("EleutherAI/pythia-70m") == "EleutherAI/pythia-70m"

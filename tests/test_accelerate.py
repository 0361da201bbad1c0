"""Two processes that `accelerate launch` starts on this machine's CPU (gloo in place of NCCL) do what one does."""

import gc
import json
import os
import subprocess
import sys
import weakref
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from accelerate.utils import DistributedType

from scaleop.corpus import write_tokens
from scaleop.experiment import ExperimentError
from scaleop.paths import ROOT
from scaleop.train import make_accelerator
from tests import accelerated
from tests.conftest import random_ids
from tests.test_race import opened, world  # noqa: F401 - fixtures: a tiny experiment and a store


def launch(*arguments, **environment):
    """`accelerate launch` with two processes; returns what ended, output and error together."""
    command = [str(Path(sys.executable).parent / "accelerate"), "launch", "--multi_gpu", "--num_processes", "2",
               "--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "0"]
    return subprocess.run([*command, *map(str, arguments)], cwd=ROOT, stdin=subprocess.DEVNULL, timeout=500, text=True,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False,
                          env={**os.environ, "PYTHONPATH": str(ROOT),
                               "OMP_NUM_THREADS": "1", **environment})


# The loop

class Stopped(Exception):
    """Raised by a test to end a run early."""


@pytest.fixture(scope="module")
def ways(tmp_path_factory):
    """Every way of `tests.accelerated` in one process, and what two processes made of it: {way: {process: found}}."""
    folder = tmp_path_factory.mktemp("ways")
    stream = write_tokens(folder / "stream", random_ids(400).astype(np.uint16), np.array([0]))
    found = {way: {"one": accelerated.run(way, stream, folder / "one" / way)} for way in accelerated.WAYS}
    calls = iter(range(100))

    def until_the_third(model):
        if next(calls) == 2:  # points lie at steps 0, 2, 4: the checkpoint is step 2's
            raise Stopped
        return accelerated.perplexity(model, accelerated.HELD_OUT, 16, 8).value
    with pytest.raises(Stopped):
        accelerated.run("plain", stream, folder / "resumed", evaluate=until_the_third)
    ended = launch(ROOT / "tests" / "accelerated.py", folder)
    assert ended.returncode == 0, ended.stdout
    for way, alike in (*((way, way) for way in accelerated.WAYS), ("sharded", "saving"), ("resumed", "plain"),
                       ("sharded bf16", "bf16")):
        two = {rank: json.loads((folder / f"{way}-{rank}.json").read_text()) for rank in (0, 1)}
        found[way] = {"one": found[alike]["one"], **two}
    return found


@pytest.mark.parametrize("way", [*accelerated.WAYS, "sharded", "sharded bf16", "resumed"])
def test_two_processes_train_as_one(ways, way):
    """Same points, same losses, same perplexities and weights, whoever looks. The process that is not the main one
    began with other weights. `sharded` is FSDP2; `resumed` went on, sharded, where one process had stopped. In bf16
    each sequence is a micro-batch of its own here, so that a pass rounds alike however many processes there are; where
    it is not, products of other sizes round otherwise, and perplexities were seen to differ by 2e-4."""
    one, main, other = (ways[way][each] for each in ("one", 0, 1))
    assert [point["tokens"] for point in main["curve"]] == [0, 88, 176, 264]
    for key in ("step", "tokens", "ppl", "loss"):
        assert [p.get(key, 0) for p in main["curve"]] == pytest.approx([p.get(key, 0) for p in one["curve"]], rel=1e-5)
    assert main["weights"] == pytest.approx(one["weights"], rel=1e-5)
    assert (other["curve"], other["weights"]) == (main["curve"], main["weights"])
    assert abs(one["curve"][0]["ppl"] / one["curve"][-1]["ppl"] - 1) > 1e-3  # a hundred times the tolerance


def test_gradients_are_exchanged_once_a_step_unless_they_would_have_to_be_held_whole(ways):
    """Two micro-batches a process and six steps: the first of each is kept back, but never where it is sharded."""
    assert [ways[way][0]["exchanges kept back"] for way in ("plain", "saving", "sharded")] == [0, 6, 0]
    assert ways["sharded"][0]["share"] + ways["sharded"][1]["share"] == pytest.approx(1)  # it was sharded
    assert ways["sharded"][0]["share"] < 0.6


# The command line

@pytest.fixture
def files(opened, world, tmp_path, monkeypatch):  # noqa: F811
    """The experiment's file, and a store whose text is there, as a run in one process left it with its result."""
    alone = opened.run("hybrid_rs", 0)
    folder = opened.folder("hybrid_rs", 0)
    (tmp_path / "store" / "runs").rename(tmp_path / "one")
    return SimpleNamespace(path=world / "tiny.yaml", alone=alone, folder=folder, race=opened,
                           arguments=("--experiment", world / "tiny.yaml", "--arm", "hybrid_rs"),
                           store={"SCALEOP_STORE": str(tmp_path / "store")})


def curves_agree(found, expected, rel):
    """Do two results' points lie at the same tokens, with perplexities and losses as near as `rel`?"""
    assert [p["tokens"] for p in found["curve"]] == [p["tokens"] for p in expected["curve"]]
    for key in ("ppl", "loss"):
        assert [p.get(key, 0) for p in found["curve"]] == pytest.approx([p.get(key, 0) for p in expected["curve"]],
                                                                        rel=rel)
    assert found["final"]["value"] == pytest.approx(expected["final"]["value"], rel=rel)
    assert found["final"]["scored"] == expected["final"]["scored"]


def test_the_race_in_two_processes_is_the_race_in_one_and_a_notebook_finds_it(files, monkeypatch):
    ended = launch("-m", "scaleop.race", *files.arguments, **files.store)
    assert ended.returncode == 0, ended.stdout
    assert ended.stdout.count("hybrid_rs seed 0: zero-shot") == 1  # the main process alone speaks
    monkeypatch.setattr("scaleop.race.train", lambda *_, **__: pytest.fail("trained again"))
    found = files.race.run("hybrid_rs", 0)
    assert found["processes"] == 2 and found["stream"] == files.alone["stream"] and found["key"] == files.alone["key"]
    assert found["made"] == files.alone["made"]
    curves_agree(found, files.alone, 1e-4)
    assert sorted(path.name for path in files.folder.iterdir()) == [".lock", "model", "result.json"]


CRASHES = """
import sys
from scaleop import race, train
from scaleop.processes import processes

def backward(*arguments, plain=train.backward, calls=[]):
    calls.append(1)
    if len(calls) == 6 and processes().process_index == 1:
        raise RuntimeError("this process has lost its GPU")
    return plain(*arguments)

train.backward = backward
race.main()
"""


def test_a_crash_in_one_process_ends_all_and_one_process_can_go_on(files, tmp_path):
    (tmp_path / "crashes.py").write_text(CRASHES)
    ended = launch(tmp_path / "crashes.py", *files.arguments, **files.store)
    assert ended.returncode != 0 and "this process has lost its GPU" in ended.stdout
    state = json.loads((files.folder / "checkpoint" / "state.json").read_text())
    assert state["step"] == 4 and not (files.folder / "result.json").exists()
    found = files.race.run("hybrid_rs", 0)
    assert "processes" not in found
    curves_agree(found, files.alone, 1e-4)


def test_the_first_version_of_fsdp_is_refused(monkeypatch):
    old = SimpleNamespace(distributed_type=DistributedType.FSDP,
                          state=SimpleNamespace(fsdp_plugin=SimpleNamespace(fsdp_version=1)))
    monkeypatch.setattr("scaleop.train.Accelerator", lambda **_: old)
    with pytest.raises(ExperimentError, match=r"FSDP version 1; only version 2 .* put fsdp_version: 2 into"):
        make_accelerator("bf16")


def test_what_a_run_held_is_gone_when_the_next_begins(tmp_path):
    """In bf16, whose loss module `prepare` ties to itself; nobody else collects meanwhile."""
    stream, held = write_tokens(tmp_path / "stream", random_ids(400).astype(np.uint16), np.array([0])), []

    def remember(model):
        held.append(weakref.ref(model.lm_head.weight))
        return 1.0
    gc.disable()
    try:
        accelerated.run("bf16", stream, tmp_path / "first", evaluate=remember)
        first = held[0]
        assert first() is not None  # else there is nothing to see here
        gone = accelerated.run("bf16", stream, tmp_path / "second", evaluate=lambda model: float(first() is None))
    finally:
        gc.enable()
    assert gone["curve"][0]["ppl"] == 1.0


def test_a_batch_that_does_not_divide_is_refused(opened, monkeypatch):  # noqa: F811
    monkeypatch.setattr("scaleop.race.processes", lambda: SimpleNamespace(num_processes=3))
    with pytest.raises(ExperimentError, match=r"race\.batch = 4 sequences do not divide over 3 processes"):
        opened.run("subclone", 0)

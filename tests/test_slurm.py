"""`snakemake race` on a real Slurm: a cluster of one node that this test starts and stops (tests/slurm.sh)."""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from scaleop import corpus, race, texts
from scaleop.experiment import load_experiment
from scaleop.paths import ROOT
from scaleop.race import Race
from scaleop.store import read_json
from tests.test_race import numbers

SCRIPT = str(ROOT / "tests" / "slurm.sh")
TINY = """extends: toy
name: tiny
title: a toy of three arms and four steps
evaluation: {quick_tokens: 500, limits: {heldout: 1_000, foreign: 1_000}}
race: {tokens: 2_048, eval_every: 1_024, checkpoint_every: 0, arms: [random, subclone, subclone_iso], leaders: []}
seeds: [0]
"""


@pytest.fixture
def cluster():
    """The environment in which sbatch and its like find a cluster of this test's own; skipped where it cannot be."""
    folder = tempfile.mkdtemp(prefix="slurm-")  # a short path: sockets lie in it
    try:
        begun = subprocess.run([SCRIPT, "start", folder], capture_output=True, text=True, check=False, timeout=120)
        if begun.returncode == 3:  # a program is missing, or we are not root
            pytest.skip(f"no Slurm here: {begun.stderr.strip()}")
        assert begun.returncode == 0, begun.stderr
        yield {"SLURM_CONF": f"{folder}/slurm.conf", "PATH": f"{folder}/bin:{os.environ['PATH']}"}
    finally:
        subprocess.run([SCRIPT, "stop", folder], check=True, timeout=60)
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def local(tmp_path, monkeypatch):
    """The experiment, opened in a local store with little text."""
    for module in (race, corpus):
        monkeypatch.setattr(module, "STORE", tmp_path / "local")
    few = texts.training_documents()[:60]
    monkeypatch.setattr(texts, "training_documents", lambda: few)
    (tmp_path / "tiny.yaml").write_text(TINY)
    return Race(load_experiment(str(tmp_path / "tiny.yaml")))


@pytest.mark.slow
def test_a_cluster_makes_the_runs_that_this_machine_makes(cluster, local, tmp_path):
    expected = {arm: local.run(arm, 0) for arm in ("random", "subclone")}
    store = tmp_path / "shared"
    shutil.copytree(tmp_path / "local" / "corpus", store / "corpus")

    def snakemake(*arguments, config=()):
        command = [sys.executable, "-P", "-m", "snakemake", "race", "--snakefile", str(ROOT / "Snakefile"), *arguments,
                   "--config", f"experiments={tmp_path / 'tiny.yaml'}", *config]
        done = subprocess.run(command, cwd=tmp_path, env={**os.environ, **cluster, "SCALEOP_STORE": str(store)},
                              capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL, timeout=500)
        return done.returncode, done.stdout + done.stderr

    profile = ("--profile", str(ROOT / "profiles" / "slurm"), "--retries", "0", "--default-resources",
               "slurm_partition=main", "--slurm-no-account", "--slurm-status-command", "squeue",
               "--slurm-init-seconds-before-status-checks", "1", "--seconds-between-status-checks", "1",
               "--latency-wait", "10")

    def folder(arm):
        return store / local.folder(arm, 0).relative_to(tmp_path / "local")

    # One job cannot work: what lies in its folder is another run's. It is reported, and the others are done.
    (folder("subclone_iso") / "checkpoint").mkdir(parents=True)
    (folder("subclone_iso") / "checkpoint" / "state.json").write_text('{"key": "of another run"}')
    code, said = snakemake(*profile)
    assert code == 1, said
    assert "belongs to a run with other settings. Delete" in said and "SLURM status is: 'FAILED'" in said
    assert not (folder("subclone_iso") / "result.json").exists()
    for arm in expected:
        assert numbers(read_json(folder(arm) / "result.json")) == numbers(expected[arm])

    # A second call for the arms that worked has nothing to do.
    code, said = snakemake("--dry-run", "--cores", "1", config=["arms=random,subclone"])
    assert code == 0 and "Nothing to be done" in said, said


def test_the_script_says_what_is_missing_and_stops_nothing_that_it_did_not_start(tmp_path):
    bare = tmp_path / "bin"
    bare.mkdir()
    for program in ("bash", "env", "realpath"):
        (bare / program).symlink_to(shutil.which(program))
    script = Path(SCRIPT).read_text(encoding="utf-8").replace("PATH=$PATH:/usr/sbin:/sbin\n", "")
    (tmp_path / "slurm.sh").write_text(script, encoding="utf-8")
    begun = subprocess.run(["bash", str(tmp_path / "slurm.sh"), "start", str(tmp_path / "none")], text=True,
                           capture_output=True, check=False, env={"PATH": str(bare)})
    assert begun.returncode == 3 and "munged is not installed (Debian: slurm-wlm, munge)" in begun.stderr
    assert subprocess.run([SCRIPT, "stop", str(tmp_path / "none")], check=False).returncode == 0

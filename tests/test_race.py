"""The race on a tiny donor and real text: same bytes for every arm, found again when finished, repeatable."""

import json
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import load_file

from scaleop import corpus, race, texts
from scaleop.corpus import train_tokenizer
from scaleop.evaluate import perplexity
from scaleop.experiment import load_experiment, planned
from scaleop.paths import ROOT
from scaleop.race import Race
from scaleop.store import locked
from scaleop.weights import load
from scaleop.wiring import WiringError
from tests.conftest import neox_config, random_model

WORDS = ("people", "government", "union", "state", "law", "war", "peace", "trade", "country", "congress", "year",
         "great", "public", "power")


def documents(n, seed):
    rng = np.random.default_rng(seed)
    return [" ".join(rng.choice(WORDS, 60)) for _ in range(n)]


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A donor folder, an experiment file and a store, all throw-away; text from a handful of words."""
    root = tmp_path_factory.mktemp("race")
    tokenizer = train_tokenizer(documents(50, 0), 300, 64)
    donor = root / "donor"
    config = neox_config(layers=2, width=32, heads=2, mlp=48, vocab=len(tokenizer))
    random_model(config, std=0.05).save_pretrained(donor)
    tokenizer.save_pretrained(donor)
    experiment = {
        "name": "tiny", "title": "tiny", "seeds": [0],
        "pair": {"donor": str(donor), "reference": None,
                 "target": {"layers": 2, "width": 16, "heads": 2, "mlp": 24}},
        "corpus": {"source": "embedded", "seed_stride": 2000, "repeat": False,
                   "frozen": {"sequences": 20, "length": 16, "similarity": 5, "moments": 10}},
        "evaluation": {"window": 16, "stride": 8, "quick_tokens": 100, "limits": {"heldout": 400, "foreign": 300}},
        "race": {"tokens": 640, "batch": 4, "length": 16, "peak_lr": 1.0e-3, "warmup_steps": 2, "eval_every": 192,
                 "checkpoint_every": 2, "precision": "bf16", "attention": "eager",
                 "arms": ["random", "subclone", "hybrid_rs"]}}
    (root / "tiny.yaml").write_text(yaml.safe_dump(experiment))
    return root


@pytest.fixture
def opened(world, monkeypatch, tmp_path):
    """The experiment, opened on a fresh store."""
    for module in (race, corpus):
        monkeypatch.setattr(module, "STORE", tmp_path / "store")
    monkeypatch.setattr(texts, "training_documents", lambda: documents(120, 1))
    monkeypatch.setitem(texts.EVALUATIONS, "heldout", lambda: documents(5, 2))
    return Race(load_experiment(str(world / "tiny.yaml")))


def test_a_model_that_gives_nan_is_a_sentence_and_no_traceback():
    broken = random_model(neox_config())
    torch.nn.init.constant_(broken.lm_head.weight, float("nan"))
    with pytest.raises(SystemExit, match="the model's loss is not finite"), race.refusals():
        perplexity(broken, np.arange(40) % 61, 16, 8)


def numbers(result):
    return {key: result[key] for key in ("curve", "zero_shot", "final", "stream", "made", "key")}


def test_every_arm_reads_the_same_bytes_under_the_same_schedule(opened):
    results = opened.runs(planned(opened.experiment, 0))
    assert [r["arm"] for r in results] == ["random", "subclone", "hybrid_rs"]
    assert len({r["stream"]["sha256"] for r in results}) == 1
    settings = [{k: v for k, v in r["settings"].items() if k != "arm"} for r in results]
    assert all(s == settings[0] for s in settings)
    assert [p["step"] for p in results[0]["curve"]] == [0, 3, 6, 9, 10]
    assert results[1]["zero_shot"] == results[1]["curve"][0]["ppl"]
    assert len({r["zero_shot"] for r in results}) == 3


def test_seeds_read_disjoint_text(opened):
    streams = [opened.run("subclone", seed)["stream"] for seed in (0, 1)]
    assert streams[0]["offset"] >= opened.corpus.guard
    assert streams[0]["offset"] + streams[0]["tokens"] <= streams[1]["offset"]


def test_a_finished_run_is_found_and_its_checkpoint_loads(opened, monkeypatch):
    first = opened.run("subclone", 0)
    monkeypatch.setattr(race, "train", lambda *a, **k: pytest.fail("trained again"))
    assert opened.run("subclone", 0) == first
    folder = opened.folder("subclone", 0)
    model = load(folder / "model")
    assert opened.full(model)["value"] == pytest.approx(first["final"]["value"], rel=1e-6)
    assert not (folder / "checkpoint").exists()
    assert {"commit", "versions", "hardware", "started"} <= first.keys()


def test_two_runs_in_two_stores_agree_to_the_last_bit(opened, monkeypatch, tmp_path):
    first = numbers(opened.run("hybrid_rs", 0))
    weights = load_file(opened.folder("hybrid_rs", 0) / "model" / "model.safetensors")
    for module in (race, corpus):
        monkeypatch.setattr(module, "STORE", tmp_path / "elsewhere")
    again = Race(opened.experiment)
    assert numbers(again.run("hybrid_rs", 0)) == first
    twin = load_file(again.folder("hybrid_rs", 0) / "model" / "model.safetensors")
    assert all(torch.equal(weights[name], twin[name]) for name in weights)


def test_another_budget_is_another_run(opened, world):
    longer = Race(load_experiment(str(world / "tiny.yaml"), tokens=1280))
    assert longer.folder("subclone", 0) != opened.folder("subclone", 0)


def test_an_anchor_is_scored_once_and_anew_under_another_protocol(opened, monkeypatch):
    donor = opened.experiment.pair.donor
    found = opened.score(donor)
    assert found["ppl"] == found["full"]["value"] == opened.full(opened.donor.model)["value"]
    assert found["quick_ppl"] == opened.quick(opened.donor.model) != found["ppl"]
    monkeypatch.setattr(race, "load", None)  # a second score would fail
    assert opened.score(donor) == found
    monkeypatch.setattr(race, "PROTOCOL", race.PROTOCOL + 1)
    with pytest.raises(TypeError):
        opened.score(donor)


@pytest.mark.parametrize(("name", "said"), [
    ("toi", "experiment = 'toi' is not in params/; did you mean 'toy'"),
    ("tiny", "unknown arm 'hybrid_sr'; did you mean 'hybrid_rs'"),
    ("wide", "width=64 is larger than the donor's 32"),
])
def test_the_command_line_refuses_in_a_sentence(world, tmp_path, monkeypatch, name, said):
    values = yaml.safe_load((world / "tiny.yaml").read_text())
    values["pair"]["target"]["width"] = 64
    (tmp_path / "wide.yaml").write_text(yaml.safe_dump(values))
    files = {"tiny": str(world / "tiny.yaml"), "wide": str(tmp_path / "wide.yaml")}
    monkeypatch.setattr(sys, "argv", ["race", "--experiment", files.get(name, name), "--arm", "hybrid_sr"])
    with pytest.raises(SystemExit, match=said):
        race.main()


def test_a_run_that_another_process_has_is_not_waited_for_if_so_told(opened, world, monkeypatch):
    command = ["race", "--experiment", str(world / "tiny.yaml"), "--arm", "subclone", "--no-wait"]
    monkeypatch.setattr(sys, "argv", command)
    with locked(opened.folder("subclone", 0)), pytest.raises(SystemExit, match=rf"in use by process {os.getpid()} on "):
        race.main()


def test_an_impossible_pair_is_refused_before_any_work(world, tmp_path):
    values = yaml.safe_load((world / "tiny.yaml").read_text())
    values["pair"]["target"]["width"] = 64
    (tmp_path / "wide.yaml").write_text(yaml.safe_dump(values))
    with pytest.raises(WiringError, match="width=64 is larger than the donor's 32"):
        Race(load_experiment(str(tmp_path / "wide.yaml")))
    assert not list(tmp_path.glob("store*"))


def test_a_killed_run_resumes_and_ends_bit_identical(world, tmp_path):
    """kill -9 after the first checkpoint, from the command line; then again to the end."""
    values = yaml.safe_load((world / "tiny.yaml").read_text())
    values["race"].update(tokens=64 * 60, checkpoint_every=5)
    values["corpus"]["seed_stride"] = 20_000
    (tmp_path / "kill.yaml").write_text(yaml.safe_dump(values))

    program = ("from scaleop import race, texts; from tests import test_race as here; "
               "texts.training_documents = lambda: here.documents(1200, 1); "
               "texts.EVALUATIONS['heldout'] = lambda: here.documents(5, 2); race.main()")

    def start(store):
        environment = {**os.environ, "SCALEOP_STORE": str(tmp_path / store)}
        return subprocess.Popen([sys.executable, "-c", program, "--experiment", str(tmp_path / "kill.yaml"),
                                 "--arm", "hybrid_rs"], env=environment, cwd=ROOT, stdin=subprocess.DEVNULL,
                                stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)

    def result(store):
        (path,) = (tmp_path / store).glob("runs/**/result.json")
        return json.loads(path.read_text()), load_file(path.parent / "model" / "model.safetensors")

    whole = start("whole")
    assert whole.wait(timeout=300) == 0, whole.stderr.read()
    killed = start("killed")
    deadline = time.monotonic() + 300
    while not list((tmp_path / "killed").glob("runs/**/checkpoint/state.json")):
        assert killed.poll() is None and time.monotonic() < deadline, "it finished before a checkpoint was seen"
        time.sleep(0.01)
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    assert not list((tmp_path / "killed").glob("runs/**/result.json"))
    resumed = start("killed")
    assert resumed.wait(timeout=300) == 0, resumed.stderr.read()
    (expected, weights), (found, twin) = result("whole"), result("killed")
    assert numbers(found) == numbers(expected)
    assert all(torch.equal(weights[name], twin[name]) for name in weights)

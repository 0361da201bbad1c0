"""`papermill notebooks/07_race.ipynb ... -p experiment mini` against a stand-in hub: the whole second world in one run.

The repositories bear the names and commits that `params/mini.yaml` pins and hold tiny models of the pair's structure
(8 heads, all widths halved; two blocks, for speed), the Pile as .jsonl.zst, WikiText as parquet and C4 as .json.gz.
The other pages run on an experiment that extends `mini`: a smaller pair, text and budget.
"""

import gzip
import json
import os
import re
import subprocess
import sys

import nbformat
import numpy as np
import pytest
import yaml
import zstandard
from transformers import AutoModelForCausalLM

from scaleop import hub_tasks
from scaleop.experiment import load_experiment
from scaleop.paths import NOTEBOOKS, ROOT
from tests.hub_server import Hub, parquet, tiny_pythia
from tests.test_hub_tasks import CARD, COUNT, PLACES, ROWS

TOKENS = 16_384  # 4 steps of 4 x 1024
WORDS = ["the", "of", "and", "to", "in", "a", "is", "that", "for", "it", "was", "on", "are", "as", "with", "they", "be"]


def documents(count, words, seed):
    """Documents of frequent words, Zipf-like."""
    draw = np.random.default_rng(seed)
    shares = 1 / np.arange(1, len(WORDS) + 1)
    return [" ".join(draw.choice(WORDS, words, p=shares / shares.sum())) for _ in range(count)]


def serve(hub, experiment, folder, layers=2, width=64, heads=8):
    """Put everything that the experiment names on the stand-in hub, under the commits it pins; the donor is twice as
    wide as `width`."""
    pair, corpus = experiment.pair, experiment.corpus
    for name, wide in {pair.donor: 2 * width, pair.like: width, pair.reference: width}.items():
        repository, commit = name.split("@")
        hub.model(repository, tiny_pythia(folder / repository, layers=layers, width=wide, heads=heads, context=1024,
                                          vocab=304, shards=2, seed=wide), commit=commit)
    lines = "".join(json.dumps({"text": text, "meta": {"pile_set_name": "none"}}) + "\n"
                    for text in documents(700, 450, seed=1))
    (folder / "pile" / "train").mkdir(parents=True)
    (folder / "pile" / "train" / "00.jsonl.zst").write_bytes(zstandard.compress(lines.encode()))
    hub.dataset(corpus.train.path, folder / "pile", commit=corpus.train.revision)
    wiki, c4 = corpus.evaluations.heldout, corpus.evaluations.foreign
    parquet(folder / "wiki" / wiki.name / "validation-00000-of-00001.parquet", {"text": documents(30, 100, seed=2)})
    card = "---\nconfigs:\n- config_name: {}\n  data_files:\n  - split: validation\n    path: {}/*validation*\n---\n"
    (folder / "wiki" / "README.md").write_text(card.format(wiki.name, wiki.name))
    hub.dataset(wiki.path, folder / "wiki", commit=wiki.revision)
    (folder / "c4" / "en").mkdir(parents=True)
    with gzip.open(folder / "c4" / "en" / "c4-validation.00000-of-00001.json.gz", "wt") as file:
        file.writelines(json.dumps({"text": text, "url": "none"}) + "\n"
                        for text in documents(c4.documents, 10, seed=3))
    (folder / "c4" / "README.md").write_text(card.format(c4.name, c4.name))
    hub.dataset(c4.path, folder / "c4", commit=c4.revision)


def serve_tasks(hub, folder):
    """Put lm-eval's data sets there, too, with a dozen items each."""
    for measure, (name, path) in PLACES.items():
        parquet(folder / measure / f"{path}-00000-of-00001.parquet", ROWS[measure])
        (folder / measure / "README.md").write_text(CARD.format(
            name={"definition": "ARC-Easy"}.get(measure, "default"), split=path.split("/")[1], path=path))
        hub.dataset(name, folder / measure, commit=hub_tasks.TASKS[measure].revision)


RETRIES = re.compile(r"(HTTP Error 503|'.*') thrown while requesting |Retrying in \d+s ")


def said_by(path):
    """What an executed page prints and shows, as text; there is no error, and on stderr nothing but retries."""
    page = nbformat.read(path, 4)
    outputs = [output for cell in page.cells for output in cell.get("outputs", [])]
    assert not [output for output in outputs if output.output_type == "error"]
    stderr = "".join(output.text for output in outputs if output.get("name") == "stderr")
    assert all(RETRIES.match(line) for line in stderr.splitlines()), stderr
    return "".join(output.get("text", "") + "".join(output.get("data", {}).get("text/html", "")) for output in outputs)


TINY = {"extends": "mini", "name": "tiny", "title": "a pair of the suite's structure",
        "corpus": {"frozen": {"sequences": 40, "length": 32, "similarity": 10, "moments": 20}, "seed_stride": 4_000},
        "evaluation": {"window": 64, "stride": 32, "quick_tokens": 300,
                       "limits": {"heldout": 600, "foreign": 300, "items": 5}},
        "race": {"tokens": 1_024, "batch": 4, "length": 64, "warmup_steps": 1, "eval_every": 512,
                 "checkpoint_every": 0, "arms": ["random", "hybrid_rs"], "leaders": [], "variants": []}, "seeds": [0]}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """Runs a page on such an experiment, with the hub and a store that all pages share; returns what it says."""
    root = tmp_path_factory.mktemp("tiny")
    (root / "tiny.yaml").write_text(yaml.safe_dump(TINY))

    def page(name):
        ran = subprocess.run([sys.executable, "-m", "papermill", str(NOTEBOOKS / f"{name}.ipynb"),
                              str(root / f"{name}.ipynb"), "-p", "experiment", str(root / "tiny.yaml")], cwd=ROOT,
                             text=True, capture_output=True, stdin=subprocess.DEVNULL, env={
            **os.environ, **hub.environment(root / "hf"), "SCALEOP_STORE": str(root / "store"), "TQDM_DISABLE": "1"})
        assert ran.returncode == 0, ran.stderr[-3000:]
        kept = root / "store" / "results" / f"{name}.json"
        return said_by(root / f"{name}.ipynb"), json.loads(kept.read_text()) if kept.exists() else None

    with Hub() as hub:
        experiment = load_experiment(str(root / "tiny.yaml"))
        serve(hub, experiment, root / "repositories", layers=6, width=32, heads=4)
        serve_tasks(hub, root / "tasks")
        yield page


def commits():
    """What every record says of the pair's models."""
    pair = load_experiment("mini").pair
    return {name: name.split("@")[1] for name in (pair.donor, pair.reference)}


@pytest.mark.slow
def test_the_setup_page_shows_the_pair_and_its_text(tiny):
    said, _ = tiny("03_setup")
    for shown in ("pythia-70m", "pythia-31m", "monology/pile-uncopyrighted", "Salesforce/wikitext", "allenai/c4",
                  "frozen probe set: 40 x 32 tokens", "No rung of the ladder is among these models."):
        assert shown in said, shown
    assert "nano" not in said


@pytest.mark.slow
def test_the_residuals_page_leaves_a_rung_of_the_ladder_out(tiny):
    said, kept = tiny("06_residuals")
    assert "test is left out: models/nano-s has a vocabulary of 4,096, the pair's models one of 304;" in said
    assert kept["models"] == {"large": "pythia-70m", "medium": "pythia-31m"} and kept["values"]["transfer"] is None
    assert kept["hub_commits"] == commits()
    verdicts = {finding["id"]: finding["verdict"] for finding in kept["findings"]}
    assert {name for name, verdict in verdicts.items() if verdict == "not run"} == {
        "depth-fits-better", "nothing-transfers", "transfer-as-control"}


@pytest.mark.slow
def test_the_hardening_page_asks_lm_evals_tasks_and_claims_no_overlap(tiny):
    said, kept = tiny("08_hardening")
    assert kept["leakage"] is None and kept["hub_commits"] == commits()
    assert "lm-eval's own tasks; what of them occurs in the training text has not been measured" in said
    assert "every definition lies behind" not in said and "share that occurs" not in said
    for (name, _), task in zip(PLACES.values(), hub_tasks.TASKS.values(), strict=True):
        assert name in said and task.task in said and task.revision in said
    assert set(kept["extended"]) == {"random", "hybrid_rs", "sibling", "donor"}
    for found in kept["extended"].values():
        assert found["last_word"]["items"] == 5 < COUNT and found["foreign_ppl"] > 1
    assert [run["arm"] for run in kept["runs"][""]] == ["random", "hybrid_rs"]


@pytest.mark.slow
def test_the_race_page_runs_on_models_and_text_of_the_hub(tmp_path):
    experiment, store = load_experiment("mini"), tmp_path / "store"
    command = [sys.executable, "-m", "papermill", str(NOTEBOOKS / "07_race.ipynb"), str(tmp_path / "out.ipynb"),
               "-p", "experiment", "mini", "-p", "tokens", str(TOKENS), "-p", "arms", "random,hybrid_rs"]
    with Hub() as hub:
        serve(hub, experiment, tmp_path / "repositories")
        hub.fail("*-00001-*.safetensors", "reset", times=1)  # a hub as one knows it
        hub.fail("*/00.jsonl.zst", 503, times=1)
        ran = subprocess.run(command, cwd=tmp_path, text=True, capture_output=True, env={
            **os.environ, **hub.environment(tmp_path / "hf"), "SCALEOP_STORE": str(store), "TQDM_DISABLE": "1"})
        assert ran.returncode == 0, ran.stderr[-3000:]
        asked = [path for method, path in hub.requests if method == "GET" and path.endswith((".bin", ".py"))]
    assert not asked  # no pickle, no code
    said_by(tmp_path / "out.ipynb")
    results = {path.parts[-3]: json.loads(path.read_text()) for path in store.glob("runs/mini/*/*/result.json")}
    assert sorted(results) == ["hybrid_rs", "random"]
    name, commit = experiment.pair.donor.split("@")
    for arm, result in results.items():
        assert result["hub"] == {"name": name, "revision": commit, "commit": commit}
        assert result["curve"][-1]["tokens"] == TOKENS and np.isfinite(result["final"]["value"])
        assert result["final"]["value"] < result["zero_shot"], arm  # four steps of a warmup begin to learn
    assert results["random"]["stream"]["sha256"] == results["hybrid_rs"]["stream"]["sha256"]
    model = AutoModelForCausalLM.from_pretrained(next(store.glob("runs/mini/hybrid_rs/*/model")))
    assert (model.config.num_hidden_layers, model.config.hidden_size, model.config.num_attention_heads) == (2, 64, 8)

    command = [sys.executable, "-m", "scaleop.race", "--experiment", "mini", "--arm", "hybrid_rs",
               "--tokens", str(TOKENS)]
    ran = subprocess.run(command, cwd=ROOT, text=True, capture_output=True, env={  # the hub is gone: the caches serve
        **os.environ, **hub.environment(tmp_path / "hf"), "SCALEOP_STORE": str(store), "TQDM_DISABLE": "1"})
    final = results["hybrid_rs"]["final"]["value"]
    assert ran.returncode == 0 and f"final {final:.2f}" in ran.stdout, ran.stderr[-3000:]
    assert len(list(store.glob("runs/mini/*/*/result.json"))) == 2  # found again, not run again

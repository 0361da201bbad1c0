"""`papermill notebooks/07_race.ipynb ... -p experiment mini` against a stand-in hub: the whole second world in one run.

The repositories bear the names and commits that `params/mini.yaml` pins and hold tiny models of the pair's structure
(8 heads, all widths halved; two blocks, for speed), the Pile as .jsonl.zst, WikiText as parquet and C4 as .json.gz.
"""

import gzip
import json
import os
import subprocess
import sys

import nbformat
import numpy as np
import pytest
import zstandard
from transformers import AutoModelForCausalLM

from scaleop.experiment import load_experiment
from scaleop.paths import NOTEBOOKS, ROOT
from tests.hub_server import Hub, parquet, tiny_pythia

TOKENS = 16_384  # 4 steps of 4 x 1024
WORDS = ["the", "of", "and", "to", "in", "a", "is", "that", "for", "it", "was", "on", "are", "as", "with", "they", "be"]


def documents(count, words, seed):
    """Documents of frequent words, Zipf-like."""
    draw = np.random.default_rng(seed)
    shares = 1 / np.arange(1, len(WORDS) + 1)
    return [" ".join(draw.choice(WORDS, words, p=shares / shares.sum())) for _ in range(count)]


def serve(hub, experiment, folder):
    """Put everything that the experiment names on the stand-in hub, under the commits it pins."""
    pair, corpus = experiment.pair, experiment.corpus
    for name, width in {pair.donor: 128, pair.like: 64, pair.reference: 64}.items():
        repository, commit = name.split("@")
        hub.model(repository, tiny_pythia(folder / repository, layers=2, width=width, heads=8, context=1024, vocab=304,
                                          shards=2, seed=width), commit=commit)
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
        file.writelines(json.dumps({"text": text, "url": "none"}) + "\n" for text in documents(30, 100, seed=3))
    (folder / "c4" / "README.md").write_text(card.format(c4.name, c4.name))
    hub.dataset(c4.path, folder / "c4", commit=c4.revision)


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
    page = nbformat.read(tmp_path / "out.ipynb", 4)
    outputs = [output for cell in page.cells for output in cell.get("outputs", [])]
    assert not [output for output in outputs if output.output_type == "error"]
    stderr = "".join(output.text for output in outputs if output.get("name") == "stderr")
    assert all(line.startswith(("HTTP Error 503 thrown", "Retrying in 1s")) for line in stderr.splitlines()), stderr
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

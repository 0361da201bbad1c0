"""The conversion that a user asks for: from a folder and a shape to a checkpoint that loads, or a sentence why not."""

import errno
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from scaleop import __main__, conversion_request, convert, corpus, measured, shards
from scaleop import store as stores
from scaleop.arms import ARMS, VARIANTS, arm_named, build
from scaleop.blockwise import check_arm
from scaleop.calibration import calibration
from scaleop.conversion_request import claimed
from scaleop.convert import target_config
from scaleop.corpus import CorpusError
from scaleop.donor import Donor
from scaleop.downloads import HubError
from scaleop.experiment import ExperimentError, load_experiment
from scaleop.paths import ROOT
from scaleop.shrink import compensate
from scaleop.store import StoreError, read_json
from scaleop.weights import load, load_config
from scaleop.wiring import WiringError, shape_of
from tests.conftest import neox_config, random_model
from tests.hub_server import Hub, parquet, tiny_pythia

SIZES = {"layers": 2, "width": 64, "heads": 4, "mlp": 60, "vocab": 4096, "rotary": 0.5}
LIKE = "hidden=32,mlp=31"
TEXT = "\n".join(f"Line {i} of a text that nobody has read {i * i} times, and {i % 7} more." for i in range(400))


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A random donor with a tokenizer, and a text, each in its own place."""
    home = tmp_path_factory.mktemp("home")
    random_model(neox_config(**SIZES)).half().save_pretrained(home / "donor")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(ROOT / "models" / "nano-l" / name, home / "donor")
    (home / "text.txt").write_text(TEXT)
    return home


@pytest.fixture(autouse=True)
def store(tmp_path, monkeypatch):
    for module in (convert, corpus):
        monkeypatch.setattr(module, "STORE", tmp_path / "store")


def made(home, out, like=LIKE, **more):
    """A conversion of the donor on a few sequences."""
    few = {"text": str(home / "text.txt"), "sequences": 40, "length": 16, "moment_sequences": 20}
    return convert.convert(str(home / "donor"), like, out, **few | more)


def ids(home, count=40, length=16):
    tokenizer = AutoTokenizer.from_pretrained(home / "donor")
    return calibration(str(home / "text.txt"), tokenizer, count, length)


# What comes out

def test_the_command_line_gives_a_checkpoint_that_loads_and_says_what_it_is(home, tmp_path, monkeypatch):
    command = [sys.executable, "-m", "scaleop", "convert", str(home / "donor"), "--like", LIKE, "--arm", "hybrid_rs",
               "--out", str(tmp_path / "small"), "--calibration", str(home / "text.txt"), "--sequences", "40",
               "--length", "16", "--moment-sequences", "20"]
    run = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert run.returncode == 0, run.stderr
    assert "It wants training" in run.stdout and "a pass of 40 sequences through blocks 0 to 1" in run.stderr
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "small")
    donor = Donor(load(home / "donor"), ids(home)[0], 20, "donor", tmp_path / "memory")
    theirs, facts = build(ARMS["hybrid_rs"], donor, target_config(donor.config, LIKE), 0)
    assert all(torch.equal(tensor, theirs.state_dict()[path]) for path, tensor in model.state_dict().items())
    found = json.loads((tmp_path / "small" / "conversion.json").read_text())
    assert found["made"] == json.loads(json.dumps(facts))
    kept = donor.maps("scored", shape_of(theirs.config)).axes
    assert found["kept"] == {str(key): map_.index.tolist() for key, map_ in kept.items()}
    assert found["calibration"] == {**ids(home)[1], "moments": 20}
    monkeypatch.setattr(sys, "argv", command[2:])
    with pytest.raises(SystemExit, match="small exists: name another folder, or overwrite it with --force"):
        __main__.main()


def test_the_folder_holds_all_that_a_reader_needs(home, tmp_path):
    facts = made(home, tmp_path / "small", dtype="bfloat16")
    found = json.loads((tmp_path / "small" / "conversion.json").read_text())
    assert found == json.loads(json.dumps(facts))
    assert found["donor"]["shape"] == {"width": 64, "heads": 4, "layers": 2, "mlp": 60, "vocab": 4096}
    assert found["target"] == {"width": 32, "heads": 4, "layers": 2, "mlp": 31, "vocab": 4096}
    assert found["arm"] == ARMS["hybrid_rs"].facts() | {"rescale": ["read_in"]}
    assert found["peak_memory_bytes"] > 10**8 and found["seconds"].keys() == {"statistics", "conversion"}
    assert found["made"]["solves"].keys() == {"0.O", "0.MLP_DOWN", "1.O", "1.MLP_DOWN"}
    assert {"commit", "versions", "hardware", "started"} <= found.keys()
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "small")
    assert model.dtype == torch.bfloat16 and model.config.intermediate_size == 31
    assert {tensor.dtype for tensor in load_file(tmp_path / "small" / "model.safetensors").values()} == {torch.bfloat16}
    ours, theirs = (AutoTokenizer.from_pretrained(folder) for folder in (tmp_path / "small", home / "donor"))
    assert ours("An executable paper.") == theirs("An executable paper.")
    card = (tmp_path / "small" / "README.md").read_text()
    for said in ("made from **donor**", "scaleop's arm `hybrid_rs`", 'from_pretrained("small")', "It wants training",
                 "18,459 before training", "83.0 after 30M tokens", "MLP 31", "40 sequences of 16 tokens of *text"):
        assert said in card
    assert not list(tmp_path.glob(".*"))  # nothing temporary is left


@pytest.mark.parametrize(("arm", "said"), [
    ("stride", "No text was read"), ("projection", "*blended*"), ("hybrid_rs_bias", "read-outs' biases"),
    ("hybrid_rs_spectrum", "rule `spectrum`"), ("hybrid_rs_act", "activation statistics"),
])
def test_the_card_says_what_the_arm_did(home, tmp_path, arm, said):
    facts = made(home, tmp_path / "small", arm=arm)
    card = (tmp_path / "small" / "README.md").read_text()
    assert said in card and ("The paper has no figures" in card) == (arm != "projection")
    assert ("after 30M tokens" in card) == (arm == "projection")  # the only one of these that it ran
    assert (facts["kept"] is None) == (arm == "projection") and (facts["calibration"] is None) == (arm == "stride")
    load(tmp_path / "small")


def test_a_finished_conversion_serves_the_next(home, tmp_path, capsys):
    made(home, tmp_path / "one")
    assert capsys.readouterr().err.count("a pass of") == 2
    made(home, tmp_path / "two", like="hidden=16,mlp=12,layers=1", arm="hybrid")
    assert "a pass of" not in capsys.readouterr().err
    made(home, tmp_path / "three", sequences=41)  # other text: measured anew
    assert capsys.readouterr().err.count("a pass of") == 2


def test_without_spectra_the_weights_are_the_same_and_the_diagnostics_fewer(home, tmp_path):
    whole, quick = made(home, tmp_path / "whole"), made(home, tmp_path / "quick", spectra=False)
    first, second = (load(tmp_path / name).state_dict() for name in ("whole", "quick"))
    assert all(torch.allclose(tensor, second[path], rtol=1e-5, atol=1e-6) for path, tensor in first.items())
    for name, solve in quick["made"]["solves"].items():
        assert solve["condition"] is None and solve["effective_rank"] is None
        assert solve["ridge"] == pytest.approx(whole["made"]["solves"][name]["ridge"], rel=1e-12)


@pytest.mark.parametrize("rule", ["mean_diagonal", "spectrum", "clamp", 0.1])
def test_a_solve_by_cholesky_is_the_solve(rule):
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(500, 12, generator=draw, dtype=torch.float64) @ torch.randn(12, 12, generator=draw).double()
    matrix, kept = torch.randn(5, 12, generator=draw), torch.tensor([0, 3, 4, 9])
    (first, theirs), (second, ours) = (compensate(matrix, (x.T @ x)[:, kept], kept, rule, spectrum=spectrum)
                                       for spectrum in (True, False))
    assert torch.allclose(first, second, rtol=1e-6) and ours.ridge == pytest.approx(theirs.ridge)
    assert (ours.condition is None) == (rule != "spectrum")  # that rule needs the eigenvalues


# Replacing, failing

def test_force_replaces_a_conversion_and_only_when_all_is_done(home, tmp_path, monkeypatch):
    made(home, tmp_path / "small", arm="stride")
    before = (tmp_path / "small" / "conversion.json").read_bytes()
    with pytest.raises(ExperimentError, match="exists: name another folder"):
        made(home, tmp_path / "small")
    with monkeypatch.context() as patch:
        patch.setattr(convert, "conversion_card", lambda *_: 1 / 0)  # the very last step
        with pytest.raises(ZeroDivisionError):
            made(home, tmp_path / "small", force=True)
    assert (tmp_path / "small" / "conversion.json").read_bytes() == before and not list(tmp_path.glob(".*"))
    (tmp_path / "small" / "old.txt").write_text("of the old version")
    made(home, tmp_path / "small", force=True)
    assert not (tmp_path / "small" / "old.txt").exists()
    assert read_json(tmp_path / "small" / "conversion.json")["arm"]["name"] == "hybrid_rs"


def never(monkeypatch):
    monkeypatch.setattr(measured, "walk", lambda *_, **__: pytest.fail("read the donor"))


def test_force_deletes_nothing_that_no_conversion_made(home, tmp_path, monkeypatch):
    never(monkeypatch)
    (tmp_path / "small").mkdir()
    (tmp_path / "small" / "mine.txt").write_text("dear to me")
    (tmp_path / "file").write_text("dear to me")
    for name in ("small", "file"):
        with pytest.raises(ExperimentError, match=f"{name} holds no conversion.json, and --force replaces only"):
            made(home, tmp_path / name, force=True)
    assert (tmp_path / "small" / "mine.txt").exists() and (tmp_path / "file").exists()


def test_a_place_that_would_hold_the_donor_or_lie_in_it_is_refused(home, tmp_path, monkeypatch):
    never(monkeypatch)
    (tmp_path / "link").symlink_to(home / "donor")
    shutil.copy(__file__, home / "conversion.json")  # even where it looks like a conversion
    for out in (home / "donor", home / "donor" / "small", home, home.parent, tmp_path / "link",
                tmp_path / ".." / tmp_path.name / "link"):
        with pytest.raises(ExperimentError, match="is the donor's folder, lies in it or holds it"):
            made(home, out, force=True)
    (home / "conversion.json").unlink()
    (tmp_path / "deep").mkdir()
    monkeypatch.chdir(tmp_path / "deep")
    for out in (".", "..", "../deep"):
        with pytest.raises(ExperimentError, match="is the current folder or holds it"):
            made(home, out, force=True)


def test_a_place_where_nothing_can_be_written_is_refused_before_any_pass(home, tmp_path, monkeypatch):
    never(monkeypatch)
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(StoreError, match=r"cannot write .*small: .* name an --out on another disk") as refused:
        made(home, tmp_path / "file" / "small")
    assert "SCALEOP_STORE" not in str(refused.value)
    monkeypatch.setattr(stores.shutil, "disk_usage", lambda _: type("Usage", (), {"free": 1000}))
    with pytest.raises(StoreError, match=r"the weights of small need 0\.0 GB .* name an --out on another disk"):
        made(home, tmp_path / "small")


def test_a_folder_that_appears_meanwhile_is_not_overwritten(home, tmp_path, monkeypatch):
    card = convert.conversion_card

    def appearing(*facts):
        (tmp_path / "small").mkdir()
        (tmp_path / "small" / "mine.txt").write_text("dear to me")
        return card(*facts)
    monkeypatch.setattr(convert, "conversion_card", appearing)
    with pytest.raises(ExperimentError, match="small exists: name another folder"):
        made(home, tmp_path / "small")
    assert [path.name for path in (tmp_path / "small").iterdir()] == ["mine.txt"] and not list(tmp_path.glob(".*"))


def test_two_conversions_to_one_place_are_refused(home, tmp_path, monkeypatch):
    never(monkeypatch)
    with claimed(tmp_path / "small", home / "donor", False, convert.STORE / "converting"), \
            pytest.raises(StoreError, match=r"converting/small-.* is in use by process \d+"):
        made(home, tmp_path / "small")


def test_a_killed_conversion_leaves_what_was_there_and_the_next_one_cleans_up(home, tmp_path):
    made(home, tmp_path / "small", arm="stride")
    script = ("import os, signal, sys; from scaleop import convert\n"
              "replace = os.replace\n"
              "def dying(source, target):\n"
              "    if str(target) == sys.argv[2]: os.kill(os.getpid(), signal.SIGKILL)\n"
              "    replace(source, target)\n"
              "os.replace = dying\n"
              f"convert.convert(sys.argv[1], '{LIKE}', sys.argv[2], 'stride', force=True)")
    killed = subprocess.run([sys.executable, "-c", script, str(home / "donor"), str(tmp_path / "small")], cwd=ROOT,
                            env=os.environ | {"SCALEOP_STORE": str(tmp_path / "store")}, check=False)
    assert killed.returncode == -signal.SIGKILL
    assert not (tmp_path / "small").exists() and len(list(tmp_path.glob(".small.*"))) == 1
    with pytest.raises(ExperimentError, match="small exists: name another folder"):  # it is back
        made(home, tmp_path / "small")
    assert not list(tmp_path.glob(".small.*")) and load(tmp_path / "small").config.hidden_size == 32


def test_a_full_disk_ends_in_a_sentence_leaves_nothing_and_loses_no_pass(home, tmp_path, monkeypatch, capsys):
    def full(tensors, path, **_):
        path.write_bytes(b"half of it")
        raise OSError(errno.ENOSPC, "No space left on device")
    with monkeypatch.context() as patch:
        patch.setattr(shards, "save_file", full)
        with pytest.raises(StoreError, match=r"cannot write .*small: No space left on device.*run again"):
            made(home, tmp_path / "small")
    assert not (tmp_path / "small").exists() and not list(tmp_path.glob(".small*"))
    capsys.readouterr()
    made(home, tmp_path / "small")
    assert "a pass of" not in capsys.readouterr().err and (tmp_path / "small" / "conversion.json").exists()


def test_what_is_refused_is_refused_before_any_pass(home, tmp_path, monkeypatch):
    never(monkeypatch)
    monkeypatch.setattr(convert, "calibration", lambda *given: pytest.fail("read text")
                        if given[0].endswith("/text.txt") and given[2] < 10**6 else calibration(*given))
    for more, error, said in (
            ({"arm": "hybrid_sr"}, ExperimentError, "did you mean 'hybrid_rs'"),
            ({"arm": "random"}, ExperimentError, "takes nothing from a donor"),
            ({"arm": "hybrid_own"}, ExperimentError, "take 'hybrid'"),
            ({"like": "hidden=128"}, WiringError, "target width=128 is larger than the donor's 64"),
            ({"like": "hidden=32,heads=3"}, WiringError, "does not divide"),
            ({"like": "hidden=32,vocab=4000"}, ExperimentError, "leaves no rows for some of the tokenizer's 4,096"),
            ({"moment_sequences": 41}, ExperimentError, "41 is more than the 40 sequences"),
            ({"sequences": 10**6}, CorpusError, "ask for at most"),
            ({"text": "text.doc"}, CorpusError, "say embedded, pile, or a file that ends in .txt, .jsonl, .parquet"),
            ({"text": "none.txt"}, CorpusError, "there is no such file"),
            *(({"sequences": wrong}, ExperimentError, f"sequences = {wrong}: give a whole number, 2 or more")
              for wrong in (-5, 0, 1, 2.5, True)),
            ({"length": 0}, ExperimentError, "length = 0: give a whole number, 1 or more"),
            ({"moment_sequences": -1}, ExperimentError, "moment-sequences = -1: give a whole number, 1 or more"),
            ({"moment_sequences": 0}, ExperimentError, "moment-sequences = 0: give a whole number"),
            *(({"moment_sequences": few, "arm": "hybrid_rs_holdout"}, ExperimentError, "none can be held out.*give 3")
              for few in (1, 2)),
            ({"moments": "ful"}, ExperimentError, "moments = 'ful': it may be full, kept; did you mean 'full'"),
            ({"dtype": "float99"}, ExperimentError, "dtype = 'float99': it may be float32, bfloat16, float16"),
            ({"spill": -1}, ExperimentError, "spill = -1: give GB of hidden states"),
            ({"spill": float("nan")}, ExperimentError, "spill = nan"),
            ({"device": "gpu"}, ExperimentError, "device = 'gpu' is not to be had here"),
            ({"like": {"hidden": 0}}, ExperimentError, "--like: hidden = 0: give a whole number"),
            ({"like": {"hidden": "32"}}, ExperimentError, "--like: hidden = '32'")):
        with pytest.raises(error, match=said):
            made(home, tmp_path / "small", **more)
    assert not (tmp_path / "small").exists()


REFUSED = ExperimentError, HubError, WiringError  # a folder and a file are read by different hands


@pytest.mark.parametrize(("content", "error", "said"), [
    *((content, REFUSED, "cannot be read .*name a folder or a file|config.json of .* is damaged")
      for content in ("{not json", '["a", "list"]', "null")),
    *((content, REFUSED, "cannot be read|of no architecture") for content in ("{}", '{"model_type": "nothing"}')),
    ('{"model_type": "gpt_neox", "hidden_size": "wide"}', ExperimentError, "cannot be read"),
    ('{"auto_map": {"AutoConfig": "code.Config"}, "model_type": "x"}', HubError, "asks for code of its own")])
def test_a_config_that_cannot_be_read_or_wants_code_is_refused(home, tmp_path, content, error, said):
    (tmp_path / "config.json").write_text(content)
    (tmp_path / "code.py").write_text("raise SystemExit('the code of a config was run')")
    for like in (tmp_path, tmp_path / "config.json"):
        with pytest.raises(error, match=said):
            made(home, tmp_path / "small", like=like)
    with pytest.raises(error, match=said):
        convert.convert(tmp_path, LIKE, tmp_path / "small")


def test_the_forward_pass_is_on_the_best_device_unless_told_otherwise(home, tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(convert, "best_device", lambda: asked.append(1) or torch.device("cpu"))
    made(home, tmp_path / "one", arm="stride")
    made(home, tmp_path / "two", arm="stride", device="cpu")
    assert asked == [1] and __main__.parser().parse_args(["convert", "a", "--like", "b", "--out", "c"]).device is None


def test_a_donor_without_a_tokenizer_is_refused(home, tmp_path):
    shutil.copytree(home / "donor", tmp_path / "donor", ignore=shutil.ignore_patterns("tokenizer*"))
    with pytest.raises(ExperimentError, match=r"no tokenizer .*copy tokenizer\.json"):
        convert.convert(tmp_path / "donor", LIKE, tmp_path / "small")


# The target's sizes

def test_like_may_be_sizes_a_model_or_a_config_file(home, tmp_path):
    donor = neox_config(**SIZES)
    other = neox_config(layers=1, width=32, heads=2, mlp=20, vocab=4096, layer_norm_eps=1e-3)
    other.save_pretrained(tmp_path)
    for like in (tmp_path, str(tmp_path), tmp_path / "config.json", "layers=1,hidden=32,heads=2,mlp=20",
                 {"layers": 1, "hidden": 32, "heads": 2, "mlp": 20}):
        target = target_config(donor, like)
        assert (target.num_hidden_layers, target.hidden_size, target.num_attention_heads, target.intermediate_size,
                target.vocab_size) == (1, 32, 2, 20, 4096)
        assert target.layer_norm_eps == donor.layer_norm_eps  # only the sizes are taken
    left_out = target_config(donor, "mlp=10")
    assert (left_out.hidden_size, left_out.num_hidden_layers, left_out.intermediate_size) == (64, 2, 10)


def test_folders_are_found_below_the_current_one(home, tmp_path, monkeypatch):
    monkeypatch.chdir(home)
    assert convert.convert("donor", "donor", tmp_path / "small", "stride")["donor"]["name"] == "donor"
    assert load(tmp_path / "small").config.hidden_size == 64


@pytest.mark.parametrize(("like", "said"), [
    ("hiden=32", "unknown size 'hiden'; did you mean 'hidden'"), ("hidden=half", "'hidden=half' is no size"),
    ("hidden=32,mlp", "'mlp' is no size: write mlp=1024"), ("hidden=0", "is no size"), ("hidden=-3", "is no size")])
def test_sizes_that_cannot_be_read_are_refused(like, said):
    with pytest.raises(ExperimentError, match=said):
        target_config(neox_config(), like)


# The text

def test_calibration_text_is_documents_whole_with_an_end_after_each(home, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(home / "donor")
    lines = ["one line", "", "another, longer line of text", "  ", "the last of them is here"]
    expected = [token for line in lines if line.strip()
                for token in [*tokenizer(line)["input_ids"], tokenizer.eos_token_id]]
    (tmp_path / "a.txt").write_text("\n".join(lines))
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps({"text": line}) for line in lines))
    pd.DataFrame({"text": lines}).to_parquet(tmp_path / "a.parquet")
    for name in ("a.txt", "a.jsonl", "a.parquet"):
        found, facts = calibration(str(tmp_path / name), tokenizer, 3, 4)
        assert found.tolist() == np.array(expected[:12]).reshape(3, 4).tolist() and found.dtype == np.int64
        assert facts["text"] == name and len(facts["sha256"]) == 64
    with pytest.raises(CorpusError, match=rf"{len(expected):,} tokens.*at most {len(expected) // 4},"):
        calibration(str(tmp_path / "a.txt"), tokenizer, 100, 4)


def test_a_hub_donor_is_measured_on_the_pile_and_remembered_by_its_commit(tmp_path, monkeypatch):
    """As README's command for pythia-1.4b, on stand-ins: old names and buffers, fp16, shards, the shape of a model."""
    pile = load_experiment("primary").corpus.train
    parquet(tmp_path / "pile" / "data" / "train-00000-of-00001.parquet", {"text": TEXT.split("\n")})
    with Hub() as server:
        server.here(monkeypatch, tmp_path / "hf")
        commit = server.model("EleutherAI/pythia-1.4b", tiny_pythia(tmp_path / "donor", width=64, shards=2))
        server.model("EleutherAI/pythia-410m", tiny_pythia(tmp_path / "like", width=32))
        server.dataset(pile.path, tmp_path / "pile", commit=pile.revision)
        facts = convert.convert("EleutherAI/pythia-1.4b", "EleutherAI/pythia-410m", tmp_path / "small", sequences=40,
                                length=16)
        asked = [path for method, path in server.requests if method == "GET" and "pythia-410m/resolve" in path]
    assert all(path.endswith("config.json") for path in asked)
    assert facts["donor"]["hub"] == {"name": "EleutherAI/pythia-1.4b", "revision": "main", "commit": commit}
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "donor")
    first = [token for line in TEXT.split("\n")[:30] for token in [*tokenizer(line)["input_ids"], 0]][: 40 * 16]
    assert facts["calibration"] == {
        "text": f"{pile.path}, train, {pile.revision[:12]}", "sequences": 40, "length": 16, "moments": 40,
        "sha256": hashlib.sha256(np.array(first, dtype="<i8").tobytes()).hexdigest()}
    assert "base_model: EleutherAI/pythia-1.4b" in (tmp_path / "small" / "README.md").read_text()
    donor = Donor(load(tmp_path / "donor"), np.array(first).reshape(40, 16), 40, "donor", tmp_path / "memory")
    theirs, _ = build(ARMS["hybrid_rs"], donor, load(tmp_path / "small").config, 0)
    assert all(torch.equal(tensor, theirs.state_dict()[path])
               for path, tensor in load(tmp_path / "small").state_dict().items())


def test_defaults_are_the_papers_for_the_hub_and_ours_for_a_folder():
    assert conversion_request.DEFAULTS == {True: ("pile", 10_000, 128, 1_000), False: ("embedded", 4_000, 128, 1_000)}
    said = " ".join(__main__.parser().format_help().split()) + __main__.EPILOG
    assert "hybrid_rs" in __main__.parser()._subparsers._group_actions[0].choices["convert"].format_help()
    assert "10,000 sequences of 128 tokens, the first 1,000" in said and "4,000 of 128, 1,000 for moments" in said


def test_every_option_of_the_command_line_is_one_of_the_function(home, tmp_path, monkeypatch, capsys):
    asked = {}
    monkeypatch.setattr(__main__, "convert", lambda **given: asked.update(given) or {
        "donor": {"name": "d"}, "arm": {"name": "a"}, "seconds": {"statistics": 1, "conversion": 2},
        "peak_memory_bytes": 3e9})
    monkeypatch.setattr(sys, "argv", ["scaleop", "convert", "d", "--like", "l", "--out", "o", "--no-spectra"])
    __main__.main()
    assert asked.keys() == set(convert.convert.__code__.co_varnames[:convert.convert.__code__.co_argcount
                                                                    + convert.convert.__code__.co_kwonlyargcount])
    assert asked["spectra"] is False and asked["text"] is None and "3.00 GB at most" in capsys.readouterr().out


def test_every_arm_with_a_donor_can_be_named():
    for name in ARMS | VARIANTS:
        arm = arm_named(name)
        assert arm.reads_text == (arm.maps not in (None, "uniform")), name


def test_the_readmes_memory_is_what_was_measured():
    found = read_json(ROOT / "benchmarks" / "results" / "conversion.json")
    first, second = (found[pair]["ways"]["streaming"]["peak GB"] for pair in ("1.4b -> 410m", "6.9b -> 1.4b"))
    said = " ".join((ROOT / "README.md").read_text().split())
    assert f"{first:.1f} GB for pythia-1.4b's shape to 410m's, {second:.1f} GB for 6.9b's to 1.4b's" in said
    assert f"({found['6.9b -> 1.4b']['donor on disk, GB']:.1f} GB on disk;" in said
    assert (found["6.9b -> 1.4b"]["target"]["layers"] == 2) == ("two of the target's blocks made" in said)
    assert first < 4 and second < 8


def test_every_command_of_the_readme_is_understood():
    commands = re.findall(r"^python -m scaleop (convert .*)$", (ROOT / "README.md").read_text(), flags=re.M)
    assert len(commands) >= 3
    for command in commands:
        asked = __main__.parser().parse_args(command.split())
        check_arm(arm_named(asked.arm))
        if asked.donor.startswith("models/") and (ROOT / asked.donor).exists():
            shape_of(target_config(load_config(ROOT / asked.donor), asked.like))

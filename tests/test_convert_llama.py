"""The conversion command on the Llama class: every family and way of its configs, on tiny random models."""

import copy
import json
import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from scaleop import convert, corpus, measured
from scaleop.arms import ARMS, build
from scaleop.calibration import calibration
from scaleop.convert import target_config
from scaleop.donor import Donor
from scaleop.experiment import ExperimentError
from scaleop.paths import ROOT
from scaleop.weights import load, load_config
from scaleop.wiring import WiringError, shape_of
from tests.conftest import neox_config, random_model
from tests.families import CONFIGS

LLAMAS = [name for name in CONFIGS if not name.startswith("gpt_neox")]
LIKE = {"llama, heads wider than the stream": "hidden=16,mlp=20", "mistral, tied, one group": "hidden=16,mlp=20",
        "llama, biases, no groups": "hidden=16,heads=2,mlp=20"}
TEMPLATE = "{% for message in messages %}{{ message.content }}<end>{% endfor %}"


@pytest.fixture(autouse=True)
def store(tmp_path, monkeypatch):
    for module in (convert, corpus):
        monkeypatch.setattr(module, "STORE", tmp_path / "store")


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """80 lines of 20 numbers."""
    file = tmp_path_factory.mktemp("text") / "text.txt"
    rows = np.random.default_rng(0).integers(0, 1000, (80, 20))
    file.write_text("\n".join(" ".join(map(str, row)) for row in rows))
    return str(file)


def donor_in(folder, name):
    """A random donor of a family with the nano ladder's tokenizer and a chat template."""
    config = copy.deepcopy(CONFIGS[name])
    config.vocab_size = 4096
    random_model(config).save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "models" / "nano-l")
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder


def made(donor, out, text, like, **more):
    return convert.convert(donor, like, out, text=text, sequences=60, length=12, moment_sequences=40, device="cpu",
                           **more)


@pytest.mark.parametrize("name", LLAMAS)
def test_the_checkpoint_is_what_build_gives_and_holds_a_tied_tensor_once(name, tmp_path, text):
    donor = donor_in(tmp_path / "donor", name)
    facts = made(donor, tmp_path / "small", text, like := LIKE.get(name, "hidden=16,heads=2,mlp=20"))
    ids, _ = calibration(text, AutoTokenizer.from_pretrained(donor), 60, 12)
    memory = Donor(load(donor), ids, 40, "donor", tmp_path / "memory")
    theirs, built = build(ARMS["hybrid_rs"], memory, target_config(memory.config, like), 0)
    ours = AutoModelForCausalLM.from_pretrained(tmp_path / "small")
    assert type(ours) is type(memory.model) and facts["model"] == type(ours).__name__
    assert facts["made"]["kept"] == built["kept"] and set(facts["made"]["solves"]) == set(built["solves"])
    for (path, tensor), other in zip(ours.state_dict().items(), theirs.state_dict().values(), strict=True):
        assert torch.allclose(tensor, other, rtol=1e-4, atol=1e-5), path
    stored, tied = load_file(tmp_path / "small" / "model.safetensors"), CONFIGS[name].tie_word_embeddings
    assert ("lm_head.weight" in stored) != tied and ours.config.tie_word_embeddings == tied
    assert (ours.lm_head.weight is ours.model.embed_tokens.weight) == tied
    assert len(stored) == len(ours.state_dict()) - tied and stored["model.embed_tokens.weight"].shape == (4096, 16)


def test_tokenizer_chat_template_and_ends_of_text_come_along_and_how_words_are_drawn_does_not(tmp_path, text):
    donor = donor_in(tmp_path / "donor", "qwen2, tied")
    (donor / "generation_config.json").write_text(json.dumps(  # as chat models have it; transformers refuses to save it
        {"eos_token_id": [60, 7], "pad_token_id": 60, "do_sample": False, "temperature": 0.6, "top_p": 0.9}))
    made(donor, tmp_path / "small", text, "hidden=16,mlp=20", arm="stride")
    ends = GenerationConfig.from_pretrained(tmp_path / "small")
    assert (ends.eos_token_id, ends.pad_token_id) == ([60, 7], 60) and ends.temperature in (None, 1.0)
    ours, theirs = (AutoTokenizer.from_pretrained(folder) for folder in (tmp_path / "small", donor))
    assert ours.apply_chat_template([{"role": "user", "content": "So it ends."}], tokenize=False) == "So it ends.<end>"
    assert ours("So it ends.") == theirs("So it ends.") and len(ours("So it ends.")["input_ids"]) > 3


@pytest.mark.parametrize("content", ["{not json", "null", '["a", "list"]'])
def test_generation_settings_that_cannot_be_read_are_refused_before_any_pass(content, tmp_path, text, monkeypatch):
    monkeypatch.setattr(measured, "walk", lambda *_, **__: pytest.fail("read the donor"))
    donor = donor_in(tmp_path / "donor", "llama")
    (donor / "generation_config.json").write_text(content)
    with pytest.raises(ExperimentError, match=r"generation_config\.json cannot be read .*copy it again, or delete it"):
        made(donor, tmp_path / "small", text, "hidden=16,mlp=20")


def test_the_card_names_class_groups_and_what_the_levers_were(tmp_path, text):
    donor = donor_in(tmp_path / "donor", "llama, tied")
    made(donor, tmp_path / "small", text, "hidden=16,heads=2,mlp=20")
    card = (tmp_path / "small" / "README.md").read_text()
    for said in ("LlamaForCausalLM, made from **donor** by", "2 blocks, width 16, 2 heads over 1 of keys and values, "
                 "MLP 20, vocabulary 4,096; the donor's: 2 blocks, width 32, 4 heads over 2 of keys and values, MLP 40",
                 "read-ins were multiplied", "It wants training"):
        assert said in card, said


@pytest.mark.parametrize("name, like, said", [
    ("llama", "hidden=16,heads=3", "does not divide"),
    ("llama", "hidden=24,heads=3", r"heads=3 is no multiple of 2, .*\(4 in 2 groups\): choose heads among"),
    ("mistral, tied, one group", "hidden=16,heads=4,kv_heads=2", r"kv_heads=2 is larger than the donor's 1"),
    ("qwen2", "hidden=64", "width=64 is larger than the donor's 32")])
def test_shapes_no_selection_reaches_are_refused_before_any_pass(name, like, said, tmp_path, text, monkeypatch):
    monkeypatch.setattr(measured, "walk", lambda *_, **__: pytest.fail("read the donor"))
    with pytest.raises(WiringError, match=said):
        made(donor_in(tmp_path / "donor", name), tmp_path / "small", text, like)


def test_a_model_of_another_family_gives_no_sizes(tmp_path, text):
    donor = donor_in(tmp_path / "donor", "llama")
    neox_config(layers=2, width=16, heads=2, mlp=20).save_pretrained(tmp_path / "like")
    with pytest.raises(ExperimentError, match="like is a gpt_neox, and the donor a llama"):
        made(donor, tmp_path / "small", text, tmp_path / "like")
    shutil.copy(donor / "config.json", tmp_path / "like.json")
    assert shape_of(target_config(load_config(donor), tmp_path / "like.json")) == shape_of(load_config(donor))

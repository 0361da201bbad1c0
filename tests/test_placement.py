"""Models that are only read run on the best device and return: the GPU is whoever's that trains next.

There is no GPU here. "cpu:0" stands in for it: torch moves a model there as to any device, and every move is noted.
"""

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer

from scaleop import captures, convert, devices, processes
from scaleop.activations import input_statistics, second_moments, stream_statistics
from scaleop.arms import arm_named, build
from scaleop.corpus import write_tokens
from scaleop.devices import best_device, device_of, on_best_device
from scaleop.evaluate import greedy, perplexity
from scaleop.paths import ROOT
from scaleop.suspects import readout_variance
from scaleop.weights import extract
from tests import accelerated
from tests.conftest import neox_config, random_ids, random_model

GPU, HOME = torch.device("cpu", 0), torch.device("cpu")
SEQUENCES = random_ids(60).reshape(6, 10)


def watched(model, notes):
    """Note where a model is moved to and that it ran, in order."""
    plain = type(model).to

    def to(*arguments):
        notes.append(arguments[0])
        return plain(model, *arguments)
    model.to = to
    model.base_model.register_forward_pre_hook(lambda module, inputs: notes.append("runs"))
    return model


@pytest.fixture
def notes(monkeypatch):
    monkeypatch.setattr(devices, "best_device", lambda: GPU)
    return []


def in_short(notes):
    """Consecutive runs as one."""
    return [note for i, note in enumerate(notes) if i == 0 or note != "runs" or notes[i - 1] != "runs"]


def tokenizer():
    """The least of a tokenizer that `greedy` needs."""
    class Ids:
        def __call__(self, prompt, return_tensors):
            return {"input_ids": torch.tensor([[1, 2, 3]])}

        def decode(self, ids):
            return " ".join(map(str, ids.tolist()))
    return Ids()


READERS = {
    "perplexity": lambda model: perplexity(model, random_ids(100), 16, 8),
    "greedy": lambda model: greedy(model, tokenizer(), "a prompt", 2),
    "stream_statistics": lambda model: stream_statistics(model, SEQUENCES, 2),
    "second_moments": lambda model: second_moments(model, SEQUENCES, {(0, "O"): torch.arange(3)}, 2),
    "input_statistics": lambda model: input_statistics(model, SEQUENCES, 2),
    "readout_variance": lambda model: readout_variance(model, SEQUENCES, torch.arange(3), 2),
    "capture": lambda model: captures.capture(model, "a-model", SEQUENCES, 2),
    "similarity": lambda model: captures.stream_similarity(model, random_model(neox_config()), SEQUENCES, 2, 2**20),
}


@pytest.mark.parametrize("reader", READERS)
def test_what_only_reads_a_model_runs_it_on_the_gpu_and_brings_it_back(reader, notes, monkeypatch, tmp_path):
    monkeypatch.setattr(captures, "STORE", tmp_path)
    READERS[reader](watched(random_model(neox_config()), notes))
    assert in_short(notes) == [GPU, "runs", HOME]


def test_a_donor_is_home_again_when_an_arm_is_built(donor, target, notes):
    watched(donor.model, notes)
    build(arm_named("hybrid_own"), donor, target, 0)  # statistics, then compensation on the small model's own inputs
    assert in_short(notes) == [GPU, "runs", HOME] * 2
    del donor.model.to


def test_a_model_that_does_not_fit_is_read_on_the_cpu_and_a_line_says_so(notes, monkeypatch, capsys):
    model = random_model(neox_config())
    size = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
    for free, moves in ((devices.BESIDE + size, True), (devices.BESIDE + size - 1, False)):
        monkeypatch.setattr(devices, "free_memory", lambda device, free=free: free)
        perplexity(watched(model, notes), random_ids(100), 16, 8)
        assert in_short(notes) == ([GPU, "runs", HOME] if moves else ["runs"])
        assert ("a model stays on the CPU, where it is slow" in capsys.readouterr().out) is not moves
        notes.clear()
        del model.to


def test_on_a_mac_everything_is_on_the_cpu(monkeypatch):
    """Apple's GPU has no fp64, which perplexity, moments and solves need; it would otherwise be found and taken."""
    for kind, expected in (("mps", True), ("cuda", False)):
        monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
        monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda kind=kind: torch.device(kind))
        assert processes.on_cpu() is expected


def test_a_failure_brings_it_back_too(notes):
    with pytest.raises(ZeroDivisionError), on_best_device(watched(random_model(neox_config()), notes)):
        raise ZeroDivisionError
    assert notes == [GPU, HOME]


def test_a_model_that_is_on_a_device_already_stays_there(notes):
    """As one that has just been trained and is scored."""
    model = watched(random_model(neox_config()).to("meta"), notes)
    with on_best_device(model):
        pass
    assert notes == []


def test_without_a_gpu_nothing_moves():
    notes = []
    perplexity(watched(random_model(neox_config()), notes), random_ids(100), 16, 8)
    assert set(notes) == {"runs"}
    assert best_device() == HOME or torch.accelerator.is_available()


def test_extracted_weights_are_copies_on_the_cpu(model):
    found = extract(model)
    assert {tensor.device for tensor in found.values()} == {HOME}
    before = model.lm_head.weight.detach().clone()
    for tensor in found.values():
        tensor.zero_()
    assert torch.equal(model.lm_head.weight, before)


# Where there is a GPU: the stand-in mixes with the CPU's tensors, this one does not

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU that torch sees")


@needs_gpu
@pytest.mark.parametrize("reader", READERS)
def test_readers_run_on_a_real_gpu(reader, monkeypatch, tmp_path):
    monkeypatch.setattr(captures, "STORE", tmp_path)
    model = random_model(neox_config())
    READERS[reader](model)
    assert device_of(model) == HOME


@needs_gpu
@pytest.mark.parametrize("way", accelerated.WAYS)
def test_training_runs_and_resumes_on_a_real_gpu(way, tmp_path):
    stream = write_tokens(tmp_path / "stream", random_ids(400).astype(np.uint16), np.array([0]))
    whole = accelerated.run(way, stream, tmp_path / "whole")
    seen = iter(range(100))

    def stopped_at_the_third(model):
        assert device_of(model).type == "cuda"
        if next(seen) == 2:
            raise ZeroDivisionError
        return perplexity(model, accelerated.HELD_OUT, 16, 8, 4).value
    with pytest.raises(ZeroDivisionError):
        accelerated.run(way, stream, tmp_path / "resumed", evaluate=stopped_at_the_third)
    again = accelerated.run(way, stream, tmp_path / "resumed")
    assert [p["ppl"] for p in again["curve"]] == pytest.approx([p["ppl"] for p in whole["curve"]], rel=1e-4)


@needs_gpu
def test_a_conversion_on_a_real_gpu_is_that_on_the_cpu(tmp_path, monkeypatch):
    monkeypatch.setattr(convert, "STORE", tmp_path / "store")
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "models" / "nano-s")
    random_model(neox_config(layers=4, width=32, heads=4, mlp=64, vocab=len(tokenizer))).save_pretrained(tmp_path / "l")
    tokenizer.save_pretrained(tmp_path / "l")
    (tmp_path / "text.txt").write_text("the law of the land and the state of the union " * 400)
    found = []
    for device in ("cpu", "cuda"):
        convert.convert(tmp_path / "l", {"hidden": 16, "heads": 2, "layers": 2, "mlp": 32}, tmp_path / device,
                        text=str(tmp_path / "text.txt"), sequences=20, length=16, moment_sequences=10, device=device)
        found.append(load_file(tmp_path / device / "model.safetensors"))
        (tmp_path / "store").rename(tmp_path / f"store of {device}")  # the other shall not find what this one read
    for name, tensor in found[0].items():
        assert torch.allclose(tensor, found[1][name], rtol=1e-3, atol=1e-4), name

"""Models that are only read run on the best device and return: the GPU is whoever's that trains next.

There is no GPU here. "cpu:0" stands in for it: torch moves a model there as to any device, and every move is noted.
"""

import pytest
import torch

from scaleop import captures, weights
from scaleop.activations import input_statistics, second_moments, stream_statistics
from scaleop.arms import arm_named, build
from scaleop.evaluate import greedy, perplexity
from scaleop.suspects import readout_variance
from scaleop.weights import best_device, extract, on_best_device
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
    monkeypatch.setattr(weights, "best_device", lambda: GPU)
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

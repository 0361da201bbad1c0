"""The models that section 3 shows: which, as what, and that taking one apart and putting it together is exact."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from scaleop import lineup
from scaleop.experiment import load_experiment
from tests.conftest import neox_config, random_ids, random_model


def test_a_pair_of_the_ladder_shows_the_ladder_and_any_other_pair_itself():
    models = lineup.lineup(load_experiment("nano"))
    assert models == {f"nano-{size}": f"models/nano-{size}" for size in "lms"}
    assert {short: card["settings"]["peak_lr"] for short, card in lineup.cards(models).items()} == {
        "nano-l": 1e-3, "nano-m": 2e-3, "nano-s": 4e-3}
    pair = SimpleNamespace(donor="owner/big@abc", reference="some/folder/small")
    pair = lineup.lineup(SimpleNamespace(pair=pair))
    assert pair == {"big": "owner/big@abc", "small": "some/folder/small"}
    assert lineup.cards(pair) == {}
    assert lineup.lineup(SimpleNamespace(pair=SimpleNamespace(donor="/a/b", reference=None))) == {"b": "/a/b"}


@pytest.mark.parametrize(("donor", "reference", "expected"), [
    ("o/big@refs/pr/3", "o/small@main", {"big": "o/big@refs/pr/3", "small": "o/small@main"}),
    ("runs/a/model", "runs/b/model", {"runs/a/model": "runs/a/model", "runs/b/model": "runs/b/model"}),
    ("o/m@step1", "o/m@step2", {"o/m@step1": "o/m@step1", "o/m@step2": "o/m@step2"}),
    ("a/same", "a/same", {"same": "a/same"})])
def test_no_model_of_a_pair_hides_another_of_its_name(donor, reference, expected):
    pair = SimpleNamespace(donor=donor, reference=reference)
    assert lineup.lineup(SimpleNamespace(pair=pair)) == expected


@pytest.fixture
def folder(tmp_path):
    random_model(neox_config(layers=3, width=16, heads=2, mlp=40, vocab=61)).save_pretrained(tmp_path / "model")
    return str(tmp_path / "model")


def test_a_model_is_a_row_with_its_shape_and_what_is_measured(folder):
    race = SimpleNamespace(score=lambda name: {"ppl": {folder: 12.5}[name]})
    block = 16 * 48 + 48 + 16 * 16 + 16 + 2 * 16 * 40 + 40 + 16 + 4 * 16  # QKV, O, MLP with biases, two norms
    assert lineup.row(race, folder, None) == {"blocks": 3, "width": 16, "heads": 2, "MLP": 40,
                                              "parameters": 2 * 61 * 16 + 3 * block + 2 * 16,
                                              "held-out, measured here": 12.5}
    card = lineup.cards({"nano-s": "models/nano-s"})["nano-s"]
    ladder = lineup.row(SimpleNamespace(score=lambda name: {"ppl": 1.0}), "models/nano-s", card)
    assert list(ladder)[4:] == ["parameters", "tokens", "peak rate", "held-out, measured here", "held-out, card",
                                "King James, card", "minutes"]
    assert ladder["parameters"] == lineup.row(SimpleNamespace(score=lambda name: {"ppl": 1.0}), "models/nano-s",
                                              None)["parameters"]  # as counted from the config


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_put_together_again_says_the_same_to_the_last_bit(folder, dtype, monkeypatch):
    ids = np.reshape(random_ids(40), (4, 10))
    assert lineup.rebuilt_difference(folder, ids, dtype) == 0.0
    plain = lineup.extract
    monkeypatch.setattr(lineup, "extract", lambda model: {key: weight * 1.5 if key == (1, "O") else weight
                                                          for key, weight in plain(model).items()})
    assert lineup.rebuilt_difference(folder, ids, dtype) > 0.01  # and one that differs is noticed

"""The ladder's recipe: shapes as the table says, a run found again, a card that repeats the stored numbers."""

import pytest
import torch
import yaml

from scaleop import corpus, pretrain, texts
from scaleop.card import card
from scaleop.experiment import ExperimentError, load_ladder
from scaleop.settings import Ladder
from scaleop.weights import load
from scaleop.wiring import shape_of
from tests.test_race import documents

TINY = """
vocabulary: 300
context: 16
rotary_fraction: 0.5
tokens: 1280
batch: 4
warmup_share: 0.1
precision: bf16
seed: 0
evaluations: 4
checkpoint_every: 5
frozen: {sequences: 10, length: 16, similarity: 5, moments: 10}
evaluation: {window: 16, stride: 8, quick_tokens: 100, limits: {heldout: 300}}
sweep: {tokens: 640, rates: [1.0e-3, 1.0e-2]}
models:
  - {name: rung, layers: 1, width: 16, heads: 2, mlp: 32, peak_lr: 1.0e-2}
"""


@pytest.fixture
def ladder(monkeypatch, tmp_path):
    for module in (pretrain, corpus):
        monkeypatch.setattr(module, "STORE", tmp_path / "store")
    monkeypatch.setattr(pretrain, "ROOT", tmp_path)
    monkeypatch.setattr(texts, "training_documents", lambda: documents(60, 1))
    monkeypatch.setitem(texts.EVALUATIONS, "heldout", lambda: documents(5, 2))
    return Ladder.model_validate(yaml.safe_load(TINY))


def test_the_ladder_mirrors_the_papers_shapes_at_an_eighth():
    shapes = {m.name: (m.layers, m.width, m.heads, m.width // m.heads, m.mlp) for m in load_ladder().models}
    assert shapes == {"nano-l": (8, 256, 8, 32, 1024), "nano-m": (8, 128, 8, 16, 512), "nano-s": (4, 96, 6, 16, 384)}
    config = pretrain.config_of(load_ladder(), load_ladder().model("nano-l"))
    assert shape_of(config).rotary_dims == 8 and not config.tie_word_embeddings and config.use_parallel_residual


def test_an_unknown_rung_is_refused_by_name():
    with pytest.raises(ExperimentError, match=r"'nano-x' is not in params/ladder\.yaml; there are: nano-l, nano-m"):
        load_ladder().model("nano-x")


def test_the_recorded_sweeps_chose_the_rates():
    """The smallest rate within 3 % of the best, from the sweep that travels with each checkpoint."""
    from scaleop.paths import ROOT
    from scaleop.store import read_json

    for model in load_ladder().models:
        path = ROOT / "models" / model.name / "training.json"
        if not path.exists():
            pytest.skip(f"{model.name} is not in models/ yet: `make models` trains it")
        sweep = read_json(path)["sweep"]
        good = [row["peak_lr"] for row in sweep if row["ppl"] <= 1.03 * min(row["ppl"] for row in sweep)]
        assert model.peak_lr == min(good), model.name


def test_publishing_ships_a_loadable_checkpoint_and_an_honest_card(ladder, monkeypatch):
    model = ladder.models[0]
    assert [row["peak_lr"] for row in pretrain.sweep(ladder, model)] == [1e-3, 1e-2]
    folder = pretrain.publish(ladder, model)
    shipped = load(folder)
    assert next(load(folder, torch.bfloat16).parameters()).dtype == torch.bfloat16
    stored = pretrain.read_json(folder / "training.json")
    assert stored["curve"][-1]["step"] == 20 and stored["stream"]["tokens"] == 1280
    assert stored["curve"][-1]["ppl"] < stored["curve"][0]["ppl"]
    text = (folder / "README.md").read_text()
    assert f"{stored['perplexity']['heldout']['value']:.3f}" in text and stored["stream"]["sha256"] in text
    assert f"{sum(p.numel() for p in shipped.parameters()):,} parameters" in text
    monkeypatch.setattr(pretrain, "train", lambda *a, **k: pytest.fail("trained again"))
    pretrain.publish(ladder, model)


def test_a_card_without_a_sweep_leaves_the_table_out(ladder):
    stored = {"settings": {"betas": [0.9, 0.95], "weight_decay": 0.1, "clip_norm": 1.0, "peak_lr": 1e-3,
                           "warmup_steps": 1, "batch": 4, "length": 16, "precision": "bf16"},
              "stream": {"guard": 160, "tokens": 10, "epochs": 1.5, "sha256": "abc"}, "versions":
              {"torch": "2", "transformers": "5"}, "perplexity": {"heldout": {"scored": 9, "value": 3.25}},
              "curve": [{"tokens": 0, "ppl": 300.0}], "parameters": 12, "sample": "a\nb", "seconds": 60.0,
              "hardware": {"threads": 1}, "commit": "c0ffee"}
    text = card(ladder.models[0], ladder, stored, None)
    assert "| heldout | 9 | 3.250 |" in text and "| 0 | - | 300.00 |" in text and "sweep" not in text
    assert "*a b*" in text

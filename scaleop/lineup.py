"""The models that section 3 shows: the whole ladder for a pair of its rungs, donor and reference for any other pair."""

from typing import Any

import numpy as np
import torch

from scaleop import hub
from scaleop.experiment import Experiment
from scaleop.paths import ROOT
from scaleop.race import Race
from scaleop.store import read_json
from scaleop.weights import assemble, empty_model, extract, load, load_config
from scaleop.wiring import shape_of


def lineup(experiment: Experiment) -> dict[str, str]:
    """{short name: model as an experiment names it}."""
    pair = experiment.pair
    if pair.donor.startswith("models/"):
        return {folder.name: f"models/{folder.name}" for folder in sorted((ROOT / "models").iterdir())
                if (folder / "training.json").exists()}
    named = [name for name in dict.fromkeys((pair.donor, pair.reference)) if name]
    short = {name: hub.short(name) for name in named}
    if len(set(short.values())) < len(named):  # two folders of one name (runs' `model`s), two commits of one repository
        short = {name: name for name in named}
    return {short[name]: name for name in named}


def cards(models: dict[str, str]) -> dict[str, Any]:
    """{short name: what its `training.json` says} of those that were trained here."""
    files = {short: ROOT / name / "training.json" for short, name in models.items()}
    return {short: read_json(file) for short, file in files.items() if file.exists()}


def row(race: Race, name: str, card: dict[str, Any] | None) -> dict[str, Any]:
    """A model as a row of a table: shape, held-out perplexity measured here, and what its card says, if it has one."""
    config, score = load_config(name), race.score(name)
    shape, measured = shape_of(config), {"held-out, measured here": score["ppl"]}
    axes = {"blocks": shape.layers, "width": shape.width, "heads": shape.heads, "MLP": shape.mlp}
    if card is None:
        with torch.device("meta"):
            parameters = sum(parameter.numel() for parameter in empty_model(config).parameters())
        return {**axes, "parameters": parameters, **measured}
    return {**axes, "parameters": card["parameters"], "tokens": card["stream"]["tokens"],
            "peak rate": card["settings"]["peak_lr"], **measured,
            "held-out, card": card["perplexity"]["heldout"]["value"],
            "King James, card": card["perplexity"]["foreign"]["value"], "minutes": card["seconds"] / 60}


def rebuilt_difference(name: str, ids: np.ndarray, dtype: torch.dtype) -> float:
    """Largest difference of logits on `ids` (n, length) between a model and itself, taken apart and put together."""
    tokens, model = torch.as_tensor(ids), load(name, dtype)
    with torch.no_grad():
        before, weights, config = model(input_ids=tokens).logits, extract(model), model.config
        del model  # of a large one, two copies are enough
        return (before - assemble(weights, config)(input_ids=tokens).logits).abs().max().item()

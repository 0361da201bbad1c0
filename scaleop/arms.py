"""Arms as data: each starting point of the race is one line that names its maps and levers.

An arm is built from the donor and a target *config*; no function here receives a trained target.
"""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import nn

from scaleop.activations import StreamStatistics, second_moments, stream_statistics
from scaleop.blending import mix
from scaleop.experiment import ExperimentError, nearest
from scaleop.maps import Maps, dense_bases, scored_selection, uniform_selection
from scaleop.shrink import compensate_all, is_selection, kept_inputs, rescale, shrink
from scaleop.store import cached_tensors, digest
from scaleop.train import seed_everything
from scaleop.weights import Weights, assemble, empty_model, extract, pythia_init
from scaleop.wiring import MLP, QK, READ_IN, READ_OUT, RESIDUAL, VO, Shape, Wiring, shape_of, wiring_of


@dataclass(frozen=True)
class Arm:
    """One starting point. `maps` None means fresh weights by the rule `init`; otherwise weights come from the donor.

    `maps` names one way to choose the maps of all axes, or one for each axis (section 5: which blending hurts?).
    """

    name: str
    maps: Literal["scored", "uniform", "dense"] | Mapping[str, str] | None = None
    init: Literal["transformers", "pythia"] | None = None
    neutral_norms: bool = False
    compensate: bool = False  # the function lever, on the read-outs
    rescale: tuple[str, ...] = ()  # the dynamics lever: which paths
    in_paper: bool = True

    def facts(self) -> dict[str, Any]:
        """What is not at its default: a run's key holds this, so a lever added later leaves older runs their keys."""
        return {field.name: value for field in fields(self)
                if (value := getattr(self, field.name)) != field.default and field.name != "in_paper"}


ARMS = {arm.name: arm for arm in (
    Arm("random", init="transformers"),
    Arm("random_pythia", init="pythia", in_paper=False),
    Arm("projection", maps="dense", neutral_norms=True),
    Arm("stride", maps="uniform", in_paper=False),
    Arm("subclone", maps="scored"),
    Arm("subclone_iso", maps="scored", rescale=(READ_OUT,)),
    Arm("hybrid", maps="scored", compensate=True),
    Arm("subclone_rs", maps="scored", rescale=(READ_IN, READ_OUT)),
    Arm("hybrid_rs", maps="scored", compensate=True, rescale=(READ_IN,)),
)}

BLENDED = (RESIDUAL, QK, VO, MLP)  # the axes that dense projection blends (the vocabulary is never blended)


def _swap(name: str, axis: str, base: str, other: str) -> Arm:
    """One axis from `other`, the rest from `base`. Norms are neutral wherever the residual stream is blended."""
    maps = {each: other if each == axis else base for each in BLENDED}
    return Arm(f"{name}_{axis}", maps=maps, neutral_norms=maps[RESIDUAL] == "dense", in_paper=False)


BLENDS = {arm.name: arm for arm in (
    Arm("subclone_neutral", maps="scored", neutral_norms=True, in_paper=False),
    *(_swap("subclone_blend", axis, "scored", "dense") for axis in BLENDED),
    *(_swap("projection_keep", axis, "dense", "scored") for axis in BLENDED),
)}
"""Section 5's own arms: the full selection with one axis blended, the full projection with one axis selected."""


def arm_named(name: str) -> Arm:
    """The arm of that name; ExperimentError suggests the nearest."""
    known = ARMS | BLENDS
    if name not in known:
        raise ExperimentError(f"arms: unknown arm {name!r}; {nearest(name, list(known))}")
    return known[name]


class Donor:
    """A pretrained model with what arms read off it, each gathered once and cached in `folder`.

    `frozen` is the (sequences, length) probe set, of which the first `moment_sequences` give second moments. `key`
    names the donor's weights and the probe set; a cache under another key is never read.
    """

    def __init__(self, model: nn.Module, frozen: np.ndarray, moment_sequences: int, key: str, folder: Path) -> None:
        self.model, self.frozen, self.moment_sequences = model, frozen, moment_sequences
        self.key, self.folder = key, folder
        self._maps: dict[tuple[str, Shape], Maps] = {}

    @property
    def config(self) -> Any:
        """The donor's transformers config."""
        return self.model.config

    @property
    def wiring(self) -> Wiring:
        """The donor's wiring table, which the target shares."""
        return wiring_of(self.config)

    @property
    def shape(self) -> Shape:
        """The donor's axis sizes."""
        return shape_of(self.config)

    @cached_property
    def weights(self) -> Weights:
        """The donor's weights by role (one copy of the model)."""
        return extract(self.model)

    @cached_property
    def statistics(self) -> StreamStatistics:
        """Residual-stream statistics over the whole frozen set."""
        def compute() -> dict[str, torch.Tensor]:
            return asdict(stream_statistics(self.model, self.frozen))
        return StreamStatistics(**self._cached("stream", {}, compute))

    def moments(self, maps: Maps) -> dict[tuple[int, str], torch.Tensor]:
        """Second moments before the read-outs of the kept blocks, columns of the kept inputs only."""
        kept = kept_inputs(self.wiring, maps)

        def compute() -> dict[str, torch.Tensor]:
            sums = second_moments(self.model, self.frozen[: self.moment_sequences], kept)
            return {f"{block}.{role}": tensor for (block, role), tensor in sums.items()}
        facts = {"sequences": self.moment_sequences,
                 "kept": {f"{block}.{role}": index.tolist() for (block, role), index in kept.items()}}
        tensors = self._cached("moments", facts, compute)
        return {(block, role): tensors[f"{block}.{role}"] for block, role in kept}

    def maps(self, kind: str | Mapping[str, str], target: Shape) -> Maps:
        """The maps an arm names; a mapping {axis: kind} takes each axis from the maps of its kind."""
        if isinstance(kind, Mapping):
            (_, base), *rest = kind.items()
            maps = self.maps(base, target)
            for axis, other in rest:
                maps = mix(maps, self.maps(other, target), [axis])
            return maps
        if kind == "uniform":
            return uniform_selection(self.shape, target)
        if (kind, target) not in self._maps:  # mixed arms ask again and again, and bases take seconds
            choose = {"scored": scored_selection, "dense": dense_bases}[kind]
            self._maps[kind, target] = choose(self.weights, self.shape, target, self.statistics)
        return self._maps[kind, target]

    def _cached(self, name: str, facts: dict[str, Any],
                compute: Callable[[], dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        path = self.folder / f"{name}-{digest([self.key, list(self.frozen.shape), facts])}.safetensors"
        return cached_tensors(path, compute)


def build(arm: Arm, donor: Donor, target: Any, seed: int) -> tuple[nn.Module, dict[str, Any]]:
    """The arm's model in fp32, and facts about how it was made (kept coordinates' digest, diagnostics of solves).

    `target` is a config. `seed` only matters to fresh weights. Costs seconds once the donor's statistics are cached.
    """
    if arm.maps is None:
        if arm.init == "pythia":
            return assemble(pythia_init(target, torch.Generator().manual_seed(seed)), target), {}
        seed_everything(seed)
        return empty_model(target).eval(), {}
    shape = shape_of(target)
    maps = donor.maps(arm.maps, shape)
    weights = shrink(donor.weights, donor.wiring, maps, arm.neutral_norms)
    facts: dict[str, Any] = {"blocks": maps.blocks}
    if is_selection(maps):
        facts["kept"] = digest({str(key): map_.index.tolist() for key, map_ in maps.axes.items()})
    if arm.compensate:
        weights, solves = compensate_all(weights, donor.weights, donor.wiring, maps, donor.moments(maps))
        facts["solves"] = {name: asdict(solve) for name, solve in solves.items()}
    weights = rescale(weights, donor.wiring, donor.shape, shape, arm.rescale)
    return assemble(weights, target), facts

"""Arms as data: each starting point of the race is one line that names its maps and levers.

An arm is built from the donor and a target *config*; no function here receives a trained target.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import nn

from scaleop.activations import StreamStatistics, second_moments, stream_statistics
from scaleop.experiment import ExperimentError, nearest
from scaleop.maps import Maps, dense_bases, scored_selection, uniform_selection
from scaleop.shrink import compensate_all, is_selection, kept_inputs, rescale, shrink
from scaleop.store import cached_tensors, digest
from scaleop.train import seed_everything
from scaleop.weights import Weights, assemble, empty_model, extract, pythia_init
from scaleop.wiring import READ_IN, READ_OUT, Shape, Wiring, shape_of, wiring_of


@dataclass(frozen=True)
class Arm:
    """One starting point. `maps` None means fresh weights by the rule `init`; otherwise weights come from the donor."""

    name: str
    maps: Literal["scored", "uniform", "dense"] | None = None
    init: Literal["transformers", "pythia"] | None = None
    neutral_norms: bool = False
    compensate: bool = False  # the function lever, on the read-outs
    rescale: tuple[str, ...] = ()  # the dynamics lever: which paths
    in_paper: bool = True


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


def arm_named(name: str) -> Arm:
    """The arm of that name; ExperimentError suggests the nearest."""
    if name not in ARMS:
        raise ExperimentError(f"arms: unknown arm {name!r}; {nearest(name, list(ARMS))}")
    return ARMS[name]


class Donor:
    """A pretrained model with what arms read off it, each gathered once and cached in `folder`.

    `frozen` is the (sequences, length) probe set, of which the first `moment_sequences` give second moments. `key`
    names the donor's weights and the probe set; a cache under another key is never read.
    """

    def __init__(self, model: nn.Module, frozen: np.ndarray, moment_sequences: int, key: str, folder: Path) -> None:
        self.model, self.frozen, self.moment_sequences = model, frozen, moment_sequences
        self.key, self.folder = key, folder

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

    def maps(self, kind: str, target: Shape) -> Maps:
        """The maps an arm names."""
        if kind == "uniform":
            return uniform_selection(self.shape, target)
        choose = {"scored": scored_selection, "dense": dense_bases}[kind]
        return choose(self.weights, self.shape, target, self.statistics)

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

"""The donor of a conversion: a pretrained model in memory, with what arms read off it, gathered once and cached."""

from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from scaleop.activations import StreamStatistics, input_statistics, second_moments, stream_statistics
from scaleop.blending import mix
from scaleop.blocks import InMemory
from scaleop.cascade_streams import stream_moments
from scaleop.devices import best_device
from scaleop.maps import Maps, dense_bases, scored_selection, uniform_selection
from scaleop.ridge import HeldOut
from scaleop.shrink import Inputs, kept_inputs
from scaleop.store import cached_tensors, digest
from scaleop.weights import Weights, extract
from scaleop.wiring import Shape, Wiring, shape_of, wiring_of

if TYPE_CHECKING:
    from scaleop.arms import Arm

HELD_OUT = 0.2  # share of the moments' sequences that the ridge rule `holdout` errs on


def held_out_from(sequences: int) -> int:
    """The first of the moments' sequences that the ridge rule `holdout` errs on; it fits on those before."""
    return round(sequences * (1 - HELD_OUT))


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

    @property
    def moment_probes(self) -> np.ndarray:
        """The frozen sequences that are set aside for moments."""
        return self.frozen[: self.moment_sequences]

    @cached_property
    def input_statistics(self) -> dict[tuple[int, str], torch.Tensor]:
        """Mean and mean square of what every read-out reads, (2, n), over the sequences of the second moments."""
        sequences = self.moment_probes
        return self._by_place("inputs", {"sequences": len(sequences)}, lambda: input_statistics(self.model, sequences))

    @cached_property
    def stream_moments(self) -> dict[str, torch.Tensor]:
        """What a cascade's bases of the residual stream are made of (`cascade_streams.stream_moments`)."""
        source, sequences = InMemory(self.weights, self.config), self.moment_probes
        return self._cached("stream_moments", {"sequences": len(sequences)}, lambda: stream_moments(
            source, sequences, self.folder / "stream", device=str(best_device())))

    def moments(self, maps: Maps, part: slice = slice(None)) -> dict[tuple[int, str], torch.Tensor]:
        """Second moments before the read-outs of the kept blocks, columns of the kept inputs only; from all sequences
        set aside for moments, or a `part` of them."""
        kept, sequences = kept_inputs(self.wiring, maps), self.moment_probes[part]
        facts = {"sequences": len(sequences), **({"from": part.start} if part.start else {}),
                 "kept": {f"{block}.{role}": index.tolist() for (block, role), index in kept.items()}}
        return self._by_place("moments", facts, lambda: second_moments(self.model, sequences, kept))

    def inputs(self, arm: "Arm", maps: Maps) -> Inputs:
        """What compensation needs to know of the donor for this arm, and no more."""
        means, held = None, None
        if arm.bias:
            means = {place: both[0] for place, both in self.input_statistics.items()}
        if arm.ridge == "holdout":
            cut = held_out_from(len(self.moment_probes))
            fit, error = self.moments(maps, slice(cut)), self.moments(maps, slice(cut, None))
            held = {place: HeldOut(fit[place], error[place]) for place in fit}
        return Inputs(self.moments(maps) if arm.compensate else {}, means, self.moment_probes.size, held)

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
            choose = {"scored": scored_selection, "dense": dense_bases,
                      "activation": lambda *given: scored_selection(*given, self.input_statistics)}[kind]
            self._maps[kind, target] = choose(self.weights, self.shape, target, self.statistics)
        return self._maps[kind, target]

    def _by_place(self, name: str, facts: dict[str, Any],
                  compute: Callable[[], dict[tuple[int, str], torch.Tensor]]) -> dict[tuple[int, str], torch.Tensor]:
        """`_cached` for tensors by (block, role)."""
        def by_name() -> dict[str, torch.Tensor]:
            return {f"{block}.{role}": tensor for (block, role), tensor in compute().items()}
        tensors = self._cached(name, facts, by_name)
        return {(int(place.split(".")[0]), place.split(".")[1]): tensor for place, tensor in tensors.items()}

    def _cached(self, name: str, facts: dict[str, Any],
                compute: Callable[[], dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        path = self.folder / f"{name}-{digest([self.key, list(self.frozen.shape), facts])}.safetensors"
        return cached_tensors(path, compute)

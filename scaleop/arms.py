"""Arms as data: each starting point of the race is one line that names its maps and levers.

An arm is built from the donor and a target *config*; no function here receives a trained target.
"""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import nn

from scaleop.activations import StreamStatistics, input_statistics, second_moments, stream_statistics
from scaleop.blending import mix
from scaleop.distillation import Distillation
from scaleop.experiment import ExperimentError, nearest
from scaleop.maps import Maps, dense_bases, scored_selection, uniform_selection
from scaleop.ridge import RULES, HeldOut
from scaleop.shrink import Inputs, Solve, compensate_all, is_selection, kept_inputs, rescale, shrink
from scaleop.store import cached_tensors, digest
from scaleop.suspects import compensate_own
from scaleop.train import seed_everything
from scaleop.weights import Weights, assemble, empty_model, extract, pythia_init
from scaleop.wiring import MLP, QK, READ_IN, READ_OUT, RESIDUAL, VO, Shape, Wiring, shape_of, wiring_of

HELD_OUT = 0.2  # share of the moments' sequences that the ridge rule `holdout` errs on


@dataclass(frozen=True)
class Arm:
    """One starting point. `maps` None means fresh weights by the rule `init`; otherwise weights come from the donor.

    `maps` names one way to choose the maps of all axes, or one for each axis (section 5: which blending hurts?).
    """

    name: str
    maps: Literal["scored", "activation", "uniform", "dense"] | Mapping[str, str] | None = None
    init: Literal["transformers", "pythia"] | None = None
    neutral_norms: bool = False
    compensate: bool = False  # the function lever, on the read-outs
    ridge: str = "mean_diagonal"  # of its solves: one of ridge.RULES
    bias: bool = False  # the mean of what was dropped goes into the read-outs' biases
    own_inputs: bool = False  # compensate on what the small model itself feeds its read-outs, not the donor
    rescale: tuple[str, ...] = ()  # the dynamics lever: which paths
    distill: Distillation | None = None  # the donor as teacher during training
    in_paper: bool = True

    def __post_init__(self) -> None:
        if self.own_inputs and (self.bias or self.ridge in ("holdout", "clamp")):
            raise ValueError(f"arm {self.name!r}: a fit to own inputs has no bias and no ridge {self.ridge!r}")
        if self.own_inputs and not self.compensate:
            raise ValueError(f"arm {self.name!r}: own_inputs says how to compensate; set compensate=True too")
        if self.bias and self.ridge == "holdout":
            raise ValueError(f"arm {self.name!r}: bias fits centred moments, but ridge 'holdout' would choose lambda "
                             "on uncentred ones; take another of ridge.RULES")

    @property
    def needs_inputs(self) -> bool:
        """Whether the arm compensates on what the donor's read-outs read."""
        return (self.compensate or self.bias) and not self.own_inputs

    @property
    def reads_text(self) -> bool:
        """Whether anything of the arm hangs on the donor's activations."""
        kinds = self.maps.values() if isinstance(self.maps, Mapping) else [self.maps]
        return self.compensate or self.bias or bool({"scored", "activation", "dense"}.intersection(kinds))

    def facts(self) -> dict[str, Any]:
        """What is not at its default: a run's key holds this, so a lever added later leaves older runs their keys."""
        defaults = asdict(Arm(""))
        return {name: value for name, value in asdict(self).items() if value != defaults[name] and name != "in_paper"}


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
"""The rungs of Table 2, and two baselines of ours."""


def _variant(base: str, suffix: str, **changes: Any) -> Arm:
    return replace(ARMS[base], name=f"{base}_{suffix}", in_paper=False, **changes)


VARIANTS = {arm.name: arm for arm in (
    *(_variant(base, "act", maps="activation") for base in ("subclone_rs", "hybrid_rs")),
    *(_variant(base, "distill", distill=Distillation()) for base in ("random", "subclone_rs", "hybrid_rs")),
    *(_variant(base, "bias", bias=True) for base in ("subclone", "hybrid", "hybrid_rs")),
    *(_variant(base, rule, ridge=rule) for base in ("hybrid", "hybrid_rs") for rule in RULES[1:]),
    *(_variant(base, "own", own_inputs=True) for base in ("hybrid", "hybrid_rs")),
)}
"""One change each: activation scores and distillation (the paper's later revision), bias compensation, the ridge rules,
and compensation on the small model's own inputs."""

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
    known = ARMS | VARIANTS | BLENDS
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

    @property
    def moment_probes(self) -> np.ndarray:
        """The frozen sequences that are set aside for moments."""
        return self.frozen[: self.moment_sequences]

    @cached_property
    def input_statistics(self) -> dict[tuple[int, str], torch.Tensor]:
        """Mean and mean square of what every read-out reads, (2, n), over the sequences of the second moments."""
        sequences = self.moment_probes
        return self._by_place("inputs", {"sequences": len(sequences)}, lambda: input_statistics(self.model, sequences))

    def moments(self, maps: Maps, part: slice = slice(None)) -> dict[tuple[int, str], torch.Tensor]:
        """Second moments before the read-outs of the kept blocks, columns of the kept inputs only; from all sequences
        set aside for moments, or a `part` of them."""
        kept, sequences = kept_inputs(self.wiring, maps), self.moment_probes[part]
        facts = {"sequences": len(sequences), **({"from": part.start} if part.start else {}),
                 "kept": {f"{block}.{role}": index.tolist() for (block, role), index in kept.items()}}
        return self._by_place("moments", facts, lambda: second_moments(self.model, sequences, kept))

    def inputs(self, arm: Arm, maps: Maps) -> Inputs:
        """What compensation needs to know of the donor for this arm, and no more."""
        means, held = None, None
        if arm.bias:
            means = {place: both[0] for place, both in self.input_statistics.items()}
        if arm.ridge == "holdout":
            cut = round(len(self.moment_probes) * (1 - HELD_OUT))
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


def converted(arm: Arm, weights: Weights, wiring: Wiring, maps: Maps, donor: Shape, target: Shape,
              inputs: Inputs | None, spectrum: bool = True) -> tuple[Weights, dict[str, Solve]]:
    """The target's weights by an arm's levers, and diagnostics of its solves; `weights` may be one block's alone, and
    `maps` then those of a target with that block only. `inputs` None: nothing is compensated here. `spectrum`: as for
    `shrink.compensate`."""
    small, solves = shrink(weights, wiring, maps, arm.neutral_norms), {}
    if inputs is not None:
        small, solves = compensate_all(small, weights, wiring, maps, inputs, arm.compensate, arm.bias, arm.ridge,
                                       spectrum)
    return rescale(small, wiring, donor, target, arm.rescale), solves


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
    facts: dict[str, Any] = {"blocks": maps.blocks}
    if is_selection(maps):
        facts["kept"] = digest({str(key): map_.index.tolist() for key, map_ in maps.axes.items()})
    inputs = donor.inputs(arm, maps) if arm.needs_inputs else None
    weights, solves = converted(arm, donor.weights, donor.wiring, maps, donor.shape, shape, inputs)
    if arm.own_inputs:  # after the rescale: it changes what the small model feeds its read-outs
        weights, solves = compensate_own(weights, donor.model, maps, target, donor.moment_probes, ridge=arm.ridge)
    if solves:
        facts["solves"] = {name: asdict(solve) for name, solve in solves.items()}
    return assemble(weights, target), facts

"""Arms as data: each starting point of the race is one line that names its maps and levers.

An arm is built from the donor and a target *config*; no function here receives a trained target.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import torch
from torch import nn

from scaleop.blocks import InMemory
from scaleop.cascade import cascade
from scaleop.cascade_settings import CASCADE_RULES, STREAMS, Cascade
from scaleop.cascade_streams import stream_basis
from scaleop.devices import best_device
from scaleop.distillation import Distillation
from scaleop.donor import Donor
from scaleop.experiment import ExperimentError, nearest
from scaleop.maps import Maps, Selection
from scaleop.regression import Regression
from scaleop.ridge import RULES
from scaleop.shrink import Inputs, Solve, compensate_all, is_selection, rescale, shrink
from scaleop.store import digest
from scaleop.suspects import compensate_own
from scaleop.train import seed_everything
from scaleop.weights import Weights, assemble, empty_model, pythia_init
from scaleop.wiring import MLP, QK, READ_IN, READ_OUT, RESIDUAL, VO, Shape, Wiring, shape_of


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
    cascade: Cascade | None = None  # every matrix fitted block by block on what the small model itself feeds it
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
        levers = (self.compensate, self.bias, self.own_inputs, self.rescale, self.neutral_norms)
        if self.cascade is not None and (any(levers) or self.ridge != "mean_diagonal"):
            raise ValueError(f"arm {self.name!r}: a cascade fits what compensate, bias, own_inputs, rescale and "
                             "neutral_norms would set, and has a ridge of its own; leave them out")
        if self.cascade is not None and self.maps is None:
            raise ValueError(f"arm {self.name!r}: a cascade fits what maps leave of a donor: name the maps")

    @property
    def needs_inputs(self) -> bool:
        """Whether the arm compensates on what the donor's read-outs read."""
        return (self.compensate or self.bias) and not self.own_inputs

    @property
    def reads_text(self) -> bool:
        """Whether anything of the arm hangs on the donor's activations."""
        kinds = self.maps.values() if isinstance(self.maps, Mapping) else [self.maps]
        levers = self.compensate or self.bias or self.cascade is not None
        return levers or bool({"scored", "activation", "dense"}.intersection(kinds))

    def facts(self) -> dict[str, Any]:
        """What is not at its default: a run's key holds this, so a lever added later leaves older runs their keys."""
        defaults = asdict(Arm(""))
        facts = {name: value for name, value in asdict(self).items() if value != defaults[name] and name != "in_paper"}
        return facts if self.cascade is None else {**facts, "cascade": self.cascade.facts()}


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


def _rung(name: str, **switches: Any) -> Arm:
    return Arm(name, maps="scored", cascade=Cascade(**switches), in_paper=False)


_LADDER: tuple[tuple[str, dict[str, Any]], ...] = (  # from subclone on; each rung adds one switch to the one before
    ("cascade_read_outs", {"stream": "selected", "read_ins": False, "correct": False, "head": False}),
    ("cascade_correct", {"stream": "selected", "read_ins": False, "head": False}),
    ("cascade_read_ins", {"stream": "selected", "head": False}),
    ("cascade_sel", {"stream": "selected"}),
    ("cascade", {}),
)
CASCADES = {arm.name: arm for arm in (
    *(_rung(name, **switches) for name, switches in _LADDER),
    _rung("cascade_no_read_ins", read_ins=False),
    _rung("cascade_no_read_outs", read_outs=False, correct=False),
    _rung("cascade_no_correct", correct=False),
    _rung("cascade_no_head", head=False),
    *(_rung(f"cascade_{stream}", stream=stream) for stream in STREAMS[2:]),
    *(_rung(f"cascade_{rule}", ridge=rule) for rule in CASCADE_RULES if rule != Cascade().ridge),
    *(Arm(f"cascade_blend_{axis}", maps={each: "dense" if each == axis else "scored" for each in BLENDED},
          cascade=Cascade(), in_paper=False) for axis in BLENDED if axis != RESIDUAL),
)}
"""Cascaded compensation (beyond the paper): the ladder from subclone to cascade; cascade without one ingredient; other
residual maps; other ridge rules; and with one of the inner axes blended as well."""


def arm_named(name: str) -> Arm:
    """The arm of that name; ExperimentError suggests the nearest."""
    known = ARMS | VARIANTS | BLENDS | CASCADES
    if name not in known:
        raise ExperimentError(f"arms: unknown arm {name!r}; {nearest(name, list(known))}")
    return known[name]


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


def _with_stream(maps: Maps, settings: Cascade, donor: Donor, width: int) -> Maps:
    """The maps with a cascade's own for the residual stream."""
    if settings.stream == "selected":
        return maps
    moments = None if settings.stream == "rotation" else donor.stream_moments
    basis = stream_basis(settings.stream, moments, donor.shape.width, width)
    return Maps(maps.blocks, {**maps.axes, (None, RESIDUAL): basis})


def _cascaded(settings: Cascade, donor: Donor, maps: Maps, target: Any) -> tuple[Weights, dict[str, Regression]]:
    """The cascade on the tokens that compensation gets, so that arms are comparable."""
    return cascade(settings, InMemory(donor.weights, donor.config), maps, target, donor.moment_probes, donor.folder,
                   device=str(best_device()))


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
    if arm.cascade is not None:
        maps = _with_stream(maps, arm.cascade, donor, shape.width)
    facts: dict[str, Any] = {"blocks": maps.blocks}
    if is_selection(maps) or arm.cascade is not None:  # of a cascade, whose stream may be blended, all other axes
        facts["kept"] = digest({str(key): map_.index.tolist() for key, map_ in maps.axes.items()
                                if isinstance(map_, Selection)})
    if arm.cascade is not None:
        weights, solves = _cascaded(arm.cascade, donor, maps, target)
    else:
        inputs = donor.inputs(arm, maps) if arm.needs_inputs else None
        weights, solves = converted(arm, donor.weights, donor.wiring, maps, donor.shape, shape, inputs)
    if arm.own_inputs:  # after the rescale: it changes what the small model feeds its read-outs
        weights, solves = compensate_own(weights, donor.model, maps, target, donor.moment_probes, ridge=arm.ridge)
    if solves:
        facts["solves"] = {name: asdict(solve) for name, solve in solves.items()}
    return assemble(weights, target), facts

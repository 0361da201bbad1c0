"""A conversion block by block: the maps of one block, its levers, its tensors into a shard, then the next block.

`scaleop.arms.build` does the same with the whole donor in memory. Both use the same pieces, and give the same indices.
"""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import torch

from scaleop.arms import Arm, converted
from scaleop.donor import held_out_from
from scaleop.experiment import ExperimentError
from scaleop.maps import (
    INNER_ROLES,
    Map,
    Maps,
    Selection,
    block_bases,
    block_map,
    block_selection,
    residual_basis,
    residual_selection,
    uniform_selection,
)
from scaleop.measured import Columns, Part, Statistics
from scaleop.progress import progress
from scaleop.ridge import HeldOut
from scaleop.shards import ShardWriter
from scaleop.shrink import Inputs, kept_inputs
from scaleop.store import digest
from scaleop.weights import Table, Weights, to_state
from scaleop.wiring import MLP, QK, RESIDUAL, VO, VOCAB, Shape, check_pair, shape_of, together

INNER = (QK, VO, MLP)
Axes = dict[tuple[int | None, str], Map]


def check_arm(arm: Arm) -> None:
    """ExperimentError for an arm that cannot be converted block by block, with the reason."""
    if arm.maps is None:
        raise ExperimentError(f"arm = {arm.name!r} takes nothing from a donor, so there is nothing to convert: "
                              "AutoModelForCausalLM.from_config gives such a model")
    if arm.cascade is not None:
        raise ExperimentError(f"arm = {arm.name!r} fits every block on what the blocks before it feed it, which a "
                              "conversion block by block does not do yet: take scaleop.arms.build")
    if arm.own_inputs:
        raise ExperimentError(f"arm = {arm.name!r} fits each block on what the finished part of the small model feeds "
                              f"it, so both models would have to be in memory: take {arm.name.removesuffix('_own')!r}, "
                              "or scaleop.arms.build")


@dataclass(frozen=True)
class Blockwise:
    """An arm's conversion of the checkpoint that `statistics` are of, to the shape of the config `target`.

    `spectrum` False leaves out the diagnostics of solves that take their eigenvalues (`shrink.compensate`).
    Raises WiringError for a pair that cannot be and ExperimentError for an arm that cannot.
    """

    arm: Arm
    statistics: Statistics
    target: Any
    spectrum: bool = True

    def __post_init__(self) -> None:
        check_arm(self.arm)
        check_pair(self.donor, self.shape)

    @cached_property
    def donor(self) -> Shape:
        """The donor's axis sizes."""
        return shape_of(self.statistics.checkpoint.config)

    @cached_property
    def shape(self) -> Shape:
        """The target's axis sizes."""
        return shape_of(self.target)

    @cached_property
    def blocks(self) -> tuple[int, ...]:
        """The donor's block for each of the target's."""
        return block_map(self.donor.layers, self.shape.layers)

    def _kind(self, axis: str) -> str:
        return self.arm.maps[axis] if isinstance(self.arm.maps, Mapping) else self.arm.maps

    @cached_property
    def _uniform(self) -> Maps:
        return uniform_selection(self.donor, self.shape)

    @cached_property
    def shared(self) -> Axes:
        """Maps of the axes that all blocks share; a pass through the donor where they hang on activations."""
        kind = self._kind(RESIDUAL)
        if kind == "uniform":
            return {key: map_ for key, map_ in self._uniform.axes.items() if key[1] in (RESIDUAL, VOCAB)}
        found = self.statistics.stream(covariance=kind == "dense")
        return residual_basis(found, self.shape) if kind == "dense" else residual_selection(found, self.shape)

    def _choose(self, kind: str, weights: Weights, block: int) -> dict[str, Map]:
        if kind == "uniform":
            return {axis: map_ for (_, axis), map_ in self._uniform.axes.items() if axis not in (RESIDUAL, VOCAB)}
        if kind == "dense":
            return block_bases(weights, block, self.donor, self.shape)
        return block_selection(weights, block, self.donor, self.shape, self._inputs if kind == "activation" else None)

    @cached_property
    def _inputs(self) -> dict[tuple[int, str], torch.Tensor]:
        return self.statistics.inputs()

    def inner(self, block: int) -> dict[str, Map]:
        """Maps of a donor block's own axes, from its weights alone (activation scores: and its inputs)."""
        kinds = {axis: self._kind(axis) for axis in INNER}
        roles = () if set(kinds.values()) == {"uniform"} else INNER_ROLES
        weights = self.statistics.checkpoint.weights(block, roles)
        chosen = {kind: self._choose(kind, weights, block) for kind in set(kinds.values())}
        return {each: chosen[kind][each] for axis, kind in kinds.items() for each in together(axis)
                if each in chosen[kind]}

    @cached_property
    def selections(self) -> dict[int, dict[str, Map]]:
        """The inner maps of every kept block, of an arm that selects; they are small."""
        return {block: self.inner(block) for block in progress(self.blocks, desc="selection", unit=" blocks")}

    @property
    def selects(self) -> bool:
        """Whether the arm selects on all axes (a blended axis has large maps, made block by block)."""
        return all(self._kind(axis) != "dense" for axis in (RESIDUAL, *INNER))

    def maps(self, block: int) -> Maps:
        """The maps of a target that has this donor block and no other."""
        inner = self.selections[block] if self.selects else self.inner(block)
        return Maps((block,), {**self.shared, **{(0, axis): map_ for axis, map_ in inner.items()}})

    @cached_property
    def _parts(self) -> dict[str, Part]:
        """The stretches of the probes whose moments the arm asks for."""
        whole = len(self.statistics.probes)
        parts = {"whole": (0, whole)} if self.arm.compensate else {}
        if self.arm.ridge == "holdout":
            cut = held_out_from(whole)
            parts |= {"fit": (0, cut), "error": (cut, whole)}
        return parts

    def prepare(self) -> None:
        """Gather all that the arm needs of the donor's activations, as far as the store lacks it."""
        _ = self.shared
        if self.arm.needs_inputs:
            columns = {block: self._columns(self.maps(block)) for block in self.blocks}
            self.statistics.gather(columns, list(self._parts.values()), means=self.arm.bias)

    def _columns(self, maps: Maps) -> Columns:
        return {role: index for (_, role), index in kept_inputs(self.statistics.checkpoint.wiring, maps).items()}

    def _needed(self, block: int, maps: Maps) -> Inputs | None:
        if not self.arm.needs_inputs:
            return None
        found = {name: {(block, role): self.statistics.columns(block, role, index, part)
                        for role, index in self._columns(maps).items()} for name, part in self._parts.items()}
        held = {place: HeldOut(found["fit"][place], found["error"][place]) for place in found.get("fit", {})}
        means = {place: both[0] for place, both in self._inputs.items()} if self.arm.bias else None
        return Inputs(found.get("whole", {}), means, self.statistics.probes.size, held or None)

    def _outside(self) -> Iterator[tuple[Weights, Table]]:
        """The target's weights outside the blocks, one at a time (the embeddings are large)."""
        checkpoint = self.statistics.checkpoint
        for role in (role for role in checkpoint.wiring.roles if not role.per_block):
            small, _ = converted(self.arm, checkpoint.weights(None, [role.name]), checkpoint.wiring,
                                 Maps((), self.shared), self.donor, self.shape, None)
            yield small, [((None, role.name), role)]

    def write(self, writer: ShardWriter) -> dict[str, Any]:
        """Convert block by block into `writer`; returns the facts that `arms.build` gives. `prepare` comes first."""
        checkpoint, solves = self.statistics.checkpoint, {}
        for small, table in self._outside():
            writer.add(to_state(small, self.target, table))
        for b, block in enumerate(progress(self.blocks, desc="conversion", unit=" blocks")):
            maps = self.maps(block)
            small, found = converted(self.arm, checkpoint.weights(block), checkpoint.wiring, maps, self.donor,
                                     self.shape, self._needed(block, maps), self.spectrum)
            table = [((b, role.name), role) for role in checkpoint.wiring.roles if role.per_block]
            writer.add(to_state({(b, role): tensor for (_, role), tensor in small.items()}, self.target, table))
            solves |= {f"{b}.{name.split('.')[1]}": asdict(solve) for name, solve in found.items()}
        return {"blocks": self.blocks, **({"kept": digest(self.kept())} if self.selects else {}),
                **({"solves": solves} if solves else {})}

    def kept(self) -> dict[str, list[int]]:
        """Kept coordinates by "(target block, axis)", of an arm that selects; shared axes are under None."""
        axes: Axes = dict(self.shared)
        if {self._kind(axis) for axis in INNER} == {"uniform"}:
            axes |= {(None, axis): map_ for axis, map_ in self.selections[self.blocks[0]].items()}
        else:
            axes |= {(b, axis): map_ for b, block in enumerate(self.blocks)
                     for axis, map_ in self.selections[block].items()}
        return {str(key): map_.index.tolist() for key, map_ in axes.items() if isinstance(map_, Selection)}

"""Blocks of a model in memory: the questions that `shards.Checkpoint` answers from disk, and one block under watch."""

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from scaleop.activations import read_by
from scaleop.roles import Stage
from scaleop.streaming import OneBlock
from scaleop.weights import Weights, module_of, to_state
from scaleop.wiring import Wiring, wiring_of


class InMemory:
    """Role-keyed weights as a source of blocks; `weights` may be changed, or grow, between two questions."""

    def __init__(self, weights: Weights, config: Any) -> None:
        self.held, self.config = weights, config

    @property
    def wiring(self) -> Wiring:
        """The table of the model's architecture."""
        return wiring_of(self.config)

    def copy_block(self, block: int, into: Mapping[str, torch.Tensor]) -> None:
        """Fill the tensors `into` (state dict of a model with one block, by path) with those of that block."""
        table = [((block, role.name), role) for role in self.wiring.roles if role.per_block]
        state = to_state(self.weights(block), self.config, table)
        for path in {role.path for _, role in table}:
            into[path.format(b=0)].copy_(state[path.format(b=block)])

    def weights(self, block: int | None, only: Iterable[str] | None = None) -> Weights:
        """The weights of one block (None: what lies outside the blocks), `only` the named roles of it."""
        return {key: tensor for key, tensor in self.held.items()
                if key[0] == block and (only is None or key[1] in only)}

    def rows(self, role: str, index: torch.Tensor) -> torch.Tensor:
        """The rows `index` of a matrix outside the blocks (the input embedding of some tokens)."""
        return self.held[None, role][index]


@torch.no_grad()
def reads(block: OneBlock, stages: Sequence[Stage], i: int, stream: torch.Tensor
          ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The residual stream that stage `i` of a block reads, given the one before the block (sequences, length, width),
    and what each of the stage's norms makes of it."""
    stream = stream.to(block.device)
    norms = {name: _norm(block, name) for name in stages[i].norms}
    if i > 0:
        stream = read_by(list(norms.values())[:1], partial(block, stream))[0]
    return stream, {name: norm(stream) for name, norm in norms.items()}


@torch.no_grad()
def inputs(block: OneBlock, stages: Sequence[Stage], i: int, stream: torch.Tensor
           ) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The residual stream that stage `i` of a block reads, given the one before the block, and what each of the stage's
    read-outs reads."""
    stream = stream.to(block.device)
    modules = [module_of(block.model, role, 0) for role in stages[i].read_outs]
    if i == 0:
        return stream, read_by(modules, partial(block, stream))
    read, *found = read_by([_norm(block, stages[i].norms[0]), *modules], partial(block, stream))
    return read, found


def _norm(block: OneBlock, name: str) -> nn.Module:
    return module_of(block.model, block.checkpoint.wiring[f"{name}_GAIN"], 0)


@torch.no_grad()
def final_norm(block: OneBlock) -> nn.Module:
    """The norm behind the last block of the model that `block` is of, with that model's weights."""
    source = block.checkpoint
    for role in (role for role in source.wiring.roles if role.name.startswith("LN_FINAL")):
        getattr(block.final_norm, role.path.rsplit(".", 1)[1]).copy_(source.weights(None, [role.name])[None, role.name])
    return block.final_norm

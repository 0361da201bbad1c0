"""Models as role-keyed weights, exact both ways, and the two ways to start a model from nothing.

`extract` hands out {(block, role): tensor} (block is None for what blocks share) and `assemble` is its exact
inverse: a model rebuilt from its own extracted weights gives bit-identical logits, in any dtype.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from scaleop.paths import resolve
from scaleop.settings import Pair, TargetShape
from scaleop.wiring import READ_OUT, Role, Wiring, shape_of, wiring_of

transformers_logging.disable_progress_bar()  # it draws on stderr, every frame of which stays in an executed notebook

Key = tuple[int | None, str]
Weights = dict[Key, torch.Tensor]


class WeightsError(ValueError):
    """Weights that do not fit the architecture: missing, unexpected or misshapen; the message lists them."""


def split_heads(fused: torch.Tensor, heads: int, parts: int) -> tuple[torch.Tensor, ...]:
    """(heads x parts x head_dim, ...) grouped by head -> `parts` tensors (heads x head_dim, ...)."""
    grouped = fused.unflatten(0, (heads, parts, -1))  # (heads, parts, head_dim, ...)
    return tuple(grouped[:, part].flatten(0, 1) for part in range(parts))


def fuse_heads(parts: tuple[torch.Tensor, ...], heads: int) -> torch.Tensor:
    """The exact inverse of `split_heads`."""
    return torch.stack([part.unflatten(0, (heads, -1)) for part in parts], dim=1).flatten(0, 2)


def keys(wiring: Wiring, layers: int) -> list[tuple[Key, Role]]:
    """Every (block, role name) of a model with its role: block by block in table order."""
    blocks = [((b, role.name), role) for b in range(layers) for role in wiring.roles if role.per_block]
    return [((None, role.name), role) for role in wiring.roles if not role.per_block] + blocks


def extract(model: nn.Module) -> Weights:
    """All weights of a causal language model by role. Tensors are copies (cost: one copy of the model).

    Raises WeightsError when the model has a tensor the wiring does not know.
    """
    return from_state(model.state_dict(), model.config)


def from_state(state: Mapping[str, torch.Tensor], config: Any) -> Weights:
    """State dict -> role-keyed weights; every entry must be claimed by the wiring."""
    wiring, heads = wiring_of(config), config.num_attention_heads
    weights, used = {}, set()
    for key, role in keys(wiring, config.num_hidden_layers):
        path = role.path.format(b=key[0])
        if path not in state:
            raise WeightsError(f"the model has no tensor {path} (role {role.name}): is it a {wiring.family}?")
        used.add(path)
        tensor = state[path]
        weights[key] = (tensor if role.slot is None else split_heads(tensor, heads, wiring.fused)[role.slot]).clone()
    if strangers := sorted(set(state) - used):
        raise WeightsError(f"tensors the {wiring.family} wiring does not know: {', '.join(strangers[:5])}")
    return weights


def to_state(weights: Mapping[Key, torch.Tensor], config: Any) -> dict[str, torch.Tensor]:
    """Role-keyed weights -> state dict. WeightsError for missing, unexpected or misshapen weights."""
    wiring, shape = wiring_of(config), shape_of(config)
    table = dict(keys(wiring, shape.layers))
    if problems := sorted(map(str, table.keys() ^ weights.keys())):
        raise WeightsError(f"missing or unexpected weights: {', '.join(problems[:5])} ({len(problems)} in all)")
    for key, role in table.items():
        expected = tuple(shape.size(axis) for axis in role.axes)
        if tuple(weights[key].shape) != expected:
            raise WeightsError(f"{key} has shape {tuple(weights[key].shape)}, its axes {role.axes} want {expected}")
    state, fused = {}, {}
    for key, role in table.items():
        path = role.path.format(b=key[0])
        if role.slot is None:
            state[path] = weights[key]
        else:
            fused.setdefault(path, {})[role.slot] = weights[key]
    for path, parts in fused.items():
        state[path] = fuse_heads(tuple(parts[slot] for slot in range(wiring.fused)), shape.heads)
    return state


def empty_model(config: Any, dtype: torch.dtype = torch.float32) -> nn.Module:
    """A model of that config with transformers' own initialisation (consumes torch's global random state)."""
    return AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=False)


def assemble(weights: Mapping[Key, torch.Tensor], config: Any, dtype: torch.dtype | None = None) -> nn.Module:
    """A fresh model that holds exactly these weights, in their dtype unless `dtype` says otherwise."""
    dtype = dtype or next(iter(weights.values())).dtype
    with torch.random.fork_rng(devices=[]):  # the initial values are overwritten: leave the random state alone
        model = empty_model(config, dtype)
    model.load_state_dict(to_state(weights, config), strict=True)
    return model.eval()


def load(name: Any, dtype: torch.dtype = torch.float32, attention: str = "sdpa") -> nn.Module:
    """A pretrained causal language model from a folder or hub name, fp32 unless asked otherwise, safetensors only.

    Every tensor must come from the checkpoint: WeightsError lists what is missing, unexpected or misshapen, so
    that no randomly initialised weight is ever taken for a trained one.
    """
    model, info = AutoModelForCausalLM.from_pretrained(
        name, dtype=dtype, attn_implementation=attention, use_safetensors=True, trust_remote_code=False,
        output_loading_info=True, ignore_mismatched_sizes=True)  # reported below with the rest, and refused
    if problems := [f"{kind}: {what}" for kind, what in info.items() if what]:
        raise WeightsError(f"{name} does not load cleanly as {model.config.model_type}: {'; '.join(problems)}")
    return model.eval()


def load_config(name: Any) -> Any:
    """The transformers config of a folder or hub name."""
    return AutoConfig.from_pretrained(name, trust_remote_code=False)


def target_shape(pair: Pair) -> TargetShape:
    """The sizes of a pair's target: as the experiment gives them, or those in the config of the model it names."""
    if pair.target is not None:
        return pair.target
    shape = shape_of(load_config(resolve(pair.like)))
    return TargetShape(layers=shape.layers, width=shape.width, heads=shape.heads, mlp=shape.mlp, vocab=shape.vocab)


def pythia_init(config: Any, generator: torch.Generator) -> Weights:
    """Fresh weights by Pythia's own rule, fp32: N(0, 2/(5d)) everywhere, read-outs N(0, (2/(L sqrt d))^2).

    Those are GPT-NeoX's `small_init` and `wang_init`; norms are neutral and biases zero. transformers' own rule
    (std 0.02 everywhere) starts Pythia-sized read-outs several times too large.
    """
    shape, weights = shape_of(config), {}
    for key, role in keys(wiring_of(config), shape.layers):
        size = [shape.size(axis) for axis in role.axes]
        if len(size) == 1:
            weights[key] = torch.full(size, role.neutral or 0.0)
        else:
            std = 2 / (shape.layers * math.sqrt(shape.width)) if role.lever == READ_OUT \
                else math.sqrt(2 / (5 * shape.width))
            weights[key] = torch.randn(size, generator=generator) * std
    return weights


def device_of(model: nn.Module) -> torch.device:
    """Where a model's weights are."""
    return model.get_output_embeddings().weight.device


def module_of(model: nn.Module, role: Role, block: int) -> nn.Module:
    """The module whose weight a role is."""
    return model.get_submodule(role.path.format(b=block).removesuffix(".weight"))

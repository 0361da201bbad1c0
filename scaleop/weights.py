"""Models as role-keyed weights, exact both ways, and the two ways to start a model from nothing.

`extract` hands out {(block, role): tensor} (block is None for what blocks share) and `assemble` is its exact
inverse: a model rebuilt from its own extracted weights gives bit-identical logits, in any dtype.
"""

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from scaleop import hub
from scaleop.settings import Pair, TargetShape
from scaleop.wiring import READ_OUT, TABLES, Role, Wiring, WiringError, shape_of, wiring_of

transformers_logging.disable_progress_bar()  # it draws on stderr, every frame of which stays in an executed notebook

Key = tuple[int | None, str]
Weights = dict[Key, torch.Tensor]
Table = list[tuple[Key, Role]]


class WeightsError(ValueError):
    """Weights that do not fit the architecture: missing, unexpected or misshapen; the message lists them."""


def split_heads(fused: torch.Tensor, heads: int, parts: int) -> tuple[torch.Tensor, ...]:
    """(heads x parts x head_dim, ...) grouped by head -> `parts` tensors (heads x head_dim, ...)."""
    grouped = fused.unflatten(0, (heads, parts, -1))  # (heads, parts, head_dim, ...)
    return tuple(grouped[:, part].flatten(0, 1) for part in range(parts))


def fuse_heads(parts: tuple[torch.Tensor, ...], heads: int) -> torch.Tensor:
    """The exact inverse of `split_heads`."""
    return torch.stack([part.unflatten(0, (heads, -1)) for part in parts], dim=1).flatten(0, 2)


def keys(wiring: Wiring, layers: int) -> Table:
    """Every (block, role name) of a model with its role: block by block in table order."""
    blocks = [((b, role.name), role) for b in range(layers) for role in wiring.roles if role.per_block]
    return [((None, role.name), role) for role in wiring.roles if not role.per_block] + blocks


def extract(model: nn.Module) -> Weights:
    """All weights of a causal language model by role. Tensors are copies on the CPU (cost: one copy of the model).

    Raises WeightsError when the model has a tensor the wiring does not know.
    """
    return from_state({name: tensor.cpu() for name, tensor in model.state_dict().items()}, model.config)


def from_state(state: Mapping[str, torch.Tensor], config: Any) -> Weights:
    """State dict -> role-keyed weights; every entry must be claimed by the wiring."""
    wiring = wiring_of(config)
    table = keys(wiring, config.num_hidden_layers)
    weights = parts_of(state, config, table)
    known = {role.path.format(b=key[0]) for key, role in table}
    for second, name in wiring.aliases:
        if second in state and name in state and not torch.equal(state[second], state[name]):
            raise WeightsError(f"{second} is not {name}, but the config ties them: set tie_word_embeddings=False")
        known.add(second)
    if strangers := sorted(set(state) - known):
        raise WeightsError(f"tensors the {wiring.family} wiring does not know: {', '.join(strangers[:5])}")
    return weights


def parts_of(state: Mapping[str, torch.Tensor], config: Any, table: Table) -> Weights:
    """Copies of the weights in `table` (some of `keys`) from a state dict that holds them, if not others."""
    wiring, weights = wiring_of(config), {}
    for key, role in table:
        path = role.path.format(b=key[0])
        if path not in state:
            raise WeightsError(f"the model has no tensor {path} (role {role.name}): is it a {wiring.family}?")
        parts = (state[path],) if role.slot is None else split_heads(state[path], config.num_attention_heads,
                                                                     wiring.fused)
        weights[key] = parts[role.slot or 0].clone()
    return weights


def to_state(weights: Mapping[Key, torch.Tensor], config: Any, table: Table | None = None) -> dict[str, torch.Tensor]:
    """Role-keyed weights -> state dict, of the whole model or of the part in `table` (some of `keys`).

    WeightsError for missing, unexpected or misshapen weights.
    """
    wiring, shape = wiring_of(config), shape_of(config)
    table = dict(keys(wiring, shape.layers) if table is None else table)
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
    state = to_state(weights, config)
    state |= {second: state[name] for second, name in wiring_of(config).aliases}
    model.load_state_dict(state, strict=True)
    return model.eval()


def load(name: Any, dtype: torch.dtype = torch.float32, attention: str = "sdpa") -> nn.Module:
    """A pretrained causal language model from a folder or hub name, fp32 unless asked otherwise, safetensors only.

    Every tensor must come from the checkpoint: WeightsError lists what is missing, unexpected or misshapen, and what
    is not as the files have it, so that no randomly initialised weight is ever taken for a trained one. HubError
    where the files cannot be had (`scaleop.hub`).
    """
    folder = hub.folder(name)
    model, info = AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, attn_implementation=attention, use_safetensors=True, trust_remote_code=False,
        output_loading_info=True, ignore_mismatched_sizes=True)  # reported below with the rest, and refused
    if problems := [f"{kind}: {what}" for kind, what in info.items() if what]:
        raise WeightsError(f"{name} does not load cleanly as {model.config.model_type}: {'; '.join(problems)}")
    if problems := differing(model, hub.weight_files(folder)):
        raise WeightsError(f"{name} was not loaded as its files have it: {'; '.join(problems[:5])}. This is a fault of "
                           "the loading library: compare its version with requirements.lock")
    return model.eval()


def differing(model: nn.Module, files: Iterable[Path], rows: int = 64) -> list[str]:
    """What a loaded model does not hold as its safetensors files do, in words; empty when nothing differs.

    Compared bit by bit, after the cast to the model's dtype: all names, shapes and tensors below a million numbers,
    and `rows` evenly spaced rows of larger ones (a tensor left random, or taken from elsewhere, differs in every row).
    """
    wiring, left, problems = wiring_of(model.config), dict(model.state_dict()), []
    for file in files:
        with safe_open(file, "pt") as stored:
            for name in stored.keys():  # noqa: SIM118 - no mapping
                if (path := wiring.in_model(name)) is None:
                    continue
                if path not in left:
                    problems.append(f"{name} of {file.name} is nowhere in the model")
                    continue
                loaded, part = left.pop(path), stored.get_slice(name)
                step = math.ceil(len(loaded) / rows) if loaded.numel() >= 2**20 else 0
                if list(loaded.shape) != part.get_shape():
                    problems.append(f"{name} of {file.name} has shape {part.get_shape()}, not {list(loaded.shape)}")
                elif not (all(_same(part[row], loaded[row]) for row in range(0, len(loaded), step)) if step
                          else _same(stored.get_tensor(name), loaded)):
                    problems.append(f"{name} of {file.name} has other values")
    tied = dict(wiring.aliases)  # files hold a tied tensor once
    return problems + [f"{path} is in no file" for path in left if path not in tied]


def _same(stored: torch.Tensor, loaded: torch.Tensor) -> bool:
    return torch.equal(stored.to(loaded.dtype), loaded.cpu())


def load_config(name: Any) -> Any:
    """The transformers config of a folder or hub name; HubError where it cannot be had."""
    folder = hub.config_folder(name)
    try:
        return AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except ValueError as error:  # a model_type that the installed transformers does not know, or none
        said = str(error).splitlines()[0]
        raise WiringError(f"{name} is of no architecture that the installed transformers reads ({said}): use a "
                          f"checkpoint of {', '.join(TABLES)}, or a newer transformers") from error


def target_shape(pair: Pair) -> TargetShape:
    """The sizes of a pair's target: as the experiment gives them, or those in the config of the model it names."""
    if pair.target is not None:
        return pair.target
    shape = shape_of(load_config(pair.like))
    return TargetShape(**shape.sizes())


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


def module_of(model: nn.Module, role: Role, block: int) -> nn.Module:
    """The module whose weight a role is."""
    return model.get_submodule(role.path.format(b=block).removesuffix(".weight"))

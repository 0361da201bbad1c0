"""Rolling checkpoints of a run: whole weights and moments in safetensors, whoever trained them and however many.

Weights and optimiser states are read and restored through torch's own state dicts, which gather what several
processes hold in parts and hand each its part back. So a run of two GPUs resumes on one or on eight.
"""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from scaleop.store import StoreError, atomic_folder, read_json, sha256, write_json

MOMENTS = ("exp_avg", "exp_avg_sq", "step")
FILES = ("model.safetensors", "optimizer.safetensors")
PREFIX = "model."  # a loss module holds its model under this name


def whole_weights(loss_of: nn.Module, on_cpu: bool = False) -> dict[str, torch.Tensor]:
    """The trained model's state dict, gathered from all processes (each must call it; with `on_cpu` only the main one
    is sure to get it)."""
    state = get_model_state_dict(loss_of, options=StateDictOptions(full_state_dict=True, cpu_offload=on_cpu))
    return {name.removeprefix(PREFIX): tensor for name, tensor in state.items()}


def save_checkpoint(folder: Path, loss_of: nn.Module, optimizer: torch.optim.Optimizer, writes: bool,
                    **state: Any) -> None:
    """Replace the last checkpoint whole by weights, both Adam moments and `state`. Every process must call it; the one
    that `writes` writes."""
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights, adam = whole_weights(loss_of, on_cpu=True), get_optimizer_state_dict(loss_of, optimizer, options=options)
    if not writes:
        return
    moments = {f"{name.removeprefix(PREFIX)}|{moment}": values[moment]
               for name, values in adam["state"].items() for moment in MOMENTS}
    with atomic_folder(folder) as part:
        for file, tensors in zip(FILES, (weights, moments), strict=True):
            save_file(_apart(tensors), part / file)
        write_json(part / "state.json", {**state, "sha256": {file: sha256(part / file) for file in FILES}})


def _apart(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors for safetensors, which takes no memory twice: a tied weight has a copy under its second name."""
    seen: set[int] = set()
    found = {}
    for name, tensor in tensors.items():
        found[name] = tensor.contiguous() if tensor.data_ptr() not in seen else tensor.clone()
        seen.add(tensor.data_ptr())
    return found


def load_checkpoint(folder: Path, loss_of: nn.Module, optimizer: torch.optim.Optimizer, key: str) -> dict[str, Any]:
    """Restore weights and optimiser in place, in every process; returns state.json. StoreError when damaged or another
    run's."""
    state = read_json(folder / "state.json")
    remedy = f"Delete {folder} to start this run afresh."
    if state["key"] != key:
        raise StoreError(f"{folder} belongs to a run with other settings. {remedy}")
    for file, expected in state["sha256"].items():
        if not (folder / file).exists() or sha256(folder / file) != expected:
            raise StoreError(f"{folder / file} is damaged or truncated. {remedy}")
    weights, moments = (load_file(folder / file) for file in FILES)
    options = StateDictOptions(full_state_dict=True, strict=True)
    set_model_state_dict(loss_of, {PREFIX + name: tensor for name, tensor in weights.items()}, options=options)
    names = [name for name, _ in loss_of.named_parameters()]
    names = [name.removeprefix("module.").removeprefix(PREFIX) for name in names]  # "module.": how DDP wraps
    adam = {PREFIX + name: {moment: moments[f"{name}|{moment}"] for moment in MOMENTS} for name in names}
    (group,) = optimizer.param_groups
    groups = [{**group, "params": list(adam)}]
    set_optimizer_state_dict(loss_of, optimizer, {"state": adam, "param_groups": groups}, options=options)
    return state

"""Where models run: on the GPU, if there is one, while they are read, and back to the CPU when others need it."""

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from scaleop.processes import processes

BESIDE = 5e9  # bytes of GPU memory beside a model that is read: perplexity's logits take 3 GB, similarity's sums 4


def device_of(model: nn.Module) -> torch.device:
    """Where a model's weights are."""
    return model.get_output_embeddings().weight.device


def best_device() -> torch.device:
    """This process's GPU if it has one that knows fp64, else the CPU; where training runs, too."""
    return processes().device


def free_memory(device: torch.device) -> float:
    """Bytes that this process may still take on a device; infinity where torch does not say (all but CUDA)."""
    if device.type != "cuda":
        return math.inf
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)  # torch keeps it for us
    return torch.cuda.mem_get_info(device)[0] + unused


@contextmanager
def on_best_device(*models: nn.Module) -> Iterator[None]:
    """Inside the block the models are on the best device here, behind it where they were: a donor that has been run
    leaves the GPU to whatever trains next. One that is on a GPU stays there. Where all that would go do not fit, with
    `BESIDE` for what they compute, they stay on the CPU and a line says so."""
    home, device = torch.device("cpu"), best_device()
    movable = [model for model in models if device_of(model).type == "cpu" and device_of(model) != device]
    need = BESIDE + sum(tensor.nbytes for model in movable for tensor in (*model.parameters(), *model.buffers()))
    if movable and need > (free := free_memory(device)):
        print(f"a model stays on the CPU, where it is slow: with a batch it wants {need / 1e9:.1f} GB of GPU memory, "
              f"and {free / 1e9:.1f} GB are free", flush=True)
        movable = []
    try:
        for model in movable:
            model.to(device)
        yield
    finally:
        for model in movable:
            model.to(home)

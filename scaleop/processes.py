"""One run in several processes, which `accelerate launch` starts: who does what alone, and how the others hear of it.

Started plainly there is one process, and everything here does nothing.
"""

from datetime import timedelta
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import broadcast_object_list
from torch import nn

PATIENCE = timedelta(hours=12)  # how long processes wait for the main one: scoring and building a large arm take hours


def on_cpu() -> bool:
    """Is there no GPU here that knows fp64? Apple's does not: there everything, training too, is on the CPU."""
    return not torch.accelerator.is_available() or torch.accelerator.current_accelerator().type == "mps"


def processes() -> PartialState:
    """accelerate's record of this launch: `num_processes`, `process_index`, `is_main_process`, `main_process_first()`,
    and `device`, this process's own.

    The first call in a launched process joins it to the others. Without a GPU they are joined on the CPU (gloo).
    """
    return PartialState(cpu=on_cpu(), timeout=PATIENCE)


def told(value: Any) -> Any:
    """What the main process calls this with, in all of them. Every process must call it."""
    if processes().num_processes == 1:
        return value
    message = [value]
    broadcast_object_list(message, from_process=0)
    return message[0]


def same_weights(model: nn.Module) -> None:
    """Give every process the main one's parameters and buffers, in place. Every process must call it."""
    if processes().num_processes > 1:
        for tensor in model.state_dict().values():
            torch.distributed.broadcast(tensor, src=0)


def summed(*values: float) -> list[float]:
    """Each value summed over the processes, in fp64. Every process must call it."""
    world = processes()
    if world.num_processes == 1:
        return list(values)
    sums = torch.tensor(values, dtype=torch.float64, device=world.device)
    torch.distributed.all_reduce(sums)
    return sums.tolist()

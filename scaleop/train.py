"""The training loop that pretrains the ladder and runs the race: one page, on `accelerate`.

The recipe is the paper's (appendix C): fp32 master weights, bf16 autocast around forward and loss, AdamW
(0.9, 0.95) with weight decay 0.1 on every parameter, clipping at norm 1, linear warmup under a cosine that falls
to a tenth of the peak. Data order is a function of the step alone, so a run resumes from one integer; a killed run
resumes from its last checkpoint and ends bit-identical to an uninterrupted one (same machine, same threads).
"""

import ctypes
import gc
import math
import platform
import random
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from copy import deepcopy
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import AutocastKwargs, DistributedDataParallelKwargs, DistributedType
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from scaleop.checkpoints import load_checkpoint, save_checkpoint, whole_weights
from scaleop.corpus import TokenFile
from scaleop.losses import NextTokenLoss
from scaleop.processes import on_cpu, processes, same_weights
from scaleop.progress import progress
from scaleop.strict import ExperimentError

BETAS, WEIGHT_DECAY, CLIP_NORM, FLOOR = (0.9, 0.95), 0.1, 1.0, 0.1


@dataclass(frozen=True)
class Recipe:
    """How long, how fast and on how much data at a time; with the token stream this determines a run."""

    tokens: int  # budget; rounded up to whole steps
    batch: int  # sequences a step, over all processes
    length: int  # tokens a sequence
    peak_lr: float
    warmup_steps: int
    eval_every: int  # tokens between evaluations along the way
    precision: str = "bf16"  # of forward and loss: bf16 | no
    checkpoint_every: int = 0  # steps between checkpoints; 0: none along the way
    micro_batch: int | None = None  # sequences at a time in a process, gradients accumulate; None: all of a step's
    checkpoint_activations: bool = False  # keep only what goes between blocks, compute the rest again in backward
    chunk: int | None = None  # positions whose logits exist at a time (`scaleop.losses`); None: all

    @property
    def steps(self) -> int:
        """Optimiser steps: the budget divided by the tokens of a step, rounded up."""
        return math.ceil(self.tokens / (self.batch * self.length))

    @property
    def consumed(self) -> int:
        """Tokens the run really reads (a whole number of steps)."""
        return self.steps * self.batch * self.length

    def learning_rate(self, step: int) -> float:
        """Rate at 0-based `step` of S: peak x min(1, (s+1)/warmup) x [0.1 + 0.45 (1 + cos(pi s/S))]."""
        warmup = min(1.0, (step + 1) / self.warmup_steps) if self.warmup_steps else 1.0
        return self.peak_lr * warmup * (FLOOR + (1 - FLOOR) / 2 * (1 + math.cos(math.pi * step / self.steps)))


class TrainingDiverged(FloatingPointError):
    """The loss is no longer finite; the message names the run, the step and the last good checkpoint."""


def seed_everything(seed: int) -> None:
    """Seed Python, numpy and torch, and ask torch for deterministic kernels."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cudnn.benchmark = False


def reuse_large_buffers() -> None:
    """Tell glibc to keep freed memory for the next step instead of returning it to the kernel.

    Logits of a step exceed malloc's largest mmap threshold (32 MB), so every step would fault their pages in anew;
    on CPU this costs up to a fifth of a small model's step. No effect outside Linux with glibc.
    """
    if platform.libc_ver()[0] == "glibc":
        mallopt, mmap_threshold, trim_threshold = ctypes.CDLL(None).mallopt, -3, -1
        mallopt(mmap_threshold, 1 << 30)
        mallopt(trim_threshold, (1 << 31) - 1)


def make_accelerator(precision: str) -> Accelerator:
    """An Accelerator on the best device here; its process-wide state is reset so that precisions may differ."""
    reuse_large_buffers()
    processes()  # joins them, with our patience and not torch's ten minutes, and chooses the device
    AcceleratorState._reset_state()
    views = DistributedDataParallelKwargs(gradient_as_bucket_view=True)  # else gradients would be held twice
    accelerator = Accelerator(mixed_precision=precision, cpu=on_cpu(), kwargs_handlers=[views])
    if is_sharded(accelerator):
        plugin = accelerator.state.fsdp_plugin
        if plugin.fsdp_version != 2:
            raise ExperimentError(f"accelerate is set to FSDP version {plugin.fsdp_version}; only version 2 trains as "
                                  "one process does: put fsdp_version: 2 into its configuration (accelerate config)")
        plugin.mixed_precision_policy = MixedPrecisionPolicy()  # its own would sum gradients in bf16: all stays fp32
    return accelerator


def make_optimizer(model: nn.Module, recipe: Recipe) -> torch.optim.Optimizer:
    """The paper's AdamW on every parameter, norms and biases too."""
    return torch.optim.AdamW(model.parameters(), lr=recipe.peak_lr, betas=BETAS, weight_decay=WEIGHT_DECAY, fused=True)


def backward(accelerator: Accelerator, loss_of: nn.Module, rows: torch.Tensor,
             micro_batch: int | None) -> torch.Tensor:
    """Gradients of the mean loss over (batch, length) token ids, `micro_batch` rows at a time; returns that mean.

    All rows have as many targets, so a part's mean weighs as its rows do, whether or not the parts are of one size.
    Processes exchange gradients once, with the last part; where the model is sharded with every part, lest each holds
    them whole.
    """
    parts = rows.split(micro_batch or len(rows))
    total = torch.zeros((), device=accelerator.device)
    for part in parts:
        with accelerator.no_sync(loss_of) if part is not parts[-1] and not is_sharded(accelerator) else nullcontext():
            with autocast(accelerator):
                value = loss_of(part.to(accelerator.device))
            value = value * (len(part) / len(rows))
            accelerator.backward(value)
        total += value.detach()
    return total


def autocast(accelerator: Accelerator) -> AbstractContextManager[None]:
    """What a forward pass runs under: `prepare` sees to it, except where it shards. There no bf16 copies of weights
    are kept from one use to the next: they would be whole."""
    if not is_sharded(accelerator):
        return nullcontext()
    return accelerator.autocast(AutocastKwargs(enabled=accelerator.native_amp, cache_enabled=False))


def is_sharded(accelerator: Accelerator) -> bool:
    """Does each process hold only a part of the weights (FSDP)?"""
    return accelerator.distributed_type == DistributedType.FSDP


def train(model: nn.Module, stream: TokenFile, recipe: Recipe, *, key: str, name: str, folder: Path,
          evaluate: Callable[[nn.Module], float],
          loss: Callable[..., nn.Module] = NextTokenLoss) -> list[dict[str, float]]:
    """Train `model` in place on `stream` and return its recovery curve.

    A point is {step, tokens, ppl (from `evaluate`), loss (mean training loss since the last point)};
    evaluations happen at step 0, at the first step past each multiple of `recipe.eval_every`, and at the end.
    `key` names the run's settings: a checkpoint in `folder`/checkpoint is resumed only if its key is the same.
    `loss` makes, of the model on its device and `chunk`, a module (batch, length) ids -> scalar to minimise. Only the
    model's own parameters are trained and saved, whatever else that module holds.
    Costs two fp32 copies of the weights for Adam on top of weights and gradients.

    In a launch of several processes every one calls this with a model of the same shape; the main one's weights count,
    and in the end all have the trained ones. Each trains on its share of every batch, and `evaluate` is called in all
    of them, on whole weights: where the model is sharded (FSDP) `model` itself is kept beside it for that.
    """
    if len(stream.tokens) < recipe.consumed:
        raise ValueError(f"the stream holds {len(stream.tokens):,} tokens, the recipe needs {recipe.consumed:,}")
    gc.collect()  # what the last run tied in circles (`prepare` does) goes before this one takes its memory
    accelerator = make_accelerator(recipe.precision)
    rank, world = accelerator.process_index, accelerator.num_processes
    if recipe.batch % world:
        raise ValueError(f"batch={recipe.batch} does not divide over {world} processes")
    checkpoint = folder / "checkpoint"
    model.to(accelerator.device)
    same_weights(model)
    trained = deepcopy(model) if is_sharded(accelerator) else model
    if recipe.checkpoint_activations:
        trained.activation_checkpointing_enable({"use_reentrant": False})
    made = loss(trained, chunk=recipe.chunk)
    made._no_split_modules = model._no_split_modules  # where FSDP cuts, unless its settings say
    loss_of, optimizer = accelerator.prepare(made, make_optimizer(trained, recipe))
    state = load_checkpoint(checkpoint, loss_of, optimizer.optimizer, key) if checkpoint.exists() else {}
    start, curve, losses = state.get("step", 0), state.get("curve", []), state.get("losses", [])

    def measure(step: int) -> None:
        if trained is not model:
            model.load_state_dict(whole_weights(loss_of))
        curve.append({"step": step, "tokens": step * recipe.batch * recipe.length, "ppl": evaluate(model),
                      **({"loss": sum(losses) / len(losses)} if losses else {})})
        losses.clear()

    if not curve:
        measure(0)
    loss_of.train()
    with progress(total=recipe.steps, initial=start, desc=name, unit=" steps",
                  disable=None if accelerator.is_main_process else True) as bar:
        for step in range(start, recipe.steps):
            for group in optimizer.param_groups:
                group["lr"] = recipe.learning_rate(step)
            rows = torch.from_numpy(stream.block(step, recipe.batch, recipe.length)[rank::world])
            value = backward(accelerator, loss_of, rows, recipe.micro_batch)
            accelerator.clip_grad_norm_(loss_of.parameters(), CLIP_NORM)
            losses.append(accelerator.reduce(value, "mean").item())
            if not math.isfinite(losses[-1]):
                where = f"the last good checkpoint is {checkpoint}" if checkpoint.exists() else "none was saved yet"
                raise TrainingDiverged(f"{name}: the loss became {losses[-1]} at step {step} of {recipe.steps} "
                                       f"(rate {recipe.learning_rate(step):.2e}); {where}. Lower the peak rate.")
            optimizer.step()
            optimizer.zero_grad()
            done, seen = step + 1, (step + 1) * recipe.batch * recipe.length
            crossed = seen // recipe.eval_every > (seen - recipe.batch * recipe.length) // recipe.eval_every
            if crossed or done == recipe.steps:
                measure(done)
            bar.set_postfix_str(f"ppl {curve[-1]['ppl']:.1f}", refresh=False)
            bar.update()
            due = recipe.checkpoint_every and done % recipe.checkpoint_every == 0 and done < recipe.steps
            if due:
                save_checkpoint(checkpoint, loss_of, optimizer.optimizer, accelerator.is_main_process, step=done,
                                key=key, curve=curve, losses=losses)
    if recipe.checkpoint_activations:
        trained.activation_checkpointing_disable()
    return curve


def settings(recipe: Recipe, **more: Any) -> dict[str, Any]:
    """The recipe and whatever else determines a run, as one JSON-able dict (its digest is the run's key).

    What saves memory is left out where it is not used: runs from before there was such a setting keep their keys.
    """
    unused = {"micro_batch": None, "checkpoint_activations": False, "chunk": None}
    values = {name: value for name, value in asdict(recipe).items() if name not in unused or value != unused[name]}
    return {**values, "betas": BETAS, "weight_decay": WEIGHT_DECAY, "clip_norm": CLIP_NORM, "floor": FLOOR, **more}

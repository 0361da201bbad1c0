"""Training throughput: the loop of `scaleop.train` against a plain fp32 one, same batch, side by side.

    python benchmarks/training.py                    # nano-m, a few minutes; writes benchmarks/results/training.json
    python benchmarks/training.py --shape 160m       # Pythia-160M's shape; results/training_160m.json

The variants alternate for some rounds, each in a process of its own (the loop's memory setting lasts for a process).
The ratio of best rounds is what may be quoted; tokens a second belong to the machine. Ours runs in bf16 autocast, as
the paper trains, and in fp32 as well: a processor without bf16 instructions imitates them, at several times the cost.
"""

import argparse
import json
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from memory import pythia_160m

from scaleop.experiment import load_experiment, load_ladder
from scaleop.pretrain import config_of
from scaleop.progress import progress
from scaleop.store import provenance, write_json
from scaleop.train import BETAS, CLIP_NORM, WEIGHT_DECAY, NextTokenLoss, make_accelerator
from scaleop.weights import empty_model

RESULTS = Path(__file__).parent / "results"


class Setting(NamedTuple):
    """How much is measured: rounds of a process each, of `warmup` and then `steps` steps of `batch` sequences."""

    rounds: int
    steps: int
    warmup: int
    batch: int
    length: int
    attention: str  # of our loop; the plain one has transformers' default, sdpa


RACE = load_experiment("nano").race
SETTINGS = {"nano-m": Setting(5, 12, 3, RACE.batch, RACE.length, RACE.attention),
            "160m": Setting(2, 2, 1, 4, 256, "sdpa")}


def plain(model: torch.nn.Module, batch: torch.Tensor, rate: float) -> None:
    """One step as anybody would write it first: fp32, the model's own loss, AdamW with its defaults."""
    if not hasattr(plain, "optimizer"):
        plain.optimizer = torch.optim.AdamW(model.parameters(), lr=rate, betas=BETAS, weight_decay=WEIGHT_DECAY)
    model(input_ids=batch, labels=batch).loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
    plain.optimizer.step()
    plain.optimizer.zero_grad()


def ours(model: torch.nn.Module, batch: torch.Tensor, rate: float, precision: str = "bf16") -> None:
    """One step as `scaleop.train` takes it."""
    if not hasattr(ours, "state"):
        accelerator = make_accelerator(precision)
        optimizer = torch.optim.AdamW(model.parameters(), lr=rate, betas=BETAS, weight_decay=WEIGHT_DECAY, fused=True)
        ours.state = (accelerator, *accelerator.prepare(NextTokenLoss(model), optimizer))
    accelerator, loss_of, optimizer = ours.state
    loss = loss_of(batch)
    accelerator.backward(loss)
    accelerator.clip_grad_norm_(model.parameters(), CLIP_NORM)
    accelerator.reduce(loss.detach(), "mean").item()
    optimizer.step()
    optimizer.zero_grad()


VARIANTS = {"plain": plain, "ours": ours, "ours in fp32": partial(ours, precision="no")}


def config(shape: str) -> Any:
    """The config of nano-m, or of Pythia-160M."""
    ladder = load_ladder()
    return config_of(ladder, ladder.model(shape)) if shape == "nano-m" else pythia_160m()


def measure(shape: str, variant: str) -> float:
    """Tokens a second of one variant: median over the steps behind a warm-up."""
    setting, made = SETTINGS[shape], config(shape)
    made._attn_implementation = "sdpa" if variant == "plain" else setting.attention
    torch.manual_seed(0)
    model, step = empty_model(made).train(), VARIANTS[variant]
    batch, seconds = torch.randint(0, made.vocab_size, (setting.batch, setting.length)), []
    for _ in range(setting.warmup + setting.steps):
        began = time.perf_counter()
        step(model, batch, RACE.peak_lr)
        seconds.append(time.perf_counter() - began)
    return batch.numel() / sorted(seconds[setting.warmup :])[setting.steps // 2]


def main(shape: str) -> None:
    """Alternate the variants and write the table."""
    origin = provenance(shape=shape, **SETTINGS[shape]._asdict())
    rates: dict[str, list[float]] = {variant: [] for variant in VARIANTS}
    for _ in progress(range(SETTINGS[shape].rounds), desc="rounds"):
        for variant, found in rates.items():
            run = subprocess.run([sys.executable, __file__, "--shape", shape, "--variant", variant],
                                 capture_output=True, text=True, check=True)
            found.append(float(run.stdout))
    ratios = {variant: max(found) / max(rates["plain"]) for variant, found in rates.items() if variant != "plain"}
    name = "training" if shape == "nano-m" else f"training_{shape}"
    write_json(RESULTS / f"{name}.json", {**origin, "tokens_per_second": rates, "ratios": ratios})
    print(json.dumps(rates, indent=1), *(f"{variant}: {ratio:.2f}x" for variant, ratio in ratios.items()), sep="\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--shape", choices=SETTINGS, default="nano-m")
    parser.add_argument("--variant", choices=VARIANTS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    print(measure(arguments.shape, arguments.variant)) if arguments.variant else main(arguments.shape)

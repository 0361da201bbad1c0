"""Training throughput of nano-m: the loop of `scaleop.train` against a plain fp32 one, same batch, side by side.

    python benchmarks/training.py            # a few minutes; writes benchmarks/results/training.json

The two alternate for some rounds, each in a process of its own (the loop's memory setting lasts for a process). The
ratio of their best rounds is what may be quoted; tokens a second belong to the machine.
"""

import json
import subprocess
import sys
import time
from pathlib import Path

import torch

from scaleop.experiment import load_experiment, load_ladder
from scaleop.pretrain import config_of
from scaleop.progress import progress
from scaleop.store import provenance, write_json
from scaleop.train import BETAS, CLIP_NORM, WEIGHT_DECAY, NextTokenLoss, make_accelerator
from scaleop.weights import empty_model

ROUNDS, STEPS, WARMUP = 5, 12, 3
OUT = Path(__file__).parent / "results" / "training.json"


def plain(model: torch.nn.Module, batch: torch.Tensor, rate: float) -> None:
    """One step as anybody would write it first: fp32, the model's own loss, AdamW with its defaults."""
    if not hasattr(plain, "optimizer"):
        plain.optimizer = torch.optim.AdamW(model.parameters(), lr=rate, betas=BETAS, weight_decay=WEIGHT_DECAY)
    model(input_ids=batch, labels=batch).loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
    plain.optimizer.step()
    plain.optimizer.zero_grad()


def ours(model: torch.nn.Module, batch: torch.Tensor, rate: float) -> None:
    """One step as `scaleop.train` takes it."""
    if not hasattr(ours, "state"):
        accelerator = make_accelerator("bf16")
        optimizer = torch.optim.AdamW(model.parameters(), lr=rate, betas=BETAS, weight_decay=WEIGHT_DECAY, fused=True)
        ours.state = (accelerator, *accelerator.prepare(NextTokenLoss(model), optimizer))
    accelerator, loss_of, optimizer = ours.state
    loss = loss_of(batch)
    accelerator.backward(loss)
    accelerator.clip_grad_norm_(model.parameters(), CLIP_NORM)
    accelerator.reduce(loss.detach(), "mean").item()
    optimizer.step()
    optimizer.zero_grad()


def measure(variant: str) -> float:
    """Tokens a second of one variant: median over STEPS steps behind a warm-up."""
    ladder, race = load_ladder(), load_experiment("nano").race
    config = config_of(ladder, ladder.model("nano-m"))
    config._attn_implementation = {"plain": "sdpa", "ours": race.attention}[variant]  # sdpa is transformers' default
    torch.manual_seed(0)
    model, step = empty_model(config).train(), {"plain": plain, "ours": ours}[variant]
    batch, seconds = torch.randint(0, ladder.vocabulary, (race.batch, race.length)), []
    for _ in range(WARMUP + STEPS):
        began = time.perf_counter()
        step(model, batch, race.peak_lr)
        seconds.append(time.perf_counter() - began)
    return batch.numel() / sorted(seconds[WARMUP:])[STEPS // 2]


def main() -> None:
    """Alternate the variants and write the table."""
    rates: dict[str, list[float]] = {"plain": [], "ours": []}
    for _ in progress(range(ROUNDS), desc="rounds"):
        for variant, found in rates.items():
            run = subprocess.run([sys.executable, __file__, variant], capture_output=True, text=True, check=True)
            found.append(float(run.stdout))
    ratio = max(rates["ours"]) / max(rates["plain"])
    write_json(OUT, provenance(tokens_per_second=rates, ratio=ratio))
    print(json.dumps(rates, indent=1))
    print(f"ratio {ratio:.2f}x")


if __name__ == "__main__":
    print(measure(sys.argv[1])) if sys.argv[1:] else main()

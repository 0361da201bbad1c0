"""Strided perplexity: `scaleop.evaluate` against one window at a time with all its logits, side by side.

    python benchmarks/perplexity.py                  # nano-m, a minute or two; benchmarks/results/perplexity.json
    python benchmarks/perplexity.py --shape 160m     # Pythia-160M's, and the paper's windows; perplexity_160m.json

Same model, same tokens, alternating rounds in one process. The two must agree to 1e-5 relative.
"""

import argparse
import math
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from memory import pythia_160m

from scaleop.evaluate import perplexity
from scaleop.experiment import load_ladder
from scaleop.pretrain import config_of
from scaleop.progress import progress
from scaleop.store import provenance, write_json
from scaleop.weights import empty_model

RESULTS = Path(__file__).parent / "results"


class Setting(NamedTuple):
    """How much is measured: rounds of both, over `tokens` tokens."""

    rounds: int
    tokens: int
    window: int
    stride: int


SETTINGS = {"nano-m": Setting(5, 10_000, 256, 128), "160m": Setting(2, 3_072, 1_024, 512)}


@torch.no_grad()
def one_at_a_time(model: torch.nn.Module, tokens: np.ndarray, window: int, stride: int) -> float:
    """The usual loop: every window through the whole model, overlap masked out of the loss."""
    ids, total, scored, previous = torch.as_tensor(tokens)[None], 0.0, 0, 0
    for begin in range(0, ids.shape[1], stride):
        end = min(begin + window, ids.shape[1])
        rows = ids[:, begin:end]
        targets = rows.clone()
        targets[:, : -(end - previous)] = -100
        logits = model(input_ids=rows, use_cache=False).logits[:, :-1].float()
        total += F.cross_entropy(logits[0], targets[0, 1:], ignore_index=-100, reduction="sum").item()
        scored += (targets[0, 1:] != -100).sum().item()
        previous = end
        if end == ids.shape[1]:
            break
    return math.exp(total / scored)


def main(shape: str) -> None:
    """Time both, compare both, write the table."""
    ladder, setting = load_ladder(), SETTINGS[shape]
    origin = provenance(shape=shape, **setting._asdict())
    config = config_of(ladder, ladder.model(shape)) if shape == "nano-m" else pythia_160m()
    torch.manual_seed(0)
    model = empty_model(config).eval()
    tokens = np.random.default_rng(0).integers(0, config.vocab_size, setting.tokens)
    variants = {"one window at a time": lambda: one_at_a_time(model, tokens, setting.window, setting.stride),
                "ours": lambda: perplexity(model, tokens, setting.window, setting.stride).value}
    values = {name: run() for name, run in variants.items()}  # also the warm-up
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    for _ in progress(range(setting.rounds), desc="rounds"):
        for name, run in variants.items():
            began = time.perf_counter()
            run()
            seconds[name].append(time.perf_counter() - began)
    slow, fast = (min(seconds[name]) for name in variants)
    difference = abs(values["ours"] / values["one window at a time"] - 1)
    name = "perplexity" if shape == "nano-m" else f"perplexity_{shape}"
    write_json(RESULTS / f"{name}.json", {**origin, "seconds": seconds, "ratio": slow / fast,
                                          "relative_difference": difference, "values": values})
    print(f"{slow:.2f} s one window at a time, {fast:.2f} s ours: {slow / fast:.2f}x; "
          f"relative difference {difference:.1e}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--shape", choices=SETTINGS, default="nano-m")
    main(parser.parse_args().shape)

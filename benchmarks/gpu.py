"""What a GPU does with a real pair: training, perplexity, donor passes and a conversion, at Pythia's shapes.

    bash benchmarks/gpu.sh                        # on a machine with a GPU: made for ten minutes; results/gpu.json
    python benchmarks/gpu.py --tiny --out FILE    # the same code at a tiny size, on any machine: that it works

Random weights and random text, of which none of these figures depends. Training is the race's own loop with the batch,
micro-batch and chunk of `params/primary.yaml` (410m) and `params/heldout.yaml` (160m). A share of peak is *model*
FLOPs (what is computed twice to save memory counts once) over the data sheet's dense bf16 peak, where that is known
here, and over what one large bf16 matrix product reaches in the same run. Every part is written as soon as it is done.
It has run at the tiny size only: that it takes ten minutes on a GPU is an estimate.
"""

import argparse
import json
import random
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoTokenizer

from scaleop.activations import second_moments, stream_statistics
from scaleop.convert import convert
from scaleop.corpus import write_tokens
from scaleop.evaluate import perplexity
from scaleop.experiment import load_experiment
from scaleop.paths import ROOT
from scaleop.progress import progress
from scaleop.pythia import PYTHIA, pythia
from scaleop.race import recipe_of
from scaleop.store import provenance, write_json
from scaleop.train import Recipe, train
from scaleop.weights import empty_model, module_of
from scaleop.wiring import READ_OUT, wiring_of

OUT = Path(__file__).parent / "results" / "gpu.json"
STEPS, WARMUP, LENGTH = 10, 3, 128  # steps timed and not; tokens of a donor's sequence
PEAKS = {"H100 PCIe": 756e12, "H100": 989e12, "H200": 989e12, "A100": 312e12, "L40S": 362e12, "L4": 121e12,
         "RTX 4090": 165e12}
"""Dense bf16 FLOP/s with fp32 sums, of NVIDIA's data sheets, by a part of the device's name."""

TINY = {"160m": (1, 48, 3), "410m": (2, 64, 4), "1.4b": (2, 128, 4)}  # blocks, width, heads


def step_flops(config: Any, length: int) -> int:
    """FLOPs a token of a training step: 6 for each weight of a matrix product, and 12 x width x length a block for
    attention's two products (all positions, as is usual to count)."""
    layers, width = config.num_hidden_layers, config.hidden_size
    weights = layers * (4 * width**2 + 2 * width * config.intermediate_size) + width * config.vocab_size
    return 6 * weights + 12 * layers * width * length


@contextmanager
def timed(facts: dict[str, Any], name: str) -> Iterator[None]:
    """Put the seconds of the block into `facts`, and the GPU's peak memory (bytes) where there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    began = time.perf_counter()
    yield
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        facts[f"{name}_bytes"] = torch.cuda.max_memory_allocated()
    facts[f"{name}_s"] = time.perf_counter() - began


def product(n: int) -> float:
    """FLOP/s of an n x n bf16 matrix product, the best of ten."""
    a, best = torch.randn(n, n, device=device(), dtype=torch.bfloat16), 0.0
    for _ in range(10):
        facts: dict[str, float] = {}
        with timed(facts, "product"):
            a @ a
        best = max(best, 2 * n**3 / facts["product_s"])
    return best


def device() -> str:
    """Where all of this runs."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def training(config: Any, recipe: Recipe, reaches: float, peak: float | None) -> dict[str, Any]:
    """Tokens a second of the race's loop, of its median step behind a warm-up, and the shares of peak that is."""
    step = recipe.batch * recipe.length
    recipe = replace(recipe, tokens=(WARMUP + STEPS) * step, eval_every=step, checkpoint_every=0)
    marks, facts = [], {"batch": recipe.batch, "length": recipe.length, "micro_batch": recipe.micro_batch,
                        "chunk": recipe.chunk}

    def mark(model: torch.nn.Module) -> float:  # called before the first step and behind each
        marks.append(time.perf_counter())
        return 1.0

    with tempfile.TemporaryDirectory() as folder, timed(facts, "whole"):
        ids = np.random.default_rng(0).integers(0, config.vocab_size, recipe.consumed).astype(np.uint16)
        stream = write_tokens(Path(folder) / "stream", ids, np.zeros(1))
        train(empty_model(config), stream, recipe, key="", name="steps", folder=Path(folder), evaluate=mark)
    seconds = sorted(b - a for a, b in list(pairwise(marks))[WARMUP:])
    rate = step / seconds[len(seconds) // 2]
    flops = rate * step_flops(config, recipe.length)
    return facts | {"tokens_per_second": rate, "flops_per_second": flops, "share_of_product": flops / reaches,
                    "share_of_peak": flops / peak if peak else None}


def evaluation(config: Any, tokens: int, window: int) -> dict[str, Any]:
    """Tokens a second of strided perplexity, fp32."""
    model, facts = empty_model(config).eval().to(device()), {"tokens": tokens, "window": window}
    ids = np.random.default_rng(0).integers(0, config.vocab_size, tokens)
    perplexity(model, ids[: 2 * window], window, window // 2)
    with timed(facts, "perplexity"):
        perplexity(model, ids, window, window // 2)
    return facts | {"tokens_per_second": tokens / facts["perplexity_s"]}


def donor_passes(config: Any, sequences: int) -> dict[str, Any]:
    """Tokens a second of both passes through a donor: stream statistics, and second moments of half its inputs."""
    model, facts = empty_model(config).eval().to(device()), {"sequences": sequences}
    ids = np.random.default_rng(0).integers(0, config.vocab_size, (sequences, LENGTH))
    kept = {(block, role.name): torch.arange(0, module_of(model, role, block).in_features, 2)
            for block in range(config.num_hidden_layers) for role in wiring_of(config).lever(READ_OUT)}
    stream_statistics(model, ids[:32])
    with timed(facts, "statistics"):
        stream_statistics(model, ids)
    with timed(facts, "moments"):
        second_moments(model, ids, kept)
    return facts | {f"{name}_tokens_per_second": ids.size / facts[f"{name}_s"] for name in ("statistics", "moments")}


def conversion(donor: Any, target: tuple[int, int, int], sequences: int) -> dict[str, Any]:
    """Seconds of `scaleop convert` by hybrid_rs, from a donor's files to the target's, with its own breakdown."""
    layers, width, heads = target
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        empty_model(donor).save_pretrained(path / "donor")
        AutoTokenizer.from_pretrained(ROOT / "models" / "nano-l").save_pretrained(path / "donor")
        draw = random.Random(0)
        words = ["".join(draw.choices("aeiounrst", k=draw.randint(1, 9))) for _ in range(sequences * LENGTH)]
        (path / "text.txt").write_text(" ".join(words) + "\n", encoding="utf-8")
        facts: dict[str, Any] = {"sequences": sequences}
        with timed(facts, "conversion"):
            made = convert(path / "donor", {"hidden": width, "heads": heads, "layers": layers, "mlp": 4 * width},
                           path / "small", text=str(path / "text.txt"), sequences=sequences, length=LENGTH,
                           moment_sequences=min(1000, sequences), moments="kept", device=device())
        return facts | {"seconds": made["seconds"], "resident_bytes": made["peak_memory_bytes"]}


def parts(tiny: bool, facts: dict[str, Any]) -> dict[str, Callable[[], Any]]:
    """What is measured, by name, in order; `facts` holds what was found before."""
    shapes, vocab = (TINY, 4096) if tiny else (PYTHIA, 50_304)
    configs = {name: pythia(*shape, vocab) for name, shape in shapes.items()}

    def of_race(experiment: str, name: str) -> dict[str, Any]:
        recipe = recipe_of(load_experiment(experiment).race)
        if tiny:
            recipe = replace(recipe, batch=4, length=32, micro_batch=2, chunk=64)
        return training(configs[name], recipe, facts["product"], facts["peak"])

    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    return {
        "peak": lambda: next((peak for part, peak in PEAKS.items() if part in name), None),
        "product": lambda: product(256 if tiny else 8192),
        "training 160m": lambda: of_race("heldout", "160m"), "training 410m": lambda: of_race("primary", "410m"),
        "perplexity 410m": lambda: evaluation(configs["410m"], 400 if tiny else 100_000, 32 if tiny else 1024),
        "donor 410m": lambda: donor_passes(configs["410m"], 40 if tiny else 1000),
        "donor 1.4b": lambda: donor_passes(configs["1.4b"], 40 if tiny else 500),
        "conversion 410m -> 160m": lambda: conversion(configs["410m"], shapes["160m"], 40 if tiny else 2000)}


def main() -> None:
    """Measure part by part and keep each at once."""
    parser = argparse.ArgumentParser(description="Throughput at Pythia's shapes on this machine's GPU.")
    parser.add_argument("--tiny", action="store_true", help="tiny shapes: that the code works, no figure worth keeping")
    parser.add_argument("--out", type=Path, help="file to write (default: benchmarks/results/gpu.json)")
    arguments = parser.parse_args()
    if not (torch.cuda.is_available() or arguments.tiny):
        parser.error("there is no GPU that torch sees here: --tiny --out FILE runs the same code at a tiny size")
    if arguments.tiny and arguments.out is None:
        parser.error("--tiny gives no figures for the book: say with --out where they shall go")
    facts, began = provenance(tiny=arguments.tiny), time.perf_counter()
    todo = parts(arguments.tiny, facts)
    for name in progress(todo, desc="parts"):
        facts[name] = todo[name]()
        facts["seconds"] = round(time.perf_counter() - began, 1)
        write_json(arguments.out or OUT, facts)
    print(json.dumps({name: facts[name] for name in todo}, indent=1))
    print(f"{facts['hardware']['device']}, {facts['seconds']} s"
          + (", at a tiny size: these say that the code works, and nothing of speed" if arguments.tiny else ""))


if __name__ == "__main__":
    main()

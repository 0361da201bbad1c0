"""Peak memory of a training step: plain, and with each way to save some, at the shape of Pythia-160M.

    python benchmarks/memory.py              # some minutes; writes benchmarks/results/memory.json
    python benchmarks/memory.py --table      # computes what the paper's pairs need; benchmarks/results/footprint.json

Every variant runs in a process of its own and reports the most memory it ever held (peak resident set, above what it
held before there was a model). Beside it stands what `scaleop.footprint` computes without running anything. The random
weights do not matter: every array has the size that it has in a real run. A small step comes first, as it does in a
long run, so that Adam's moments are there.
"""

import json
import resource
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path

import psutil
import torch
from transformers import GPTNeoXConfig

from scaleop.experiment import load_experiment
from scaleop.footprint import footprint
from scaleop.losses import NextTokenLoss
from scaleop.progress import progress
from scaleop.race import recipe_of
from scaleop.store import provenance, write_json
from scaleop.train import CLIP_NORM, Recipe, backward, make_accelerator, make_optimizer
from scaleop.weights import empty_model

OUT = Path(__file__).parent / "results" / "memory.json"
PLAIN = Recipe(tokens=1, batch=8, length=256, peak_lr=1e-4, warmup_steps=0, eval_every=1)
ALL = {"micro_batch": 2, "checkpoint_activations": True, "chunk": 256}
VARIANTS = {"plain": PLAIN, **{name: replace(PLAIN, **{name: value}) for name, value in ALL.items()},
            "all": replace(PLAIN, **ALL)}


PYTHIA = {"heldout": (12, 768, 12), "primary": (24, 1_024, 16), "scale": (24, 2_048, 16)}
"""Targets of the paper's pairs: blocks, width, heads."""


def pythia(layers: int, width: int, heads: int) -> GPTNeoXConfig:
    """A Pythia of that shape, with the 50,304 tokens of all sizes up to 1.4B."""
    return GPTNeoXConfig(vocab_size=50_304, hidden_size=width, num_hidden_layers=layers, num_attention_heads=heads,
                         intermediate_size=4 * width, rotary_pct=0.25, max_position_embeddings=2_048,
                         tie_word_embeddings=False, attn_implementation="sdpa")


def pythia_160m() -> GPTNeoXConfig:
    """The shape of Pythia-160M: 12 blocks of width 768."""
    return pythia(*PYTHIA["heldout"])


def table() -> None:
    """Bytes of a training step of the paper's pairs at their targets' shapes: plain, as params/ has it, all ways."""
    found, origin = {}, provenance()
    for name, shape in progress(PYTHIA.items(), desc="experiments"):
        recipe, nothing = recipe_of(load_experiment(name).race), dict.fromkeys(("micro_batch", "chunk"))
        all_ways = {"micro_batch": 4, "checkpoint_activations": True, "chunk": 2_048}
        found[name] = {way: asdict(footprint(pythia(*shape), each)) for way, each in {
            "plain": replace(recipe, checkpoint_activations=False, **nothing), "as in params": recipe,
            "all": replace(recipe, **all_ways)}.items()}
        print(name, {way: f"{each['peak'] / 1e9:.1f} GB" for way, each in found[name].items()}, flush=True)
    write_json(OUT.with_name("footprint.json"), {**origin, "experiments": found})


def measure(variant: str) -> dict[str, float]:
    """Bytes above the start, loss and seconds of one step in this process."""
    recipe, accelerator = VARIANTS[variant], make_accelerator("bf16")
    before = psutil.Process().memory_info().rss
    torch.manual_seed(0)
    model = empty_model(pythia_160m()).train()
    if recipe.checkpoint_activations:
        model.activation_checkpointing_enable({"use_reentrant": False})
    loss_of, optimizer = accelerator.prepare(NextTokenLoss(model, recipe.chunk), make_optimizer(model, recipe))
    tokens = torch.randint(0, 50_304, (recipe.batch, recipe.length))
    for rows in (tokens[:1], tokens):
        began = time.perf_counter()
        loss = backward(accelerator, loss_of, rows, recipe.micro_batch).item()
        accelerator.clip_grad_norm_(model.parameters(), CLIP_NORM)
        optimizer.step()
        optimizer.zero_grad()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {"peak": peak - before, "loss": loss, "seconds": round(time.perf_counter() - began, 1)}


def main() -> None:
    """Run every variant and write the table."""
    origin, found = provenance(batch=PLAIN.batch, length=PLAIN.length, settings=ALL), {}
    for variant, recipe in progress(VARIANTS.items(), desc="variants"):
        run = subprocess.run([sys.executable, __file__, variant], capture_output=True, text=True, check=True)
        found[variant] = {**json.loads(run.stdout), "computed": footprint(pythia_160m(), recipe).peak}
    plain = found["plain"]["peak"]
    for values in found.values():
        values["share"] = values["peak"] / plain
    write_json(OUT, {**origin, "variants": found})
    for variant, values in found.items():
        print(f"{variant:24} {values['peak'] / 1e9:5.2f} GB ({values['share']:.2f} of plain), computed "
              f"{values['computed'] / 1e9:5.2f} GB; {values['seconds']} s, loss {values['loss']:.5f}")


if __name__ == "__main__":
    if sys.argv[1:] == ["--table"]:
        table()
    else:
        print(json.dumps(measure(sys.argv[1]))) if sys.argv[1:] else main()

"""Peak memory of a training step: plain, and with each way to save some, at the shape of Pythia-160M.

    python benchmarks/memory.py              # some minutes; writes benchmarks/results/memory.json
    python benchmarks/memory.py --table      # computes what the paper's pairs need; benchmarks/results/footprint.json

Every variant runs in a process of its own and reports the most memory it ever held (peak resident set, above what it
held before there was a model). Beside it stands what `scaleop.footprint` computes without running anything. The random
weights do not matter: every array has the size that it has in a real run. A small step comes first, as it does in a
long run, so that Adam's moments are there.
"""

import json
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path

import psutil
import torch

from scaleop.convert import peak_memory
from scaleop.experiment import load_experiment
from scaleop.footprint import footprint, ways
from scaleop.losses import NextTokenLoss
from scaleop.progress import progress
from scaleop.pythia import PYTHIA, pythia
from scaleop.race import recipe_of
from scaleop.store import provenance, write_json
from scaleop.train import CLIP_NORM, Recipe, backward, make_accelerator, make_optimizer
from scaleop.weights import empty_model

OUT = Path(__file__).parent / "results" / "memory.json"
PLAIN = Recipe(tokens=1, batch=8, length=256, peak_lr=1e-4, warmup_steps=0, eval_every=1)
ALL = {"micro_batch": 2, "checkpoint_activations": True, "chunk": 256}
VARIANTS = {"plain": PLAIN, **{name: replace(PLAIN, **{name: value}) for name, value in ALL.items()},
            "all": replace(PLAIN, **ALL)}
TARGETS = {"heldout": "160m", "primary": "410m", "scale": "1.4b"}


def table() -> None:
    """Bytes of a training step of the paper's pairs at their targets' shapes: plain, as params/ has it, all ways."""
    found, origin = {}, provenance()
    for name, shape in progress(TARGETS.items(), desc="experiments"):
        recipe, nothing = recipe_of(load_experiment(name).race), dict.fromkeys(("micro_batch", "chunk"))
        found[name] = {way: asdict(footprint(pythia(*PYTHIA[shape]), each)) for way, each in {
            "plain": replace(recipe, checkpoint_activations=False, **nothing), "as in params": recipe,
            "all": ways(recipe)["all three"]}.items()}
        print(name, {way: f"{each['peak'] / 1e9:.1f} GB" for way, each in found[name].items()}, flush=True)
    write_json(OUT.with_name("footprint.json"), {**origin, "experiments": found})


def measure(variant: str) -> dict[str, float]:
    """Bytes above the start, loss and seconds of one step in this process."""
    recipe, accelerator = VARIANTS[variant], make_accelerator("bf16")
    before = psutil.Process().memory_info().rss
    torch.manual_seed(0)
    model = empty_model(pythia(*PYTHIA["160m"])).train()
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
    return {"peak": peak_memory() - before, "loss": loss, "seconds": round(time.perf_counter() - began, 1)}


def main() -> None:
    """Run every variant and write the table."""
    origin, found = provenance(batch=PLAIN.batch, length=PLAIN.length, settings=ALL), {}
    for variant, recipe in progress(VARIANTS.items(), desc="variants"):
        run = subprocess.run([sys.executable, __file__, variant], capture_output=True, text=True, check=True)
        found[variant] = {**json.loads(run.stdout), "computed": footprint(pythia(*PYTHIA["160m"]), recipe).peak}
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

"""What `tests/test_accelerate.py` runs in two processes: `accelerate launch` this file with a folder.

Trains the same tiny model in several ways and leaves in the folder, a file a way and process, the curve and a sum of
the weights; the test has trained the same in one process.
"""

import json
import sys
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
from accelerate import PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin

from scaleop import train as loop
from scaleop.corpus import TokenFile
from scaleop.distillation import Distillation, DistilledLoss
from scaleop.evaluate import perplexity
from scaleop.losses import NextTokenLoss
from scaleop.processes import processes
from scaleop.train import Recipe, train
from tests.conftest import neox_config, random_model

RECIPE = Recipe(tokens=4 * 11 * 6, batch=4, length=11, peak_lr=3e-3, warmup_steps=2, eval_every=88, precision="no",
                checkpoint_every=2)
SAVING = replace(RECIPE, micro_batch=1, checkpoint_activations=True, chunk=4)
HELD_OUT = np.random.default_rng(5).integers(0, 61, 400)


def taught():
    """A loss with a teacher that is wider than the student."""
    teacher = random_model(neox_config(width=32, vocab=68), seed=1)
    return partial(DistilledLoss, teacher=teacher, settings=Distillation(3.0, 0.3))


WAYS = {"plain": (RECIPE, lambda: NextTokenLoss), "saving": (SAVING, lambda: NextTokenLoss), "taught": (SAVING, taught),
        "bf16": (replace(SAVING, precision="bf16"), lambda: NextTokenLoss)}


def run(way, stream, folder, seed=0, evaluate=None):
    """Train one way; {curve, weights}. Weights other than the main process's must not matter: `seed` makes them."""
    recipe, loss = WAYS[way]
    model = random_model(neox_config(), std=0.1, seed=seed)
    curve = train(model, stream, recipe, key="key", name=way, folder=folder, loss=loss(),
                  evaluate=evaluate or (lambda model: perplexity(model, HELD_OUT, 16, 8, 4, together=True).value))
    return {"curve": curve, "weights": model.lm_head.weight.detach().double().square().sum().item()}


def shard():
    """Make accelerate shard (FSDP2) here; returns where it notes which share of the weights a process has. accelerate
    does so on GPUs only, and takes plain data parallelism on CPUs without a word; torch's sharding itself runs there.
    """
    plain, noted = loop.Accelerator, []

    def sharding(**settings):
        accelerator = plain(**settings)
        PartialState._shared_state["distributed_type"] = DistributedType.FSDP  # as accelerate itself does on GPUs
        accelerator.state.distributed_type = DistributedType.FSDP
        accelerator.state.fsdp_plugin = plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2, auto_wrap_policy="transformer_based_wrap", cpu_ram_efficient_loading=False)
        if settings["mixed_precision"] != "no":
            plugin.set_mixed_precision(settings["mixed_precision"])
        prepare = accelerator.prepare

        def watched(module, optimizer):
            module, optimizer = prepare(module, optimizer)
            parts = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            noted.append(sum(part.to_local().numel() for part in parts) / sum(part.numel() for part in parts))
            return module, optimizer
        accelerator.prepare = watched
        return accelerator
    loop.Accelerator = sharding
    return noted


def count_kept_back():
    """How often a backward pass was kept from exchanging gradients."""
    from accelerate import Accelerator

    counted, plain = Counter(), Accelerator.no_sync

    def no_sync(self, model):
        counted["kept"] += 1
        return plain(self, model)
    Accelerator.no_sync = no_sync
    return counted


def main():
    """All ways in this process, of which there is another."""
    folder, world, counted = Path(sys.argv[1]), processes(), count_kept_back()
    stream, rank = TokenFile(folder / "stream"), world.process_index

    def keep(name, found):
        found = {**found, "exchanges kept back": counted.pop("kept", 0)}
        (folder / f"{name}-{rank}.json").write_text(json.dumps(found))

    for way in WAYS:
        keep(way, run(way, stream, folder / way, seed=10 * rank))
    noted = shard()
    keep("sharded", {**run("saving", stream, folder / "sharded", seed=10 * rank), "share": noted[0]})
    keep("sharded bf16", run("bf16", stream, folder / "sharded bf16", seed=10 * rank))
    keep("resumed", run("plain", stream, folder / "resumed"))  # begun by one process, and now sharded
    world.destroy_process_group()


if __name__ == "__main__":
    main()

"""What a training step needs, before anybody has the GPU for it: its own code runs on tensors without contents.

    python -m scaleop.footprint --experiment nano          # as its file says, and with what saves memory

Fake tensors have shapes and no bytes, so a step of any size takes seconds on any machine; every storage that comes and
goes is counted. What a kernel uses inside itself, the allocator's fragmentation (a few per cent) and the framework's
own gigabyte are not. The step is the training loop's own model, loss and optimiser in a short loop of this module's, as
torch runs them on a CPU: its autocast and kernels. A GPU's may keep other intermediate results.
"""

import argparse
import weakref
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from scaleop.distillation import Distillation, DistilledLoss
from scaleop.losses import NextTokenLoss
from scaleop.train import Recipe, make_optimizer
from scaleop.weights import empty_model, load_config


@dataclass(frozen=True)
class Footprint:
    """Bytes of one process: the three that stay (weights, gradients, Adam's moments) and the `peak` of a step, whose
    remainder are activations, logits and copies in bf16."""

    weights: int
    gradients: int
    moments: int
    peak: int

    @property
    def rest(self) -> int:
        """What is there at the peak beside weights, gradients and moments."""
        return self.peak - self.weights - self.gradients - self.moments


class Peak(TorchDispatchMode):
    """Counts the bytes of all storages that operations make inside the block: `now`, and the most there ever were."""

    def __init__(self) -> None:
        super().__init__()
        self.now, self.most = 0, 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation and count what storage it made."""
        made = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(made):
            if isinstance(tensor, torch.Tensor) and (storage := tensor.untyped_storage())._cdata not in self._known:
                self._known.add(storage._cdata)
                self.now += storage.nbytes()
                self.most = max(self.most, self.now)
                weakref.finalize(storage, self._gone, storage._cdata, storage.nbytes())
        return made

    def _gone(self, key: int, size: int) -> None:
        self._known.remove(key)
        self.now -= size

    def __enter__(self) -> Self:
        """As TorchDispatchMode."""
        super().__enter__()
        return self


def footprint(config: Any, recipe: Recipe, processes: int = 1, teacher: Any = None) -> Footprint:
    """The memory of a step of `recipe` for a model of that config, in one of `processes` (data parallel).

    Of a step's micro-batches the first two are taken: with the second, gradients of the first are there. `teacher`: the
    config of a donor to distil from; it counts to the rest.
    """
    rows = recipe.batch // processes
    part = min(recipe.micro_batch or rows, rows)
    with FakeTensorMode(), Peak() as memory:
        donor = empty_model(teacher) if teacher is not None else None
        taught = memory.now
        model = empty_model(config).train()
        if recipe.checkpoint_activations:
            model.activation_checkpointing_enable({"use_reentrant": False})
        weights = memory.now - taught
        optimizer = make_optimizer(model, recipe)
        loss_of = DistilledLoss(model, donor, Distillation(), recipe.chunk) if donor else NextTokenLoss(
            model, recipe.chunk)
        for size in (1, min(2 * part, rows)):  # a small step first: it makes Adam's moments
            for ids in torch.zeros(size, recipe.length, dtype=torch.long).split(part):
                with torch.autocast("cpu", torch.bfloat16, enabled=recipe.precision == "bf16"):
                    loss = loss_of(ids)
                loss.backward()
            del ids, loss
            optimizer.step()
            gradients = sum(parameter.grad.untyped_storage().nbytes() for parameter in model.parameters())
            optimizer.zero_grad()
        return Footprint(weights, gradients, memory.now - weights - taught, memory.most)


def ways(recipe: Recipe) -> dict[str, Recipe]:
    """The recipe as it is, and with each way to save memory at a usual setting, and with all three."""
    one = {"micro_batch": 4, "checkpoint_activations": True, "chunk": 2048}
    return {"as it is": recipe, **{name: replace(recipe, **{name: value}) for name, value in one.items()},
            "all three": replace(recipe, **one)}


def main() -> None:
    """Command line: the table of one experiment."""
    from scaleop.experiment import load_experiment
    from scaleop.race import Race, refusals

    parser = argparse.ArgumentParser(prog="python -m scaleop.footprint", description="What a training step needs.")
    parser.add_argument("--experiment", default="nano")
    parser.add_argument("--processes", type=int, default=1)
    arguments = parser.parse_args()
    with refusals():
        race = Race(load_experiment(arguments.experiment))
    print(f"{'GB':24} weights  gradients  moments  rest   peak")
    donor = load_config(race.experiment.pair.donor)
    todo = [(name, recipe, None) for name, recipe in ways(race.recipe).items()]
    for name, recipe, teacher in [*todo, ("as it is, distilled", race.recipe, donor)]:
        found = footprint(race.target, recipe, arguments.processes, teacher)
        print(f"{name:24} {found.weights / 1e9:7.2f}  {found.gradients / 1e9:9.2f}  {found.moments / 1e9:7.2f}  "
              f"{found.rest / 1e9:5.2f}  {found.peak / 1e9:5.2f}")


if __name__ == "__main__":
    main()

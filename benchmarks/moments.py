"""Second moments: `scaleop.activations`, kept columns only, against hooks that sum the full square, side by side.

    OMP_NUM_THREADS=1 python benchmarks/moments.py      # some ten minutes; writes benchmarks/results/moments.json

Blocks of two real pairs with random weights: of Pythia-1.4B (half of its read-outs' inputs are kept on the way to
410M) and of Pythia-410M (three quarters, and every second block, on the way to 160M). Every measurement is a process
of its own. Time: one block (or two, of which one is kept) and four batches, as a bare pass and then with hooks, so
that the seconds of the moments alone are known too; rounds alternate their order. Memory: the process's peak (Linux's
count) above the loaded model, with six blocks and sequences a quarter as long, so that sums and activations stand to
each other as in the whole model's 24 blocks.

`precision` says what the dtype of the sums costs: the error against fp64 throughout, at a smaller shape.
"""

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import psutil
import torch
from torch import nn
from transformers import GPTNeoXConfig

from scaleop.activations import forward_all, hooked, second_moments
from scaleop.convert import peak_memory
from scaleop.progress import progress
from scaleop.store import provenance, write_json
from scaleop.weights import empty_model, module_of
from scaleop.wiring import READ_OUT, wiring_of

ROUNDS, BATCH = 2, 16
OUT = Path(__file__).parent / "results" / "moments.json"
SHAPES = {"1.4b -> 410m": {"width": 2048, "heads": 16, "every": 1, "share": 1 / 2},
          "410m -> 160m": {"width": 1024, "heads": 16, "every": 2, "share": 3 / 4}}
"""Of the donor; `every` so many blocks one is kept, and a `share` of its read-outs' inputs."""
MEMORY = {"blocks": 6, "sequences": 32, "length": 32}

Moments = dict[tuple[int, str], torch.Tensor]


def full_square(model: nn.Module, sequences: np.ndarray, dtype: torch.dtype = torch.float32) -> Moments:
    """The obvious way: a hook on every read-out of every block adds the whole of x'x to a square."""
    sums, handles = {}, []
    for block in range(model.config.num_hidden_layers):
        for role in wiring_of(model.config).lever(READ_OUT):
            def accumulate(module: nn.Module, inputs: tuple[torch.Tensor], key: tuple = (block, role.name)) -> None:
                x = inputs[0].flatten(0, -2).to(dtype)  # (positions, n)
                square = x.T @ x
                sums[key] = square if key not in sums else sums[key].add_(square)
            handles.append(module_of(model, role, block).register_forward_pre_hook(accumulate))
    with hooked(handles):
        forward_all(model, sequences, BATCH, "full squares")
    return sums


def opened(width: int, heads: int, every: int, share: float, blocks: int, sequences: int,
           length: int = 128) -> tuple[nn.Module, np.ndarray, Moments]:
    """Random donor, token ids, and {(kept block, read-out): kept inputs}. Its vocabulary is small: it plays no part."""
    torch.manual_seed(0)
    model = empty_model(GPTNeoXConfig(hidden_size=width, intermediate_size=4 * width, num_hidden_layers=blocks,
                                      num_attention_heads=heads, vocab_size=1000, max_position_embeddings=2048)).eval()
    kept = {}
    for block in range(0, blocks, every):
        for role in wiring_of(model.config).lever(READ_OUT):
            n = module_of(model, role, block).in_features
            kept[block, role.name] = torch.randperm(n)[: round(share * n)].sort().values
    return model, np.random.default_rng(0).integers(0, 1000, (sequences, length)), kept


def variants(model: nn.Module, sequences: np.ndarray, kept: Moments) -> dict[str, Callable[[], Moments]]:
    """The three ways to gather the same moments."""
    return {"full square, fp32": lambda: full_square(model, sequences),
            "kept columns, fp64": lambda: second_moments(model, sequences, kept, BATCH, torch.float64),
            "kept columns, fp32": lambda: second_moments(model, sequences, kept, BATCH, torch.float32)}


def measure_time(shape: str, variant: str) -> dict[str, float]:
    """One bare pass and one of a variant: processor seconds of both (which other work on the machine hardly changes),
    and the latter's by the clock."""
    model, sequences, kept = opened(**SHAPES[shape], blocks=SHAPES[shape]["every"], sequences=4 * BATCH)
    forward_all(model, sequences[:1], 1, "warm-up")
    began = time.process_time()
    forward_all(model, sequences, BATCH, "no moments")
    between, clock = time.process_time(), time.perf_counter()
    variants(model, sequences, kept)[variant]()
    return {"forward_s": between - began, "seconds": time.process_time() - between,
            "clock_s": time.perf_counter() - clock}


def measure_memory(shape: str, variant: str) -> dict[str, float]:
    """Peak bytes of a variant's pass above the loaded model."""
    model, sequences, kept = opened(**SHAPES[shape], **MEMORY)
    Path("/proc/self/clear_refs").write_text("5")  # the peak so far, of making the model, is forgotten
    loaded = psutil.Process().memory_info().rss
    variants(model, sequences, kept)[variant]()
    return {"bytes": peak_memory() - loaded}


def precision() -> dict[str, float]:
    """Relative (Frobenius) error of each variant's moments against fp64 throughout, of the worst read-out."""
    model, sequences, kept = opened(width=256, heads=4, blocks=1, every=1, share=1 / 2, sequences=400)
    exact = {key: square[:, kept[key]] for key, square in full_square(model, sequences, torch.float64).items()}

    def error(sums: Moments, key: tuple[int, str]) -> float:
        columns = sums[key] if sums[key].shape == exact[key].shape else sums[key][:, kept[key]]
        return ((columns.double() - exact[key]).norm() / exact[key].norm()).item()

    return {name: max(error(sums, key) for key in exact)
            for name, sums in ((name, run()) for name, run in variants(model, sequences, kept).items())}


def alone(measure: str, shape: str, variant: str) -> dict[str, float]:
    """A measurement in a process of its own."""
    run = subprocess.run([sys.executable, __file__, measure, shape, variant], stdout=subprocess.PIPE, text=True,
                         check=True)
    return json.loads(run.stdout.splitlines()[-1])


def main() -> None:
    """Memory of each variant, then rounds of time, their order alternating."""
    names, found = list(variants(None, None, None)), {}
    origin = provenance(memory=MEMORY, batch=BATCH)
    for shape in progress(SHAPES, desc="shapes"):
        memory = {name: alone("memory", shape, name) for name in names}
        rounds = []
        for turn in progress(range(ROUNDS), desc="rounds"):
            run = {name: alone("time", shape, name) for name in (names if turn % 2 == 0 else names[::-1])}
            rounds.append({name: run[name] for name in names})
        found[shape] = {**SHAPES[shape], "memory": memory, "rounds": rounds}
        write_json(OUT, {**origin, "shapes": found})
    write_json(OUT, {**origin, "shapes": found, "precision": precision()})


if __name__ == "__main__":
    if sys.argv[1:]:
        print(json.dumps({"time": measure_time, "memory": measure_memory}[sys.argv[1]](*sys.argv[2:])))
    else:
        main()

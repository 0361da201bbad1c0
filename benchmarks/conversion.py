"""Converting block by block against loading everything: peak memory and wall time, at Pythia's shapes, random weights.

    python benchmarks/conversion.py                              # all pairs; hours on two cores, and 14 GB of disk
    python benchmarks/conversion.py "410m -> 160m"               # one
    python benchmarks/conversion.py "6.9b -> 1.4b" --blocks 2    # the whole donor read, two blocks of the target made

Donors are written to a temporary folder (TMPDIR) a block at a time in fp16. Each way runs in a process of its own;
its largest resident set is the figure, and the time is that of the work alone, without imports. Loading everything is
`scaleop.arms.build`, which has two fp32 copies of the donor and all columns of the moments in memory; where the machine
has not that much, it is left out and its parts' sizes are given instead. Results of pairs that are not asked for stay.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from scaleop.arms import ARMS, build
from scaleop.blockwise import Blockwise
from scaleop.convert import peak_memory
from scaleop.donor import Donor
from scaleop.measured import Statistics
from scaleop.progress import progress
from scaleop.pythia import pythia
from scaleop.shards import Checkpoint, ShardWriter
from scaleop.store import provenance, read_json, write_json
from scaleop.weights import keys, load, to_state
from scaleop.wiring import GPT_NEOX, config_like, shape_of

OUT = Path(__file__).parent / "results" / "conversion.json"
M410 = {"layers": 24, "width": 1024, "heads": 16, "mlp": 4096, "vocab": 50304}
B14 = {"layers": 24, "width": 2048, "heads": 16, "mlp": 8192, "vocab": 50304}
STREAMING, FULL, EVERYTHING = "streaming", "streaming, full moments", "loading everything"
PAIRS = {  # donor, target, ways, (sequences, tokens each, sequences for moments)
    "410m -> 160m": (M410, {"layers": 12, "width": 768, "heads": 12, "mlp": 3072, "vocab": 50304},
                     (STREAMING, FULL, EVERYTHING), (64, 64, 32)),
    "1.4b -> 410m": (B14, M410, (STREAMING, EVERYTHING), (32, 32, 32)),
    "6.9b -> 1.4b": ({"layers": 32, "width": 4096, "heads": 32, "mlp": 16384, "vocab": 50432}, B14,
                     (STREAMING,), (8, 16, 8)),
}
"""Few tokens: memory does not hang on them (hidden states beyond 1 GB wait on disk), time does, either way."""


def write_donor(folder: Path, sizes: dict[str, int]) -> None:
    """A checkpoint of that shape with random fp16 weights (std 0.02, norms neutral), a block in memory at a time."""
    config = pythia(sizes["layers"], sizes["width"], sizes["heads"], sizes["vocab"], dtype="float16",
                    architectures=["GPTNeoXForCausalLM"])
    shape, writer, draw = shape_of(config), ShardWriter(folder, GPT_NEOX, torch.float16), torch.Generator()
    parts: dict[Any, list[Any]] = {}
    for key, role in keys(GPT_NEOX, shape.layers):
        parts.setdefault(key[0], []).append((key, role))
    for block in progress(parts, desc="random donor", unit=" blocks"):
        weights = {}
        for key, role in parts[block]:
            tensor = torch.empty([shape.size(axis) for axis in role.axes]).normal_(std=0.02, generator=draw)
            weights[key] = tensor if role.neutral is None else tensor.fill_(role.neutral)
        writer.add(to_state(weights, config, parts[block]))
    writer.finish()
    config.save_pretrained(folder)


def measure(way: str, folder: Path, job: dict[str, Any]) -> dict[str, float]:
    """Convert the donor of `folder` one way; its seconds, those of the processor alone, and peak memory in GB."""
    checkpoint = Checkpoint(folder / "donor")
    target = config_like(checkpoint.config, **job["target"])
    sequences, length, moments = job["text"]
    ids = np.random.default_rng(0).integers(0, checkpoint.config.vocab_size, (sequences, length))
    arm, out, began, worked = ARMS["hybrid_rs"], folder / way, time.perf_counter(), time.process_time()
    out.mkdir()
    if way != EVERYTHING:
        keep = "full" if way == FULL else "kept"  # for any later shape, or what the other way gathers too
        statistics = Statistics(checkpoint, ids, moments, folder / f"blocks, {keep}", keep)
        conversion = Blockwise(arm, statistics, target, job["spectra"])
        conversion.prepare()
        writer = ShardWriter(out, checkpoint.wiring)
        conversion.write(writer)
        writer.finish()
        target.save_pretrained(out)
    else:
        donor = Donor(load(folder / "donor"), ids, moments, "donor", folder / "memory")
        build(arm, donor, target, 0)[0].save_pretrained(out)
    return {"seconds": time.perf_counter() - began, "processor seconds": time.process_time() - worked,
            "peak GB": peak_memory() / 1e9}


def everything(donor: dict[str, int], target: dict[str, int]) -> float:
    """GB that loading everything holds at the least: the donor twice, the kept columns of its moments, the result."""
    def numbers(sizes: dict[str, int]) -> float:
        width, mlp = sizes["width"], sizes["mlp"]
        return 2 * sizes["vocab"] * width + sizes["layers"] * (4 * width**2 + 2 * width * mlp)

    columns = target["layers"] * (donor["mlp"] * target["mlp"] + donor["width"] * target["width"])
    return (4 * (2 * numbers(donor) + numbers(target)) + 8 * columns) / 1e9


def available() -> float:
    """GB of memory that processes may still take (Linux)."""
    lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines())
    return int(lines["MemAvailable"].split()[0]) * 1024 / 1e9


def run(name: str, blocks: int | None, spectra: bool) -> dict[str, Any]:
    """Measure one pair, each way in a process of its own."""
    donor, target, ways, text = PAIRS[name]
    job = {"donor": donor, "target": {**target, "layers": blocks or target["layers"]}, "text": text, "spectra": spectra}
    result = provenance(**job, ways={})
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "donor").mkdir()
        write_donor(Path(folder) / "donor", donor)
        for way in ways:
            need = everything(donor, job["target"])
            if way == EVERYTHING and need > (free := available()):
                result["ways"][way] = {"left out": f"its parts take {need:.1f} GB, and {free:.1f} GB were free"}
                continue
            process = subprocess.run([sys.executable, __file__, "--measure", way, folder, json.dumps(job)],
                                     stdout=subprocess.PIPE, text=True, check=True)
            result["ways"][way] = json.loads(process.stdout.splitlines()[-1])
        result["donor on disk, GB"] = sum(path.stat().st_size for path in Path(folder, "donor").iterdir()) / 1e9
    return result


def main() -> None:
    """Measure the pairs that are asked for and keep what was found, after each."""
    parser = argparse.ArgumentParser()
    parser.add_argument("pairs", nargs="*", help=f"of {', '.join(PAIRS)}; default: all")
    parser.add_argument("--blocks", type=int, help="make so many of the target's blocks only")
    parser.add_argument("--no-spectra", dest="spectra", action="store_false", help="no spectra of solves (streaming)")
    parser.add_argument("--measure", nargs=3, metavar=("WAY", "FOLDER", "JOB"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        way, folder, job = arguments.measure
        print(json.dumps(measure(way, Path(folder), json.loads(job))))
        return
    for name in arguments.pairs or PAIRS:
        found = read_json(OUT) if OUT.exists() else {}
        write_json(OUT, found | {name: run(name, arguments.blocks, arguments.spectra)})
        print(name, json.dumps(read_json(OUT)[name]["ways"]))


if __name__ == "__main__":
    main()

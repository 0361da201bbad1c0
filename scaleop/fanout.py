"""Runs alone, without pages: `snakemake race --config experiments=primary,heldout arms=... seeds=0,1,2`.

Which runs that names, and what each of them asks of a machine or a cluster: the Snakefile turns this into jobs.
"""

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from scaleop.experiment import Experiment, ExperimentError, load_experiment, planned
from scaleop.strict import nearest

if TYPE_CHECKING:
    from scaleop.race import Race

LARGE = 1e8  # weights of a target that wants a GPU
FLOPS = {"gpu": 2e13, "cpu": 2e10}  # of one GPU (the paper's GB10: 9,400 tokens/s of the primary race), of one CPU core


class Asked(NamedTuple):
    """What `snakemake race --config ...` may be told."""

    experiments: str  # comma-separated: names, or paths of YAML files
    arms: str | None = None  # comma-separated
    seeds: str | int | None = None  # comma-separated
    tokens: int | None = None  # of each run
    gpus: int | None = None  # for each run; None: one where the target is large, else none
    processes: int | None = None  # for each run; None: one for each of its GPUs
    launch: str | None = None  # path of a configuration of accelerate (`accelerate config`): FSDP, say

    @classmethod
    def of(cls, config: dict[str, Any]) -> "Asked":
        """The values of `--config`; ExperimentError for what cannot be."""
        for key in config:
            if key not in cls._fields:
                raise ExperimentError(f"--config {key}={config[key]}: unknown key; {nearest(key, list(cls._fields))}")
        asked = cls(**absolute(config))
        if asked.launch is None:
            return asked
        if not Path(asked.launch).is_file():
            raise ExperimentError(f"--config launch={asked.launch}: there is no such file; `accelerate config "
                                  "--config_file FILE` writes one")
        if (asked.processes or asked.gpus or 1) < 2:
            raise ExperimentError(f"--config launch={asked.launch} is for runs of several processes: give gpus=4, say")
        return asked


def absolute(config: dict[str, Any]) -> dict[str, Any]:
    """`--config` with files by their absolute paths: experiments that are YAML files, and accelerate's."""
    def found(text: str) -> str:
        return ",".join(str(Path(name).resolve()) if name.endswith((".yaml", ".yml", ".json")) else name
                        for name in map(str.strip, text.split(",")))
    return {key: found(value) if key in ("experiment", "experiments", "launch") and isinstance(value, str) else value
            for key, value in config.items()}


def fan_out(asked: Asked) -> dict[str, tuple[Experiment, list[tuple[str, int]]]]:
    """{name as asked for: (experiment, its (arm, seed) pairs)}.

    Without arms and seeds: each experiment's own plan (its arms on the first seed, its leaders on every seed). With
    any: each of the arms (default: the experiment's) on each of the seeds (default: the experiment's).
    """
    found = {}
    for name in [part.strip() for part in asked.experiments.split(",")]:
        each = load_experiment(name, tokens=asked.tokens, arms=asked.arms, seeds=asked.seeds)
        crossed = [(arm, seed) for arm in dict.fromkeys(each.race.arms) for seed in dict.fromkeys(each.seeds)]
        found[name] = each, planned(each) if asked.arms is None and asked.seeds is None else crossed
    return found


class Needs(NamedTuple):
    """What one run asks for. Generous: these are limits, and a run that reaches one resumes when it is repeated."""

    mem_mb: int  # of the machine, not of its GPUs
    runtime: int  # minutes
    gpu: int
    processes: int
    threads: int  # of all processes

    @property
    def gloo(self) -> bool:
        """Several processes without GPUs?"""
        return self.processes > 1 and self.gpu == 0


def needs(race: "Race", gpus: int | None = None, processes: int | None = None) -> Needs:
    """The needs of any run of an experiment, from the weights of donor and target and from its tokens.

    Memory: the donor in fp32, and twice as much again for moments and copies; for each process the target with
    gradients and both Adam moments, and where an arm is distilled, for each but the main one the donor and its copy on
    the way to the GPU. Time: 6 operations a weight and token at `FLOPS`, three times over, plus an hour.
    """
    from scaleop.arms import arm_named
    from scaleop.weights import load_config

    donor, target = weights(load_config(race.experiment.pair.donor)), weights(race.target)
    gpu = (1 if target > LARGE else 0) if gpus is None else gpus
    count = max(1, gpu) if processes is None else processes
    rate = FLOPS["gpu"] * gpu if gpu else FLOPS["cpu"] * count
    settings = race.experiment.race
    distilled = any(arm_named(arm).distill for arm in (*settings.arms, *settings.leaders))
    teachers = 8 * donor * (count - 1) if distilled else 0
    return Needs(mem_mb=round(3000 + (12 * donor + 16 * target * count + teachers) / 1e6),
                 runtime=60 + math.ceil(3 * 6 * target * race.recipe.consumed / rate / 60),
                 gpu=gpu, processes=count, threads=max(count, 4 * gpu))


def weights(config: Any) -> int:
    """How many weights a model of a transformers config has."""
    from scaleop.weights import keys
    from scaleop.wiring import shape_of, wiring_of

    shape = shape_of(config)
    return sum(math.prod(shape.size(axis) for axis in role.axes) for _, role in keys(wiring_of(config), shape.layers))


def launcher(run: Needs, configuration: str | None = None) -> list[str]:
    """What stands between `python` and `-m scaleop.race`: nothing, or accelerate's launcher for several processes.

    How they train together is DDP, or what a `configuration` of accelerate says (FSDP, say). Processes without GPUs
    are asked for as if they had some: ACCELERATE_USE_CPU=true, which the Snakefile sets, makes gloo of it.
    """
    if run.processes == 1:
        return []
    together = ["--config_file", configuration] if configuration else ["--multi_gpu"]  # that would overrule a file
    return ["-m", "accelerate.commands.launch", *together, "--num_machines", "1", "--num_processes",
            str(run.processes), "--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "0"]

"""Experiments as data: `params/<name>.yaml`, read into strict typed objects before any work starts.

`load_experiment("nano", tokens=100_000)` is what a notebook's parameters become. What is not as it should be is refused
with a sentence that names the key, the value and the remedy (`scaleop.strict`).
"""

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from pydantic import Field, PositiveInt

from scaleop.paths import PARAMS
from scaleop.settings import CorpusSettings, Evaluation, Ladder, Pair, RaceSettings
from scaleop.strict import ExperimentError, Strict, experiments, nearest, read_yaml, validate


class Experiment(Strict):
    """One file of `params/`, with a notebook's overrides applied."""

    name: str
    title: str
    pair: Pair
    corpus: CorpusSettings
    evaluation: Evaluation
    race: RaceSettings
    seeds: list[int] = Field(min_length=1)
    companions: dict[str, str] = Field(default_factory=dict)  # {role: experiment}: the pairs and budgets of 7.5, 7.6
    share: float = Field(default=1.0, gt=0)  # of its file's budget; `load_experiment` sets it where `tokens` is given


def load_ladder(path: Path = PARAMS / "ladder.yaml") -> Ladder:
    """The pretraining recipe of the nano ladder."""
    return read_yaml(path, Ladder)


class NotebookParameters(Strict):
    """What a notebook's `parameters` cell may hold; None leaves what the experiment's file says."""

    experiment: str = "nano"
    seed: int = Field(default=0, ge=0)
    tokens: PositiveInt | None = None
    arms: str | list[str] | None = None
    seeds: str | int | list[int] | None = None
    width: int | None = Field(default=None, ge=512)  # of section 7.6's widest solve; no part of the experiment


CHECKED = "_scaleop_parameters_checked"


def from_notebook(namespace: dict[str, Any]) -> tuple[Experiment, int]:
    """The experiment and seed that a notebook's parameters ask for; `namespace` is `globals()`, or a copy of it.

    Call it before any other work: papermill accepts any name (`-p sead 2`) in silence, so every value of the fresh
    `namespace` must be a parameter (what was imported may stay); ExperimentError otherwise. In a kernel where this
    has succeeded before (the cell is run again by hand) other names are fine.

    A parameter that the notebook itself does not list is taken (`scaleop.reproduce` gives all pages the same ones), but
    a line says so. A notebook annotates its own, `seed: int = 0`; what papermill injects is not annotated.
    """
    given = {name: value for name, value in namespace.items()
             if not name.startswith("_") and name not in ("In", "Out") and not callable(value)
             and not isinstance(value, ModuleType)}
    if CHECKED in namespace:
        given = {name: value for name, value in given.items() if name in NotebookParameters.model_fields}
    values = validate(given, NotebookParameters, "notebook parameters")
    experiment = load_experiment(values.experiment, tokens=values.tokens, arms=values.arms, seeds=values.seeds)
    own = namespace.get("__annotations__") or given  # nothing annotated: no notebook of ours
    for name in given:
        if name not in own:
            print(f"note: {name} = {given[name]!r} is no parameter of this notebook's own; it may change nothing here")
    vars(sys.modules["__main__"])[CHECKED] = True  # the kernel's own namespace; `namespace` may be a copy
    return experiment, values.seed


def load_experiment(name: str, *, tokens: int | None = None, arms: list[str] | str | None = None,
                    seeds: list[int] | int | str | None = None) -> Experiment:
    """An experiment by name (or path of a YAML file), with overrides; None leaves what the file says.

    `arms` and `seeds` may be lists or comma-separated strings. `name` may end in a training seed: `mini@seed3` is
    `mini` with donor and reference of that pretraining run. Raises ExperimentError for anything unknown or of the wrong
    type; `scaleop.race.Race` then refuses unknown arms and impossible pairs, which takes the donor's config.
    """
    file, _, training_seed = str(name).partition("@")
    path = Path(file) if file.endswith(".yaml") else PARAMS / f"{file}.yaml"
    if not path.exists():
        raise ExperimentError(f"experiment = {file!r} is not in params/; {nearest(file, experiments())}")
    experiment = read_yaml(path, Experiment)
    if training_seed:
        experiment = _of_training_seed(experiment, training_seed)
    race: dict[str, Any] = {}
    if tokens is not None:
        race["tokens"] = tokens
    if arms is not None:
        race["arms"] = [arm.strip() for arm in arms.split(",")] if isinstance(arms, str) else arms
        race["leaders"], race["variants"] = [], []  # who names arms wants these and no others
    if race or seeds is not None:
        values = experiment.model_dump()
        values["race"].update(race)
        values["seeds"] = _whole_numbers(seeds) if seeds is not None else values["seeds"]
        changed: Experiment = validate(values, Experiment, "parameters")
        return changed.model_copy(update={"share": changed.race.tokens / experiment.race.tokens})
    return experiment


def _of_training_seed(experiment: Experiment, which: str) -> Experiment:
    """The experiment with its pair from another pretraining run, `which` is "seed3"; its name then says so."""
    others = experiment.pair.training_seeds
    if others is None:
        raise ExperimentError(f"experiment {experiment.name} has no training seeds, so {experiment.name}@{which} is "
                              "nothing; its file may declare them under pair.training_seeds (params/mini.yaml does)")
    seeds = {f"seed{seed}": seed for seed in others.seeds}
    if which not in seeds:
        raise ExperimentError(f"experiment {experiment.name} has no training seed {which!r}; "
                              f"{nearest(which, list(seeds))}")
    named = {part: name.replace("{seed}", str(seeds[which])) for part in ("donor", "like", "reference")
             if (name := getattr(others, part)) is not None}
    pair = experiment.pair.model_copy(update={**named, "training_seeds": None})
    return experiment.model_copy(update={"name": f"{experiment.name}@{which}", "pair": pair})


def _whole_numbers(seeds: list[int] | int | str) -> Any:
    """[0, 1, 2] for "0,1,2"; what is no such list is left for validation to refuse."""
    if isinstance(seeds, int):
        return [seeds]
    parts = [part.strip() for part in seeds.split(",")] if isinstance(seeds, str) else seeds
    return [int(part) if isinstance(part, str) and part.isdigit() else part for part in parts]


def planned(experiment: Experiment, seed: int | None = None) -> list[tuple[str, int]]:
    """(arm, seed) of every run of an experiment: its arms on `seed` (None: the first of its seeds), then its leaders on
    every one of its seeds; each once. Variants are not among them: their results are committed."""
    first = experiment.seeds[0] if seed is None else seed
    runs = [(arm, first) for arm in experiment.race.arms]
    runs += [(arm, each) for each in experiment.seeds for arm in experiment.race.leaders]
    return list(dict.fromkeys(runs))


def companion(experiment: Experiment, role: str, required: bool = False) -> Experiment | None:
    """The experiment that plays `role` (long, convergence, depth, scale) beside this one; None if it names none, or
    ExperimentError where one is `required`.

    Where this one's budget was changed (`-p tokens ...`), the companion's changes in proportion; where this one is of
    another training seed (`mini@seed3`), so is the companion, and one whose models have no training seeds is as if it
    were not named (`scale` beside `primary@seed3`).
    """
    name = experiment.companions.get(role)
    if name is None:
        if required:
            alike = "mini" if experiment.corpus.source == "hub" else "nano"  # in the same world
            raise ExperimentError(f"experiment {experiment.name} names no companion for {role!r}; add companions: "
                                  f"{{{role}: {alike}_{role}}}")
        return None
    if "@" in experiment.name:
        if load_experiment(name).pair.training_seeds is None and not required:
            return None
        name += experiment.name[experiment.name.find("@"):]
    found = load_experiment(name)
    share = experiment.share
    return found if share == 1 else load_experiment(name, tokens=round(share * found.race.tokens))

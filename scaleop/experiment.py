"""Experiments as data: `params/<name>.yaml`, read into strict typed objects before any work starts.

An unknown key, a value of the wrong type or an impossible pair is refused with a sentence that names the key, the
value and the remedy. `load_experiment("nano", tokens=100_000)` is what a notebook's parameters become. A file
that says `extends: nano` holds only what differs from that one.
"""

import difflib
import sys
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, get_args, get_origin

import yaml
from pydantic import BaseModel, ConfigDict, Field, PositiveInt, ValidationError

from scaleop.paths import PARAMS


class ExperimentError(ValueError):
    """A parameter, a key of a YAML file or a pair that cannot be; the message says which, and what to do."""


class Strict(BaseModel):
    """No unknown keys, no silent conversion (an int may stand for a float), immutable."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class TargetShape(Strict):
    """The shape a donor is converted to (a config only: no arm ever sees trained target weights)."""

    layers: PositiveInt
    width: PositiveInt  # residual stream
    heads: PositiveInt
    mlp: PositiveInt  # hidden units


class Pair(Strict):
    """Donor, target shape, and a trained model of that shape to compare with, if one exists."""

    donor: str  # folder below the repository, a folder anywhere, or a hub name
    target: TargetShape
    reference: str | None = None


class Frozen(Strict):
    """The frozen probe set: the stream's head, never trained on."""

    sequences: PositiveInt
    length: PositiveInt  # tokens
    similarity: PositiveInt = 500  # sequences for CKA, all positions
    moments: PositiveInt = 1000  # sequences for the second moments of compensation


class CorpusSettings(Strict):
    """Which text, how much of it is frozen, and how far apart the seeds start."""

    source: Literal["embedded"]
    frozen: Frozen
    seed_stride: PositiveInt  # tokens between two seeds' first tokens
    repeat: bool = False  # may a stream wrap around or run into later seeds' text?


class Evaluation(Strict):
    """Strided perplexity (section 3)."""

    window: PositiveInt
    stride: PositiveInt
    quick_tokens: PositiveInt  # of `heldout`, along the way
    limits: dict[str, PositiveInt | None]  # tokens per evaluation text; null: all of it


class RaceSettings(Strict):
    """Budget, schedule and arms of section 7; the same for every arm."""

    tokens: PositiveInt
    batch: PositiveInt  # sequences a step
    length: PositiveInt  # tokens a sequence
    peak_lr: float = Field(gt=0)
    warmup_steps: int = Field(ge=0)
    eval_every: PositiveInt  # tokens
    checkpoint_every: int = Field(ge=0)  # steps; 0: none along the way
    precision: Literal["bf16", "no"]
    attention: Literal["eager", "sdpa"]  # eager is the faster one on CPU at short context
    arms: list[str] = Field(min_length=1)
    leaders: list[str] = []  # close finishers, run on every seed of the experiment
    variants: list[str] = []  # further arms, not run by default: their results are committed (scaleop.committed)


class Experiment(Strict):
    """One file of `params/`, with a notebook's overrides applied."""

    name: str
    title: str
    pair: Pair
    corpus: CorpusSettings
    evaluation: Evaluation
    race: RaceSettings
    seeds: list[int] = Field(min_length=1)
    companions: dict[str, str] = {}  # {role: experiment}: the other pairs and budgets that sections 7.5 and 7.6 need


class LadderModel(Strict):
    """One rung: shape and peak rate (chosen by the recorded sweep)."""

    name: str
    layers: PositiveInt
    width: PositiveInt
    heads: PositiveInt
    mlp: PositiveInt
    peak_lr: float = Field(gt=0)


class Sweep(Strict):
    """The short learning-rate sweep."""

    tokens: PositiveInt
    rates: list[float]


class Ladder(Strict):
    """`params/ladder.yaml`: how the nano models are pretrained."""

    vocabulary: PositiveInt
    context: PositiveInt
    rotary_fraction: float
    tokens: PositiveInt
    batch: PositiveInt
    warmup_share: float
    precision: Literal["bf16", "no"]
    seed: int
    evaluations: PositiveInt
    checkpoint_every: PositiveInt
    frozen: Frozen
    evaluation: Evaluation
    sweep: Sweep
    models: list[LadderModel]

    def model(self, name: str) -> LadderModel:
        """The rung of that name; ExperimentError lists the names there are."""
        for model in self.models:
            if model.name == name:
                return model
        raise ExperimentError(f"model {name!r} is not in params/ladder.yaml; there are: "
                              + ", ".join(model.name for model in self.models))


def nearest(name: str, names: list[str]) -> str:
    """' Did you mean ...?' for a mistyped name, or the list of names there are."""
    close = difflib.get_close_matches(name, names, n=1)
    return f"did you mean {close[0]!r}?" if close else f"there are: {', '.join(sorted(names))}"


def read_yaml(path: Path, kind: type[Strict]) -> Any:
    """A YAML file as a `kind`; ExperimentError names the file, the key, the value and the remedy."""
    return validate(_values(path), kind, f"params/{path.name}")


def _values(path: Path, above: tuple[str, ...] = ()) -> Any:
    """What a YAML file says, laid over the file of `params/` that it `extends`, if it does (companions are not
    inherited: they belong to the experiment that names them)."""
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise ExperimentError(f"{path.name} is not valid YAML: {error}") from error
    if not isinstance(values, dict) or "extends" not in values:
        return values
    base = values.pop("extends")
    if not (PARAMS / f"{base}.yaml").exists():
        raise ExperimentError(f"params/{path.name}: extends = {base!r} is not in params/; "
                              f"{nearest(str(base), experiments())}")
    if base in (above := (*above, path.stem)):
        raise ExperimentError(f"params/{path.name}: extends goes in a circle: {' -> '.join((*above, base))}")
    below = _values(PARAMS / f"{base}.yaml", above)
    return _laid_over({key: value for key, value in below.items() if key != "companions"}, values)


def _laid_over(base: dict[str, Any], values: dict[str, Any]) -> dict[str, Any]:
    """`base` with every key of `values`; mappings in both are merged, anything else (lists too) is replaced."""
    both = {key: _laid_over(base[key], value) for key, value in values.items()
            if isinstance(value, dict) and isinstance(base.get(key), dict)}
    return {**base, **values, **both}


def validate(values: Any, kind: type[Strict], where: str) -> Any:
    """`values` as a `kind`, with pydantic's findings turned into sentences."""
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        raise ExperimentError("\n".join(_sentence(problem, kind, where) for problem in error.errors())) from None


def _sentence(problem: Any, kind: type[Strict], where: str) -> str:
    key = ".".join(map(str, problem["loc"])) or "the file"
    if problem["type"] == "extra_forbidden":
        owner = _model_at(kind, problem["loc"][:-1])
        return f"{where}: unknown key {key} = {problem['input']!r}; {nearest(str(problem['loc'][-1]), list(owner))}"
    if problem["type"] == "missing":
        return f"{where}: the key {key} is missing; add it (params/nano.yaml shows a complete file)"
    hint = " (in YAML write 3.0e-4, not 3e-4)" if problem["type"] == "float_type" else ""
    return f"{where}: {key} = {problem['input']!r} will not do: {problem['msg']}{hint}"


def _model_at(kind: type[Strict], loc: tuple[Any, ...]) -> dict[str, Any]:
    fields = kind.model_fields
    for part in loc:
        if isinstance(part, int):
            continue  # an element of a list: `fields` are already its own
        annotation = fields[part].annotation if part in fields else None
        annotation = next(iter(get_args(annotation)), annotation) if get_origin(annotation) is list else annotation
        if not (isinstance(annotation, type) and issubclass(annotation, BaseModel)):
            break
        fields = annotation.model_fields
    return fields


def experiments() -> list[str]:
    """Names of the experiments in `params/`."""
    return sorted(path.stem for path in PARAMS.glob("*.yaml") if path.stem != "ladder")


def load_ladder(path: Path = PARAMS / "ladder.yaml") -> Ladder:
    """The pretraining recipe of the nano ladder."""
    return read_yaml(path, Ladder)


class NotebookParameters(Strict):
    """What a notebook's `parameters` cell may hold; None leaves what the experiment's file says."""

    experiment: str = "nano"
    seed: int = Field(default=0, ge=0)
    tokens: PositiveInt | None = None
    arms: str | list[str] | None = None


CHECKED = "_scaleop_parameters_checked"


def from_notebook(namespace: dict[str, Any]) -> tuple[Experiment, int]:
    """The experiment and seed that a notebook's parameters ask for; `namespace` is `globals()`, or a copy of it.

    Call it before any other work: papermill accepts any name (`-p sead 2`) in silence, so every value of the fresh
    `namespace` must be a parameter (what was imported may stay); ExperimentError otherwise. In a kernel where this
    has succeeded before (the cell is run again by hand) other names are fine.
    """
    given = {name: value for name, value in namespace.items()
             if not name.startswith("_") and name not in ("In", "Out") and not callable(value)
             and not isinstance(value, ModuleType)}
    if CHECKED in namespace:
        given = {name: value for name, value in given.items() if name in NotebookParameters.model_fields}
    values = validate(given, NotebookParameters, "notebook parameters")
    experiment = load_experiment(values.experiment, tokens=values.tokens, arms=values.arms)
    vars(sys.modules["__main__"])[CHECKED] = True  # the kernel's own namespace; `namespace` may be a copy
    return experiment, values.seed


def load_experiment(name: str, *, tokens: int | None = None, arms: list[str] | str | None = None) -> Experiment:
    """An experiment by name (or path of a YAML file), with overrides; None leaves what the file says.

    `arms` may be a list or a comma-separated string. Raises ExperimentError for anything unknown or of the wrong type;
    `scaleop.race.Race` then refuses unknown arms and impossible pairs, which takes the donor's config.
    """
    path = Path(name) if str(name).endswith(".yaml") else PARAMS / f"{name}.yaml"
    if not path.exists():
        raise ExperimentError(f"experiment = {name!r} is not in params/; {nearest(str(name), experiments())}")
    experiment = read_yaml(path, Experiment)
    race: dict[str, Any] = {}
    if tokens is not None:
        race["tokens"] = tokens
    if arms is not None:
        race["arms"] = [arm.strip() for arm in arms.split(",")] if isinstance(arms, str) else arms
        race["leaders"], race["variants"] = [], []  # who names arms wants these and no others
    if race:
        values = experiment.model_dump()
        values["race"].update(race)
        experiment = validate(values, Experiment, "parameters")
    return experiment


def companion(experiment: Experiment, role: str) -> Experiment | None:
    """The experiment that plays `role` (long, convergence, depth, scale) beside this one, or None if it names none.

    Where this one's budget was changed (`-p tokens ...`), the companion's changes in proportion.
    """
    name = experiment.companions.get(role)
    if name is None:
        return None
    share = experiment.race.tokens / load_experiment(experiment.name).race.tokens
    found = load_experiment(name)
    return found if share == 1 else load_experiment(name, tokens=round(share * found.race.tokens))

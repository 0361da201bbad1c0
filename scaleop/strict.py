"""Files of `params/` as strict typed objects, and every refusal a sentence that says what to do.

An unknown key or a value of the wrong type is refused with the key, the value and the remedy. A file that says
`extends: nano` holds only what differs from that one.
"""

import difflib
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError

from scaleop.paths import PARAMS


class ExperimentError(ValueError):
    """A parameter, a key of a YAML file or a pair that cannot be; the message says which, and what to do."""


class Strict(BaseModel):
    """No unknown keys, no silent conversion (an int may stand for a float), immutable."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


def experiments() -> list[str]:
    """Names of the experiments in `params/`."""
    return sorted(path.stem for path in PARAMS.glob("*.yaml") if path.stem != "ladder")


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
    return f"{where}: {key} = {problem['input']!r} will not do: {problem['msg'].removeprefix('Value error, ')}{hint}"


def _model_at(kind: type[Strict], loc: tuple[Any, ...]) -> dict[str, Any]:
    fields = kind.model_fields
    for part in loc:
        if isinstance(part, int):
            continue  # an element of a list: `fields` are already its own
        annotation = fields[part].annotation if part in fields else None
        while get_args(annotation):  # list[Model], Model | None
            annotation = get_args(annotation)[0]
        if not (isinstance(annotation, type) and issubclass(annotation, BaseModel)):
            break
        fields = annotation.model_fields
    return fields

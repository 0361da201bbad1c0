"""What the book is made of: the race runs behind each section, and what an executed page depends on beside them.

The Snakefile turns this into jobs. Nothing here is needed to run one notebook: it trains what it does not find.
"""

import ast
import hashlib
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import scaleop
from scaleop.experiment import Experiment, companion, from_notebook, planned
from scaleop.paths import BOOK, ROOT, STORE, resolve
from scaleop.smollm2 import NAME, missing
from scaleop.store import digest, read_json, sha256

if TYPE_CHECKING:
    from scaleop.race import Race

TRAINED = {"07": ("",), "08": ("", "long", "depth"), "09": ("scale", "", "depth")}
"""The races that a section shows, by the role a companion plays; "" is the experiment itself."""
KEPT = {"08": ("convergence", "depth_long"), "09": ("convergence", "scale_control"),
        "10": ("", "depth", "own_rate", "depth_own_rate")}
"""Further races, of which a section shows committed results (`scaleop.committed`): never run here. Of its own
and of its depth pair, section 10 itself runs what is not there (`committed.kept_or_run`)."""
OWN = {"10": "smollm2"}
"""Sections whose notebook has a default experiment of its own."""
MEASURED = {"12": "benchmarks/results"}
"""Folders whose results a section shows: never made here, as they take a quiet machine (`benchmarks/`)."""
DRIVERS = ("plan.py", "fanout.py", "reproduce.py")  # they decide what runs when, no number depends on them


def chosen(section: str, parameters: Mapping[str, Any]) -> Experiment:
    """The experiment that a section (`10_wiring`) is run with, given the notebooks' `parameters`."""
    own = OWN.get(section[:2])
    return from_notebook({**({"experiment": own} if own else {}), **parameters})[0]


def lacking(section: str, parameters: Mapping[str, Any]) -> str | None:
    """Why a section cannot be run here, with the remedy: it is about a model of a package that is not installed."""
    if section[:2] not in OWN:
        return None
    return missing() if chosen(section, parameters).pair.donor == NAME else None


class Run(NamedTuple):
    """One run of the race, by name of its experiment."""

    experiment: str
    arm: str
    seed: int


def trained(section: str, experiment: Experiment) -> list[Experiment]:
    """The experiments whose runs a section (`07_race`) shows: the one given, or companions of it."""
    return _playing(TRAINED.get(section[:2], ()), experiment)


def needed(section: str, experiment: Experiment, seed: int = 0) -> list[Run]:
    """The runs a section shows, each once; `seed` is the notebooks' parameter, which companions do not follow."""
    return [Run(each.name, arm, at) for each in trained(section, experiment)
            for arm, at in planned(each, seed if each is experiment else None)]


def shown(sections: Iterable[str], experiment: Experiment) -> dict[str, Experiment]:
    """The experiments whose runs any of the sections shows, by name."""
    return {each.name: each for section in sections for each in trained(section, experiment)}


def opened(experiments: Mapping[str, Experiment]) -> "dict[str, Race]":
    """Each of the experiments as a `Race`: its `folder(arm, seed)` is then known."""
    if not experiments:
        return {}
    from scaleop.race import Race  # torch takes seconds to import, and most sections need none of it here

    return {name: Race(each) for name, each in experiments.items()}


def _playing(roles: tuple[str, ...], experiment: Experiment) -> list[Experiment]:
    found = [companion(experiment, role) if role else experiment for role in roles]
    return [each for each in found if each is not None]


def seconds(notebook: Path) -> float:
    """How long the page of `book/` took when it was made: a guess of how long it will take. Without one: an hour."""
    page = BOOK / notebook.name
    ran = read_json(page)["metadata"].get("papermill", {}) if page.exists() else {}  # none: a page saved by hand
    return float(ran.get("seconds", 3600))


def ingredients(notebook: Path, experiment: Experiment) -> dict[str, str]:
    """A digest of each thing whose change makes a notebook's page stale, its parameters and runs aside."""
    roles = (*TRAINED.get(notebook.stem[:2], ()), *KEPT.get(notebook.stem[:2], ()))
    experiments = [experiment, *_playing(roles, experiment)]
    named = {name for each in experiments for name in (each.pair.donor, each.pair.reference) if name is not None}
    places = {resolve(name) for name in named}  # a hub model's name holds its revision: part of the experiments below
    folders = {place for place in places if isinstance(place, Path)}
    folders |= {path for path in (ROOT / "models").glob("*") if path.is_dir()}
    kept = []
    if roles:
        from scaleop.committed import place  # as above

        kept = [sha256(path) for each in experiments if (path := place(each.name)).exists()]
        shown_only = _playing(KEPT.get(notebook.stem[:2], ()), experiment)  # finished runs in the store, by their keys
        kept += [sorted(str(path.relative_to(STORE)) for path in (STORE / "runs" / each.name).glob("*/*/result.json"))
                 for each in shown_only]
    if folder := MEASURED.get(notebook.stem[:2]):
        kept += [[path.name, sha256(path)] for path in sorted((ROOT / folder).glob("*.json"))]
    return {"notebook": sha256(notebook)[:12],
            "experiments": digest([each.model_dump() for each in experiments]),
            "committed": digest(kept),
            "models": digest([[file.name, sha256(file)] for folder in sorted(folders)
                              for ending in ("*.safetensors", "*.json") for file in sorted(folder.glob(ending))]),
            "code": code_digest(Path(scaleop.__file__).parent)}


@cache
def code_digest(package: Path) -> str:
    """Digest of a package's code and data. Comments and layout do not count: modules are read as syntax trees."""
    def content(path: Path) -> str:
        if path.suffix == ".py":
            return hashlib.sha256(ast.dump(ast.parse(path.read_bytes(), str(path))).encode()).hexdigest()
        return sha256(path)
    files = [path for ending in ("*.py", "*.json") for path in sorted(package.rglob(ending))]
    return digest([[str(path.relative_to(package)), content(path)] for path in files if path.name not in DRIVERS])

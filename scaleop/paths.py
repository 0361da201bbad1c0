"""The one place that knows where things lie (papermill, Jupyter and pytest all start elsewhere)."""

import os
from pathlib import Path

ROOT = Path(os.environ.get("SCALEOP_HOME", Path(__file__).resolve().parent.parent))
"""Repository root: `params/`, `models/`, `notebooks/` and `book/` lie below it. Override: SCALEOP_HOME."""

STORE = Path(os.environ.get("SCALEOP_STORE", ROOT / "store"))
"""Everything that runs leave behind (token files, moments, race runs). Override: SCALEOP_STORE."""

PARAMS = ROOT / "params"
BOOK = ROOT / "book"
NOTEBOOKS = ROOT / "notebooks"


def resolve(name: str) -> Path | str:
    """A model named in an experiment: a folder below the root or anywhere on disk, else a hub name, unchanged."""
    folder = ROOT / name  # an absolute `name` wins over ROOT
    return folder if folder.exists() or name.startswith(("models/", "store/", "/", ".")) else name


def relative(path: Path | str) -> str:
    """`path` as provenance shows it: relative to the repository, never a path of the machine it ran on."""
    try:
        return str(Path(path).resolve().relative_to(ROOT.resolve()))
    except ValueError:
        return Path(path).name

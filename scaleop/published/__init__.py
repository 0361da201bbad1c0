"""The paper's numbers, as data: what the authors printed, and the recovery curves they stored with their code.

`results.json` holds one record a number: `value` is the number as printed (`printed` is its very spelling),
`more_digits` the same from the authors' repository where it says more, `source` where it was read (`repo:` paths
are theirs), `revision` is "v3" for what a later revision adds. `curves.json` holds `points`, (tokens, quick
perplexity), a run. Both are about Pythia and WikiText-103; nothing in them was measured by this project.
"""

import difflib
import json
import re
from functools import cache
from importlib.resources import files
from typing import Any

PAPER_ARMS = ("random", "projection", "subclone", "subclone_iso", "hybrid", "subclone_rs", "hybrid_rs")
"""The rungs of Table 2, top to bottom."""


@cache
def _read(name: str) -> Any:
    return json.loads(files(__package__).joinpath(name).read_text(encoding="utf-8"))


@cache
def _by_id() -> dict[str, dict[str, Any]]:
    return {record["id"]: record for record in _read("results.json")}


def published(name: str) -> dict[str, Any]:
    """The record of one published number, e.g. `published("ladder.hybrid_rs.final")["value"]`.

    Raises KeyError that names the nearest ids.
    """
    try:
        return dict(_by_id()[name])
    except KeyError:
        close = ", ".join(difflib.get_close_matches(name, _by_id(), n=3, cutoff=0))
        raise KeyError(f"the paper has no number {name!r}; the nearest ids are {close}") from None


def in_print(template: str) -> str:
    """`template` with every `[id]` replaced by that number as the paper prints it; KeyError for an unknown id."""
    return re.sub(r"\[([\w.]+)\]", lambda match: published(match[1])["printed"], template)


def curves() -> list[dict[str, Any]]:
    """The stored recovery curves: batch-16 and distilled runs at 30M tokens, activation-scored ones, 1B runs."""
    return [dict(run) for run in _read("curves.json")]


def race() -> list[dict[str, Any]]:
    """Table 2 in the form that `scaleop.race` gives its own results: one dict an arm, single seed, without a curve."""
    def best(name: str) -> float:
        record = published(name)
        return record["value"] if record["more_digits"] is None else record["more_digits"]

    return [{"experiment": "paper", "arm": arm, "seed": 0, "curve": [], "zero_shot": best(f"ladder.{arm}.zero_shot"),
             "final": {"value": best(f"ladder.{arm}.final")}} for arm in PAPER_ARMS]


def anchors() -> dict[str, dict[str, Any]]:
    """Donor and reference of Table 2's pair with their full WikiText-103 perplexity."""
    return {role: {"name": name, "ppl": published(f"anchor.real_{size}")["more_digits"]}
            for role, name, size in (("donor", "Pythia-1.4B", "1.4b"), ("reference", "Pythia-410M", "410m"))}

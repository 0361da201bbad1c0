"""Named numbers of one section as evidence, for claims that do not compare arms of a race."""

from collections.abc import Mapping, Sequence
from typing import Any


class Measured:
    """What a section measured: `values` by name (numbers, lists, dicts), with one seed.

    A claim's `needs` are names; evidence that lacks one, or is asked for a seed it does not have, is None.
    """

    def __init__(self, values: Mapping[str, Any], seed: int = 0) -> None:
        self.values, self.seeds = dict(values), [seed]

    def only(self, needs: Sequence[str], seeds: Sequence[int] | None = None) -> "Measured | None":
        """Itself, if everything needed was measured (on one of `seeds`), else None."""
        there = all(self.values.get(name) is not None for name in needs)
        return self if there and (seeds is None or self.seeds[0] in seeds) else None

    def __getitem__(self, name: str) -> Any:
        return self.values[name]

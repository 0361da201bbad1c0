"""Several races as one body of evidence, for claims that reach over budgets and pairs."""

from collections.abc import Mapping, Sequence
from functools import reduce
from typing import Any

from scaleop.claims.standings import Standings


class Experiments:
    """Races by role, their arms and anchors by dotted name: `hybrid_rs` is the main race's (role ""), `depth.hybrid_rs`
    that of the race whose role is "depth" (the roles are `companions` in params/nano.yaml).

    Has `Standings`' methods, so that a predicate on arms of one race also serves another's, or two at once. Each race
    keeps its own seeds; `seeds` are those that all of them have.
    """

    def __init__(self, races: Mapping[str, Standings]) -> None:
        self.races = dict(races)

    @property
    def seeds(self) -> list[int]:
        """The seeds that every arm of every race has."""
        return sorted(reduce(set.intersection, (set(race.seeds) for race in self.races.values())))

    @property
    def anchors(self) -> dict[str, Any]:
        """Every race's anchors."""
        return {_join(role, name): anchor for role, race in self.races.items() for name, anchor in race.anchors.items()}

    def only(self, needs: Sequence[str], seeds: Sequence[int] | None = None) -> "Experiments | None":
        """The races that `needs` names, each restricted as `Standings.only` does; None if anything is missing, or if no
        seed is common to all."""
        named: dict[str, list[str]] = {}
        for need in needs:
            role, name = _split(need)
            named.setdefault(role, []).append(name)
        parts = {role: self.races[role].only(names, seeds) if role in self.races else None
                 for role, names in named.items()}
        if None in parts.values():
            return None
        found = Experiments(parts)
        return found if found.seeds else None

    def seeds_of(self, arm: str) -> list[int]:
        """The seeds of one arm."""
        race, name = self._find(arm)
        return race.seeds_of(name)

    def results(self, arm: str) -> list[dict[str, Any]]:
        """An arm's results, one a seed."""
        race, name = self._find(arm)
        return race.results(name)

    def values(self, axis: str, arm: str) -> list[float]:
        """Perplexities of an arm, one a seed, as in `Standings.values`."""
        race, name = self._find(arm)
        return race.values(axis, name)

    def value(self, axis: str, arm: str) -> float:
        """Mean of `values` over the arm's seeds."""
        race, name = self._find(arm)
        return race.value(axis, name)

    def curve(self, arm: str) -> dict[int, float]:
        """Quick perplexity by tokens seen, as in `Standings.curve`."""
        race, name = self._find(arm)
        return race.curve(name)

    def _find(self, arm: str) -> tuple[Standings, str]:
        role, name = _split(arm)
        return self.races[role], name


def _split(name: str) -> tuple[str, str]:
    role, _, rest = name.rpartition(".")
    return role, rest


def _join(role: str, name: str) -> str:
    return f"{role}.{name}" if role else name

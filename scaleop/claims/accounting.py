"""What makes the race a fair one (section 7's protocol and the compute accounting of 7.6), asked of the results."""

from typing import Any

from scaleop.claims.core import Claim
from scaleop.published import PAPER_ARMS, published

NEGLIGIBLE = 0.05  # of an arm's training time: the paper's 75 s of 55 minutes are 2.3 %


def _results(race: Any, needs: str) -> list[dict[str, Any]]:
    """The seven arms' results, if all of them recorded `needs`; else none."""
    results = [result for arm in PAPER_ARMS for result in race.results(arm)]
    return results if all(needs in result for result in results) else []


def _streams(race: Any) -> int:
    """The most different token streams that the arms of one seed trained on; 0 where none is recorded."""
    found: dict[int, set[str]] = {}
    for result in _results(race, "stream"):
        found.setdefault(result["seed"], set()).add(result["stream"]["sha256"])
    return max(map(len, found.values()), default=0)


def _same(race: Any) -> bool | None:
    return _streams(race) == 1 if _streams(race) else None


def _share(race: Any) -> float:
    """Seconds of building over seconds of training, all seven arms together: statistics are gathered once for all.

    By the wall clock, so an arm that waits while another gathers them counts the waiting too.
    """
    seconds = [result["seconds"] for result in _results(race, "seconds")]
    return sum(one["build"] for one in seconds) / sum(one["train"] for one in seconds)


def _negligible(race: Any) -> bool | None:
    return _share(race) < NEGLIGIBLE if _results(race, "seconds") else None


def _share_in_paper() -> float:
    return published("compute.moments_s")["value"] / (60 * published("compute.arm_minutes")["value"])


CLAIMS = [
    Claim("same-data", "7", "Every arm trains on the same tokens in the same order", PAPER_ARMS,
          _same, lambda race: f"token streams a seed: {_streams(race)}", paper="by protocol"),
    Claim("construction-negligible", "7.6",
          f"Building the starting weights costs next to nothing: under {NEGLIGIBLE:.0%} of the training time, as "
          "clocked here, waiting for other jobs included",
          PAPER_ARMS, _negligible, lambda race: f"{_share(race):.1%} by the wall clock",
          paper=f"moments [compute.moments_s] of [compute.arm_minutes] an arm ({_share_in_paper():.1%})"),
]

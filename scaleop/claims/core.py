"""A claim, a verdict, and the one evaluator that gets from the first to the second.

Evidence is any object with `seeds` and `only(needs, seeds=None)`: itself restricted to what a claim needs (and to
those seeds), or None if something is missing. `standings.Standings` is the evidence of section 7.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import pandas as pd

from scaleop.published import in_print

HOLDS, FAILS, NOT_RUN = "holds", "does not hold", "not run"


@dataclass(frozen=True)
class Claim:
    """One sentence that results can contradict.

    `section` is the paper's, or "ours" for a question the paper does not ask. `needs` names what has to have been
    run. `holds` maps the evidence to True, False or None (cannot be said); `ours` maps it to the numbers behind that.
    `paper` is a template for the published numbers, `[id]` standing for one. `seeds` is how many seeds it takes: with
    fewer the claim is not run.
    """

    id: str
    section: str
    statement: str
    needs: tuple[str, ...]
    holds: Callable[[Any], bool | None]
    ours: Callable[[Any], str]
    paper: str = "-"
    seeds: int = 1


@dataclass(frozen=True)
class Finding:
    """What the evidence says about a claim: on the means over `seeds`, and on which seeds it holds alone (None when one
    seed says nothing about it, as about a spread)."""

    claim: Claim
    verdict: str
    ours: str = "-"
    seeds: tuple[int, ...] = ()
    holds_on: tuple[int, ...] | None = ()

    def record(self) -> dict[str, Any]:
        """The finding as a JSON-able dict."""
        claim, alone = self.claim, None if self.holds_on is None else list(self.holds_on)
        return {"id": claim.id, "section": claim.section, "statement": claim.statement, "paper": in_print(claim.paper),
                "ours": self.ours, "seeds": list(self.seeds), "holds_on": alone, "verdict": self.verdict}


def evaluate(claims: Iterable[Claim], evidence: Any) -> list[Finding]:
    """What `evidence` says about each claim, in order."""
    findings = []
    for claim in claims:
        part = evidence.only(claim.needs)
        said = None if part is None or len(part.seeds) < claim.seeds else claim.holds(part)
        if said is None:
            findings.append(Finding(claim, NOT_RUN))
            continue
        each = {seed: claim.holds(part.only(claim.needs, [seed])) for seed in part.seeds}
        alone = tuple(seed for seed, holds in each.items() if holds)
        silent = all(holds is None for holds in each.values())
        findings.append(Finding(claim, HOLDS if said else FAILS, claim.ours(part), tuple(part.seeds),
                                None if silent else alone))
    return findings


def to_records(findings: Iterable[Finding]) -> list[dict[str, Any]]:
    """Findings as JSON-able dicts, for a ledger of claims."""
    return [finding.record() for finding in findings]


def tabulate(findings: Iterable[Finding]) -> pd.DataFrame:
    """Findings as a table; `seeds` counts what the verdict's means are over, `holds on` those it holds on alone."""
    def alone(finding: Finding) -> str:
        silent = finding.holds_on is None or not finding.seeds
        return "-" if silent else f"{len(finding.holds_on)}/{len(finding.seeds)}"

    rows = [(f.claim.statement, f.claim.section, in_print(f.claim.paper), f.ours, len(f.seeds), alone(f), f.verdict)
            for f in findings]
    return pd.DataFrame(rows, columns=["claim", "section", "paper", "ours", "seeds", "holds on", "verdict"])

"""The paper's numbers and its claims as predicates over results.

`published(id)` looks a printed number up; `ladder`, `seeded`, `depth`, `scale` and `distilled` are Tables 2, 8, 9, 10
and the later revision's, each with ours beside; `evaluate` decides claims. Verdicts come from predicates only: "holds",
"does not hold", or "not run". A further section adds a module with its evidence and its list of `Claim`s, and uses the
same `evaluate`, `tabulate` and `to_records`.

Section 7: LADDER_CLAIMS (7.1, 7.2), MECHANISM_CLAIMS (7.2), SEEDED_CLAIMS (7.3), VARIANT_CLAIMS (later revision, and
ours), BUDGET_CLAIMS and DEPTH_CLAIMS (7.5), SCALE_CLAIMS (7.6) and ACCOUNTING_CLAIMS, together RACE_CLAIMS, are over
`Experiments` (those that name one race, also over its `Standings`); CONSTRUCTION_CLAIMS (7.4), EXTENDED_CLAIMS (Table
7) and CONDITIONING_CLAIMS (7.6, 9) are over `Measured`.

Another wiring (page 10): CARRIED_CLAIMS, those of section 7 that another pair can decide, over `Experiments`;
WIRING_CLAIMS, MOMENT_CLAIMS and TASK_CLAIMS over `Measured`.
"""

from scaleop.claims.accounting import CLAIMS as ACCOUNTING_CLAIMS
from scaleop.claims.budgets import CLAIMS as BUDGET_CLAIMS
from scaleop.claims.budgets import Crossing, crossing, crossings, overtaking
from scaleop.claims.carry_over import CLAIMS as CARRIED_CLAIMS
from scaleop.claims.carry_over import carried, side_by_side, verdicts
from scaleop.claims.conditioning import CLAIMS as CONDITIONING_CLAIMS
from scaleop.claims.conditioning import conditioning_evidence
from scaleop.claims.core import FAILS, HOLDS, NOT_RUN, Claim, Finding, evaluate, tabulate, to_records
from scaleop.claims.depth import CLAIMS as DEPTH_CLAIMS
from scaleop.claims.experiments import Experiments
from scaleop.claims.hardening import CLAIMS as EXTENDED_CLAIMS
from scaleop.claims.measured import Measured
from scaleop.claims.mechanism import CLAIMS as MECHANISM_CLAIMS
from scaleop.claims.mechanism import CONSTRUCTION as CONSTRUCTION_CLAIMS
from scaleop.claims.mechanism import construction_evidence
from scaleop.claims.paired import Paired, paired, versus
from scaleop.claims.paper import TABLE_8, TABLE_9, extended_in_paper, in_paper, seeds_in_paper
from scaleop.claims.real_donor import MOMENTS as MOMENT_CLAIMS
from scaleop.claims.real_donor import TASKS as TASK_CLAIMS
from scaleop.claims.real_donor import moments_evidence, probe_sizes, ridge_rules, typical
from scaleop.claims.scale import CLAIMS as SCALE_CLAIMS
from scaleop.claims.scale import scale
from scaleop.claims.section7 import CLAIMS as LADDER_CLAIMS
from scaleop.claims.section7 import table
from scaleop.claims.seeded import CLAIMS as SEEDED_CLAIMS
from scaleop.claims.seeded import depth, distilled, seeded
from scaleop.claims.standings import ORDER, Standings, ladder, readable, show
from scaleop.claims.tables import changes, runs_behind
from scaleop.claims.variants import CLAIMS as VARIANT_CLAIMS
from scaleop.claims.wiring import CLAIMS as WIRING_CLAIMS
from scaleop.claims.wiring import wiring_evidence
from scaleop.published import PAPER_ARMS, in_print, published

RACE_CLAIMS = [*LADDER_CLAIMS, *MECHANISM_CLAIMS, *SEEDED_CLAIMS, *VARIANT_CLAIMS, *BUDGET_CLAIMS, *DEPTH_CLAIMS,
               *SCALE_CLAIMS, *ACCOUNTING_CLAIMS]

__all__ = ["ACCOUNTING_CLAIMS", "BUDGET_CLAIMS", "CARRIED_CLAIMS", "CONDITIONING_CLAIMS", "CONSTRUCTION_CLAIMS",
           "DEPTH_CLAIMS", "EXTENDED_CLAIMS", "FAILS", "HOLDS", "LADDER_CLAIMS", "MECHANISM_CLAIMS", "MOMENT_CLAIMS",
           "NOT_RUN", "ORDER", "PAPER_ARMS", "RACE_CLAIMS", "SCALE_CLAIMS", "SEEDED_CLAIMS", "TABLE_8", "TABLE_9",
           "TASK_CLAIMS", "VARIANT_CLAIMS", "WIRING_CLAIMS", "Claim", "Crossing", "Experiments", "Finding", "Measured",
           "Paired", "Standings", "carried", "changes", "conditioning_evidence", "construction_evidence", "crossing",
           "crossings", "depth", "distilled", "evaluate", "extended_in_paper", "in_paper", "in_print", "ladder",
           "moments_evidence", "overtaking", "paired", "probe_sizes", "published", "readable", "ridge_rules",
           "runs_behind", "scale", "seeded", "seeds_in_paper", "show", "side_by_side", "table", "tabulate",
           "to_records", "typical", "verdicts", "versus", "wiring_evidence"]

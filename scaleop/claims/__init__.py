"""The paper's numbers and its claims as predicates over results.

`published(id)` looks a printed number up; `ladder(results, anchors)` is Table 2 with ours beside it; and
`table(results, anchors)` decides every claim of sections 7.1 and 7.2. Verdicts come from predicates only: "holds",
"does not hold", or "not run". A further section adds a module with its evidence and its list of `Claim`s, and uses the
same `evaluate`, `tabulate` and `to_records`.
"""

from scaleop.claims.core import FAILS, HOLDS, NOT_RUN, Claim, Finding, evaluate, tabulate, to_records
from scaleop.claims.section7 import CLAIMS as LADDER_CLAIMS
from scaleop.claims.section7 import table
from scaleop.claims.standings import ORDER, Standings, ladder, readable, show
from scaleop.published import PAPER_ARMS, in_print, published

__all__ = ["FAILS", "HOLDS", "LADDER_CLAIMS", "NOT_RUN", "ORDER", "PAPER_ARMS", "Claim", "Finding", "Standings",
           "evaluate", "in_print", "ladder", "published", "readable", "show", "table", "tabulate", "to_records"]

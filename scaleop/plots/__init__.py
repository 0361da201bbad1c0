"""Every figure of the book, a function each: `alignment` for section 4, `projection` for section 5, `residuals` for
section 6; for section 7 `race` (curves, the ladder's too), `levers`, `seeds`, `scale`, `conditioning`; `speed` for the
benchmarks; `wiring` for a real donor; `base` is what they share."""

from scaleop.plots.alignment import maps, similarity
from scaleop.plots.base import notebook, style
from scaleop.plots.conditioning import by_share, by_width
from scaleop.plots.levers import CHANGES, LEVERS, levers
from scaleop.plots.projection import blending, convergence
from scaleop.plots.race import COLOURS, PUBLISHED_RUNS, budgets, pretraining, recovery
from scaleop.plots.residuals import power, spectra
from scaleop.plots.scale import solves, variances
from scaleop.plots.seeds import paired_seeds
from scaleop.plots.speed import ratios
from scaleop.plots.wiring import held_out, moments

__all__ = ["CHANGES", "COLOURS", "LEVERS", "PUBLISHED_RUNS", "blending", "budgets", "by_share", "by_width",
           "convergence", "held_out", "levers", "maps", "moments", "notebook", "paired_seeds", "power", "pretraining",
           "ratios", "recovery", "similarity", "solves", "spectra", "style", "variances"]

"""Every figure of the book, a function each: `alignment` for section 4, `projection` for section 5, `residuals` for
section 6, `race` for section 7 and the ladder; `base` is what they share."""

from scaleop.plots.alignment import maps, similarity
from scaleop.plots.base import notebook, style
from scaleop.plots.projection import blending, convergence
from scaleop.plots.race import COLOURS, LEVERS, PUBLISHED_RUNS, levers, pretraining, recovery
from scaleop.plots.residuals import power, spectra

__all__ = ["COLOURS", "LEVERS", "PUBLISHED_RUNS", "blending", "convergence", "levers", "maps", "notebook", "power",
           "pretraining", "recovery", "similarity", "spectra", "style"]

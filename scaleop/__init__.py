"""scaleop: an executable paper on converting a large transformer into a smaller sibling.

Every weight has *named axes*; an axis is made smaller by a *map* (a selection or a basis); an *arm* of the
race is a line of data that says which maps, whether read-outs are compensated and which paths are rescaled.
The modules read from the ground floor up: ``experiment``, ``store``, ``corpus``, ``wiring``, ``weights``,
``activations``, ``maps``, ``shrink``, ``arms``, ``evaluate``, ``train``, ``race``, ``claims``, ``plots``.
"""

import warnings

# transformers imports tqdm's widget bar, which without ipywidgets writes a warning (and this machine's paths) on the
# stderr of a notebook. Before any other import, because it happens at import.
warnings.filterwarnings("ignore", message="IProgress not found")

__version__ = "0.1.0"

"""scaleop: an executable paper on converting a large transformer into a smaller sibling.

Every weight has *named axes*; an axis is made smaller by a *map* (a selection or a basis); an *arm* of the
race is a line of data that says which maps, whether read-outs are compensated and which paths are rescaled.
The modules read from the ground floor up: ``strict``, ``experiment``, ``store``, ``texts``, ``corpus``,
``documents``, ``token_head``, ``hub_corpus``, ``roles``, ``tables``, ``wiring``, ``weights``, ``activations``,
``heads``, ``maps``, ``ridge``, ``shrink``, ``evaluate``, ``train``, ``distillation``, ``suspects``, ``donor``,
``regression``, ``cascade``, ``arms``, ``race``, ``committed``, ``hardening``, ``conditioning``, ``claims``, ``plots``.
"""

import warnings

__version__ = "0.1.0"

# transformers imports tqdm's notebook flavour, which asks for widgets nobody here uses; in an executed notebook the
# warning would stand above the first result.
warnings.filterwarnings("ignore", message="IProgress not found")

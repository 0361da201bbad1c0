"""scaleop: an executable paper on converting a large transformer into a smaller sibling.

Every weight has *named axes*; an axis is made smaller by a *map* (a selection or a basis); an *arm* of the
race is a line of data that says which maps, whether read-outs are compensated and which paths are rescaled.
The modules read from the ground floor up: ``experiment``, ``store``, ``corpus``, ``wiring``, ``weights``,
``activations``, ``maps``, ``shrink``, ``arms``, ``evaluate``, ``train``, ``race``, ``claims``, ``plots``.
"""

__version__ = "0.1.0"

"""A model from nothing, by Pythia's own rule; transformers' rule is `weights.empty_model`."""

import math
from typing import Any

import torch

from scaleop.weights import Weights, keys
from scaleop.wiring import READ_OUT, shape_of, wiring_of


def pythia_init(config: Any, generator: torch.Generator) -> Weights:
    """Fresh weights by Pythia's own rule, fp32: N(0, 2/(5d)) everywhere, read-outs N(0, (2/(L sqrt d))^2).

    Those are GPT-NeoX's `small_init` and `wang_init`; norms are neutral and biases zero. transformers' own rule
    (std 0.02 everywhere) starts Pythia-sized read-outs several times too large.
    """
    shape, weights = shape_of(config), {}
    for key, role in keys(wiring_of(config), shape.layers):
        size = [shape.size(axis) for axis in role.axes]
        if len(size) == 1:
            weights[key] = torch.full(size, role.neutral or 0.0)
        else:
            std = 2 / (shape.layers * math.sqrt(shape.width)) if role.lever == READ_OUT \
                else math.sqrt(2 / (5 * shape.width))
            weights[key] = torch.randn(size, generator=generator) * std
    return weights

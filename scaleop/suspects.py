"""Suspects for the paper's over-correction (section 7.6): on its scale pair compensation with rescale did worst.

The authors blame the conditioning of the solve, untested. Two other causes can be looked at before any training:

    double counting   compensation restores the variance of what a read-out writes, and a rescale beside it then adds
                      to it again: `variance_ratios` measures what a small model's read-outs write against its donor's
    foreign inputs    the fit assumes that the kept inputs are the donor's, but the small model's own differ (fewer
                      features, norms over fewer of them, rescaled read-ins): `compensate_own` fits on its own inputs
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn

from scaleop.activations import forward_all, hooked, read_by
from scaleop.devices import device_of, on_best_device
from scaleop.maps import Maps
from scaleop.progress import progress
from scaleop.shrink import Solve, compensate
from scaleop.weights import Weights, assemble, module_of
from scaleop.wiring import READ_OUT, RESIDUAL, wiring_of


def readout_variance(model: nn.Module, sequences: np.ndarray, features: torch.Tensor | None = None,
                     batch: int = 16) -> dict[str, float]:
    """{"<block>.<role>": variance of what each read-out writes, over all positions, summed over residual features}.

    `sequences`: (n, length) token ids. `features`: (k,) residual coordinates to sum over; all by default. The variance
    is the population's (divided by n x length), streamed in fp64 about the first batch's mean. Costs one forward pass
    of the body, and memory for a batch's outputs at one read-out in fp64.
    """
    index = slice(None) if features is None else features.to(device_of(model))
    shift, total, square = {}, {}, {}

    def hook(key: str) -> Callable[..., None]:
        def accumulate(module: nn.Module, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
            y = output.flatten(0, -2)[:, index].double()  # (positions, features)
            centred = y - shift.setdefault(key, y.mean(dim=0))
            total[key] = total.get(key, 0) + centred.sum(dim=0)
            square[key] = square.get(key, 0) + centred.square().sum(dim=0)
        return accumulate

    handles = [module_of(model, role, b).register_forward_hook(hook(f"{b}.{role.name}"))
               for b in range(model.config.num_hidden_layers) for role in wiring_of(model.config).lever(READ_OUT)]
    with hooked(handles):
        forward_all(model, sequences, batch, "variance behind the read-outs")
    return {key: (square[key] / sequences.size - (total[key] / sequences.size).square()).sum().item() for key in square}


def variance_ratios(small: nn.Module, donor: nn.Module, maps: Maps, sequences: np.ndarray,
                    batch: int = 16) -> dict[str, float]:
    """{"<target block>.<role>": variance the small model's read-out writes / the donor's on the kept features}.

    1 where the small model's residual stream grows as the donor's does in the kept features; each runs on its own
    inputs. Needs a selection of the residual stream. Costs a forward pass of each model.
    """
    whole = readout_variance(donor, sequences, maps(None, RESIDUAL).index, batch)
    own = readout_variance(small, sequences, batch=batch)
    places = {key: key.split(".") for key in own}
    return {key: own[key] / whole[f"{maps.blocks[int(b)]}.{role}"] for key, (b, role) in places.items()}


def inputs_of(model: nn.Module, modules: list[nn.Module], ids: torch.Tensor) -> list[torch.Tensor]:
    """What each of the modules reads, (positions, inputs) fp32. The forward pass ends before the last one runs."""
    seen = read_by(modules, lambda: model.base_model(input_ids=ids.to(device_of(model)), use_cache=False))
    return [inputs.flatten(0, -2).float() for inputs in seen]


def own_moments(donor: tuple[nn.Module, list[nn.Module]], small: tuple[nn.Module, list[nn.Module]],
                sequences: np.ndarray, batch: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Sums over all positions of x s' (n, k) and s s' (k, k) in fp64, for each pair of modules of the two models;
    x is what the donor's module reads and s what the small model's does, on the same tokens."""
    sums = [[0.0, 0.0] for _ in donor[1]]
    for start in range(0, len(sequences), batch):
        ids = torch.as_tensor(sequences[start : start + batch])
        for pair, x, s in zip(sums, inputs_of(*donor, ids), inputs_of(*small, ids), strict=True):
            pair[0] += (x.T @ s.to(x.device)).double().cpu()
            pair[1] += (s.T @ s).double().cpu()
    return [tuple(pair) for pair in sums]


def refit(matrix: torch.Tensor, cross: torch.Tensor, square: torch.Tensor, kept: torch.Tensor,
          ridge: str | float) -> tuple[torch.Tensor, Solve]:
    """M' = M E[x s'] (E[s s'] + lambda I)^-1, with `compensate`'s lambda and diagnostics.

    `compensate` fits to inputs of which some are kept. So it is given the donor's input with s put in the kept places,
    and what that replaced, x_K - s, as k more inputs to drop: M x = M x~ + M_K (x_K - s).
    """
    mixed = cross.index_copy(0, kept, square)  # x~ s'
    both, moments = torch.cat([matrix, matrix[:, kept]], dim=1), torch.cat([mixed, cross[kept] - square])
    return compensate(both, moments, kept, ridge)


def compensate_own(small: Weights, donor: nn.Module, maps: Maps, target: Any, sequences: np.ndarray,
                   batch: int = 16, ridge: str | float = "mean_diagonal") -> tuple[Weights, dict[str, Solve]]:
    """`small` with every read-out re-fitted to the donor's output from the inputs that the small model itself has.

    Eq. 3 with s, the small model's own input at that place, instead of the donor's kept inputs; target and ridge as
    there, biases untouched. `small`: weights of the target config, selected and with its read-ins rescaled as they
    are to be used, since the fit belongs to them. An input depends on the read-outs before it, so blocks are fitted in
    order, each on what the fitted ones give; within a block the read-outs are fitted together where attention and MLP
    are parallel, else one after the other in the wiring's order. Needs selections on all axes.

    `ridge`: the rule mean_diagonal or spectrum of scaleop.ridge, or a multiple of the mean diagonal.

    Every fit runs both models from the start up to its block: about L/2 forward passes of the body of each for L
    blocks (L when not parallel). Memory: one small model, a batch, and a block's (n + k) x k fp64 sums.
    """
    together, rows = [stage.read_outs for stage in wiring_of(target).stages(target)], maps(None, RESIDUAL)
    model, fitted, solves = assemble(small, target), dict(small), {}
    steps = [(b, group) for b in range(len(maps.blocks)) for group in together]
    with on_best_device(donor, model):
        for b, group in progress(steps, desc="compensation on own inputs", unit=" solves"):
            theirs = [module_of(donor, role, maps.blocks[b]) for role in group]
            ours = [module_of(model, role, b) for role in group]
            moments = own_moments((donor, theirs), (model, ours), sequences, batch)
            for role, their, our, (cross, square) in zip(group, theirs, ours, moments, strict=True):
                matrix = rows.apply(their.weight.detach().cpu(), 0)
                matrix, solves[f"{b}.{role.name}"] = refit(matrix, cross, square, maps(b, role.axes[1]).index, ridge)
                fitted[b, role.name] = matrix
                our.weight.data.copy_(matrix)
    return fitted, solves

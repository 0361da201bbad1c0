"""The safe-wiring analysis of an architecture as claims: what a conversion may touch, checked on the tensors.

The paper lists the tensors of GPT-NeoX (section 7.2) and asks for the analysis per architecture (section 9).
"""

import math
from typing import Any

import torch

from scaleop.activations import second_moments
from scaleop.arms import ARMS, converted
from scaleop.claims.core import Claim
from scaleop.claims.measured import Measured
from scaleop.claims.mechanism import CONSTRUCTION, frequency_gap
from scaleop.donor import Donor
from scaleop.maps import Maps
from scaleop.shrink import Inputs, kept_inputs, rescale
from scaleop.weights import Weights, assemble, extract
from scaleop.wiring import KEYS, QK, READ_IN, Shape, Wiring, shape_of

BARE = {"O", "MLP_DOWN"}  # what writes to the residual stream with no norm in between
FRONTED = {"Q", "K", "V", "MLP_GATE", "MLP_UP", "EMB_OUT"}  # what a norm stands in front of
PROBES = 4  # sequences: which tensors compensation touches hangs on no more
ROUNDING = 1e-5  # relative, of fp32 logits


def wiring_evidence(donor: Donor, target: Any) -> Measured:
    """What the levers do to this pair's tensors; `target` is a config that cuts the residual stream.

    `rebuilt`: tensors of the donor that taking it apart and putting it together changed. `compensated`: roles that
    Eq. 3 changed in every block, and those it changed in some. `rescaled`: {role: factor} that the rescale multiplied
    exactly, None for one that it changed otherwise; `fronted`: those in front of which this wiring has a norm, a tied
    head's place being the final norm's. `strangers`: kept query heads that would read another
    group's keys. `frequencies`: as for `construction_evidence`. `tied`: how far the final norm's factor is from one on
    a tied head, in logits (relative; None where the head is not tied).
    """
    shape, wiring = shape_of(target), donor.wiring
    maps = donor.maps("scored", shape)
    bare, _ = converted(ARMS["subclone"], donor.weights, wiring, maps, donor.shape, shape, None)
    scaled = rescale(bare, wiring, donor.shape, shape, ARMS["subclone_rs"].rescale)
    inputs = Inputs(second_moments(donor.model, donor.frozen[:PROBES], kept_inputs(wiring, maps)))
    fitted, _ = converted(ARMS["hybrid"], donor.weights, wiring, maps, donor.shape, shape, inputs, spectrum=False)
    return Measured({
        "rebuilt": _rebuilt(donor), "compensated": _changed(fitted, bare),
        "rescaled": _factors(scaled, bare, wiring, donor.shape, shape), "fronted": sorted(_fronted(donor)),
        "strangers": _strangers(maps, donor.shape, shape), "frequencies": frequency_gap(maps, donor.shape, shape),
        "tied": _tied(donor, bare, shape, target)})


def _rebuilt(donor: Donor) -> list[str]:
    again = assemble(extract(donor.model), donor.config).state_dict()
    return [name for name, tensor in donor.model.state_dict().items() if not torch.equal(tensor, again[name])]


def _changed(weights: Weights, bare: Weights) -> dict[str, list[str]]:
    """{"every": roles that differ from `bare` in all their places, "some": in a part of them}."""
    differs: dict[str, list[bool]] = {}
    for (b, name), tensor in weights.items():
        differs.setdefault(name, []).append(not torch.equal(tensor, bare[b, name]))
    return {"every": sorted(name for name, found in differs.items() if all(found)),
            "some": sorted(name for name, found in differs.items() if any(found) and not all(found))}


def _factors(weights: Weights, bare: Weights, wiring: Wiring, donor: Shape, target: Shape) -> dict[str, float | None]:
    """{role: sqrt(inputs before / after), where each of its tensors is `bare`'s times just that; None where one is
    not}; roles that the two have alike are left out."""
    factors: dict[str, float | None] = {}
    for role in wiring.roles:
        pairs = [(tensor, bare[key]) for key, tensor in weights.items() if key[1] == role.name]
        factor = math.sqrt(donor.size(role.axes[-1]) / target.size(role.axes[-1]))
        if not all(torch.equal(tensor, base) for tensor, base in pairs):
            exact = all(torch.equal(tensor, base * factor) for tensor, base in pairs)
            factors[role.name] = factor if exact else None
    return factors


def _fronted(donor: Donor) -> set[str]:
    """The roles of FRONTED that this wiring has, a tied head's standing with the final norm."""
    roles = {role.name for role in donor.wiring.roles}
    tied = {name for name in roles if name.startswith("LN_FINAL")} if "EMB_OUT" not in roles else set()
    return (FRONTED & roles) | tied


def _strangers(maps: Maps, donor: Shape, target: Shape) -> int:
    """Kept query heads whose group in the target is not the one they had; 0 too where every head has its own keys."""
    if donor.kv_heads is None:
        return 0
    count = 0
    for b in range(len(maps.blocks)):
        heads = maps(b, QK).index.unflatten(0, (target.heads, -1))[:, 0] // donor.head_dim
        groups = maps(b, KEYS).index.unflatten(0, (target.groups, -1))[:, 0] // donor.head_dim
        count += (heads // donor.sharing != groups.repeat_interleave(target.sharing)).sum().item()
    return count


@torch.no_grad()
def _tied(donor: Donor, bare: Weights, shape: Shape, target: Any) -> float | None:
    norms = [role.name for role in donor.wiring.lever(READ_IN) if role.neutral is not None]
    if not norms:
        return None
    factor = math.sqrt(donor.shape.width / shape.width)
    loud = bare | {(None, name): bare[None, name] * factor for name in norms}
    ids = torch.as_tensor(donor.frozen[:1])
    plain, louder = (assemble(weights, target)(input_ids=ids).logits for weights in (bare, loud))
    return ((louder - factor * plain).abs().max() / (factor * plain).abs().max()).item()


CLAIMS = [
    Claim("rebuild-exact", "3", "Taking the donor apart and putting it together again changes no bit of any tensor",
          ("rebuilt",), lambda e: not e["rebuilt"], lambda e: f"{len(e['rebuilt'])} tensors differ",
          paper="by protocol"),
    Claim("compensation-touches-read-outs", "7.2",
          "Compensation re-fits what is bare to the stream and no other tensor: O and MLP_DOWN, in every block",
          ("compensated",), lambda e: set(e["compensated"]["every"]) == BARE and not e["compensated"]["some"],
          lambda e: ", ".join(e["compensated"]["every"]), paper="dense and dense_4h_to_h"),
    Claim("rescale-touches-both", "7.2",
          "Rescale multiplies just these and what a norm stands in front of, by sqrt(inputs before / after), exactly",
          ("rescaled", "fronted"),
          lambda e: set(e["rescaled"]) == BARE | set(e["fronted"]) and None not in e["rescaled"].values(),
          lambda e: ", ".join(f"{name} x {factor:.3f}" if factor else name for name, factor in e["rescaled"].items()),
          paper="QKV, dense, dense_h_to_4h, dense_4h_to_h, embed_out"),
    Claim("groups-stay", "ours", "Every kept query head reads the keys and values that it read in the donor",
          ("strangers",), lambda e: e["strangers"] == 0, lambda e: f"{e['strangers']} heads read others'"),
    *(claim for claim in CONSTRUCTION if claim.id == "frequencies-match"),
    Claim("tied-head", "ours",
          "Where head and embedding are one tensor, the final norm's gain times s gives the logits that the head "
          "times s would", ("tied",), lambda e: e["tied"] < ROUNDING,
          lambda e: f"off by {e['tied']:.1g} of the largest"),
]
"""Over `wiring_evidence`."""

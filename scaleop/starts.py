"""What converted models know before any training, where no race asks: compensation with each ridge rule and from fewer
probes, a cut that drops blocks alone, and a tied head whose rescale goes elsewhere.

Cheap beside a run, so it can be asked of a donor that is large for the machine. Everything is found again in the store.
"""

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch

from scaleop.activations import second_moments
from scaleop.arms import ARMS, arm_named, build, converted
from scaleop.donor import Donor, held_out_from
from scaleop.maps import Maps
from scaleop.paths import STORE
from scaleop.progress import progress
from scaleop.race import Race
from scaleop.ridge import RULES, HeldOut
from scaleop.shrink import Inputs, kept_inputs, rescale
from scaleop.store import cached_values, digest
from scaleop.weights import Weights, assemble, extract
from scaleop.wiring import READ_IN, RESIDUAL, config_like, shape_of

PROTOCOL = 1  # raise it when a change of code changes what is measured: older results are then not reused
SHARES = (1 / 8, 1 / 2, 1.0)  # of the sequences that are set aside for moments
HELD_OUT = 100  # frozen sequences behind those, on which fits err
CORNERS = ("subclone", "hybrid", "subclone_rs", "hybrid_rs")

Row = dict[str, Any]


def compensated(race: Race) -> dict[str, list[Row]]:
    """The fits of Eq. 3 by ridge rule, on all moments, and by the paper's rule on the `SHARES` of them.

    `fits`: a row a (rule, share, block, role) with `positions`, lambda over the mean diagonal (`ridge`), `condition`,
    `norm_ratio`, and on sequences that no fit has seen the `error` E|Mx - M'x_K|^2 and plain selection's (`selected`),
    both over E|Mx|^2. `starts`: a row a (rule, share, arm) with the quick perplexity (`ppl`) of hybrid and hybrid_rs.

    Holds up to five sets of the kept columns' moments and one of whole squares. ValueError when no frozen sequence is
    left behind those of the moments.
    """
    donor = race.donor
    if len(donor.frozen) <= donor.moment_sequences:
        raise ValueError(f"all {len(donor.frozen)} frozen sequences give moments, so no fit can be tried on others: "
                         "raise corpus.frozen.sequences, or lower corpus.frozen.moments")
    return _kept(race, "compensated", lambda: _compensated(race), moments=donor.moment_sequences, held_out=HELD_OUT,
                 shares=SHARES)


def _compensated(race: Race) -> dict[str, list[Row]]:
    donor, wiring, shape = race.donor, race.donor.wiring, shape_of(race.target)
    maps = donor.maps("scored", shape)
    kept, errors = kept_inputs(wiring, maps), Errors(donor, maps)
    fits, starts = [], []
    for rule, share, inputs in progress(_cases(donor, maps), desc="compensation", total=len(SHARES) + len(RULES) - 1):
        arm = ARMS["hybrid"] if rule == RULES[0] else arm_named(f"hybrid_{rule}")
        weights, solves = converted(arm, donor.weights, wiring, maps, donor.shape, shape, inputs)
        for place, index in kept.items():
            b = maps.blocks.index(place[0])
            solve, moments = solves[f"{b}.{place[1]}"], inputs.moments[place]
            fits.append({"rule": rule, "share": share, "positions": inputs.positions, "block": place[0],
                         "role": place[1], "width": len(index),
                         "ridge": solve.ridge / moments[index].diagonal().mean().item(), "condition": solve.condition,
                         "norm_ratio": solve.norm_ratio, "error": errors(place, weights[b, place[1]]),
                         "selected": errors(place)})
        for name, levers in (("hybrid", ()), ("hybrid_rs", (READ_IN,))):
            rescaled = rescale(weights, wiring, donor.shape, shape, levers)
            starts.append({"rule": rule, "share": share, "positions": inputs.positions, "arm": name,
                           "ppl": race.quick(assemble(rescaled, race.target))})
    return {"fits": fits, "starts": starts}


def _cases(donor: Donor, maps: Maps) -> Iterator[tuple[str, float, Inputs]]:
    """(rule, share of the moments, inputs) of every case; smaller shares are gathered stretch by stretch and added up,
    and all moments are those that the race's arms use."""
    sequences, length = donor.moment_probes.shape
    start, total = 0, {}
    for share in SHARES[:-1]:
        end = max(start + 1, round(share * sequences))
        part = donor.moments(maps, slice(start, end))
        total = {place: total[place] + moments for place, moments in part.items()} if total else part
        yield RULES[0], share, Inputs(total, positions=end * length)
        start = end
    whole, behind = donor.moments(maps), donor.moments(maps, slice(held_out_from(sequences), None))
    yield RULES[0], SHARES[-1], Inputs(whole, positions=sequences * length)
    held = {place: HeldOut(moments - behind[place], behind[place]) for place, moments in whole.items()}
    for rule in RULES[1:]:
        yield rule, SHARES[-1], Inputs(whole, positions=sequences * length, held=held)


class Errors:
    """Errors of fits on frozen sequences behind those that are set aside for moments: of the read-outs' kept rows."""

    def __init__(self, donor: Donor, maps: Maps) -> None:
        rows, first = maps(None, RESIDUAL), donor.moment_sequences
        self.kept = kept_inputs(donor.wiring, maps)
        self.matrices = {place: rows.apply(donor.weights[place], 0).double() for place in self.kept}
        everything = {place: torch.arange(matrix.shape[1]) for place, matrix in self.matrices.items()}
        self.moments = second_moments(donor.model, donor.frozen[first : first + HELD_OUT], everything)
        self.whole = {place: self._power(place, matrix) for place, matrix in self.matrices.items()}

    def __call__(self, place: tuple[int, str], fitted: torch.Tensor | None = None) -> float:
        """E|Mx - M'x_K|^2 / E|Mx|^2 of `fitted` M' (out, k), or of the plain selection M[:, K]."""
        matrix, kept = self.matrices[place], self.kept[place]
        off = matrix.clone()
        off[:, kept] -= matrix[:, kept] if fitted is None else fitted.double()
        return self._power(place, off) / self.whole[place]

    def _power(self, place: tuple[int, str], matrix: torch.Tensor) -> float:
        return ((matrix @ self.moments[place]) * matrix).sum().item()


def depth_cut(race: Race, layers: int, probes: int = 64) -> list[Row]:
    """The four corners of the levers where blocks go and nothing else does: width, heads and MLP stay the donor's.

    A row an arm with its quick perplexity (`ppl`) and the relative distance of its weights from bare selection's
    (`moved`): no axis is cut, so the rescale's factor is 1 and Eq. 3 can only shrink what it fits. `probes` sequences
    are then enough for its moments.
    """
    def measured() -> list[Row]:
        whole = race.donor
        donor = Donor(whole.model, whole.frozen, min(probes, whole.moment_sequences), whole.key, whole.folder)
        target = config_like(donor.config, **{**donor.shape.sizes(), "layers": layers})
        target._attn_implementation = race.target._attn_implementation
        rows, bare = [], {}
        for name in progress(CORNERS, desc="depth alone"):
            model, _ = build(ARMS[name], donor, target, 0)
            weights = extract(model)
            bare = bare or weights
            rows.append({"arm": name, "layers": layers, "ppl": race.quick(model), "moved": _distance(weights, bare)})
        return rows

    return _kept(race, "depth", measured, layers=layers, probes=min(probes, race.donor.moment_sequences))


def _distance(weights: Weights, other: Weights) -> float:
    off = sum((tensor - other[key]).double().square().sum().item() for key, tensor in weights.items())
    return math.sqrt(off / sum(tensor.double().square().sum().item() for tensor in other.values()))


def tied_head(race: Race) -> list[Row]:
    """Quick perplexity (`ppl`) of subclone_rs by where a tied head's factor goes: to the final norm, as the tables have
    it, to the tensor that is embedding and head, or nowhere. Empty where the head has a tensor of its own."""
    donor, shape = race.donor, shape_of(race.target)
    norms = [role.name for role in donor.wiring.lever(READ_IN) if role.neutral is not None]
    if not norms:
        return []

    def measured() -> list[Row]:
        maps, factor = donor.maps("scored", shape), math.sqrt(donor.shape.width / shape.width)
        weights, _ = converted(ARMS["subclone_rs"], donor.weights, donor.wiring, maps, donor.shape, shape, None)
        nowhere = weights | {(None, name): weights[None, name] / factor for name in norms}
        places = {"the final norm": weights,
                  "the embedding": nowhere | {(None, "EMB_IN"): weights[None, "EMB_IN"] * factor}, "nowhere": nowhere}
        return [{"the head's factor goes to": place, "ppl": race.quick(assemble(found, race.target))}
                for place, found in places.items()]

    return _kept(race, "tied", measured)


def _kept(race: Race, what: str, compute: Callable[[], Any], **facts: Any) -> Any:
    """`compute()`'s values, found again by all that decides them: donor, probes, target, evaluation and `facts`."""
    measure, donor = race.experiment.evaluation, race.donor
    facts = {"protocol": PROTOCOL, "donor": donor.key, "frozen": list(donor.frozen.shape),
             "target": race.target_shape.model_dump(exclude_none=True), "tokenizer": race.corpus.key,
             "evaluation": [measure.window, measure.stride, measure.quick_tokens], **facts}
    return cached_values(STORE / "starts" / f"{what}-{digest(facts)}" / "rows.json", compute, **facts)

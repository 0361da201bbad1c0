"""Section 6 on trained models: fit the operators of two pairs, test what they leave, keep every result in the store.

The width pair is an experiment's donor and reference; the depth pair, for the transfer test, is the reference and a
still smaller sibling. Everything here looks at trained targets: it diagnoses, and no arm of the race is made from it.
"""

from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn

from scaleop import hub
from scaleop.claims.measured import Measured
from scaleop.experiment import Experiment, ExperimentError, companion
from scaleop.fitted import Fitted, Reproduced, fit_pair
from scaleop.paths import STORE, resolve
from scaleop.planted import REPAIRINGS, detection, power
from scaleop.predictors import EVERY, HIDDEN, cross_examine, examine, fit, held_out, inputs, repaired, scores, targets
from scaleop.predictors import as_stacks as to_stacks
from scaleop.projection import matrix_types
from scaleop.race import Race, model_key
from scaleop.residuals import compare, cosine_test, rank_test, shuffled, spectral_test, spectrum
from scaleop.store import cached_values, digest
from scaleop.train import seed_everything
from scaleop.weights import Weights, assemble, empty_model, extract, load, load_config
from scaleop.wiring import wiring_of

PROTOCOL = 1  # raise it when a change of code changes what a test computes: older results are then not reused
PREDICTORS = {"linear": None, f"mlp{HIDDEN}": HIDDEN}

Values = dict[str, Any]


class ResidualStudy:
    """Section 6 for one experiment; each part is computed when asked for, and found again in the store.

    `smaller` names a trained sibling smaller than the reference; without one the transfer test is not run, nor with a
    model of another family or vocabulary (a line says so). Raises ExperimentError when the experiment has no
    reference: a residual needs a trained model of the target's shape.
    """

    def __init__(self, race: Race, smaller: str | None = None, seed: int = 0) -> None:
        pair = race.experiment.pair
        if pair.reference is None:
            raise ExperimentError(f"pair.reference of experiment {race.experiment.name!r} is null: section 6 needs a "
                                  "trained model of the target's shape; name one, or choose another experiment")
        self.race, self.seed = race, seed
        self.names = {"large": pair.donor, "medium": pair.reference} | ({} if smaller is None else {"small": smaller})
        for name in self.names.values():
            if isinstance(place := resolve(name), Path) and not place.exists():
                raise ExperimentError(f"section 6 compares trained models, and {name} is not there: `make models` "
                                      "trains the nano ladder; to do without a smaller sibling, set smaller to None")
        if smaller is not None and (why := stranger(smaller, pair.reference)):
            print(f"note: the transfer test is left out: {why}; {_instead(race.experiment)}")
            del self.names["small"]
        self.keys = {size: model_key(name) for size, name in self.names.items()}
        self.key = digest([PROTOCOL, self.keys, seed, race.corpus.key, race.experiment.evaluation.model_dump()])
        self.folder = STORE / "residuals" / race.experiment.name / self.key
        self._weights: dict[str, Weights] = {}

    @property
    def called(self) -> dict[str, str]:
        """The models' names by size, without the folders they lie in."""
        return {size: hub.short(name) for size, name in self.names.items()}

    def weights(self, size: str) -> Weights:
        """Weights of the "large", "medium" or "small" model by role, fp32."""
        if size not in self._weights:
            self._weights[size] = extract(load(self.names[size]))
        return self._weights[size]

    @cached_property
    def width(self) -> Fitted:
        """Operators from the donor to the reference."""
        return self._fitted("large", "medium")

    @cached_property
    def depth(self) -> Fitted | None:
        """Operators from the reference to the smaller sibling, block l from the block it would be made of."""
        if "small" not in self.names:
            return None
        try:
            return self._fitted("medium", "small")
        except Reproduced as error:
            print(f"note: the transfer test is left out: {self.names['small']} is no target for it ({error})")
            return None

    def _fitted(self, large: str, small: str) -> Fitted:
        return fit_pair(self.weights(large), self.weights(small), matrix_types(wiring_of(self.race.target)),
                        self.folder / "operators" / f"{large}-{small}.safetensors", self.seed)

    # Tests 1 and 2

    def spectral(self) -> Values:
        """Test 1 by type, and the same for residuals of fits to noise (`noise`)."""
        return self._stored("spectral", lambda: {
            role: {**spectral_test(delta), "noise": spectral_test(self.width.noise[role])}
            for role, delta in self.width.residuals.items()})

    def spectra(self, block: int) -> dict[str, dict[str, list[float]]]:
        """Singular values of one block's residual and of its controls, by type: what Figure 3 draws."""
        found = {}
        for role, delta in self.width.residuals.items():
            kinds = {"residual": delta, "shuffled": shuffled(delta), "fit to noise": self.width.noise[role]}
            found[role] = {kind: spectrum(matrices[block : block + 1])[0].tolist() for kind, matrices in kinds.items()}
        return found

    def cosine(self) -> Values:
        """Test 2 by type, and the same for residuals of fits to noise (`noise`)."""
        return self._stored("cosine", lambda: {
            role: {**cosine_test(delta), "noise": cosine_test(self.width.noise[role])["delta"]}
            for role, delta in self.width.residuals.items()})

    # Tests 3 and 4

    def learnability(self) -> Values:
        """Test 3 by predictor: `split` as the authors hold out blocks, with the real pairing's rank among re-pairings
        (the authors' control, seed 0, is one of them); `whole` with every block held out once."""
        def compute() -> Values:
            fitted, found = self.width, {}
            seen, held = inputs(fitted.outputs), self.held
            goals = torch.stack([targets(stacks) for stacks in (fitted.residuals, *(
                repaired(fitted.residuals, seed) for seed in range(REPAIRINGS)))])
            for name, hidden in PREDICTORS.items():
                real, control, *others = examine(seen, goals, held, hidden)
                rank = rank_test(real.reduction, [other.reduction for other in (control, *others)])
                found[name] = {"split": {**compare(real, control), "p_rank": rank, "repairings": REPAIRINGS},
                               "whole": compare(*cross_examine(seen, goals[:2], hidden))}
            return {"held": held, "patches": int(seen.of(held).sum()), "learned": int((~seen.of(held)).sum()), **found}
        return self._stored("learnability", compute)

    @property
    def held(self) -> list[int]:
        """The held-out blocks of the authors' split."""
        return held_out(len(next(iter(self.width.residuals.values()))))

    def transfer(self) -> Values | None:
        """Test 4 by predictor: learned on all blocks of the width pair, scored on all of the depth pair; the control is
        learned on re-paired residuals and scored on the same, real ones. None without a smaller sibling, and where no
        type has a residual in both pairs."""
        if self.depth is None or not self.depth.residuals.keys() & self.width.residuals.keys():
            return None

        def compute() -> Values:
            common = [role for role in self.width.residuals if role in self.depth.residuals]
            near, far = ({role: stacks[role] for role in common} for stacks in (self.width.outputs, self.depth.outputs))
            deltas = {role: self.width.residuals[role] for role in common}
            goals = torch.stack([targets(deltas), targets(repaired(deltas))])
            seen, there = inputs(near), inputs(far)
            aims = targets({role: self.depth.residuals[role] for role in common}).expand(2, -1, -1)
            everything = torch.ones(len(there.block), dtype=torch.bool)
            return {name: compare(*scores(fit(seen.features, goals, seen.inside, hidden), there, aims, everything))
                    for name, hidden in PREDICTORS.items()}
        return self._stored("transfer", compute)

    def power(self) -> Values:
        """The positive control: every test on planted residuals (`rows`), and the least share each finds (`table`)."""
        def compute() -> Values:
            rows = power(self.width.outputs, self.width.residuals)
            return {"rows": rows, "table": detection(rows)}
        return self._stored("power", compute)

    # Behaviour

    def behaviour(self) -> dict[str, float]:
        """Quick perplexities of the reference as a shell around other matrices (appendix B.2), all else its own.

        `operator`: the operators' outputs; `corrected`: plus the MLP's prediction, learned on the split and applied to
        all blocks, as the authors do; `cross-fitted`: plus predictions for blocks unseen in learning only; `residual`:
        plus the residual itself, the control that must give `reference` again. `random`: fresh weights.
        """
        def compute() -> Values:
            fitted = self.width
            learned, unseen = self._corrections()
            variants = {"operator": None, "corrected": learned, "cross-fitted": unseen, "residual": fitted.residuals}
            found = {name: self.race.quick(self._shell(change)) for name, change in variants.items()}
            seed_everything(self.seed)
            fresh = empty_model(self.race.target).eval()
            return {**found, "reference": self.race.quick(assemble(self.weights("medium"), self.race.target)),
                    "random": self.race.quick(fresh)}
        return self._stored("behaviour", compute)

    def _corrections(self) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """The MLP's corrections of all blocks: by the authors' split, and by predictors that had not seen the block."""
        seen, goals = inputs(self.width.outputs), targets(self.width.residuals)[None]
        blocks, unseen = int(seen.block.max()) + 1, torch.zeros_like(goals[0])
        for offset in range(EVERY):
            held = held_out(blocks, offset)
            away = seen.of(held)
            fitted = fit(seen.features[~away], goals[:, ~away], seen.inside[~away], HIDDEN)
            unseen[away] = fitted(seen.features[away])[0]
            if held == self.held:
                learned = fitted(seen.features)[0]
        return to_stacks(learned, self.width.residuals), to_stacks(unseen, self.width.residuals)

    def _shell(self, change: dict[str, torch.Tensor] | None) -> nn.Module:
        """The reference with its six matrix types replaced by operator outputs, plus `change` where there is one."""
        weights = dict(self.weights("medium"))
        for role, made in (self.width.outputs | self.width.reproduced).items():
            whole = made if change is None or role not in change else made + change[role]
            weights.update({(b, role): whole[b] for b in range(len(whole))})
        return assemble(weights, self.race.target)

    # All of it

    def measured(self) -> Measured:
        """What the claims of section 6 are decided on (`scaleop.claims.section6`)."""
        values = {"operator": self.width.errors, "free": self.width.free, "spectral": self.spectral(),
                  "cosine": self.cosine(), "learnability": self.learnability(), "transfer": self.transfer(),
                  "depth_operator": None if self.depth is None else self.depth.errors,
                  "behaviour": self.behaviour(), "power": self.power()}
        return Measured(values, self.seed)

    def _stored(self, name: str, compute: Callable[[], Values]) -> Values:
        """The part's values; computed once, and kept with their provenance and seconds."""
        return cached_values(self.folder / f"{name}.json", compute, part=name, experiment=self.race.experiment.name,
                             models=self.called)


def stranger(name: str, reference: str) -> str | None:
    """Why a model is no sibling of the reference, as a clause; None where it may be one. Reads configs only."""
    ours, its = load_config(reference), load_config(name)
    if its.model_type != ours.model_type:
        return f"{name} is a {its.model_type}, the pair's models are of {ours.model_type}"
    if its.vocab_size != ours.vocab_size:
        return f"{name} has a vocabulary of {its.vocab_size:,}, the pair's models one of {ours.vocab_size:,}"
    return None


def _instead(experiment: Experiment) -> str:
    """What to pass for `smaller`: the reference of the experiment's depth companion, or a model to look for."""
    depth = companion(experiment, "depth")
    sibling = None if depth is None else depth.pair.reference
    return f"-p smaller {sibling or 'NAME, with a sibling of the pair smaller than its reference,'} runs it"

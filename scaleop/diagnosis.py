"""Section 5 on trained models: why dense projection fails, measured; every part is found again in the store.

Table 4 and the treatment "own" look at a trained target, which no arm of the race may: they diagnose, and nothing is
trained from them. Without a reference in the experiment those parts are left out. The rest needs the donor alone.
"""

from collections.abc import Callable
from functools import cached_property
from typing import Any

import torch
from torch import nn

from scaleop.arms import BLENDED, arm_named, build
from scaleop.blending import gram_against_svd, shared_stacks, treatments
from scaleop.claims.measured import Measured
from scaleop.evaluate import greedy, perplexity
from scaleop.experiment import Experiment
from scaleop.paths import STORE
from scaleop.progress import progress
from scaleop.projection import (
    authors_start,
    block_errors,
    fit_adam,
    fit_als,
    free_share,
    matrix_types,
    operator_outputs,
    shuffled,
    stack,
)
from scaleop.race import Race, model_key
from scaleop.shrink import shrink
from scaleop.store import cached_values, digest
from scaleop.weights import Weights, assemble, extract, load
from scaleop.wiring import Shape, shape_of

PROTOCOL = 1  # raise it when a change of code changes what is computed: older results are then not reused
PROMPT, NEW_TOKENS = "The capital of France is", 12  # the authors' generation check
TOKENS = 50_000  # of the held-out text for Table 5: the authors' own quick budget
CORNERS = ("random", "subclone", "subclone_neutral", "projection")
VARIANTS = (*CORNERS, *(f"{name}_{axis}" for name in ("subclone_blend", "projection_keep") for axis in BLENDED))
"""What is trained for "which blending hurts?": two corners, scratch, neutral norms alone, and eight swaps."""


def shortened(experiment: Experiment, tokens: int) -> Experiment:
    """The experiment with another budget: warmup in proportion, half-way evaluation, ends scored by the quick text."""
    race, measure = experiment.race, experiment.evaluation
    warmup = max(1, round(race.warmup_steps * tokens / race.tokens))
    limits = {**measure.limits, "heldout": measure.quick_tokens}
    return experiment.model_copy(update={
        "race": race.model_copy(update={"tokens": tokens, "warmup_steps": warmup, "eval_every": max(1, tokens // 2),
                                        "checkpoint_every": 0}),
        "evaluation": measure.model_copy(update={"limits": limits})})


class Diagnosis:
    """Section 5 for one experiment (see `shortened`) and seed; each part is computed when first asked for."""

    def __init__(self, race: Race, seed: int = 0) -> None:
        self.race, self.seed = race, seed
        self.name = race.experiment.pair.reference
        self.keys = {"donor": race.donor_key, "reference": self.name and model_key(self.name)}
        self.folder = STORE / "projection" / race.experiment.name

    @property
    def shape(self) -> Shape:
        """The target's axis sizes."""
        return shape_of(self.race.target)

    @cached_property
    def reference(self) -> nn.Module | None:
        """The trained model of the target's shape, if there is one."""
        return self.name and load(self.name)

    @cached_property
    def target(self) -> Weights | None:
        """The reference's weights by role."""
        return self.reference and extract(self.reference)

    def small(self, kind: str) -> Weights:
        """The donor's weights under the maps of that kind, norms mapped along."""
        donor = self.race.donor
        return shrink(donor.weights, donor.wiring, donor.maps(kind, self.shape))

    def fits(self) -> dict[str, dict[str, Any]]:
        """Table 4 by weight type: errors (means over blocks), pooled errors, seconds, curves; {} without a reference.

        Both fits begin at the authors' start; `als_shuffled` is the same fit to targets whose entries are shuffled.
        """
        return self._kept("operators", self._fits) if self.name else {}

    def _fits(self) -> dict[str, dict[str, Any]]:
        donor, projected = self.race.donor, self.small("dense")
        kept, blocks = donor.maps("dense", self.shape).blocks, range(self.shape.layers)
        draw, found = torch.Generator().manual_seed(self.seed), {}
        types = matrix_types(donor.wiring)
        pairs = {role: (stack(donor.weights, role, kept), stack(self.target, role, blocks)) for role in types}
        starts = {role: authors_start(big, *goal.shape[1:], draw) for role, (big, goal) in pairs.items()}
        for role, (big, goal) in pairs.items():
            adam = fit_adam(big, goal, starts[role], name=f"Adam, {role}")
            als = fit_als(big, goal, starts[role], name=f"ALS, {role}")
            noise = fit_als(big, shuffled(goal, draw), starts[role], name=f"shuffled, {role}")
            alone = fit_als(big[:1], goal[:1], starts[role], name=f"one block, {role}")
            found[role] = {
                "target_free": block_errors(stack(projected, role, blocks), goal).mean().item(),
                "start": als.errors[0], "free_share": free_share(big, goal), "als_shuffled": noise.errors[-1],
                "one_block": alone.errors[-1],
                **{name: {"error": block_errors(operator_outputs(fit.operator, big), goal).mean().item(),
                          "pooled": fit.errors[-1], "seconds": fit.seconds[-1], "steps": len(fit.errors) - 1,
                          "curve": [list(point) for point in zip(fit.seconds, fit.errors, strict=True)][::every],
                          "rises": sum(b > a for a, b in zip(fit.errors, fit.errors[1:], strict=False))}
                   for name, fit, every in (("adam", adam, 10), ("als", als, 1))}}
        return found

    def bases(self) -> dict[str, dict[str, float]]:
        """Gram against full SVD by inner axis, on the donor's kept blocks: the largest sine, mean energy, total
        seconds, and ranks of the MLP's stack and of UP alone in the first block."""
        return self._kept("bases", self._bases)

    def _bases(self) -> dict[str, dict[str, float]]:
        donor, rows = self.race.donor, {}
        kept = donor.maps("scored", self.shape).blocks
        for block in progress(kept, desc="bases", unit=" blocks"):
            weights = {role: donor.weights[block, role] for role in matrix_types(donor.wiring)}
            for axis, matrix in shared_stacks(weights).items():
                rows.setdefault(axis, []).append(gram_against_svd(matrix, self.shape.size(axis)))
        up = donor.weights[kept[0], "MLP_UP"].double()
        joint = torch.cat([up, donor.weights[kept[0], "MLP_DOWN"].double().T], dim=1)
        return {axis: {"sine": max(row["sine"] for row in found), "blocks": len(found),
                       "gap": min((row["gap"] for row in found if row["gap"]), default=None),
                       "energy": sum(row["energy"] for row in found) / len(found),
                       **{key: sum(row[key] for row in found) for key in ("gram, s", "SVD, s")}}
                for axis, found in rows.items()} | {"rank": {
                    "up": torch.linalg.matrix_rank(up).item(), "joint": torch.linalg.matrix_rank(joint).item(),
                    "target": self.shape.mlp}}

    def models(self) -> dict[str, nn.Module]:
        """Table 5's models: the donor, its sibling, random weights, the selection, and the projection four ways."""
        race = self.race
        donor, arms = race.donor, {name: arm_named(name) for name in ("random", "subclone")}
        anchors = {"donor": donor.model, "reference": self.reference,
                   **{name: build(arm, donor, race.target, self.seed)[0] for name, arm in arms.items()}}
        treated = treatments(self.small("dense"), self.small("scored"), self.target, donor.wiring)
        models = anchors | {name: assemble(weights, race.target) for name, weights in treated.items()}
        return {name: model for name, model in models.items() if model is not None}

    def scores(self) -> dict[str, dict[str, Any]]:
        """Table 5: strided perplexity on the first TOKENS held-out tokens, a greedy sample (made twice: `repeats`),
        and the sample's perplexity under the donor (`salad`: how improbable a trained model finds it)."""
        return self._kept("scores", self._scores, tokens=TOKENS)

    def _scores(self) -> dict[str, dict[str, Any]]:
        race, measure, tokenizer = self.race, self.race.experiment.evaluation, self.race.corpus.tokenizer
        text, found = race.corpus.evaluation("heldout", TOKENS), {}
        for name, model in progress(self.models().items(), desc="Table 5", unit=" models"):
            sample, again = (greedy(model, tokenizer, PROMPT, NEW_TOKENS) for _ in range(2))
            ids = tokenizer(sample, return_tensors="np")["input_ids"][0]
            found[name] = {"ppl": perplexity(model, text, measure.window, measure.stride).value, "sample": sample,
                           "repeats": sample == again,
                           "salad": perplexity(race.donor.model, ids, measure.window, measure.stride).value}
        return found

    def identity(self) -> float:
        """Largest difference of logits between the donor and itself rebuilt from its extracted weights."""
        donor, ids = self.race.donor, torch.as_tensor(self.race.corpus.frozen()[:4])
        rebuilt = assemble(donor.weights, donor.config)
        with torch.no_grad():
            return (donor.model(input_ids=ids).logits - rebuilt(input_ids=ids).logits).abs().max().item()

    def mapped_norms(self) -> dict[str, float]:
        """Quick perplexity of the two variants with a blended stream whose norms are blended along, not neutral."""
        def measure() -> dict[str, float]:
            race, donor = self.race, self.race.donor
            kinds = {name: arm_named(name).maps for name in ("subclone_blend_residual", "projection")}
            small = {name: shrink(donor.weights, donor.wiring, donor.maps(kind, self.shape))
                     for name, kind in kinds.items()}
            return {name: race.quick(assemble(weights, race.target)) for name, weights in small.items()}
        return self._kept("mapped-norms", measure)

    def variants(self) -> list[dict[str, Any]]:
        """The runs of VARIANTS under the shortened budget, in that order."""
        return self.race.runs((arm, self.seed) for arm in VARIANTS)

    def measured(self) -> Measured:
        """Everything the claims of section 5 read; what was not measured is missing."""
        fits, runs, scores = self.fits(), self.variants(), self.scores()
        values = {"identity": self.identity(), "rank": self.bases()["rank"], "vocabulary": self.race.target.vocab_size,
                  "scores": scores, "mapped": self.mapped_norms(), "start": {r["arm"]: r["zero_shot"] for r in runs},
                  "end": {r["arm"]: r["final"]["value"] for r in runs}, "fits": fits or None,
                  "own": scores.get("own")}
        return Measured(values, self.seed)

    def _kept(self, name: str, compute: Callable[[], Any], **facts: Any) -> Any:
        """The values of a part, computed once for these models, this text and this seed."""
        experiment = self.race.experiment
        key = digest([PROTOCOL, self.keys, self.seed, self.race.corpus.key, experiment.corpus.model_dump(),
                      experiment.evaluation.model_dump(), experiment.pair.model_dump(), facts])
        return cached_values(self.folder / f"{name}-{key}.json", compute, part=name, seed=self.seed, keys=self.keys)

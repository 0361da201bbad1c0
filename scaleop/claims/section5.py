"""The claims of section 5 (why dense projection fails) and questions of our own; evidence: `Diagnosis.measured()`.

"Starts" are quick perplexities before training, "ends" those at the shortened budget of the mixed arms, and `scores`
those of Table 5; lower is better. A factor above 1 says that a change makes things worse.
"""

import math
from collections.abc import Callable
from typing import Any

from scaleop.claims.core import Claim
from scaleop.claims.measured import Measured
from scaleop.claims.section5_tables import passed
from scaleop.claims.section7 import PYTHIA_VOCABULARY
from scaleop.claims.standings import show
from scaleop.published import published

STRUCTURE = {"qk": "rotary pairs and heads (Q/K)", "vo": "heads (V/O)", "mlp": "GELU's units (MLP)",
             "residual": "the stream's features (LayerNorm)"}


def _errors(measured: Measured, fit: str) -> dict[str, float]:
    """Table 4's errors by type: "target_free", "adam" or "als"."""
    return {role: row[fit] if fit == "target_free" else row[fit]["error"] for role, row in measured["fits"].items()}


def _range(values: dict[str, float]) -> str:
    low, high = min(values, key=values.get), max(values, key=values.get)
    return f"{values[low]:.3f} ({low}) to {values[high]:.3f} ({high})"


def _ppl(measured: Measured, name: str) -> float:
    return measured["scores"][name]["ppl"]


def worse(first: str, second: str) -> dict[str, Any]:
    """The model `first` of Table 5 has a higher perplexity than `second`."""
    return {"needs": ("scores", *(("own",) if "own" in (first, second) else ())),
            "holds": lambda m: _ppl(m, first) > _ppl(m, second),
            "ours": lambda m: f"{show(_ppl(m, first))} against {show(_ppl(m, second))} "
                              f"({_ppl(m, first) / _ppl(m, second):.3g}x)"}


def swap(stage: str, arm: str, base: str, up: bool) -> dict[str, Any]:
    """Going from the arm `base` to `arm` raises (or lowers) perplexity at the start or at the end."""
    def factor(measured: Measured) -> float:
        return measured[stage][arm] / measured[stage][base]

    return {"needs": (stage,), "holds": lambda m: factor(m) > 1 if up else factor(m) < 1,
            "ours": lambda m: f"{show(m[stage][base])} → {show(m[stage][arm])} ({factor(m):.3g}x)"}


def factors(measured: Measured, stage: str) -> dict[str, float]:
    """How much blending each axis alone raises the full selection's perplexity. The residual axis: against a selection
    whose norms are neutral too."""
    runs = measured[stage]
    return {axis: runs[f"subclone_blend_{axis}"] / runs["subclone_neutral" if axis == "residual" else "subclone"]
            for axis in STRUCTURE}


def _with_norms(measured: Measured) -> dict[str, float]:
    """The starts' factors when norms are blended with the stream they act on, as the paper's argument has it."""
    blended = measured["mapped"]["subclone_blend_residual"] / measured["start"]["subclone"]
    return {**factors(measured, "start"), "residual": blended}


def largest(values: Callable[[Measured], dict[str, float]], needs: tuple[str, ...]) -> dict[str, Any]:
    """The residual axis has the largest factor of the four."""
    return {"needs": needs, "holds": lambda m: max(values(m), key=values(m).get) == "residual",
            "ours": lambda m: ", ".join(f"{axis} {factor:.3g}x" for axis, factor in values(m).items())}


def _explained(measured: Measured, fit: str) -> float:
    return 1 - min(_errors(measured, fit).values())


def _floor(fit: str) -> dict[str, Any]:
    """No type is fitted better than the paper's best (its printed value, to the printed digit)."""
    return {"needs": ("fits",),
            "holds": lambda m: min(_errors(m, fit).values()) >= published("oper.err.range_lo")["value"] - 0.005,
            "ours": lambda m: _range(_errors(m, fit))}


def _pooled(measured: Measured) -> dict[str, float]:
    """ALS's pooled error less Adam's."""
    return {role: row["als"]["pooled"] - row["adam"]["pooled"] for role, row in measured["fits"].items()}


def _time(measured: Measured) -> dict[str, float]:
    """How much of Adam's time ALS takes to get where Adam ends; infinite if it does not."""
    times = {role: passed(row) for role, row in measured["fits"].items()}
    return {role: math.inf if time is None else time / measured["fits"][role]["adam"]["seconds"]
            for role, time in times.items()}


def _chance(measured: Measured) -> dict[str, float]:
    """How much lower the error is than the same fit's to shuffled targets."""
    return {role: row["als_shuffled"] - row["als"]["pooled"] for role, row in measured["fits"].items()}


def _free(measured: Measured) -> dict[str, float]:
    return {role: row["free_share"] for role, row in measured["fits"].items()}


def _rank_line(measured: Measured) -> str:
    rank = measured["rank"]
    return f"UP alone {rank['up']}, [UP, DOWN'] {rank['joint']}, wanted {rank['target']}"


def _salad(measured: Measured) -> str:
    scores = measured["scores"]
    return (f"under the donor: projected (neutral norms) {show(scores['neutral']['salad'])}, the donor's own "
            f"{show(scores['donor']['salad'])}; held-out text {show(scores['donor']['ppl'])}")


def _blends(stage: str) -> list[Claim]:
    """One claim an axis and a direction; `stage` is "start" or "end"."""
    when, section = ("before training", "5") if stage == "start" else ("after a brief training", "ours")
    claims = []
    for axis, what in STRUCTURE.items():
        base = "subclone_neutral" if axis == "residual" else "subclone"
        claims.append(Claim(f"blend-{axis}-{stage}", section,
                            f"Blending {what} alone makes the selection worse {when}",
                            **swap(stage, f"subclone_blend_{axis}", base, up=True),
                            paper="said, not measured" if section == "5" else "-"))
        claims.append(Claim(f"keep-{axis}-{stage}", "ours", f"Sparing {what} alone makes the projection better {when}",
                            **swap(stage, f"projection_keep_{axis}", "projection", up=False)))
    return claims


CLAIMS = [
    Claim("identity", "5", "The donor rebuilt from its own extracted weights gives the same logits, to the last bit",
          ("identity",), lambda m: m["identity"] == 0, lambda m: f"{m['identity']:g}", "[identity.max_logit_diff]"),
    Claim("misses-target", "5", "Every target-free error exceeds 1: worse than predicting zero", ("fits",),
          lambda m: min(_errors(m, "target_free").values()) > 1, lambda m: _range(_errors(m, "target_free")),
          "[proj.err.V] (V) to [proj.err.O] (O)"),
    Claim("operator-helps", "5", "A shared operator fitted to the target errs less than predicting zero, in every type",
          ("fits",), lambda m: max(_errors(m, "adam").values()) < 1, lambda m: _range(_errors(m, "adam")),
          "[oper.err.Q] (Q) to [oper.err.V] (V)"),
    Claim("operator-floor", "5", "Even the fitted operator (Adam) gets no lower than the paper's best type",
          **_floor("adam"), paper="[oper.err.range_lo] to [oper.err.range_hi]"),
    Claim("operator-floor-als", "ours", "The same for the fit by ALS: the floor is not the optimiser's",
          **_floor("als"), paper="[oper.err.range_lo] to [oper.err.range_hi]"),
    Claim("a-third-explained", "5", "At best about 30 % of a weight is explained, read as 1 - error (below 35 %)",
          ("fits",), lambda m: _explained(m, "adam") < 0.35, lambda m: f"{_explained(m, 'adam'):.0%}",
          "[oper.var_explained]"),
    Claim("variance-is-more", "ours", "Read as what it is called, variance (1 - error²), more than 35 % is explained",
          ("fits",), lambda m: 1 - min(_errors(m, "adam").values()) ** 2 > 0.35,
          lambda m: f"{1 - min(_errors(m, 'adam').values()) ** 2:.0%}"),
    Claim("per-layer-degenerate", "5", "A fit to one block alone is degenerate: its error goes to 0 (below 0.01)",
          ("fits",), lambda m: max(row["one_block"] for row in m["fits"].values()) < 0.01,
          lambda m: f"at most {max(row['one_block'] for row in m['fits'].values()):.1e}", "said, not measured"),
    Claim("shared-not-degenerate", "ours", "The shared fit is not: fewer free numbers than numbers to explain, in "
          "every type", ("fits",), lambda m: max(_free(m).values()) < 1, lambda m: f"free share {_range(_free(m))}"),
    Claim("more-than-chance", "ours", "The shared fit explains more of every type than of the same weights shuffled",
          ("fits",), lambda m: min(_chance(m).values()) > 0,
          lambda m: f"error lower by {_range(_chance(m))}"),
    Claim("als-no-worse", "ours", "ALS ends no higher than Adam's 1,500 steps, in every type (pooled error)", ("fits",),
          lambda m: max(_pooled(m).values()) <= 0, lambda m: f"ALS less Adam: {_range(_pooled(m))}"),
    Claim("als-faster", "ours", "ALS gets there in at most a fifth of Adam's time, in every type", ("fits",),
          lambda m: max(_time(m).values()) <= 0.2, lambda m: f"time ratio {_range(_time(m))}"),
    Claim("als-falls", "ours", "ALS's error never rises", ("fits",),
          lambda m: not any(row["als"]["rises"] for row in m["fits"].values()),
          lambda m: f"{sum(row['als']['rises'] for row in m['fits'].values())} rises; "
                    f"Adam's: {sum(row['adam']['rises'] for row in m['fits'].values())}"),
    Claim("joint-basis", "5", "UP alone has too low a rank for the target's hidden units; UP and DOWN together suffice",
          ("rank",), lambda m: m["rank"]["up"] < m["rank"]["target"] <= m["rank"]["joint"], _rank_line,
          "said, not measured"),
    Claim("random-is-uniform", "5", "Random weights guess uniformly: perplexity within a factor 2 of the vocabulary",
          ("scores", "vocabulary"), lambda m: 0.5 < _ppl(m, "random") / m["vocabulary"] < 2,
          lambda m: f"{show(_ppl(m, 'random'))} for {m['vocabulary']:,} tokens",
          f"[anchor.random_410m] for {PYTHIA_VOCABULARY:,}"),
    Claim("worse-than-random", "5", "Projected, with the sibling's norms, is worse than random weights",
          **worse("own", "random"), paper="[anchor.proj_ln_small] against [anchor.random_410m]"),
    Claim("confidently-wrong", "5", "It is worse than a uniform guess: perplexity above the vocabulary's size",
          ("scores", "vocabulary", "own"), lambda m: _ppl(m, "own") > m["vocabulary"],
          lambda m: f"{show(_ppl(m, 'own'))} for {m['vocabulary']:,} tokens",
          f"[anchor.proj_ln_small] for {PYTHIA_VOCABULARY:,}"),
    Claim("projected-norms-explode", "5", "With projected norms it is far worse still than with the sibling's",
          **worse("projected", "own"), paper="[anchor.proj_ln_project] against [anchor.proj_ln_small]"),
    Claim("neutral-best", "5", "Neutral norms repair much: better than with the sibling's norms",
          **worse("own", "neutral"), paper="[anchor.proj_ln_small] against [anchor.proj_ln_neutral] (quick)"),
    Claim("neutral-beats-random", "5", "With neutral norms the projection beats random weights before any training",
          **worse("random", "neutral"), paper="[anchor.random_410m] against [anchor.proj_ln_neutral] (quick)"),
    Claim("selected-norms", "ours", "Selected norms, which belong to other coordinates, are worse than neutral ones",
          **worse("selected", "neutral")),
    Claim("selection-starts-lower", "5", "Selection respects the structure: it starts lower than the projection "
          "(neutral norms)", **worse("neutral", "subclone"),
          paper="[anchor.proj_ln_neutral] against [v3.t5.structured_selection] (quick, a later revision)"),
    Claim("greedy-deterministic", "5", "Greedy generation is deterministic", ("scores",),
          lambda m: all(row["repeats"] for row in m["scores"].values()),
          lambda m: f"{sum(row['repeats'] for row in m['scores'].values())} of {len(m['scores'])} samples repeat",
          "said, not measured"),
    Claim("word-salad", "5", "... but word salad: the donor finds the projection's sample less likely than real text",
          ("scores",), lambda m: m["scores"]["neutral"]["salad"] > _ppl(m, "donor"), _salad, "said, not measured"),
    *_blends("start"),
    Claim("layernorm-largest", "5", "LayerNorm is the largest factor: blending the stream and its norms costs the most",
          **largest(_with_norms, ("start", "mapped")), paper="much of the collapse is LayerNorm mismatch"),
    Claim("stream-largest", "ours", "Blending the stream costs the most even when norms are neutral before and after",
          **largest(lambda m: factors(m, "start"), ("start",))),
    Claim("norms-alone", "ours", "Giving up the selection's norms alone (neutral ones instead) makes it worse",
          **swap("start", "subclone_neutral", "subclone", up=True)),
    Claim("initialization-only", "5", "Dense projection is useful as an initialisation: after a brief training it is "
          "ahead of random weights", **swap("end", "projection", "random", up=False),
          paper="[ladder.random.final] → [ladder.projection.final] at 30M tokens"),
    Claim("selection-ends-lower", "ours", "After a brief training the full selection is ahead of the full projection",
          **swap("end", "subclone", "projection", up=False),
          paper="[ladder.projection.final] → [ladder.subclone.final] at 30M tokens"),
    *_blends("end"),
    Claim("stream-largest-end", "ours", "After a brief training, too, blending the stream costs the most",
          **largest(lambda m: factors(m, "end"), ("end",))),
]

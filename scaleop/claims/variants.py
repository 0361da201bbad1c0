"""Single changes of the leaders: activation scores and distillation (the paper's later revision), and ours, the mean of
the dropped inputs in the read-outs' biases (as FLAP prunes)."""

from typing import Any

from scaleop.claims.core import Claim
from scaleop.claims.paired import on_every_seed
from scaleop.claims.section7 import both, falling, rising

ACT, DISTILL = "7.5 (v3)", "7.7 (v3)"  # sections of the later revision


def _drop(race: Any, high: str, low: str) -> float:
    return race.value("end", high) - race.value("end", low)


def _grows(race: Any) -> bool:
    return _drop(race, "subclone_rs_act", "hybrid_rs_act") > _drop(race, "subclone_rs", "hybrid_rs")


def _shares(race: Any) -> list[float]:
    """Per seed, how much of the gap between the leaders activation scores alone close."""
    plain, scored, stacked = (race.values("end", arm) for arm in ("subclone_rs", "subclone_rs_act", "hybrid_rs"))
    return [(a - b) / (a - c) if a != c else float("nan") for a, b, c in zip(plain, scored, stacked, strict=True)]


def _share(race: Any) -> float:
    gap = _drop(race, "subclone_rs", "hybrid_rs")
    return _drop(race, "subclone_rs", "subclone_rs_act") / gap if gap > 0 else float("nan")


def _under_half(race: Any) -> bool | None:
    """None where there is no gap to have a share of."""
    return None if _drop(race, "subclone_rs", "hybrid_rs") <= 0 else _share(race) < 0.5


def _change(claim: str, section: str, statement: str, base: str, variant: str, predicate: Any = falling,
            axis: str = "end", paper: str = "-") -> Claim:
    return Claim(claim, section, statement, **predicate(axis, base, variant), paper=paper)


def _scored(arm: str) -> list[Claim]:
    """Activation scores on `arm`: a better end, a worse start."""
    return [
        _change(f"act-end-{arm}", ACT, f"Selecting by activations improves the end: {arm}_act ends lower than {arm}",
                arm, f"{arm}_act", paper=f"[seeds.{arm}.mean] → [act.{arm}_act.mean]"),
        _change(f"act-start-{arm}", ACT,
                f"Selecting by activations worsens the start: {arm}_act starts higher than {arm}",
                arm, f"{arm}_act", rising, "start", f"[ladder.{arm}.zero_shot] → [act.{arm}_act.zero_shot]")]


def _taught(arm: str, predicate: Any, statement: str, which: str) -> Claim:
    return _change(f"distill-{arm}", DISTILL, statement, arm, f"{arm}_distill", predicate,
                   paper=f"[distill.{arm}.b16.{which}] → [distill.{arm}.d16.{which}]")


def _biased(arm: str) -> list[Claim]:
    """The bias on `arm`: start and end."""
    return [_change(f"bias-{axis}-{arm}", "ours", f"The dropped inputs' mean in the biases improves the {axis}: "
                    f"{arm}_bias {axis}s lower than {arm}", arm, f"{arm}_bias", axis=axis) for axis in ("start", "end")]


CLAIMS = [
    *_scored("subclone_rs"), *_scored("hybrid_rs"),
    Claim("act-compensation", ACT, "Compensation works on that selection too: hybrid_rs_act ends lower than "
          "subclone_rs_act", **falling("end", "subclone_rs_act", "hybrid_rs_act"),
          paper="[act.subclone_rs_act.mean] → [act.hybrid_rs_act.mean]"),
    Claim("act-compensation-grows", ACT,
          "Compensation is worth more there: it lowers the end by more perplexity than on the norm-scored selection",
          ("subclone_rs", "hybrid_rs", "subclone_rs_act", "hybrid_rs_act"), _grows,
          lambda race: f"{_drop(race, 'subclone_rs', 'hybrid_rs'):.1f} by norms, "
                       f"{_drop(race, 'subclone_rs_act', 'hybrid_rs_act'):.1f} by activations",
          paper="[act.comp_effect_norm] by norms, [act.comp_effect_act] by activations"),
    Claim("act-not-the-information", ACT,
          "Compensation is more than the donor's statistics: hybrid_rs beats subclone_rs_act on every seed",
          **on_every_seed(("subclone_rs_act", "hybrid_rs")), seeds=3,
          paper="[act.subclone_rs_act.mean] → [seeds.hybrid_rs.mean], [act.paired_wins]"),
    Claim("act-under-half", ACT,
          "The statistics alone close under half of the gap between subclone_rs and hybrid_rs, on the means",
          ("subclone_rs", "subclone_rs_act", "hybrid_rs"), _under_half,
          lambda race: f"{_share(race):.2f}; by seed " + ", ".join(f"{share:.2f}" for share in _shares(race)),
          paper="[act.info_share]: [act.info_effect] of [act.comp_effect_norm]"),
    _taught("hybrid_rs", falling, "The donor as teacher helps the stack: hybrid_rs_distill ends lower than hybrid_rs",
            "mean"),
    _taught("subclone_rs", rising,
            "The donor as teacher hurts rescale alone: subclone_rs_distill ends higher than subclone_rs", "mean"),
    _taught("random", falling, "The donor as teacher helps from scratch: random_distill ends lower than random", "s0"),
    Claim("distill-stack", DISTILL, "With a teacher the stack stays ahead: hybrid_rs_distill ends lower than "
          "subclone_rs_distill", **falling("end", "subclone_rs_distill", "hybrid_rs_distill"),
          paper="[distill.subclone_rs.d16.mean] → [distill.hybrid_rs.d16.mean]"),
    *_biased("subclone"), *_biased("hybrid"), *_biased("hybrid_rs"),
    Claim("bias-is-not-enough", "ours",
          "A bias cannot stand in for the re-fit: hybrid starts and ends lower than subclone_bias",
          **both(falling("start", "subclone_bias", "hybrid"), falling("end", "subclone_bias", "hybrid"))),
]

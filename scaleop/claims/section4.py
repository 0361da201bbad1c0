"""Section 4 (representations align, parameters do not): its evidence, Table 3, and its claims.

Values are named as the paper's ids are, without their "align.": `act` are mean-pooled activations of matched blocks,
`last` the same at the last token (cached by the authors, never shown), `untrained` the donor against a model of the
target's shape that never saw text, `emb_in` and `emb_out` the embeddings.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
import torch

from scaleop.alignment import diagonal
from scaleop.claims.core import Claim
from scaleop.claims.measured import Measured
from scaleop.published import published

ROWS = {  # of Table 3: label, and whether the paper has it
    "act": ("activations, mean-pooled", True), "last": ("activations, last token", False),
    "untrained": ("activations, untrained sibling", False), "emb_in": ("input embedding", True),
    "emb_out": ("output embedding", True)}
MEASURES = {"cka": "CKA", "procrustes": "Procrustes R²", "ridge": "ridge R²"}


def alignment_evidence(cka: torch.Tensor, blocks: Sequence[int], activations: Mapping[str, Mapping[str, list[float]]],
                       embeddings: Mapping[str, Mapping[str, Any]], seed: int = 0) -> Measured:
    """What section 4 measured, as evidence for CLAIMS.

    `cka` is the (L, l) matrix of `captures.similarity`, `blocks[b]` the donor block that block b of the reference is
    matched with; `activations` maps `act`, `last` and `untrained` to `alignment.block_scores`, `embeddings` maps
    `emb_in` and `emb_out` to `alignment.embedding_scores`. Any of them may be missing: its claims are then not run.
    """
    mean, best = diagonal(cka, blocks)
    values: dict[str, Any] = {"act.cka": cka[list(blocks)].tolist(), "act.cka_diag_mean": mean,
                              "act.cka_best_on_diag": best}
    for row, scores in activations.items():
        for name, by_block in scores.items():
            values |= {f"{row}.{name}": by_block, f"{row}.{name}_r2_mean": float(np.mean(by_block))}
    for row, scores in embeddings.items():
        values[f"{row}.cka"] = scores["cka"]
        for name in ("ridge", "procrustes"):
            values |= {f"{row}.{name}_r2": scores[name], f"{row}.{name}_r2_random": scores[f"{name}_random"]}
    return Measured(values, seed)


def alignment_table(measured: Measured) -> pd.DataFrame:
    """Table 3 with ours beside the paper's: a row a comparison, rows of our own marked, numbers as text.

    Activations: CKA is the mean over matched blocks, R^2 the mean over blocks. Embeddings come twice, on the paper's
    split in vocabulary order and on random splits (mean ± sample standard deviation).
    """
    found = []
    for row, (label, in_paper) in ROWS.items():
        embedding = row.startswith("emb")
        ids = {"cka": f"{row}.cka" if embedding else f"{row}.cka_diag_mean"} | {
            name: f"{row}.{name}_r2" + ("" if embedding else "_mean") for name in ("procrustes", "ridge")}
        line = {"": label if in_paper else f"{label} (not in the paper)"}
        for name, title in MEASURES.items():
            line[f"{title}, paper"] = published(f"align.{ids[name]}")["printed"] if in_paper else "-"
            line[f"{title}, ours"] = _number(measured.values.get(ids[name]))
        found.append(line)
        if embedding:
            drawn = {name: measured.values.get(f"{row}.{name}_r2_random") for name in ("procrustes", "ridge")}
            found.append({"": f"{label}, random split (not in the paper)"} | {
                f"{MEASURES[name]}, ours": _spread(draws) for name, draws in drawn.items()})
    return pd.DataFrame(found).fillna("-")


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _spread(draws: list[float] | None) -> str:
    if not draws:
        return "-"
    return f"{np.mean(draws):.3f}" + (f" ± {np.std(draws, ddof=1):.3f}" if len(draws) > 1 else "")


# Predicates, each with what it needs and the numbers it shows; `**` puts one into a Claim.

def above(low: str | float, *high: str) -> dict[str, Any]:
    """Every one of `high` exceeds `low`, a value's name or a number."""
    def bar(m: Measured) -> float:
        return m[low] if isinstance(low, str) else low

    return {"needs": (*high, low) if isinstance(low, str) else high,
            "holds": lambda m: all(m[name] > bar(m) for name in high),
            "ours": lambda m: ", ".join(_number(m[name]) for name in high) + (
                f" over {_number(m[low])}" if isinstance(low, str) else "")}


def below(high: str | float, *low: str) -> dict[str, Any]:
    """Every one of `low` is less than `high`, a value's name or a number."""
    def bar(m: Measured) -> float:
        return m[high] if isinstance(high, str) else high

    return {"needs": (*low, high) if isinstance(high, str) else low,
            "holds": lambda m: all(m[name] < bar(m) for name in low),
            "ours": lambda m: ", ".join(_number(m[name]) for name in low) + (
                f" under {_number(m[high])}" if isinstance(high, str) else "")}


def middle(blocks: int) -> range:
    """The paper's middle band, its layers 4 to 22 of 24, in a model of another depth: 2 to 6 of 8."""
    return range(math.ceil(blocks / 6), blocks - 1)


def _band(m: Measured) -> tuple[float, float, float, float] | None:
    """Mean CKA of unmatched pairs inside the band and the lowest of them, mean of early and of last block with it."""
    cka = np.array(m["act.cka"])
    band = list(middle(len(cka)))
    if len(band) < 2:
        return None
    inside = cka[np.ix_(band, band)][~np.eye(len(band), dtype=bool)]
    early, last = range(band[0]), [len(cka) - 1]
    outside = [np.concatenate([cka[np.ix_(ends, band)].ravel(), cka[np.ix_(band, ends)].ravel()]).mean()
               for ends in (early, last)]
    return inside.mean(), inside.min(), *outside


def _saturated(m: Measured) -> bool | None:
    found = _band(m)
    return None if found is None else bool(found[0] > 0.9)


def _ends_distinct(m: Measured) -> bool | None:
    found = _band(m)
    return None if found is None else bool(max(found[2:]) < found[0])


def _band_line(m: Measured) -> str:
    mean, least, *_ = _band(m)
    blocks = len(m["act.cka"])
    return f"mean {mean:.3f}, lowest {least:.3f} (blocks {middle(blocks)[0]} to {middle(blocks)[-1]} of {blocks})"


def _lowest(values: Sequence[float]) -> int:
    return int(np.argmin(values))


def _near(m: Measured, one: int, other: int) -> bool:
    """Within an eighth of the depth: the paper's dip is layers 3 to 5 of 24."""
    return abs(one - other) <= max(1, len(m["act.ridge"]) // 8)


def _dip_together(m: Measured) -> bool | None:
    dips = [_lowest(m[name]) for name in ("act.ridge", "act.procrustes")]
    inner = range(1, len(m["act.ridge"]) - 1)
    return _near(m, *dips) and all(dip in inner for dip in dips) if inner else None


def _dips(m: Measured) -> str:
    return "; ".join(f"{label} lowest at block {_lowest(values)} of {len(values)} ({_number(min(values))}, mean "
                     f"{_number(float(np.mean(values)))})"
                     for label, values in (("ridge", m["act.ridge"]), ("Procrustes", m["act.procrustes"])))


def _matched(m: Measured) -> list[float]:
    return np.diag(np.array(m["act.cka"])).tolist()


_MEANS = ("act.ridge_r2_mean", "act.procrustes_r2_mean")
_EMBEDDINGS = ("emb_in.ridge_r2", "emb_out.ridge_r2")
_RANDOM = tuple(f"{name}_random" for name in _EMBEDDINGS)
_SIDES = {label: (f"emb_in.{name}", f"emb_out.{name}")
          for label, name in (("CKA", "cka"), ("ridge", "ridge_r2"), ("Procrustes", "procrustes_r2"))}


def _gap(m: Measured) -> float:
    return m[_MEANS[0]] - m[_MEANS[1]]


def _drawn(m: Measured) -> list[float]:
    return [float(np.mean(m[name])) for name in _RANDOM]


CLAIMS = [
    Claim("cka-diagonal", "4", "Matched blocks are alike: mean linear CKA on the diagonal is above one half",
          **above(0.5, "act.cka_diag_mean"), paper="[align.act.cka_diag_mean]"),
    Claim("cka-no-sharp-match", "4",
          "Yet CKA resolves no sharp match: under half of the donor's blocks find their best match on the diagonal",
          **below(0.5, "act.cka_best_on_diag"), paper="[align.act.cka_best_on_diag]"),
    Claim("cka-saturates", "4",
          "CKA saturates in the middle: unmatched pairs of middle blocks have a mean CKA above 0.9",
          ("act.cka",), _saturated, _band_line, paper="≈ 1.0 (blocks 4 to 22 of 24), says the text"),
    Claim("cka-ends-distinct", "4",
          "The early blocks and the last one are distinct: less like the middle than the middle is like itself",
          ("act.cka",), _ends_distinct, lambda m: "early {2:.3f}, last {3:.3f}, middle {0:.3f}".format(*_band(m)),
          paper="blocks 0 to 2 and block 23 of 24, says the text"),
    Claim("ridge-explains-most", "4",
          "The small model's activations are largely a linear image of the large one's: ridge's mean held-out R² is "
          "above one half", **above(0.5, "act.ridge_r2_mean"), paper="[align.act.ridge_r2_mean]"),
    Claim("procrustes-gets-most-of-it", "4",
          "Most of that is a change of basis: Procrustes reaches more than half of ridge's mean R²",
          _MEANS, lambda m: m[_MEANS[1]] > 0.5 * m[_MEANS[0]],
          lambda m: f"{_number(m[_MEANS[1]])} of {_number(m[_MEANS[0]])}",
          paper="[align.act.procrustes_r2_mean] of [align.act.ridge_r2_mean]"),
    Claim("ridge-above-procrustes", "4",
          "The rest is reshaping that no rotation gives: ridge's mean R² is above Procrustes'",
          _MEANS, lambda m: _gap(m) > 0, lambda m: f"gap {_gap(m):.3f}", paper="gap [align.act.gap]"),
    Claim("dip-together", "4",
          "Both maps dip together inside the stack: their lowest blocks are inner ones, at most an eighth of the depth "
          "apart", ("act.ridge", "act.procrustes"), _dip_together, _dips,
          paper="ridge [align.act.ridge_r2_layer3], [align.act.ridge_r2_layer4], [align.act.ridge_r2_layer5] at blocks "
                "3, 4, 5 of 24 (mean [align.act.ridge_r2_mean]); Procrustes lowest at block 3 "
                "([align.act.procrustes_r2_layer3], mean [align.act.procrustes_r2_mean])"),
    Claim("dip-where-cka-is-low", "4",
          "The dip is where CKA is low: matched CKA and ridge's R² are lowest at most an eighth of the depth apart",
          ("act.cka", "act.ridge"), lambda m: _near(m, _lowest(_matched(m)), _lowest(m["act.ridge"])),
          lambda m: f"CKA lowest at block {_lowest(_matched(m))} ({min(_matched(m)):.3f}), ridge at block "
                    f"{_lowest(m['act.ridge'])}",
          paper="dip at blocks 3 to 5, “the layers CKA flagged”; its CKA paragraph names 0 to 2 and 23"),
    Claim("embeddings-below-activations", "4",
          "A linear map explains less of either embedding than of the activations",
          **below("act.ridge_r2_mean", *_EMBEDDINGS),
          paper="[align.emb_in.ridge_r2], [align.emb_out.ridge_r2] under [align.act.ridge_r2_mean]"),
    Claim("embeddings-loosely-linear", "4",
          "Even for the embeddings, which share the vocabulary, a linear map explains less than half of the variance",
          **below(0.5, *_EMBEDDINGS), paper="[align.emb_in.ridge_r2], [align.emb_out.ridge_r2]"),
    Claim("output-above-input", "4",
          "The output embeddings align better than the input embeddings, by all three measures",
          tuple(name for names in _SIDES.values() for name in names),
          lambda m: all(m[after] > m[before] for before, after in _SIDES.values()),
          lambda m: "; ".join(f"{label} {_number(m[before])} → {_number(m[after])}"
                              for label, (before, after) in _SIDES.items()),
          paper="CKA [align.emb_in.cka] → [align.emb_out.cka]; ridge [align.emb_in.ridge_r2] → "
                "[align.emb_out.ridge_r2]; Procrustes [align.emb_in.procrustes_r2] → [align.emb_out.procrustes_r2]"),
    Claim("representation-parameter-gap", "4",
          "Representations align, parameters do not: ridge explains more than half of the activations and less than "
          "half of either embedding", (_MEANS[0], *_EMBEDDINGS),
          lambda m: m[_MEANS[0]] > 0.5 > max(m[name] for name in _EMBEDDINGS),
          lambda m: f"{_number(m[_MEANS[0]])} against {', '.join(_number(m[name]) for name in _EMBEDDINGS)}",
          paper="[align.act.ridge_r2_mean] against [align.emb_in.ridge_r2], [align.emb_out.ridge_r2]"),
    Claim("gap-carries-over", "ours",
          "The gap between the two maps carries over: within a factor 2 of the paper's",
          _MEANS, lambda m: 0.5 < _gap(m) / published("align.act.gap")["value"] < 2,
          lambda m: f"{_gap(m):.3f}", paper="[align.act.gap]"),
    Claim("last-token-alike", "ours",
          "Last-token activations say the same: ridge's mean R² is above one half and above Procrustes'",
          ("last.ridge_r2_mean", "last.procrustes_r2_mean"),
          lambda m: m["last.ridge_r2_mean"] > max(0.5, m["last.procrustes_r2_mean"]),
          lambda m: f"ridge {_number(m['last.ridge_r2_mean'])}, Procrustes {_number(m['last.procrustes_r2_mean'])}"),
    Claim("alignment-is-learned", "ours",
          "The alignment is learned: ridge explains more of the trained sibling than of an untrained one",
          **above("untrained.ridge_r2_mean", "act.ridge_r2_mean")),
    Claim("vocabulary-order-is-harder", "ours",
          "The vocabulary-order split is the harder one: a random split explains more of both embeddings (ridge)",
          (*_EMBEDDINGS, *_RANDOM),
          lambda m: all(drawn > m[name] for drawn, name in zip(_drawn(m), _EMBEDDINGS, strict=True)),
          lambda m: "; ".join(f"{side} {_number(m[name])} → {_number(drawn)}" for side, name, drawn in zip(
              ("input", "output"), _EMBEDDINGS, _drawn(m), strict=True))),
    Claim("gap-survives-random-split", "ours",
          "On a random split the embeddings still stay below the activations",
          (_MEANS[0], *_RANDOM), lambda m: max(_drawn(m)) < m[_MEANS[0]],
          lambda m: f"{', '.join(map(_number, _drawn(m)))} under {_number(m[_MEANS[0]])}"),
]

"""Section 7.6, measured: does the compensation solve fail for being wide?

The paper suspects that its ridge, 1e-3 times the mean diagonal, under-regularises Eq. 3 at 8,192 inputs. Here the solve
is run at the true widths and at the paper's 128,000 positions, on inputs whose true moments are known
(`scaleop.sampling`): so the held-out error of every M' is exact, and so is the least error any M' can have.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
import torch

from scaleop.paths import STORE
from scaleop.progress import progress
from scaleop.ridge import RULES, effective_rank
from scaleop.sampling import Population, draw
from scaleop.solves import BATCH, SINGLE, Fits, solve_single
from scaleop.store import cached_values, digest

PROTOCOL = 1  # raise it when a change of code changes what a case computes: older results are then not reused
WIDTHS = (512, 1024, 2048, 4096, 8192)
POSITIONS = 128_000  # the paper's: 1,000 sequences of 128
EXPONENTS = (1.0, 1.5)  # nano-l's read-outs: 0.8 to 1.6
SWEEP = ((512, 8_000), (1024, 8_000), (1024, 32_000), (2048, 8_000), (2048, 32_000), (4096, 16_000))
REPEATED = 1_024  # widths up to this are drawn several times; wider moments average themselves

Row = dict[str, Any]


def case(width: int, exponent: float, mean_share: float, positions: int, seed: int, rows: int) -> list[Row]:
    """One draw: a row a rule, for the moments about the mean (`mean_share` 0) and for those about zero.

    `error` is relative to E|Mx|^2 and exact, `floor` the least there is, `selected` plain selection's; `norm_ratio`
    and `row_ratio` (the largest row's) compare M' with M[:, K], `floor_norm` is the optimum's norm ratio. `lambda` is
    relative to the mean diagonal. `off` (fp32 only): distance to the same rule's fp64 M', relative.
    """
    rng = np.random.default_rng([seed, width, positions])
    population = Population(width, exponent, mean_share, rows, seed)
    moments = draw(population, positions, rng)
    fits, found = Fits(population, moments, rng), []
    lengths = np.linalg.norm(population.matrix[:, population.kept], axis=1)
    for mean, inputs in enumerate((population.without_mean(), population)):
        eigenvalues, solved = fits.by_rule(mean)
        ridge, paper = solved["mean_diagonal"]
        solved[SINGLE] = ridge, solve_single(moments, mean, -(-positions // BATCH), rng)
        best = inputs.optimum()
        for rule, (ridge, fitted) in solved.items():
            row = {"exponent": exponent, "mean_share": mean * mean_share, "width": width, "positions": positions,
                   "seed": seed, "rule": rule, "lambda": ridge / eigenvalues.mean(),
                   "condition": (eigenvalues[-1] + ridge) / (eigenvalues[0] + ridge),
                   "effective_rank": effective_rank(torch.from_numpy(eigenvalues)),
                   "error": inputs.error(fitted), "floor": inputs.error(best), "selected": inputs.selection_error(),
                   "norm_ratio": np.linalg.norm(fitted) / np.linalg.norm(lengths),
                   "floor_norm": np.linalg.norm(best) / np.linalg.norm(lengths),
                   "row_ratio": (np.linalg.norm(fitted, axis=1) / lengths).max()}
            if rule == SINGLE:
                row["off"] = np.linalg.norm(fitted - paper) / np.linalg.norm(paper)
            found.append({key: value if isinstance(value, (str, int)) else float(value) for key, value in row.items()})
    return found


def study(exponents: Sequence[float] = EXPONENTS, widths: Sequence[int] = WIDTHS, mean_share: float = 0.9,
          positions: int = POSITIONS, sweep: Sequence[tuple[int, int]] = SWEEP, repeats: int = 3,
          rows: int = 64) -> list[Row]:
    """`case` for every exponent and width at that many positions, and for the (width, positions) of `sweep`.

    Each draw is kept in the store and found again. By default about five minutes on one core the first time, most of
    it at 8,192, and 3 GB of memory.
    """
    draws = [(width, exponent, mean_share, count, seed, rows)
             for width, count in sorted({*((width, positions) for width in widths), *sweep})
             for exponent in exponents for seed in range(repeats if width <= REPEATED else 1)]
    found = []
    with progress(total=sum(draw[0] ** 2 for draw in draws), desc="ridge at width", unit_scale=True) as bar:
        for draw_ in draws:
            bar.set_postfix_str(f"{draw_[0]:,} inputs, {draw_[3]:,} positions")
            found += _stored(*draw_)
            bar.update(draw_[0] ** 2)
    return found


def _stored(*settings: float) -> list[Row]:
    path = STORE / "conditioning" / f"{settings[0]}-{digest([PROTOCOL, *settings])}" / "rows.json"
    return cached_values(path, lambda: case(*settings), settings=list(settings))  # by draw: one at 8,192 takes minutes


def summary(rows: Sequence[Row]) -> pd.DataFrame:
    """Means over draws by `exponent`, `mean_share`, `positions`, `width` and `rule`; with `excess`, the held-out error
    over the least there is, less 1, and `noise`, the excess of a fit without any ridge: k / (N - k - 1) on average
    over Gaussian draws about zero, one position more about their own mean."""
    table = pd.DataFrame(rows)
    table["rule"] = pd.Categorical(table["rule"], [*RULES, SINGLE], ordered=True)
    table["excess"] = table["error"] / table["floor"] - 1
    table["noise"] = table["width"] / (table["positions"] - table["width"] - 1)
    keys = ["exponent", "mean_share", "positions", "width", "rule"]
    return table.groupby(keys, observed=True).mean(numeric_only=True).drop(columns="seed").reset_index()


def verdict(rows: Sequence[Row], positions: int = POSITIONS) -> pd.DataFrame:
    """Does the paper's rule fail with width? By `exponent` and `mean_share`, at `positions`, narrowest and widest: its
    condition, its excess beside the noise's and beside the best rule's, its norm ratio over the optimum's, and how
    far off fp32 is."""
    table = summary(rows)
    table = table[table["positions"] == positions]
    found = []
    for (exponent, share, width), here in table.groupby(["exponent", "mean_share", "width"]):
        if width not in (table["width"].min(), table["width"].max()):
            continue
        by_rule = here.set_index("rule")
        paper, best = by_rule.loc["mean_diagonal"], by_rule.loc[list(RULES), "excess"].idxmin()
        found.append({"exponent": exponent, "mean_share": share, "width": width, "condition": paper["condition"],
                      "excess": paper["excess"], "noise": paper["noise"], "best rule": best,
                      "its excess": by_rule.loc[best, "excess"],
                      "norm over optimum's": paper["norm_ratio"] / paper["floor_norm"],
                      "fp32 off": by_rule.loc[SINGLE, "off"], "fp32 excess": by_rule.loc[SINGLE, "excess"]})
    return pd.DataFrame(found)

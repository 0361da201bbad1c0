"""Tables 1 and 6 with our numbers beside the paper's, and two tables of our own on the same tests.

The evidence is `residual_study.ResidualStudy(...).measured()`.
"""

import math
from typing import Any

import pandas as pd

from scaleop.claims.measured import Measured
from scaleop.published import in_print, published

PREDICTORS = ("linear", "mlp512")
TABLE_1 = (("held-out blocks", "res.pred"), ("depth pair", "res.xfer"))


def rank_table(measured: Measured) -> pd.DataFrame:
    """Table 6, the paper's effective ranks and ours in one row a type (our matrices are smaller: compare deficits).

    A deficit is how far the residual lies below its shuffle. Two controls are ours: normal entries with the residual's
    own row and column norms, and what an operator leaves that was fitted to shuffled weights. "-": not tested here.
    """
    rows = []
    for role in measured["operator"]:
        paper = {kind: published(f"res.erank.{kind}.{role}") for kind in ("delta", "shuffle", "gauss")}
        ours = measured["spectral"].get(role)
        row = {"type": role, "Δ, paper": paper["delta"]["printed"], "Δ, ours": _number(ours, "delta"),
               "shuffled, paper": paper["shuffle"]["printed"], "shuffled, ours": _number(ours, "shuffled"),
               "Gaussian, paper": paper["gauss"]["printed"], "Gaussian, ours": _number(ours, "gaussian"),
               "deficit, paper": percent(1 - paper["delta"]["value"] / paper["shuffle"]["value"]),
               "deficit, ours": percent(deficit(ours)), "same norms (ours)": percent(norms_deficit(ours)),
               "fit to noise (ours)": percent(deficit(ours and ours["noise"])),
               "below both": f"{ours['below']}/{ours['blocks']}" if ours else "-"}
        rows.append(row)
    return pd.DataFrame(rows)


def predictor_table(measured: Measured) -> pd.DataFrame:
    """Table 1, the paper's row and ours in one: error reductions, control, 95 % interval of the gap, one-sided p."""
    rows = []
    for where, base in TABLE_1:
        for name in PREDICTORS:
            mine = outcome(measured, where, name)
            printed = f"[{base}.{name}.gap_ci_lo] to [{base}.{name}.gap_ci_hi]" if base == "res.pred" else "-"
            rows.append({"scored on": where, "predictor": name,
                         "reduction, paper": in_print(f"[{base}.{name}.reduction]"),
                         "reduction, ours": signed(mine and mine["reduction"]),
                         "control, paper": in_print(f"[{base}.{name}.shuffle]"),
                         "control, ours": signed(mine and mine["control"]),
                         "gap, paper": in_print(printed), "gap, ours": interval(mine and mine["patches"]),
                         "p, paper": in_print(f"[{base}.{name}.p]"),
                         "p, ours": p_value(mine and mine["patches"]["p_one"])})
    return pd.DataFrame(rows)


def stricter_table(measured: Measured) -> pd.DataFrame:
    """The same gaps under tests the paper does not make: two-sided, by held-out block, among many re-pairings."""
    rows = []
    for where in ("held-out blocks", "all blocks, in turn", "depth pair"):
        for name in PREDICTORS:
            mine = outcome(measured, where, name)
            if mine is not None:
                rows.append({"scored on": where, "predictor": name, "patches": mine["patches"]["units"],
                             "gap": signed(mine["patches"]["gap"]), "p, two-sided": p_value(mine["patches"]["p_two"]),
                             "blocks": len(mine["gaps"]), "gap by blocks": interval(mine["blocks"]),
                             "p, sign of blocks": p_value(mine["p_sign"]),
                             "p, among re-pairings": p_value(mine.get("p_rank"))})
    return pd.DataFrame(rows)


def power_table(measured: Measured) -> pd.DataFrame:
    """The least share of the residual's variance that each test finds, by kind of planted signal, and false alarms."""
    def cell(row: dict[str, Any]) -> str:
        return "none" if row["smallest"] is None else f"{row['smallest']:.1%}"

    rows = measured["power"]["table"]
    kinds = list(dict.fromkeys(row["kind"] for row in rows))
    tests = list(dict.fromkeys(row["test"] for row in rows))
    found = {(row["test"], row["kind"]): row for row in rows}
    return pd.DataFrame([{
        "test": test, **{kind: cell(found[test, kind]) if (test, kind) in found else "-" for kind in kinds},
        "false alarms": next(f"{row['alarms']}/{row['draws']}" if row["draws"] else "1/20 by design"
                             for row in rows if row["test"] == test)}
        for test in tests])


def outcome(measured: Measured, where: str, name: str) -> dict[str, Any] | None:
    """What test 3 ("held-out blocks", "all blocks, in turn") or test 4 ("depth pair") says of a predictor."""
    if where == "depth pair":
        transfer = measured.values.get("transfer")
        return transfer and transfer[name]
    return measured["learnability"][name]["split" if where == "held-out blocks" else "whole"]


def deficit(test: dict[str, Any] | None) -> float:
    """How far an effective rank lies below its shuffled control, as a share; NaN where nothing was tested."""
    return 1 - test["delta"] / test["shuffled"] if test else math.nan


def norms_deficit(test: dict[str, Any] | None) -> float:
    """The same for the control with the residual's own row and column norms."""
    return 1 - test["norm_matched"] / test["shuffled"] if test else math.nan


def _number(test: dict[str, Any] | None, name: str) -> str:
    return f"{test[name]:.1f}" if test else "-"


def percent(share: float) -> str:
    """A share in per cent; - for NaN."""
    return "-" if math.isnan(share) else f"{share:.1%}"


def signed(value: float | None) -> str:
    """A reduction or a gap as Table 1 prints them, with its sign."""
    return "-" if value is None else f"{value:+.4f}"


def p_value(value: float | None) -> str:
    """A p to three places."""
    return "-" if value is None else f"{value:.3f}"


def interval(test: dict[str, Any] | None) -> str:
    """The 95 % interval of a gap."""
    return "-" if test is None else f"{test['low']:+.4f} to {test['high']:+.4f}"

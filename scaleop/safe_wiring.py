"""The safe-wiring analysis as a table, generated from the wirings: what may be done to which tensor, and why.

The paper asks for it per architecture ("porting needs a per-architecture safe-wiring analysis").
"""

from typing import Any

import pandas as pd

from scaleop.wiring import (
    READ_IN,
    READ_OUT,
    RESIDUAL,
    Role,
    Shape,
    Wiring,
    WiringError,
    check_pair,
    config_like,
    shape_of,
)


def treatment(role: Role) -> str:
    """What a conversion may do to a role once its axes are cut, in words."""
    if role.lever == READ_IN and role.neutral is not None:
        return "norm of a tied head: takes the head's factor"
    if role.lever == READ_IN:
        return f"read-in, fronted by a norm: times sqrt({role.axes[-1]} / kept)"
    if role.lever == READ_OUT:
        return f"read-out, bare to the stream: re-fitted to what is dropped, or times sqrt({role.axes[-1]} / kept)"
    if role.neutral is not None:
        return "norm: its kept features"
    return "token rows: kept as they are" if len(role.axes) == 2 else f"bias: its kept {role.axes[0]}"


def safe_wiring(*wirings: Wiring) -> pd.DataFrame:
    """A row a role, in the order of the first table that has it; for every wiring its axes (out × in) and how the
    checkpoint stores it, "-" where it has none; and what may be done to the role."""
    roles: dict[str, Role] = {}
    for wiring in wirings:
        for role in wiring.roles:
            roles.setdefault(role.name, role)
    rows = []
    for name, first in roles.items():
        row = {"role": name}
        for wiring in wirings:
            here = next((role for role in wiring.roles if role.name == name), None)
            row[wiring.family] = "-" if here is None else _axes(here, wiring)
        rows.append({**row, "after selection": treatment(first)})
    return pd.DataFrame(rows).set_index("role")


def _axes(role: Role, wiring: Wiring) -> str:
    stored = f" (part {role.slot + 1} of {wiring.fused}, fused by head)" if role.slot is not None else ""
    switched = f" (if {role.switch})" if role.switch else ""
    return " × ".join(role.axes) + stored + switched


def shared_axes(wiring: Wiring) -> dict[str, list[str]]:
    """{axis inside a block: the roles that must be cut alike on it}, in table order."""
    axes: dict[str, list[str]] = {}
    for role in wiring.roles:
        for axis in role.axes:
            if role.per_block and axis != RESIDUAL:
                axes.setdefault(axis, []).append(role.name)
    return axes


def reachable(config: Any) -> pd.DataFrame:
    """Which smaller shapes a selection of `config`'s model reaches: a row a cut with the sizes that it asks for (all
    others stay) and what the tables say, the shape reached or the sentence that refuses it."""
    have, rows = shape_of(config), []
    stay = {"layers": have.layers, "width": have.width, "heads": have.heads, "mlp": have.mlp}
    for cut, sizes in _cuts(have).items():
        try:
            small = shape_of(config_like(config, **{**stay, **sizes}))
            check_pair(have, small)
            said = f"reached: {small.heads} heads of {small.head_dim} dims in {small.groups} groups"
        except WiringError as error:
            said = f"refused: {' '.join(str(error).split())}"
        rows.append({"cut": cut, "asks for": ", ".join(f"{name}={value}" for name, value in sizes.items()),
                     "the table says": said})
    return pd.DataFrame(rows).set_index("cut")


def _cuts(have: Shape) -> dict[str, dict[str, int]]:
    """Cuts to try on a shape, by what they do; those that make no sense for it are left out."""
    dim, shared = have.head_dim, have.sharing > 1
    fewer = have.heads - have.sharing
    cuts = {
        "half of the blocks": {"layers": have.layers // 2},
        "the last group goes": {"width": fewer * dim, "heads": fewer},
        "one head goes": {"width": (have.heads - 1) * dim, "heads": have.heads - 1} if shared else {},
        "one head and one group go": {"width": (have.heads - 1) * dim, "heads": have.heads - 1,
                                      "kv_heads": have.groups - 1} if shared else {},
        "one query head of each group stays": {"width": have.groups * dim, "heads": have.groups,
                                               "kv_heads": have.groups} if shared else {},
        "a narrower stream, heads as they are": {"width": fewer * dim // have.heads * have.heads, "head_dim": dim},
        "heads half as wide": {"width": have.width // 2},
        "heads three quarters as wide": {"width": have.width * 3 // 4},
        "a group goes, and heads get narrower": {"width": fewer * dim // 2, "heads": fewer},
        "a wider MLP": {"mlp": 2 * have.mlp}}
    return {cut: sizes for cut, sizes in cuts.items() if sizes and min(sizes.values()) > 0}

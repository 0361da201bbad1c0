"""The safe-wiring analysis as a table, generated from the wirings: what may be done to which tensor, and why.

The paper asks for it per architecture ("porting needs a per-architecture safe-wiring analysis").
"""

import pandas as pd

from scaleop.wiring import READ_IN, READ_OUT, RESIDUAL, Role, Wiring


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

"""The language of wiring tables: roles, axes and levers. `scaleop.tables` speaks it, once per architecture.

A *role* is a logical weight (Q, O, MLP_UP, ...), whatever tensor of the checkpoint stores it. Its *axes* are named:

    residual       the residual stream's features
    qk, vo         the dimensions inside the query heads, as Q or as O index them (heads x head_dim, head-major)
    keys, values   the same dimensions once a key-value head, where several query heads share one: K's and V's axes
                   (key-value heads x head_dim). Where every head has its own, K is on qk and V on vo
    mlp            the MLP's hidden units
    vocab          the vocabulary

Its *lever* says what may be done to it after selection (paper, section 7.2): a `read_in` is fronted by a norm
(the rescale lever), a `read_out` writes to the residual stream with no norm in between (the compensation lever).

A block computes in *stages*: read-ins that read the residual stream at one point, then the read-outs that add to it.
"""

from dataclasses import dataclass, replace
from typing import Any, Self

RESIDUAL, QK, VO, KEYS, VALUES, MLP, VOCAB = "residual", "qk", "vo", "keys", "values", "mlp", "vocab"
SHARED = {QK: KEYS, VO: VALUES}  # what the query heads of a group share; chosen together with the axis it belongs to
READ_IN, READ_OUT = "read_in", "read_out"


class WiringError(ValueError):
    """An architecture without a table, or a target shape its wiring cannot reach; the message says why."""


def together(axis: str) -> tuple[str, ...]:
    """The axis and, where it has one, its shared part: they are mapped alike."""
    return (axis, SHARED[axis]) if axis in SHARED else (axis,)


@dataclass(frozen=True)
class Role:
    """One logical weight: `path` is its name in the model's state dict, `{b}` the block; axes are (out, in).

    `slot` is its place among the parts of a tensor fused head by head ([q, k, v] for GPT-NeoX), else None.
    `neutral` is the value that makes a norm parameter do nothing (gain 1, bias 0), None for other roles.
    `switch` is the config's attribute that must be true for the tensor to exist; None: it always does.
    `norm` is, of a read-in, the norm in front of it: what that writes is what the read-in reads.
    """

    name: str
    axes: tuple[str, ...]
    path: str
    lever: str | None = None
    slot: int | None = None
    neutral: float | None = None
    switch: str | None = None
    norm: str | None = None

    @property
    def per_block(self) -> bool:
        """Whether every block has one of these."""
        return "{b}" in self.path


@dataclass(frozen=True)
class Stage:
    """A part of a block: what reads the residual stream at one point, and what then writes to it at once."""

    read_ins: tuple[Role, ...]
    read_outs: tuple[Role, ...]

    @property
    def norms(self) -> tuple[str, ...]:
        """The norms in front of its read-ins; all of them read the same stream."""
        return tuple(dict.fromkeys(role.norm for role in self.read_ins))


@dataclass(frozen=True)
class Wiring:
    """The table of one architecture."""

    family: str
    roles: tuple[Role, ...]
    block: str  # path of a block; its output is the residual stream behind it
    rotary: str  # config attribute that holds the rotary settings
    fused: int = 1  # parts in a fused attention tensor
    kv_heads: str | None = None  # config attribute that counts key-value heads; None: every head has its own
    head_dim: str | None = None  # config attribute that may free head_dim from width / heads; None: it never is
    parallel: str | None = None  # config attribute that lets attention and MLP read the same stream; None: never
    by_block: tuple[str, ...] = ()  # config attributes that list something for every block
    renamed: tuple[tuple[str, str], ...] = ()  # (name in checkpoint files, name in the state dict) where they differ
    buffers: tuple[str, ...] = ()  # endings of names in old files that are no weights: masks and rotary tables
    aliases: tuple[tuple[str, str], ...] = ()  # (second name, name) of one tensor in the state dict: tied embeddings

    def in_model(self, stored: str) -> str | None:
        """The state dict's name of a checkpoint file's tensor; None where it holds no weight."""
        return None if stored.endswith(self.buffers or "\0") else dict(self.renamed).get(stored, stored)

    def __getitem__(self, name: str) -> Role:
        """The role of that name; KeyError otherwise."""
        found = next((role for role in self.roles if role.name == name), None)
        if found is None:
            raise KeyError(name)
        return found

    def lever(self, lever: str) -> tuple[Role, ...]:
        """All roles a lever acts on, in table order."""
        return tuple(role for role in self.roles if role.lever == lever)

    def stages(self, config: Any) -> tuple[Stage, ...]:
        """A block's stages in the order of the forward pass: one where a config makes attention and MLP parallel, else
        one that ends with O and one that ends with MLP_DOWN."""
        matrices = [role for role in self.roles if role.per_block and role.lever]
        starts = [i for i, role in enumerate(matrices) if role.lever == READ_IN and matrices[i - 1].lever == READ_OUT]
        if self.parallel and getattr(config, self.parallel):
            starts = [0]
        parts = [matrices[start:stop] for start, stop in zip(starts, [*starts[1:], len(matrices)], strict=True)]
        return tuple(Stage(tuple(role for role in part if role.lever == READ_IN),
                           tuple(role for role in part if role.lever == READ_OUT)) for part in parts)

    def of(self, config: Any) -> Self:
        """The table as a config has it: without the biases it switches off, and tied where it ties its embeddings."""
        roles = tuple(role for role in self.roles if role.switch is None or getattr(config, role.switch, False))
        table = self if len(roles) == len(self.roles) else replace(self, roles=roles)
        return table.tied() if getattr(config, "tie_word_embeddings", False) else table

    def tied(self) -> Self:
        """The table of a model whose output head is its input embedding: one tensor, two levers.

        The embedding keeps the tensor: nothing fronts it with a norm, so to scale it would change how loud a token is
        in the stream beside all that blocks add to it. The head's rescale moves to the final norm, which only the head
        reads: its gain (and bias) times s gives the logits that the head times s would.
        """
        tensor, head = self["EMB_IN"].path, self["EMB_OUT"].path
        roles = (replace(role, lever=READ_IN) if role.name.startswith("LN_FINAL") else role
                 for role in self.roles if role.name != "EMB_OUT")
        return replace(self, roles=tuple(roles), aliases=(*self.aliases, (head, tensor)))

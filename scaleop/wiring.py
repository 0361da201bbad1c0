"""The wiring: one table per architecture that says what every tensor's axes are. Nothing else knows.

A *role* is a logical weight (Q, O, MLP_UP, ...), whatever tensor of the checkpoint stores it. Its *axes* are named:

    residual   the residual stream's features
    qk, vo     the dimensions inside the heads, as Q/K or as V/O index them (heads x head_dim, head-major)
    mlp        the MLP's hidden units
    vocab      the vocabulary

Its *lever* says what may be done to it after selection (paper, section 7.2): a `read_in` is fronted by a norm
(the rescale lever), a `read_out` writes to the residual stream with no norm in between (the compensation lever).
"""

from dataclasses import dataclass
from typing import Any

RESIDUAL, QK, VO, MLP, VOCAB = "residual", "qk", "vo", "mlp", "vocab"
READ_IN, READ_OUT = "read_in", "read_out"


class WiringError(ValueError):
    """An architecture without a table, or a target shape its wiring cannot reach; the message says why."""


@dataclass(frozen=True)
class Role:
    """One logical weight: `path` is its name in the model's state dict, `{b}` the block; axes are (out, in).

    `slot` is its place among the parts of a tensor fused head by head ([q, k, v] for GPT-NeoX), else None.
    `neutral` is the value that makes a norm parameter do nothing (gain 1, bias 0), None for other roles.
    """

    name: str
    axes: tuple[str, ...]
    path: str
    lever: str | None = None
    slot: int | None = None
    neutral: float | None = None

    @property
    def per_block(self) -> bool:
        """Whether every block has one of these."""
        return "{b}" in self.path


@dataclass(frozen=True)
class Wiring:
    """The table of one architecture."""

    family: str
    roles: tuple[Role, ...]
    fused: int  # parts in a fused attention tensor
    block: str  # path of a block; its output is the residual stream behind it
    rotary: str  # config attribute that holds the rotary settings
    renamed: tuple[tuple[str, str], ...] = ()  # (name in checkpoint files, name in the state dict) where they differ
    buffers: tuple[str, ...] = ()  # endings of names in old files that are no weights: masks and rotary tables

    def in_model(self, stored: str) -> str | None:
        """The state dict's name of a checkpoint file's tensor; None where it holds no weight."""
        return None if stored.endswith(self.buffers or "\0") else dict(self.renamed).get(stored, stored)

    def __getitem__(self, name: str) -> Role:
        """The role of that name; KeyError otherwise."""
        return next(role for role in self.roles if role.name == name)

    def lever(self, lever: str) -> tuple[Role, ...]:
        """All roles a lever acts on, in table order."""
        return tuple(role for role in self.roles if role.lever == lever)


@dataclass(frozen=True)
class Shape:
    """The sizes of a model's axes. Units: counts."""

    layers: int
    width: int
    heads: int
    head_dim: int
    mlp: int
    vocab: int
    rotary_dims: int  # leading dims of a head that rotate; pair j is (j, j + rotary_dims / 2)
    rotary_base: float  # pair j turns by base^(-2j / rotary_dims) radians a position

    def size(self, axis: str) -> int:
        """Length of a named axis."""
        inner = self.heads * self.head_dim
        return {RESIDUAL: self.width, QK: inner, VO: inner, MLP: self.mlp, VOCAB: self.vocab}[axis]

    def frequencies(self) -> list[float]:
        """Radians per position of each rotary pair, (rotary_dims / 2,), as the model's own `inv_freq` has them."""
        return [self.rotary_base ** (-2 * j / self.rotary_dims) for j in range(self.rotary_dims // 2)]


_LAYER, _ATTENTION, _MLP = "gpt_neox.layers.{b}", "gpt_neox.layers.{b}.attention", "gpt_neox.layers.{b}.mlp"


def _norm(name: str, path: str) -> tuple[Role, Role]:
    return (Role(f"{name}_GAIN", (RESIDUAL,), f"{path}.weight", neutral=1.0),
            Role(f"{name}_BIAS", (RESIDUAL,), f"{path}.bias", neutral=0.0))


GPT_NEOX = Wiring(
    family="gpt_neox",
    fused=3,
    block=_LAYER,
    rotary="rope_parameters",
    renamed=(("embed_out.weight", "lm_head.weight"),),
    buffers=(".attention.bias", ".attention.masked_bias", ".attention.rotary_emb.inv_freq"),
    roles=(
        Role("EMB_IN", (VOCAB, RESIDUAL), "gpt_neox.embed_in.weight"),
        *_norm("LN_ATTN", f"{_LAYER}.input_layernorm"),
        *_norm("LN_MLP", f"{_LAYER}.post_attention_layernorm"),
        Role("Q", (QK, RESIDUAL), f"{_ATTENTION}.query_key_value.weight", READ_IN, slot=0),
        Role("K", (QK, RESIDUAL), f"{_ATTENTION}.query_key_value.weight", READ_IN, slot=1),
        Role("V", (VO, RESIDUAL), f"{_ATTENTION}.query_key_value.weight", READ_IN, slot=2),
        Role("Q_BIAS", (QK,), f"{_ATTENTION}.query_key_value.bias", slot=0),
        Role("K_BIAS", (QK,), f"{_ATTENTION}.query_key_value.bias", slot=1),
        Role("V_BIAS", (VO,), f"{_ATTENTION}.query_key_value.bias", slot=2),
        Role("O", (RESIDUAL, VO), f"{_ATTENTION}.dense.weight", READ_OUT),
        Role("O_BIAS", (RESIDUAL,), f"{_ATTENTION}.dense.bias"),
        Role("MLP_UP", (MLP, RESIDUAL), f"{_MLP}.dense_h_to_4h.weight", READ_IN),
        Role("MLP_UP_BIAS", (MLP,), f"{_MLP}.dense_h_to_4h.bias"),
        Role("MLP_DOWN", (RESIDUAL, MLP), f"{_MLP}.dense_4h_to_h.weight", READ_OUT),
        Role("MLP_DOWN_BIAS", (RESIDUAL,), f"{_MLP}.dense_4h_to_h.bias"),
        *_norm("LN_FINAL", "gpt_neox.final_layer_norm"),
        Role("EMB_OUT", (VOCAB, RESIDUAL), "lm_head.weight", READ_IN),
    ),
)

TABLES = {GPT_NEOX.family: GPT_NEOX}


def wiring_of(config: Any) -> Wiring:
    """The table for a transformers config; WiringError names the families there are."""
    if config.model_type not in TABLES:
        raise WiringError(f"no wiring table for model_type={config.model_type!r}; there are: {', '.join(TABLES)}")
    return TABLES[config.model_type]


def shape_of(config: Any) -> Shape:
    """The axis sizes of a transformers config."""
    rotary = getattr(config, wiring_of(config).rotary)
    if rotary["rope_type"] != "default":
        raise WiringError(f"rope_type={rotary['rope_type']!r} rescales rotary frequencies; only 'default' is mapped")
    head_dim = config.hidden_size // config.num_attention_heads
    return Shape(config.num_hidden_layers, config.hidden_size, config.num_attention_heads, head_dim,
                 config.intermediate_size, config.vocab_size,
                 int(head_dim * rotary.get("partial_rotary_factor", 1.0)), rotary["rope_theta"])


def config_like(config: Any, *, layers: int, width: int, heads: int, mlp: int, vocab: int | None = None) -> Any:
    """A config of another size in the same family: everything but the sizes is `config`'s, rotary table included.

    The rotary fraction lives in `rope_parameters` and is easily lost (passing it by name is ignored in silence),
    so the result is checked. Raises WiringError when `heads` does not divide `width`.
    """
    rotary = wiring_of(config).rotary
    if width % heads:
        raise WiringError(f"target heads={heads} does not divide target width={width}: choose heads among the "
                          f"divisors of {width}")
    values = config.to_dict()
    values.update(num_hidden_layers=layers, hidden_size=width, num_attention_heads=heads, intermediate_size=mlp,
                  vocab_size=vocab or config.vocab_size)
    small = type(config).from_dict(values)
    if getattr(small, rotary) != getattr(config, rotary):
        raise WiringError(f"rotary settings were lost: {getattr(small, rotary)} for {getattr(config, rotary)}")
    small._attn_implementation = config._attn_implementation
    return small


def check_pair(donor: Shape, target: Shape) -> None:
    """Refuse a target that no selection of the donor reaches; WiringError names the key, its value and the remedy."""
    for key, have, want in (("layers", donor.layers, target.layers), ("width", donor.width, target.width),
                            ("heads", donor.heads, target.heads), ("mlp", donor.mlp, target.mlp),
                            ("vocab", donor.vocab, target.vocab), ("head_dim", donor.head_dim, target.head_dim)):
        if want > have:
            raise WiringError(f"target {key}={want} is larger than the donor's {have}: a conversion only shrinks; "
                              f"choose {key} <= {have}")
    if target.heads < donor.heads and target.head_dim != donor.head_dim:
        raise WiringError(
            f"target heads={target.heads} drops heads (donor {donor.heads}) while head_dim changes from "
            f"{donor.head_dim} to {target.head_dim}: heads are then kept or dropped whole, so either keep "
            f"heads={donor.heads} or set width={target.heads * donor.head_dim}")
    match_frequencies(donor, target)


def match_frequencies(donor: Shape, target: Shape) -> list[int]:
    """The donor's rotary pair for each of the target's, by equal frequency (stride 2 when the width halves).

    Raises WiringError when a frequency of the target does not occur in the donor.
    """
    table, pairs = donor.frequencies(), []
    for frequency in target.frequencies():
        match = [j for j, have in enumerate(table) if abs(have - frequency) <= 1e-9 * frequency]
        if not match:
            raise WiringError(
                f"target head_dim={target.head_dim} rotates {target.rotary_dims // 2} pairs, and their frequencies do "
                f"not all occur among the donor's {donor.rotary_dims // 2}: choose a head_dim whose rotary part "
                f"divides the donor's ({donor.rotary_dims} of {donor.head_dim} dims)")
        pairs += match
    return pairs

"""The wiring: one table per architecture that says what every tensor's axes are. Nothing else knows.

A *role* is a logical weight (Q, O, MLP_UP, ...), whatever tensor of the checkpoint stores it. Its *axes* are named:

    residual   the residual stream's features
    qk, vo     the dimensions inside the heads, as Q/K or as V/O index them (heads x head_dim, head-major)
    mlp        the MLP's hidden units
    vocab      the vocabulary

Its *lever* says what may be done to it after selection (paper, section 7.2): a `read_in` is fronted by a norm
(the rescale lever), a `read_out` writes to the residual stream with no norm in between (the compensation lever).
"""

from dataclasses import dataclass, field
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
    on_disk: dict[str, str] = field(default_factory=dict)  # state-dict name -> name in checkpoint files
    hidden_units: tuple[str, str] = ("MLP_UP", "MLP_DOWN")

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

    def size(self, axis: str) -> int:
        """Length of a named axis."""
        inner = self.heads * self.head_dim
        return {RESIDUAL: self.width, QK: inner, VO: inner, MLP: self.mlp, VOCAB: self.vocab}[axis]


_LAYER, _ATTENTION, _MLP = "gpt_neox.layers.{b}", "gpt_neox.layers.{b}.attention", "gpt_neox.layers.{b}.mlp"


def _norm(name: str, path: str) -> tuple[Role, Role]:
    return (Role(f"{name}_GAIN", (RESIDUAL,), f"{path}.weight", neutral=1.0),
            Role(f"{name}_BIAS", (RESIDUAL,), f"{path}.bias", neutral=0.0))


GPT_NEOX = Wiring(
    family="gpt_neox",
    fused=3,
    on_disk={"lm_head.weight": "embed_out.weight"},
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
    wiring_of(config)
    head_dim = config.hidden_size // config.num_attention_heads
    fraction = config.rope_parameters.get("partial_rotary_factor", 1.0)
    return Shape(config.num_hidden_layers, config.hidden_size, config.num_attention_heads, head_dim,
                 config.intermediate_size, config.vocab_size, int(head_dim * fraction))


def config_like(config: Any, *, layers: int, width: int, heads: int, mlp: int, vocab: int | None = None) -> Any:
    """A config of another size in the same family: everything but the sizes is `config`'s, rotary table included.

    The rotary fraction lives in `rope_parameters` and is easily lost (passing it by name is ignored in silence),
    so the result is checked. Raises WiringError when `heads` does not divide `width`.
    """
    wiring_of(config)
    if width % heads:
        raise WiringError(f"target heads={heads} does not divide target width={width}: choose heads among the "
                          f"divisors of {width}")
    values = config.to_dict()
    values.update(num_hidden_layers=layers, hidden_size=width, num_attention_heads=heads, intermediate_size=mlp,
                  vocab_size=vocab or config.vocab_size)
    small = type(config).from_dict(values)
    if small.rope_parameters != config.rope_parameters:
        raise WiringError(f"rotary settings were lost: {small.rope_parameters} instead of {config.rope_parameters}")
    small._attn_implementation = config._attn_implementation
    return small

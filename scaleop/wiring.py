"""The wiring of a model: its table and the sizes of its axes, and which smaller shapes a selection reaches.

`scaleop.roles` is the language of tables, `scaleop.tables` holds them; here they meet a transformers config.
"""

from dataclasses import dataclass
from typing import Any

from huggingface_hub.errors import StrictDataclassError

from scaleop.roles import (
    KEYS,
    MLP,
    QK,
    READ_IN,
    READ_OUT,
    RESIDUAL,
    VALUES,
    VO,
    VOCAB,
    Role,
    Wiring,
    WiringError,
    together,
)
from scaleop.tables import GPT_NEOX, LLAMA, MISTRAL, QWEN2, REFUSED, TABLES

__all__ = ["GPT_NEOX", "KEYS", "LLAMA", "MISTRAL", "MLP", "QK", "QWEN2", "READ_IN", "READ_OUT", "RESIDUAL", "TABLES",
           "VALUES", "VO", "VOCAB", "Role", "Shape", "Wiring", "WiringError", "check_pair", "config_like",
           "match_frequencies", "shape_of", "together", "wiring_of"]


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
    kv_heads: int | None = None  # where K and V have axes of their own: heads there, of which queries share each

    @property
    def groups(self) -> int:
        """Heads of keys and values; each is shared by a group of query heads."""
        return self.heads if self.kv_heads is None else self.kv_heads

    @property
    def sharing(self) -> int:
        """Query heads in a group."""
        return self.heads // self.groups

    def size(self, axis: str) -> int:
        """Length of a named axis."""
        inner, shared = self.heads * self.head_dim, self.groups * self.head_dim
        return {RESIDUAL: self.width, QK: inner, VO: inner, KEYS: shared, VALUES: shared, MLP: self.mlp,
                VOCAB: self.vocab}[axis]

    def sizes(self) -> dict[str, int]:
        """What `config_like` takes to make a config of this shape."""
        own = {} if self.kv_heads is None else {"kv_heads": self.kv_heads, "head_dim": self.head_dim}
        return {name: getattr(self, name) for name in ("width", "heads", "layers", "mlp", "vocab")} | own

    def frequencies(self) -> list[float]:
        """Radians per position of each rotary pair, (rotary_dims / 2,), as the model's own `inv_freq` has them."""
        return [self.rotary_base ** (-2 * j / self.rotary_dims) for j in range(self.rotary_dims // 2)]


def wiring_of(config: Any) -> Wiring:
    """The table for a transformers config, without what the config switches off; WiringError for a family that has
    none, with the reason where it cannot have one."""
    family = config.model_type
    if family in REFUSED:
        raise WiringError(f"model_type={family!r} has no wiring table: {REFUSED[family]}")
    if family not in TABLES:
        raise WiringError(f"no wiring table for model_type={family!r}; there are: {', '.join(TABLES)}")
    for name in TABLES[family].by_block:
        if len(kinds := set(getattr(config, name) or ())) > 1:
            raise WiringError(f"{name} differs from block to block ({', '.join(sorted(kinds))}): which blocks of a "
                              "smaller model take after which is not mapped; only models with equal blocks are")
    return TABLES[family].of(config)


def shape_of(config: Any) -> Shape:
    """The axis sizes of a transformers config."""
    wiring = wiring_of(config)
    rotary, heads = getattr(config, wiring.rotary), config.num_attention_heads
    if rotary["rope_type"] != "default":
        raise WiringError(f"rope_type={rotary['rope_type']!r} rescales rotary frequencies; only 'default' is mapped")
    head_dim = (getattr(config, wiring.head_dim, None) if wiring.head_dim else None) or config.hidden_size // heads
    kv_heads = getattr(config, wiring.kv_heads) if wiring.kv_heads else None
    if kv_heads is not None and heads % kv_heads:
        raise WiringError(f"heads={heads} cannot be shared out evenly over kv_heads={kv_heads}: choose kv_heads among "
                          f"the divisors of {heads}")
    return Shape(config.num_hidden_layers, config.hidden_size, heads, head_dim, config.intermediate_size,
                 config.vocab_size, int(head_dim * rotary.get("partial_rotary_factor", 1.0)), rotary["rope_theta"],
                 kv_heads)


def config_like(config: Any, *, layers: int, width: int, heads: int, mlp: int, vocab: int | None = None,
                kv_heads: int | None = None, head_dim: int | None = None) -> Any:
    """A config of another size in the same family: everything but the sizes is `config`'s, rotary table included.

    Left out, `kv_heads` is what keeps the size of the groups, and `head_dim` is width / heads where it was that in
    `config`, else `config`'s own. The rotary fraction lives in `rope_parameters` and is easily lost (passing it by
    name is ignored in silence), so the result is checked. WiringError for sizes that no config of the family has.
    """
    wiring, have = wiring_of(config), shape_of(config)
    follows = have.heads * have.head_dim == have.width or wiring.head_dim is None
    if width % heads and follows and head_dim is None:
        raise WiringError(f"target heads={heads} does not divide target width={width}: choose heads among the "
                          f"divisors of {width}")
    head_dim = head_dim or (width // heads if follows else have.head_dim)
    values = config.to_dict()
    values.update(num_hidden_layers=layers, hidden_size=width, num_attention_heads=heads, intermediate_size=mlp,
                  vocab_size=vocab or config.vocab_size)
    if wiring.head_dim is None and head_dim * heads != width:
        raise WiringError(f"target head_dim={head_dim} is not width / heads, and a {wiring.family} has no other: leave "
                          f"head_dim out, or set width={heads * head_dim}")
    if wiring.head_dim in values or head_dim * heads != width:
        values[wiring.head_dim] = head_dim
    if wiring.kv_heads is None and kv_heads not in (None, heads):
        raise WiringError(f"target kv_heads={kv_heads}: every head of a {wiring.family} has keys and values of its "
                          "own; leave kv_heads out")
    if wiring.kv_heads is not None:
        values[wiring.kv_heads] = kv_heads or _kept_groups(have, heads)
    for name in wiring.by_block:
        values[name] = values[name] and values[name][:1] * layers  # all equal: `wiring_of` saw to it
    if (values.get("pad_token_id") or 0) >= values["vocab_size"]:
        values["pad_token_id"] = None  # no row is left for it, and transformers' embedding insists
    try:
        small = type(config).from_dict(values)
    except StrictDataclassError as error:
        raise WiringError(f"transformers refuses such a {wiring.family}: {error}") from error
    if getattr(small, wiring.rotary) != getattr(config, wiring.rotary):
        raise WiringError(f"rotary settings were lost: {getattr(small, wiring.rotary)} for "
                          f"{getattr(config, wiring.rotary)}")
    small._attn_implementation = config._attn_implementation
    return small


def _kept_groups(donor: Shape, heads: int) -> int:
    """Key-value heads of a target with that many query heads, in groups as large as the donor's."""
    if heads % donor.sharing:
        raise WiringError(f"target heads={heads} is no multiple of {donor.sharing}, the query heads that share a "
                          f"key-value head in the donor ({donor.heads} in {donor.groups} groups): choose heads among "
                          f"the multiples of {donor.sharing}, or say kv_heads to make groups smaller")
    return heads // donor.sharing


def check_pair(donor: Shape, target: Shape) -> None:
    """Refuse a target that no selection of the donor reaches; WiringError names the key, its value and the remedy."""
    for key, have, want in (("layers", donor.layers, target.layers), ("width", donor.width, target.width),
                            ("heads", donor.heads, target.heads), ("kv_heads", donor.groups, target.groups),
                            ("mlp", donor.mlp, target.mlp), ("vocab", donor.vocab, target.vocab),
                            ("head_dim", donor.head_dim, target.head_dim)):
        if want > have:
            raise WiringError(f"target {key}={want} is larger than the donor's {have}: a conversion only shrinks; "
                              f"choose {key} <= {have}")
    if target.sharing > donor.sharing:
        reachable = sorted({groups * sharing for groups in range(1, donor.groups + 1)
                            for sharing in range(1, donor.sharing + 1)})
        raise WiringError(
            f"target heads={target.heads} in kv_heads={target.groups} groups makes {target.sharing} query heads share "
            f"a key-value head, and the donor's groups have {donor.sharing}: a query head works with its own group's "
            f"keys and values only. Choose heads among {', '.join(map(str, reachable))}, in at most {donor.groups} "
            f"groups of at most {donor.sharing}")
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

"""The wiring tables: what every tensor's axes and levers are, one table per architecture. Nothing else knows.

How to add one: book/add_a_wiring.md. Any table here must pass tests/test_wiring_contract.py.
"""

from collections.abc import Iterator, Mapping

from scaleop.roles import KEYS, MLP, QK, READ_IN, READ_OUT, RESIDUAL, VALUES, VO, VOCAB, Role, Wiring

_LAYER, _ATTENTION, _MLP = "gpt_neox.layers.{b}", "gpt_neox.layers.{b}.attention", "gpt_neox.layers.{b}.mlp"


def _norm(name: str, path: str) -> tuple[Role, Role]:
    return (Role(f"{name}_GAIN", (RESIDUAL,), f"{path}.weight", neutral=1.0),
            Role(f"{name}_BIAS", (RESIDUAL,), f"{path}.bias", neutral=0.0))


GPT_NEOX = Wiring(
    family="gpt_neox",
    fused=3,
    block=_LAYER,
    rotary="rope_parameters",
    parallel="use_parallel_residual",
    renamed=(("embed_out.weight", "lm_head.weight"),),
    buffers=(".attention.bias", ".attention.masked_bias", ".attention.rotary_emb.inv_freq"),
    roles=(
        Role("EMB_IN", (VOCAB, RESIDUAL), "gpt_neox.embed_in.weight"),
        *_norm("LN_ATTN", f"{_LAYER}.input_layernorm"),
        *_norm("LN_MLP", f"{_LAYER}.post_attention_layernorm"),
        Role("Q", (QK, RESIDUAL), f"{_ATTENTION}.query_key_value.weight", READ_IN, slot=0, norm="LN_ATTN"),
        Role("K", (QK, RESIDUAL), f"{_ATTENTION}.query_key_value.weight", READ_IN, slot=1, norm="LN_ATTN"),
        Role("V", (VO, RESIDUAL), f"{_ATTENTION}.query_key_value.weight", READ_IN, slot=2, norm="LN_ATTN"),
        Role("Q_BIAS", (QK,), f"{_ATTENTION}.query_key_value.bias", slot=0),
        Role("K_BIAS", (QK,), f"{_ATTENTION}.query_key_value.bias", slot=1),
        Role("V_BIAS", (VO,), f"{_ATTENTION}.query_key_value.bias", slot=2),
        Role("O", (RESIDUAL, VO), f"{_ATTENTION}.dense.weight", READ_OUT),
        Role("O_BIAS", (RESIDUAL,), f"{_ATTENTION}.dense.bias"),
        Role("MLP_UP", (MLP, RESIDUAL), f"{_MLP}.dense_h_to_4h.weight", READ_IN, norm="LN_MLP"),
        Role("MLP_UP_BIAS", (MLP,), f"{_MLP}.dense_h_to_4h.bias"),
        Role("MLP_DOWN", (RESIDUAL, MLP), f"{_MLP}.dense_4h_to_h.weight", READ_OUT),
        Role("MLP_DOWN_BIAS", (RESIDUAL,), f"{_MLP}.dense_4h_to_h.bias"),
        *_norm("LN_FINAL", "gpt_neox.final_layer_norm"),
        Role("EMB_OUT", (VOCAB, RESIDUAL), "lm_head.weight", READ_IN, norm="LN_FINAL"),
    ),
)


def _linear(name: str, axes: tuple[str, str], path: str, lever: str, biases: Mapping[str, str | None],
            norm: str | None = None) -> Iterator[Role]:
    """A matrix (a read-in: behind which norm) and, where the class knows one, its bias."""
    yield Role(name, axes, f"{path}.weight", lever, norm=norm)
    if name in biases:
        yield Role(f"{name}_BIAS", axes[:1], f"{path}.bias", switch=biases[name])


def _llama_class(family: str, biases: Mapping[str, str | None], by_block: tuple[str, ...] = ()) -> Wiring:
    """RMSNorm in front of both sublayers, one after the other; grouped queries; a gated MLP; rotary on whole heads.

    `biases`: {role: the config's switch for its bias (None: it always has one)}.
    """
    layer, attention, mlp = "model.layers.{b}", "model.layers.{b}.self_attn", "model.layers.{b}.mlp"
    return Wiring(
        family=family,
        block=layer,
        rotary="rope_parameters",
        kv_heads="num_key_value_heads",
        head_dim="head_dim",
        by_block=by_block,
        buffers=(".rotary_emb.inv_freq",),
        roles=(
            Role("EMB_IN", (VOCAB, RESIDUAL), "model.embed_tokens.weight"),
            Role("LN_ATTN_GAIN", (RESIDUAL,), f"{layer}.input_layernorm.weight", neutral=1.0),
            Role("LN_MLP_GAIN", (RESIDUAL,), f"{layer}.post_attention_layernorm.weight", neutral=1.0),
            *_linear("Q", (QK, RESIDUAL), f"{attention}.q_proj", READ_IN, biases, "LN_ATTN"),
            *_linear("K", (KEYS, RESIDUAL), f"{attention}.k_proj", READ_IN, biases, "LN_ATTN"),
            *_linear("V", (VALUES, RESIDUAL), f"{attention}.v_proj", READ_IN, biases, "LN_ATTN"),
            *_linear("O", (RESIDUAL, VO), f"{attention}.o_proj", READ_OUT, biases),
            *_linear("MLP_GATE", (MLP, RESIDUAL), f"{mlp}.gate_proj", READ_IN, biases, "LN_MLP"),
            *_linear("MLP_UP", (MLP, RESIDUAL), f"{mlp}.up_proj", READ_IN, biases, "LN_MLP"),
            *_linear("MLP_DOWN", (RESIDUAL, MLP), f"{mlp}.down_proj", READ_OUT, biases),
            Role("LN_FINAL_GAIN", (RESIDUAL,), "model.norm.weight", neutral=1.0),
            Role("EMB_OUT", (VOCAB, RESIDUAL), "lm_head.weight", READ_IN, norm="LN_FINAL"),
        ),
    )


LLAMA = _llama_class("llama", {**dict.fromkeys(("Q", "K", "V", "O"), "attention_bias"),
                               **dict.fromkeys(("MLP_GATE", "MLP_UP", "MLP_DOWN"), "mlp_bias")})  # SmolLM2 is one
MISTRAL = _llama_class("mistral", {})  # one sliding window for all blocks, a config's setting that weights do not see
QWEN2 = _llama_class("qwen2", dict.fromkeys(("Q", "K", "V")), by_block=("layer_types",))

TABLES = {table.family: table for table in (GPT_NEOX, LLAMA, MISTRAL, QWEN2)}

REFUSED = {
    "olmo2": "its norms stand behind the sublayers: Q, K, V and the MLP read the residual stream with no norm in "
             "front, and what O and MLP_DOWN write passes a norm before it is added. So neither lever does there what "
             "the tables mean by it; and norms of all queries and of all keys tie its heads together",
}
"""Families whose wiring these tables cannot say honestly, with the reason."""

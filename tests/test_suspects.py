"""Variance behind the read-outs, and compensation on the small model's own inputs, against stacked activations."""


import numpy as np
import pytest
import torch

from scaleop.activations import second_moments
from scaleop.maps import Maps, Selection, uniform_selection
from scaleop.shrink import compensate, kept_inputs, rescale, shrink
from scaleop.suspects import compensate_own, readout_variance, variance_ratios
from scaleop.weights import assemble, extract
from scaleop.wiring import GPT_NEOX, MLP, QK, READ_IN, RESIDUAL, VO, VOCAB, config_like, shape_of
from tests.conftest import neox_config, random_model

SEQUENCES = np.random.default_rng(0).integers(0, 61, (30, 10))  # 300 positions, more than any read-out has inputs
READ_OUTS = {"O": "attention.dense", "MLP_DOWN": "mlp.dense_4h_to_h"}


def module(model, block, role):
    return model.gpt_neox.layers[block].get_submodule(READ_OUTS[role])


def seen(model, block, role, side):
    """(positions, features) fp64: everything a read-out reads (side 0) or writes (side 1), stacked."""
    caught = []
    handle = module(model, block, role).register_forward_hook(lambda _, inputs, output: caught.append(
        (inputs[0], output)[side]))
    with torch.no_grad():
        model(input_ids=torch.as_tensor(SEQUENCES))
    handle.remove()
    return caught[0].flatten(0, 1).double()


def identity(shape):
    axes = {(None, axis): Selection(torch.arange(shape.size(axis))) for axis in (RESIDUAL, QK, VO, MLP, VOCAB)}
    return Maps(tuple(range(shape.layers)), axes)


# Variance

def test_the_variance_is_that_of_stacked_outputs_and_ignores_the_mean(donor):
    features = torch.tensor([3, 30, 7])
    found, some = (readout_variance(donor.model, SEQUENCES, which, batch=7) for which in (None, features))
    assert list(found) == ["0.O", "0.MLP_DOWN", "1.O", "1.MLP_DOWN"]
    for key in found:
        block, role = key.split(".")
        outputs = seen(donor.model, int(block), role, 1)
        assert found[key] == pytest.approx(outputs.var(dim=0, correction=0).sum().item(), rel=1e-6)
        assert some[key] == pytest.approx(outputs[:, features].var(dim=0, correction=0).sum().item(), rel=1e-6)
    shifted = random_model(donor.config)
    shifted.gpt_neox.layers[1].mlp.dense_4h_to_h.bias.data += 1000.0  # a mean that dwarfs the spread
    assert readout_variance(shifted, SEQUENCES, batch=7)["1.MLP_DOWN"] == pytest.approx(found["1.MLP_DOWN"], rel=1e-3)


def test_a_model_writes_as_much_as_itself_and_twice_as_much_under_root_two(donor):
    maps, weights = identity(donor.shape), dict(donor.weights)
    same = variance_ratios(donor.model, donor.model, maps, SEQUENCES)
    assert all(ratio == pytest.approx(1.0, rel=1e-12) for ratio in same.values())
    weights[1, "O"] = weights[1, "O"] * 2**0.5
    loud = variance_ratios(assemble(weights, donor.config), donor.model, maps, SEQUENCES)
    assert loud == pytest.approx({**same, "1.O": 2.0}, rel=1e-5)  # the last block's MLP reads beside it, not behind


def test_ratios_compare_a_block_with_the_one_it_comes_from_on_kept_features():
    deep = random_model(neox_config(layers=4, width=32, mlp=48), seed=3)
    small = config_like(deep.config, layers=2, width=16, heads=2, mlp=20)
    maps = uniform_selection(shape_of(deep.config), shape_of(small))
    model = assemble(shrink(extract(deep), GPT_NEOX, maps), small)
    ratios = variance_ratios(model, deep, maps, SEQUENCES, batch=11)
    assert maps.blocks == (0, 2) and len(ratios) == 4
    ours = seen(model, 1, "MLP_DOWN", 1).var(dim=0, correction=0).sum()
    theirs = seen(deep, 2, "MLP_DOWN", 1)[:, ::2].var(dim=0, correction=0).sum()  # uniform: every other feature
    assert ratios["1.MLP_DOWN"] == pytest.approx((ours / theirs).item(), rel=1e-6)


# Compensation on own inputs

def by_brute_force(small, donor, maps, target, ridge=1e-3):
    """Fit read-out after read-out, O before MLP_DOWN, each from stacked activations of whole forward passes."""
    model, rows = assemble(small, target), maps(None, RESIDUAL).index
    for b, block in enumerate(maps.blocks):
        for role in READ_OUTS:
            x, s = seen(donor, block, role, 0), seen(model, b, role, 0)
            y = x @ module(donor, block, role).weight[rows].double().T  # what to reproduce, (positions, rows)
            square = s.T @ s
            damped = square + ridge * square.diagonal().mean() * torch.eye(len(square))
            module(model, b, role).weight.data = torch.linalg.solve(damped, s.T @ y).T.float()
    return extract(model)


def pair(parallel=True, layers=2):
    """A random donor of four or two blocks, the config of two blocks of half its width, and the weights of hybrid_rs
    before its fit: selected, read-ins rescaled."""
    donor = random_model(neox_config(layers=layers, width=32, mlp=48, use_parallel_residual=parallel), seed=layers)
    target = config_like(donor.config, layers=2, width=16, heads=2, mlp=20)
    big, small = shape_of(donor.config), shape_of(target)
    maps = uniform_selection(big, small)
    return donor, target, maps, rescale(shrink(extract(donor), GPT_NEOX, maps), GPT_NEOX, big, small, (READ_IN,))


@pytest.mark.parametrize("parallel", [True, False])
@pytest.mark.parametrize("layers", [2, 4])
def test_the_fit_is_the_one_by_brute_force(parallel, layers):
    donor, target, maps, small = pair(parallel, layers)
    found, solves = compensate_own(small, donor, maps, target, SEQUENCES, batch=7)
    expected = by_brute_force(small, donor, maps, target)
    assert found.keys() == small.keys()
    for key, tensor in found.items():
        if key[1] in READ_OUTS:
            assert torch.allclose(tensor, expected[key], rtol=1e-3, atol=1e-4 * expected[key].abs().max()), key
            assert (tensor - small[key]).norm() > 0.1 * small[key].norm()  # the fit is no rounding
        else:
            assert torch.equal(tensor, small[key]), key
    selected = module(donor, maps.blocks[1], "O").weight[maps(None, RESIDUAL).index][:, maps(1, VO).index]
    s = seen(assemble(found, target), 1, "O", 0)
    square = (s.T @ s).numpy()
    solve = solves["1.O"]
    assert list(solves) == ["0.O", "0.MLP_DOWN", "1.O", "1.MLP_DOWN"]
    assert solve.norm_ratio == pytest.approx((found[1, "O"].norm() / selected.norm()).item(), rel=1e-5)
    assert solve.ridge == pytest.approx(1e-3 * np.diag(square).mean(), rel=1e-4)
    assert solve.condition == pytest.approx(np.linalg.cond(square + solve.ridge * np.eye(16)), rel=1e-3)


def test_as_the_ridge_vanishes_each_fit_is_least_squares():
    donor, target, maps, small = pair()
    found, _ = compensate_own(small, donor, maps, target, SEQUENCES, ridge=1e-9)
    model, rows = assemble(found, target), maps(None, RESIDUAL).index
    for role in READ_OUTS:  # of the last block: what comes before it is as it was when it was fitted
        y = seen(donor, 1, role, 0) @ module(donor, 1, role).weight[rows].double().T
        direct = np.linalg.lstsq(seen(model, 1, role, 0), y.detach(), rcond=None)[0].T
        assert np.allclose(found[1, role], direct, rtol=1e-3, atol=1e-4)


def test_a_donor_fitted_to_itself_keeps_its_weights(donor):
    found, solves = compensate_own(donor.weights, donor.model, identity(donor.shape), donor.config, SEQUENCES,
                                   ridge=1e-10)
    for key, tensor in donor.weights.items():
        assert torch.allclose(found[key], tensor, atol=1e-4), key
    assert all(solve.norm_ratio == pytest.approx(1.0, rel=1e-4) for solve in solves.values())


def test_where_own_inputs_are_the_donors_the_fit_is_the_ordinary_one(donor):
    """With only MLP units cut, block 0 of the small model reads what the donor's kept units give; block 1 does not."""
    target = config_like(donor.config, layers=2, width=32, heads=2, mlp=20)
    maps = Maps((0, 1), {**identity(donor.shape).axes, (None, MLP): Selection(torch.arange(1, 41, 2))})
    small = shrink(donor.weights, GPT_NEOX, maps)
    found, _ = compensate_own(small, donor.model, maps, target, SEQUENCES)
    kept = kept_inputs(GPT_NEOX, maps)
    moments = second_moments(donor.model, SEQUENCES, kept)
    ordinary = {key: compensate(donor.weights[key], moments[key], kept[key])[0] for key in moments}
    for role in READ_OUTS:
        assert torch.allclose(found[0, role], ordinary[0, role], rtol=1e-3, atol=1e-5)
    assert (found[1, "MLP_DOWN"] - ordinary[1, "MLP_DOWN"]).norm() > 0.05 * ordinary[1, "MLP_DOWN"].norm()


def test_the_fit_undoes_a_scale_before_the_read_out():
    """Values twice as large give attention outputs twice as large: O is halved, and nothing after it changes."""
    donor, target, maps, small = pair()
    doubled = {key: 2 * tensor if key in ((0, "V"), (0, "V_BIAS")) else tensor for key, tensor in small.items()}
    plain, scaled = (compensate_own(weights, donor, maps, target, SEQUENCES)[0] for weights in (small, doubled))
    assert torch.allclose(scaled[0, "O"], plain[0, "O"] / 2, rtol=1e-4, atol=1e-6)
    assert torch.allclose(scaled[1, "MLP_DOWN"], plain[1, "MLP_DOWN"], rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("parallel, passes", [(True, 1), (False, 2)])
def test_forward_passes_end_at_the_block_that_is_fitted(parallel, passes):
    donor, target, maps, small = pair(parallel, layers=4)
    calls = [0, 0, 0, 0]
    for block, layer in enumerate(donor.gpt_neox.layers):
        layer.register_forward_pre_hook(lambda _, inputs, block=block: calls.__setitem__(block, calls[block] + 1))
    compensate_own(small, donor, maps, target, SEQUENCES, batch=10)
    assert maps.blocks == (0, 2)
    assert calls == [2 * 3 * passes, 3 * passes, 3 * passes, 0]  # three batches; block 2's passes run 0, 1, 2


def test_the_donor_is_left_as_it_was():
    donor, target, maps, small = pair()
    before, given = extract(donor), {key: tensor.clone() for key, tensor in small.items()}
    compensate_own(small, donor, maps, target, SEQUENCES)
    assert all(torch.equal(tensor, before[key]) for key, tensor in extract(donor).items())
    assert all(torch.equal(tensor, given[key]) for key, tensor in small.items())
    assert not any(layer._forward_pre_hooks for layer in donor.modules())

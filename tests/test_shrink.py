"""Shrinking, compensating and rescaling against closed forms and slow references."""

import math

import numpy as np
import pytest
import torch

from scaleop import activations
from scaleop.activations import input_statistics, second_moments, stream_statistics
from scaleop.maps import Basis, Maps, Selection, dense_bases, scored_selection
from scaleop.shrink import Inputs, absorb_mean, centred, compensate, compensate_all, kept_inputs, rescale, shrink
from scaleop.weights import assemble, empty_model, extract, keys
from scaleop.wiring import GPT_NEOX, MLP, QK, READ_IN, READ_OUT, RESIDUAL, VO, VOCAB, shape_of
from tests.test_maps import config


@pytest.fixture(scope="module")
def donor():
    """A random donor with biases and gains that are not neutral, so that mistakes with them show."""
    torch.manual_seed(0)
    model = empty_model(config()).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


@pytest.fixture(scope="module")
def sequences():
    return np.random.default_rng(0).integers(0, 40, (40, 12))


def identity(shape):
    axes = {(None, axis): Selection(torch.arange(shape.size(axis))) for axis in (RESIDUAL, QK, VO, MLP, VOCAB)}
    return Maps(tuple(range(shape.layers)), axes)


def logits(model):
    with torch.no_grad():
        return model(input_ids=torch.arange(12)[None] % 40).logits


def test_the_identity_map_reproduces_the_donor_bit_for_bit(donor):
    small = shrink(extract(donor), GPT_NEOX, identity(shape_of(donor.config)))
    assert torch.equal(logits(assemble(small, donor.config)), logits(donor))


def test_permuting_heads_and_units_consistently_leaves_logits_unchanged(donor):
    shape, maps = shape_of(donor.config), identity(shape_of(donor.config))
    heads = torch.arange(32).view(2, 16).flip(0).flatten()  # swap the two heads, Q, K, V and O alike
    units = torch.randperm(shape.mlp, generator=torch.Generator().manual_seed(0))
    vo = torch.cat([16 + torch.randperm(16), torch.randperm(16)])  # dims inside a head are free for V/O
    axes = {**maps.axes, (None, QK): Selection(heads), (None, VO): Selection(vo), (None, MLP): Selection(units)}
    permuted = assemble(shrink(extract(donor), GPT_NEOX, Maps(maps.blocks, axes)), donor.config)
    assert torch.allclose(logits(permuted), logits(donor), atol=2e-5)
    wrong = {**axes, (None, QK): Selection(torch.arange(32).roll(1))}  # a shift tears rotary pairs apart
    broken = assemble(shrink(extract(donor), GPT_NEOX, Maps(maps.blocks, wrong)), donor.config)
    assert not torch.allclose(logits(broken), logits(donor), atol=1e-2)


def test_shrink_applies_equation_one(donor):
    weights, small = extract(donor), config(width=16, heads=2, mlp=20)
    stream = stream_statistics(donor, np.arange(120).reshape(10, 12) % 40)
    maps = dense_bases(weights, shape_of(donor.config), shape_of(small), stream)
    shrunk = shrink(weights, GPT_NEOX, maps, neutral_norms=True)
    p = {axis: maps(1, axis).matrix.float() for axis in (RESIDUAL, QK, VO, MLP)}
    assert torch.allclose(shrunk[1, "K"], p[QK] @ weights[1, "K"] @ p[RESIDUAL].T, atol=1e-5)
    assert torch.allclose(shrunk[1, "O"], p[RESIDUAL] @ weights[1, "O"] @ p[VO].T, atol=1e-5)
    assert torch.allclose(shrunk[1, "MLP_UP_BIAS"], p[MLP] @ weights[1, "MLP_UP_BIAS"], atol=1e-5)
    assert torch.allclose(shrunk[None, "EMB_OUT"], weights[None, "EMB_OUT"] @ p[RESIDUAL].T, atol=1e-5)
    for (_, name), tensor in shrunk.items():
        if name.startswith("LN_"):
            assert (tensor == (1.0 if name.endswith("GAIN") else 0.0)).all()


def test_stream_statistics_equal_a_two_pass_reference(donor, sequences):
    found = stream_statistics(donor, sequences, batch=7)
    with torch.no_grad():
        outputs = []
        handles = [layer.register_forward_hook(lambda m, i, o: outputs.append(o)) for layer in donor.gpt_neox.layers]
        donor(input_ids=torch.as_tensor(sequences))
        for handle in handles:
            handle.remove()
    pooled = torch.stack([o.mean(1) for o in outputs]).double()  # (blocks, sequences, width)
    assert torch.allclose(found.variance, pooled.var(dim=1, unbiased=True), rtol=1e-5)
    assert torch.allclose(found.covariance, torch.cov(pooled.flatten(0, 1).T, correction=0), rtol=1e-4, atol=1e-7)


def test_stream_statistics_need_two_sequences(donor):
    with pytest.raises(ValueError, match="at least two"):
        stream_statistics(donor, np.zeros((1, 4), dtype=int))


def test_moments_are_the_columns_of_the_full_square(donor, sequences):
    kept = {(0, "O"): torch.tensor([3, 1, 30]), (1, "MLP_DOWN"): torch.tensor([0, 47])}
    sums = second_moments(donor, sequences, kept, batch=9)
    seen = []
    handle = donor.gpt_neox.layers[1].mlp.dense_4h_to_h.register_forward_pre_hook(lambda m, i: seen.append(i[0]))
    with torch.no_grad():
        donor(input_ids=torch.as_tensor(sequences))
    handle.remove()
    x = seen[0].flatten(0, 1).double()
    assert torch.allclose(sums[1, "MLP_DOWN"], (x.T @ x)[:, [0, 47]], rtol=1e-4, atol=1e-5)
    assert sums[0, "O"].shape == (32, 3)


def test_moments_are_summed_in_the_dtype_asked_for_however_many_rows_at_once(donor, sequences, monkeypatch):
    kept = {(0, "O"): torch.tensor([3, 1, 30]), (1, "MLP_DOWN"): torch.tensor([0, 47])}
    batches = [second_moments(donor, sequences[at : at + 9], kept, batch=9) for at in range(0, len(sequences), 9)]
    double = {key: sum(each[key] for each in batches) for key in kept}
    single = {key: sum(each[key].float() for each in batches) for key in kept}
    monkeypatch.setattr(activations, "ROWS", 5)  # of 32 and of 48
    for dtype, expected in ((torch.float64, double), (torch.float32, single)):
        found = second_moments(donor, sequences, kept, batch=9, dtype=dtype)
        for key in kept:
            assert found[key].dtype == dtype and torch.equal(found[key], expected[key])
    assert not torch.equal(single[0, "O"].double(), double[0, "O"])  # what the smaller dtype costs


def test_compensation_equals_a_direct_least_squares_fit_as_the_ridge_vanishes():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(500, 12)) @ rng.normal(size=(12, 12)) + 0.3  # correlated, not centred
    matrix, kept = rng.normal(size=(5, 12)), [0, 3, 4, 7, 10]
    direct = np.linalg.lstsq(x[:, kept], x @ matrix.T, rcond=None)[0].T
    moments = torch.from_numpy(x.T @ x)[:, kept]
    fitted, solve = compensate(torch.from_numpy(matrix), moments, torch.tensor(kept), ridge=1e-13)
    assert np.allclose(fitted.numpy(), direct, rtol=1e-6, atol=1e-8)
    scaled, _ = compensate(torch.from_numpy(matrix), moments / 500, torch.tensor(kept), ridge=1e-13)
    assert np.allclose(scaled, fitted, rtol=1e-9)  # sums or means: the same
    assert solve.condition == pytest.approx(np.linalg.cond(x[:, kept].T @ x[:, kept]), rel=1e-3)


def test_compensation_is_equation_three_written_out():
    rng = np.random.default_rng(1)
    x, matrix, kept = rng.normal(size=(90, 8)), rng.normal(size=(3, 8)), [1, 2, 6]
    sigma = x.T @ x
    damped = sigma[np.ix_(kept, kept)] + 1e-3 * np.diag(sigma)[kept].mean() * np.eye(3)
    expected = matrix @ sigma[:, kept] @ np.linalg.inv(damped)
    fitted, solve = compensate(torch.from_numpy(matrix), torch.from_numpy(sigma[:, kept]), torch.tensor(kept))
    assert np.allclose(fitted.numpy(), expected, rtol=1e-10)
    assert solve.ridge == pytest.approx(1e-3 * np.diag(sigma)[kept].mean())
    assert solve.norm_ratio == pytest.approx(np.linalg.norm(expected) / np.linalg.norm(matrix[:, kept]))


def test_compensation_is_plain_selection_when_dropped_units_are_uncorrelated():
    sigma = torch.diag(torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.float64))
    sigma[0, 2] = sigma[2, 0] = 0.5  # kept units may be correlated with each other
    matrix, kept = torch.randn(3, 4, dtype=torch.float64), torch.tensor([0, 2])
    fitted, _ = compensate(matrix, sigma[:, kept], kept, ridge=0.0)
    assert torch.allclose(fitted, matrix[:, kept])


def test_compensation_never_raises_the_error_on_its_own_moments():
    rng = np.random.default_rng(2)
    x, matrix, kept = rng.normal(size=(200, 10)) ** 3, rng.normal(size=(4, 10)), [0, 1, 2, 5]
    fitted, _ = compensate(torch.from_numpy(matrix), torch.from_numpy((x.T @ x)[:, kept]), torch.tensor(kept))
    error = [np.square(x @ matrix.T - x[:, kept] @ m.T).sum() for m in (fitted.numpy(), matrix[:, kept])]
    assert error[0] <= error[1]


def test_useless_moments_are_refused():
    for bad in (torch.zeros(4, 2), torch.full((4, 2), math.nan)):
        with pytest.raises(ValueError, match="second moments"):
            compensate(torch.randn(3, 4), bad, torch.tensor([0, 1]))


def test_compensate_all_refits_exactly_the_read_outs(donor, sequences):
    small = config(width=16, heads=2, mlp=20)
    weights = extract(donor)
    stream = stream_statistics(donor, sequences)
    maps = scored_selection(weights, shape_of(donor.config), shape_of(small), stream)
    plain = shrink(weights, GPT_NEOX, maps)
    moments = second_moments(donor, sequences, kept_inputs(GPT_NEOX, maps))
    fitted, solves = compensate_all(plain, weights, GPT_NEOX, maps, Inputs(moments))
    changed = {name for key, tensor in fitted.items() if not torch.equal(tensor, plain[key]) for name in [key[1]]}
    assert changed == {"O", "MLP_DOWN"} and len(solves) == 4
    rows, kept = maps(None, RESIDUAL).index, maps(1, VO).index
    expected, _ = compensate(weights[1, "O"][rows], moments[1, "O"], kept)
    assert torch.equal(fitted[1, "O"], expected)


def test_centred_compensation_with_a_bias_is_least_squares_with_an_intercept():
    rng = np.random.default_rng(3)
    x = rng.normal(size=(300, 9)) @ rng.normal(size=(9, 9)) + rng.normal(size=9) * 3  # far from centred
    matrix, bias, kept = rng.normal(size=(4, 9)), rng.normal(size=4), [0, 2, 5, 7]
    design = np.column_stack([x[:, kept], np.ones(300)])
    direct = np.linalg.lstsq(design, x @ matrix.T + bias, rcond=None)[0].T  # (out, kept + intercept)
    m, index, mean = torch.from_numpy(matrix), torch.tensor(kept), torch.from_numpy(x.mean(axis=0))
    moments = centred(torch.from_numpy((x.T @ x)[:, kept]), mean, index, len(x))
    assert np.allclose(moments, len(x) * np.cov(x.T, bias=True)[:, kept])
    fitted, _ = compensate(m, moments, index, ridge=1e-13)
    assert np.allclose(fitted, direct[:, :-1], rtol=1e-6, atol=1e-8)
    assert np.allclose(absorb_mean(torch.from_numpy(bias), m, fitted, mean, index), direct[:, -1], rtol=1e-6)


def test_the_bias_of_a_plain_selection_takes_the_mean_of_what_was_dropped():
    matrix = torch.tensor([[1.0, 2.0, 3.0], [0.0, 1.0, -1.0]])
    mean, kept = torch.tensor([5.0, 7.0, 11.0]), torch.tensor([0, 2])
    moved = absorb_mean(torch.tensor([0.5, 0.0]), matrix, matrix[:, kept], mean, kept)
    assert moved.tolist() == [0.5 + 2 * 7, 7.0]


def test_an_architecture_without_biases_is_refused_a_bias(donor, sequences):
    small = config(width=16, heads=2, mlp=20)
    weights = extract(donor)
    maps = scored_selection(weights, shape_of(donor.config), shape_of(small), stream_statistics(donor, sequences))
    bare = {key: tensor for key, tensor in shrink(weights, GPT_NEOX, maps).items() if not key[1].endswith("_BIAS")}
    means = {(b, role): torch.zeros(n) for b in range(2) for role, n in (("O", 32), ("MLP_DOWN", 48))}
    with pytest.raises(ValueError, match="no O_BIAS"):
        compensate_all(bare, weights, GPT_NEOX, maps, Inputs({}, means), fit=False, bias=True)


def test_input_statistics_equal_a_direct_computation(donor, sequences):
    found, seen = input_statistics(donor, sequences, batch=7), []
    handle = donor.gpt_neox.layers[1].attention.dense.register_forward_pre_hook(lambda m, i: seen.append(i[0]))
    with torch.no_grad():
        donor(input_ids=torch.as_tensor(sequences))
    handle.remove()
    x = seen[0].flatten(0, 1).double()
    assert set(found) == {(b, role) for b in range(2) for role in ("O", "MLP_DOWN")}
    assert torch.allclose(found[1, "O"], torch.stack([x.mean(0), x.square().mean(0)]), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(("levers", "touched"), [
    ((READ_OUT,), {"O", "MLP_DOWN"}),
    ((READ_IN,), {"Q", "K", "V", "MLP_UP", "EMB_OUT"}),
    ((READ_IN, READ_OUT), {"Q", "K", "V", "MLP_UP", "EMB_OUT", "O", "MLP_DOWN"}),
    ((), set()),
])
def test_rescale_touches_exactly_the_tensors_the_levers_name(donor, levers, touched):
    large, small = shape_of(donor.config), shape_of(config(width=24, heads=2, mlp=12))
    ones = {key: torch.ones(3) for key, _ in keys(GPT_NEOX, 2)}
    scaled = rescale(ones, GPT_NEOX, large, small, levers)
    factor = {"MLP_DOWN": math.sqrt(48 / 12)}  # by the input axis: MLP width here, residual or V/O width elsewhere
    for (block, name), tensor in scaled.items():
        expected = factor.get(name, math.sqrt(32 / 24)) if name in touched else 1.0
        assert torch.allclose(tensor, torch.full((3,), expected)), (block, name)


def test_a_basis_and_a_selection_agree_where_they_are_the_same_map():
    index = torch.tensor([4, 1, 2])
    tensor = torch.randn(6, 7)
    assert torch.equal(Basis(torch.eye(6, dtype=torch.float64)[index]).apply(tensor, 0),
                       Selection(index).apply(tensor, 0))

"""What a cascade is said to cost, against torch's own count of what it does."""

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

from scaleop.blocks import InMemory
from scaleop.cascade import cascade
from scaleop.cascade_cost import flops, parameters, worth_in_tokens
from scaleop.cascade_settings import Cascade
from scaleop.cascade_streams import stream_basis, stream_moments
from scaleop.maps import Maps, uniform_selection
from scaleop.weights import extract
from scaleop.wiring import RESIDUAL, config_like, shape_of
from tests.conftest import random_model
from tests.families import llama, neox

LENGTH = 12
ATTENTION = {torch.ops.aten._scaled_dot_product_flash_attention_for_cpu:
             lambda query, key, value, *_, out_shape=None, **__: sdpa_flop_count(query, key, value)}


def counted(settings, donor, target, sequences, folder):
    """Matrix products of a whole cascade, its choice of directions included, by torch's count."""
    ids = np.random.default_rng(0).integers(0, 61, (sequences, LENGTH))
    source, maps = InMemory(extract(donor), donor.config), uniform_selection(shape_of(donor.config), shape_of(target))
    with FlopCounterMode(display=False, custom_mapping=ATTENTION) as counter:
        if settings.stream != "selected":
            moments = None if settings.stream == "rotation" else stream_moments(source, ids, folder)
            basis = stream_basis(settings.stream, moments, donor.config.hidden_size, target.hidden_size)
            maps = Maps(maps.blocks, {**maps.axes, (None, RESIDUAL): basis})
        cascade(settings, source, maps, target, ids, folder)
    return counter.get_total_flops()


@pytest.mark.parametrize(("name", "settings"), [
    ("parallel", Cascade()),
    ("parallel", Cascade("selected", correct=False)),
    ("sequential", Cascade("rotation", correct=False, head=False)),
    ("sequential", Cascade("selected", read_ins=False)),
    ("grouped", Cascade("selected")),
    ("grouped", Cascade("pca_raw", read_outs=False, correct=False)),
])
def test_operations_a_token_are_those_that_torch_counts(name, settings, tmp_path):
    """Five sequences' worth: the difference of two runs, in which all that text does not lengthen cancels."""
    config = llama() if name == "grouped" else neox(parallel=name == "parallel")
    donor = random_model(config_like(config, **shape_of(config).sizes() | {"layers": 3}))
    groups = {"kv_heads": 2, "head_dim": 4} if name == "grouped" else {}
    target = config_like(config, layers=2, width=16, heads=4, mlp=20, **groups)
    found = [counted(settings, donor, target, n, tmp_path) for n in (6, 11)]
    said = [sum(flops(settings, donor.config, target, n, LENGTH).values()) for n in (6, 11)]
    assert found[1] - found[0] == pytest.approx(said[1] - said[0], rel=1e-6)


def test_operations_are_worth_tokens_at_six_a_weight():
    target = llama(tie_word_embeddings=True)
    assert parameters(target) == random_model(target).num_parameters()
    assert worth_in_tokens(6e9 * parameters(target), target) == pytest.approx(1e9)

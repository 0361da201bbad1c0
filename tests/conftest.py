# ruff: noqa: E402 - the environment must be set before scaleop and torch are imported
"""Every test works in a throw-away store, on one thread, with tiny GPT-NeoX models; nothing touches `store/`."""

import atexit
import os
import shutil
import tempfile

# Before scaleop is imported: paths.STORE is read once, and subprocesses inherit these variables.
os.environ["SCALEOP_STORE"] = _STORE = tempfile.mkdtemp(prefix="scaleop-test-store-")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # tiny tensors are faster on one thread, and sums have one order
os.environ["HF_HUB_OFFLINE"] = "1"  # no test may depend on the hub
os.environ["HF_HOME"] = _HUB = tempfile.mkdtemp(prefix="scaleop-test-hub-")  # or what the user's cache holds
for _name in ("HF_HUB_CACHE", "HF_DATASETS_CACHE", "HF_ASSETS_CACHE", "HF_XET_CACHE", "HF_MODULES_CACHE"):
    os.environ.pop(_name, None)
for _folder in (_STORE, _HUB):
    atexit.register(shutil.rmtree, _folder, ignore_errors=True)

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, GPTNeoXConfig

from scaleop import corpus
from scaleop.donor import Donor
from scaleop.wiring import config_like

torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))


@pytest.fixture
def store(tmp_path, monkeypatch):
    """A store that only this test sees."""
    folder = tmp_path / "store"
    monkeypatch.setattr(corpus, "STORE", folder)
    return folder


def neox_config(layers=2, width=16, heads=2, mlp=40, vocab=61, rotary=0.5, **more):
    """A tiny GPT-NeoX configuration; MLP and vocabulary sizes are odd ones, so that mixed-up axes do not fit."""
    return GPTNeoXConfig(vocab_size=vocab, hidden_size=width, num_hidden_layers=layers, num_attention_heads=heads,
                         intermediate_size=mlp, rotary_pct=rotary, tie_word_embeddings=False, bos_token_id=0,
                         eos_token_id=0, **{"max_position_embeddings": 64, **more})


def random_model(config, seed=0, std=0.3, dtype=torch.float32):
    """A model all of whose parameters are random (biases and norms too), so that none can be lost unnoticed.

    `dtype` is given at construction, as loading does: a later `.to(dtype)` would round the rotary table as well.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.normal_(std=std)
                if "norm" in name:
                    parameter.add_(float(name.endswith("weight")))
    return model.eval()


def random_ids(count, vocab=61, seed=0):
    """(count,) int64 token ids, uniform."""
    return np.random.default_rng(seed).integers(0, vocab, count)


@pytest.fixture
def model():
    """A random two-block GPT-NeoX of width 16."""
    return random_model(neox_config())


@pytest.fixture(scope="module")
def donor(tmp_path_factory):
    """A random two-block donor of width 32 with its probe set and a cache of its own."""
    model = random_model(neox_config(layers=2, width=32, heads=2, mlp=48))
    sequences = np.random.default_rng(0).integers(0, 61, (30, 10))
    return Donor(model, sequences, 20, "a-donor", tmp_path_factory.mktemp("donor"))


@pytest.fixture(scope="module")
def target(donor):
    """The config of half that width."""
    return config_like(donor.config, layers=2, width=16, heads=2, mlp=20)

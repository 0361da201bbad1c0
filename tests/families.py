"""Tiny configs of every family that has a wiring table, and of the ways its configs differ."""

from transformers import LlamaConfig, MistralConfig, Qwen2Config

from tests.conftest import neox_config

SIZES = {"vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
         "intermediate_size": 40, "max_position_embeddings": 64}


def neox(tied=False, parallel=True):
    """GPT-NeoX: every head has its own keys and values, half of each rotates."""
    config = neox_config(layers=2, width=32, heads=4, mlp=40, use_parallel_residual=parallel)
    config.tie_word_embeddings = tied
    return config


def llama(**more):
    """Llama in two groups of two query heads, unless `more` says otherwise."""
    return LlamaConfig(**SIZES | {"num_key_value_heads": 2, "tie_word_embeddings": False} | more)


def mistral(**more):
    """Mistral with a sliding window shorter than the texts of these tests."""
    return MistralConfig(**SIZES | {"num_key_value_heads": 2, "tie_word_embeddings": False, "sliding_window": 6} | more)


def qwen2(**more):
    """Qwen2, whose queries, keys and values have biases."""
    return Qwen2Config(**SIZES | {"num_key_value_heads": 2, "tie_word_embeddings": False} | more)


CONFIGS = {
    "gpt_neox": neox(),
    "gpt_neox, tied": neox(tied=True),
    "gpt_neox, one after the other": neox(parallel=False),
    "llama": llama(),
    "llama, tied": llama(tie_word_embeddings=True, pad_token_id=2),
    "llama, biases, no groups": llama(num_key_value_heads=4, attention_bias=True, mlp_bias=True),
    "llama, heads wider than the stream": llama(head_dim=12),
    "mistral": mistral(),
    "mistral, tied, one group": mistral(num_key_value_heads=1, tie_word_embeddings=True),
    "qwen2": qwen2(),
    "qwen2, tied": qwen2(tie_word_embeddings=True),
}
"""A new table adds its own here, and tests/test_wiring_contract.py does the rest."""

"""Pythia's published shapes, for what needs no weights: footprints and benchmarks."""

from typing import Any

from transformers import GPTNeoXConfig

PYTHIA = {"160m": (12, 768, 12), "410m": (24, 1024, 16), "1.4b": (24, 2048, 16)}  # blocks, width, heads


def pythia(layers: int, width: int, heads: int, vocab: int = 50_304, **more: Any) -> GPTNeoXConfig:
    """The config of a Pythia of that shape; all up to 1.4B have 50,304 tokens. `more`: other settings."""
    return GPTNeoXConfig(num_hidden_layers=layers, hidden_size=width, num_attention_heads=heads, vocab_size=vocab,
                         intermediate_size=4 * width, rotary_pct=0.25, max_position_embeddings=2048,
                         tie_word_embeddings=False, bos_token_id=0, eos_token_id=0, attn_implementation="sdpa", **more)

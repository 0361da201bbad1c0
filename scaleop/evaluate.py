"""How good a model is: strided sliding-window perplexity, and a greedy sample.

The protocol is the paper's (section 3): windows of `window` tokens every `stride` tokens, each token but the very
first scored exactly once with as much context as its window gives, fp32 forward and loss, exp(total NLL / tokens).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from scaleop.devices import device_of, on_best_device
from scaleop.processes import processes, summed


@dataclass(frozen=True)
class Perplexity:
    """A perplexity and what it was measured with; `nll` is the total in nats over `scored` tokens."""

    value: float
    nll: float
    scored: int
    window: int
    stride: int

    def facts(self) -> dict[str, float | int]:
        """The same as a plain dict for JSON."""
        return asdict(self)


def windows(length: int, window: int, stride: int) -> list[tuple[int, int, int]]:
    """(begin, end, first scored position) of every window over `length` tokens; the last one may be short.

    Scored position p means: token p is predicted from the tokens begin..p-1. Together the windows score tokens
    1..length-1 once each.
    """
    if not 0 < stride <= window - 1:
        raise ValueError(f"stride={stride} must lie between 1 and window - 1 = {window - 1}")
    spans, scored = [], 1
    for begin in range(0, length, stride):
        end = min(begin + window, length)
        if scored < end:
            spans.append((begin, end, scored))
            scored = end
        if end == length:
            break
    return spans


@contextmanager
def fused_attention(model: nn.Module) -> Iterator[None]:
    """Run `model` with torch's fused attention inside the block. In fp32 it gives the eager result to eight digits and
    takes 1.4 times less of an evaluation (in bf16, at a training step's short context, the eager one is faster)."""
    before, model.config._attn_implementation = model.config._attn_implementation, "sdpa"
    try:
        yield
    finally:
        model.config._attn_implementation = before


@torch.no_grad()
def perplexity(model: nn.Module, tokens: np.ndarray, window: int, stride: int, batch: int = 16,
               together: bool = False) -> Perplexity:
    """Strided perplexity of a causal language model on `tokens` ((n,) ids), fp32.

    Windows of equal length run `batch` at a time, and the output head only sees positions whose next token is
    scored, so memory is bounded by batch x stride x vocabulary fp32 logits. With `together` every process of a launch
    must call it, with the same weights: each takes its share of the windows, and all get the whole's perplexity.
    A model on the CPU goes to the GPU for it, if there is one, and back.
    Raises ValueError for fewer than two tokens and FloatingPointError when the model gives NaN.
    """
    if len(tokens) < 2:
        raise ValueError(f"perplexity needs at least two tokens, got {len(tokens)}")
    body, head = model.base_model, model.get_output_embeddings()
    ids = torch.as_tensor(np.asarray(tokens, dtype=np.int64))
    groups: dict[tuple[int, int], list[int]] = {}  # (window length, tokens scored) -> window starts
    for begin, end, first in windows(len(ids), window, stride):
        groups.setdefault((end - begin, end - first), []).append(begin)
    pieces = [(*shape, begins[i : i + batch]) for shape, begins in groups.items() for i in range(0, len(begins), batch)]
    if together:
        pieces = pieces[processes().process_index :: processes().num_processes]
    training, total, scored = model.training, 0.0, 0
    model.eval()
    with on_best_device(model), fused_attention(model):
        for length, last, begins in pieces:
            rows = torch.stack([ids[b : b + length] for b in begins]).to(head.weight.device)
            hidden = body(input_ids=rows, use_cache=False).last_hidden_state[:, length - last - 1 : -1]
            logits = head(hidden).float()
            targets = rows[:, length - last :]
            losses = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
            total += losses.cpu().double().sum().item()
            scored += targets.numel()
    model.train(training)
    if together:
        total, scored = summed(total, scored)
        scored = int(scored)
    if not np.isfinite(total):
        raise FloatingPointError("the model's loss is not finite: its weights hold NaN or its logits overflow")
    return Perplexity(float(np.exp(min(total / scored, 700.0))), total, scored, window, stride)


@torch.no_grad()
def greedy(model: nn.Module, tokenizer, prompt: str, new_tokens: int = 12) -> str:
    """The prompt with `new_tokens` greedily chosen tokens after it (deterministic)."""
    with on_best_device(model):
        ids = tokenizer(prompt, return_tensors="pt")["input_ids"].to(device_of(model))
        for _ in range(new_tokens):
            logits = model(input_ids=ids, use_cache=False).logits[:, -1]
            ids = torch.cat([ids, logits.argmax(-1, keepdim=True)], dim=1)
    return tokenizer.decode(ids[0])

"""The training loss: next-token cross-entropy, at once or a chunk of positions at a time.

Logits are the largest array of a step: at the primary pair 32 x 1,024 positions x 50,304 tokens take 6.6 GB in fp32,
and cross-entropy and its gradient as much again. With `chunk` the hidden states go through the head a chunk of
positions at a time, and each chunk's logits are computed anew in the backward pass, so that never more than one
chunk's exist. The loss and its gradients are the same up to rounding.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

IGNORED = -100  # the target of a position whose next token is unknown


def hidden_of(model: nn.Module, input_ids: torch.Tensor) -> torch.Tensor:
    """(batch, length) ids -> (batch, length, width): what the output head reads."""
    return model.base_model(input_ids=input_ids, use_cache=False).last_hidden_state


def logits_of(model: nn.Module, input_ids: torch.Tensor) -> torch.Tensor:
    """(batch, length) ids -> (batch, length, vocabulary) logits in fp32."""
    return model.get_output_embeddings()(hidden_of(model, input_ids)).float()


def next_tokens(input_ids: torch.Tensor) -> torch.Tensor:
    """(batch, length) ids -> (batch, length): the next token of each position, IGNORED at the last one."""
    return F.pad(input_ids[:, 1:], (0, 1), value=IGNORED)  # shifting the targets copies no logits


def next_token_cross_entropy(logits: torch.Tensor, input_ids: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy of the next token over all shifted positions, a scalar; shapes as in `logits_of`."""
    return F.cross_entropy(logits.flatten(0, 1), next_tokens(input_ids).flatten(), ignore_index=IGNORED)


def mean_by_chunks(total: Callable[..., torch.Tensor], chunk: int, input_ids: torch.Tensor,
                   *hidden: torch.Tensor) -> torch.Tensor:
    """Sum of `total(targets, *hidden)` over chunks of `chunk` positions, divided by the positions with a next token.

    `hidden`: (batch, length, width) each, cut as the targets are. What `total` computes is forgotten and computed
    again in the backward pass. Autocast keeps no copies of weights meanwhile: with one bf16 copy for all chunks their
    gradients would be summed in bf16; so each chunk's is cast first and the sum is fp32.
    """
    device = input_ids.device.type

    def forgotten(targets: torch.Tensor, *states: torch.Tensor) -> torch.Tensor:
        with torch.autocast(device, enabled=torch.is_autocast_enabled(device), cache_enabled=False):
            return total(targets, *states)

    targets = next_tokens(input_ids).flatten()
    pieces = (states.flatten(0, 1).split(chunk) for states in hidden)
    sums = [checkpoint(forgotten, *piece, use_reentrant=False, preserve_rng_state=False)
            for piece in zip(targets.split(chunk), *pieces, strict=True)]
    return torch.stack(sums).sum() / (targets != IGNORED).sum()


class NextTokenLoss(nn.Module):
    """Mean cross-entropy (fp32) of the next token over all shifted positions; a module, so DDP can wrap it.

    `chunk`: positions whose logits exist at a time (None: all). It trades one more pass through the head for memory.
    """

    def __init__(self, model: nn.Module, chunk: int | None = None) -> None:
        super().__init__()
        self.model, self.chunk = model, chunk

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """(batch, length) ids -> scalar loss."""
        if self.chunk is None:
            return next_token_cross_entropy(logits_of(self.model, input_ids), input_ids)
        return mean_by_chunks(self.total, self.chunk, input_ids, hidden_of(self.model, input_ids))

    def total(self, targets: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """(positions,) targets and (positions, width) hidden states -> summed cross-entropy."""
        logits = self.model.get_output_embeddings()(hidden).float()
        return F.cross_entropy(logits, targets, ignore_index=IGNORED, reduction="sum")

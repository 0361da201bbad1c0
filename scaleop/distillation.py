"""Distillation as an option of the race (section 7): the donor teaches while the small model trains.

The loss is a CE + (1 - a) T^2 KL(teacher || student), where both distributions are softened by the temperature T and
every term is a mean over the shifted positions. The paper's text writes KL(student || teacher); its authors' code
computes KL(teacher || student), the usual direction (Hinton et al. 2015), and so do we.
"""

from copy import deepcopy
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from scaleop.devices import device_of
from scaleop.losses import IGNORED, hidden_of, logits_of, mean_by_chunks, next_token_cross_entropy


@dataclass(frozen=True)
class Distillation:
    """The paper's two numbers. ValueError for a temperature that is not positive, or alpha outside [0, 1]."""

    temperature: float = 2.0  # T: divides both models' logits
    alpha: float = 0.5  # weight of the cross-entropy; the divergence weighs 1 - alpha

    def __post_init__(self) -> None:
        if not self.temperature > 0:
            raise ValueError(f"temperature={self.temperature} must be positive (the paper: 2)")
        if not 0 <= self.alpha <= 1:
            raise ValueError(f"alpha={self.alpha} must lie in [0, 1] (the paper: 0.5; 1 is no distillation)")


def divergence(teacher: torch.Tensor, student: torch.Tensor) -> torch.Tensor:
    """KL(teacher || student) in nats of the distributions that two arrays of logits (..., vocabulary) give: (...)."""
    return F.kl_div(student.log_softmax(-1), teacher.log_softmax(-1), reduction="none", log_target=True).sum(-1)


class DistilledLoss(nn.Module):
    """The loss that `train` minimises in place of NextTokenLoss: `partial(DistilledLoss, teacher=..., settings=...)`.

    The teacher is frozen: it runs in eval mode, without gradient, under whatever autocast the student runs. It is no
    submodule, so neither the optimiser, nor a checkpoint, nor DDP sees it. It may know more tokens than the student:
    its logits beyond the student's vocabulary are cut off before the softmax. Fewer are refused with ValueError.

    Costs the teacher's forward pass a step, and on top of NextTokenLoss about seven fp32 arrays of the size of a
    process's logits (sequences x length x vocabulary): on the nano pair 250 MB, and half as much time again a step.
    With `chunk` these arrays are of `chunk` positions only, and both heads run once more in the backward pass.
    When the student is on another device the teacher is copied there.
    """

    def __init__(self, model: nn.Module, teacher: nn.Module, settings: Distillation, chunk: int | None = None) -> None:
        super().__init__()
        self.model, self.settings, self.chunk = model, settings, chunk
        have, want = (each.get_output_embeddings().out_features for each in (teacher, model))
        if have < want:
            raise ValueError(f"the teacher knows {have} tokens, the student {want}: distil from a donor whose "
                             f"vocabulary holds the student's")
        if device_of(teacher) != device_of(model):
            teacher = deepcopy(teacher).to(device_of(model))  # a copy: whoever lent it goes on using it where it is
        self.frozen = (teacher.eval(),)  # in a tuple, lest nn.Module register it

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """(batch, length) ids -> scalar loss."""
        temperature, alpha = self.settings.temperature, self.settings.alpha
        if self.chunk is not None:
            student = hidden_of(self.model, input_ids)
            with torch.no_grad():
                teacher = hidden_of(self.frozen[0], input_ids)
            return mean_by_chunks(self.total, self.chunk, input_ids, student, teacher)
        student = logits_of(self.model, input_ids)
        with torch.no_grad():
            teacher = logits_of(self.frozen[0], input_ids)[..., : student.shape[-1]]
        soft = divergence(teacher / temperature, student / temperature)[:, :-1].mean()  # the last has no next token
        return alpha * next_token_cross_entropy(student, input_ids) + (1 - alpha) * temperature**2 * soft

    def total(self, targets: torch.Tensor, student: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
        """(positions,) targets and both models' (positions, width) hidden states -> the loss summed over positions."""
        temperature, alpha = self.settings.temperature, self.settings.alpha
        student = self.model.get_output_embeddings()(student).float()
        with torch.no_grad():
            teacher = self.frozen[0].get_output_embeddings()(teacher).float()[..., : student.shape[-1]]
        soft = divergence(teacher / temperature, student / temperature).masked_fill(targets == IGNORED, 0).sum()
        hard = F.cross_entropy(student, targets, ignore_index=IGNORED, reduction="sum")
        return alpha * hard + (1 - alpha) * temperature**2 * soft

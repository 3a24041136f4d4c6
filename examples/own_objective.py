"""Train with a loss of your own: next-token prediction with smoothed targets, and the accuracy beside the loss.

    scrimp train --objective.name examples/own_objective.py:Smoothed --trust-code

With smoothing s, and a vocabulary of V entries, each target gets 1 - s of the weight and all entries share the rest::

    loss = (1 - s) * -log p(target) + s * mean over entries of -log p

`head_loss` is all that differs. The memory account, the proof and evaluations ask the objective, and so run this one.
It needs whole logits in float32, which the account therefore contains: they are not cut into chunks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from scrimp.data import IGNORED
from scrimp.models.model import Model
from scrimp.objectives import LossSums
from scrimp.objectives.next_token import NextToken

SMOOTHING = 0.1


@dataclass(frozen=True)
class Smoothed(NextToken):
    """Cross-entropy with smoothed targets."""

    def head_loss(self, model: Model, hidden_SD: Tensor, targets_S: Tensor, *, chunk: int = 0) -> LossSums:
        """The loss from the hidden states; `chunk` is not used."""
        logits_SV = model.logits(hidden_SD).float()
        real_S = targets_S != IGNORED
        sharp = F.cross_entropy(logits_SV, targets_S, ignore_index=IGNORED, reduction="sum")
        uniform = -(torch.log_softmax(logits_SV, dim=-1).mean(dim=-1) * real_S).sum()
        right = ((logits_SV.argmax(dim=-1) == targets_S) & real_S).sum()
        loss = (1 - SMOOTHING) * sharp + SMOOTHING * uniform
        return LossSums(loss, torch.zeros_like(loss), {"accuracy": right.detach()})

    def head_passes(self, num_tokens: int, chunk: int) -> int:
        """One for all tokens."""
        return 1

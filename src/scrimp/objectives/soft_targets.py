"""Targets that another model gives: the probabilities of a teacher, or of several whose logits are averaged.

    q = softmax(mean over teachers k of h_k W_k^T)

Problem  A teacher says of every token how likely each word is: as many numbers as there are logits.
Method   The teachers' last hidden states are kept, S x D each. Their logits are made where the loss makes the
         student's, for a chunk of tokens at a time. Logits are averaged, not probabilities, as Kim et al. do.
Source   Hinton et al., "Distilling the knowledge in a neural network" (2015, arXiv 1503.02531), at temperature 1; Kim
         et al., "Pre-training under infinite compute" (2025, arXiv 2509.14786)
Checked  tests/objectives/test_soft_targets.py

Shapes: S tokens, D width of a teacher, V vocabulary; a chunk has Q of the S tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from scrimp.gemm.observe import running
from scrimp.models.functions import at_least_float32


@dataclass(frozen=True)
class Taught:
    """What teachers say of some tokens."""

    weight: float
    """Share of the loss that is theirs, 0 to 1."""
    probabilities: Tensor
    """The probability of each word, shape (Q, V), in float32 or wider."""


@dataclass(frozen=True)
class SoftTargets:
    """What teachers say of a micro-batch."""

    weight: float
    """Share of the loss that is theirs, 0 to 1."""
    hidden: tuple[Tensor, ...]
    """Each teacher's hidden states after its final norm, shape (S, D)."""
    heads: tuple[Tensor, ...]
    """Each teacher's head, shape (V, D)."""

    def probabilities(self, rows: slice) -> Tensor:
        """What the teachers give each word behind these tokens, shape (Q, V)."""
        return torch.softmax(self.logits(rows), dim=-1)

    @running
    def logits(self, rows: slice) -> Tensor:
        """The mean of all teachers' logits of these tokens, shape (Q, V)."""
        total: Tensor | None = None
        for hidden_SD, head_VD in zip(self.hidden, self.heads, strict=True):
            logits = at_least_float32(hidden_SD[rows].to(head_VD.dtype) @ head_VD.T)
            total = logits if total is None else total.add_(logits)
        assert total is not None, "there is a teacher"
        return total.div_(len(self.hidden))

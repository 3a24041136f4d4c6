"""Next-token loss of a bare model, for tests that need some loss."""

from __future__ import annotations

from torch import Tensor

from scrimp.data import Batch
from scrimp.models.model import Model
from scrimp.objectives import LossSums
from scrimp.objectives.next_token import NextToken


def next_token_loss(
    model: Model,
    tokens_BT: Tensor,
    targets_BT: Tensor,
    document_starts: Tensor | None = None,
    *,
    chunk: int = 0,
    z_loss: float = 0.0,
) -> LossSums:
    """Sums over the real targets."""
    return NextToken(z_loss).loss(model, Batch.of(tokens_BT, targets_BT, document_starts), chunk=chunk)

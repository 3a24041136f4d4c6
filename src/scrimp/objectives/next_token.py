"""Next-token prediction: the cross-entropy of every target in the batch, and the z-loss.

    loss     sum of -log p(target)
    penalty  z_loss * sum of log(Z)^2, which keeps the softmax's partition Z near 1

Targets of `IGNORED` count nothing: what a batch leaves out (padding, the other side of a conversation) is decided where
batches are made, in `scrimp.data`.
Checked  tests/models/test_decoder.py, against a float64 reference; tests/objectives/test_cross_entropy.py
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from scrimp.config import ObjectiveConfig
from scrimp.data import Batch
from scrimp.models.model import Model
from scrimp.objectives.base import LossSums, Reads
from scrimp.objectives.cross_entropy import cross_entropy_sums
from scrimp.objectives.cut_vocabulary import CutVocabulary
from scrimp.objectives.soft_targets import SoftTargets
from scrimp.objectives.source_weights import SourceWeights


@dataclass(frozen=True)
class NextToken:
    """Each position predicts its target."""

    z_loss: float = 0.0
    """Weight of the squared log-partition."""

    @classmethod
    def build(cls, settings: ObjectiveConfig) -> NextToken:
        """As the settings say."""
        return cls(z_loss=settings.z_loss)

    @property
    def reads(self) -> Reads:
        """Documents."""
        return "documents"

    def loss(self, model: Model, batch: Batch, *, chunk: int = 0) -> LossSums:
        """See `Objective`."""
        hidden_SD = model(batch.tokens_BT, batch.document_starts).flatten(0, 1)
        targets_S, weights = batch.targets_BT.flatten(), SourceWeights.of(batch)
        if weights is None:
            return self.head_loss(model, hidden_SD, targets_S, chunk=chunk)
        return self._sums(model, hidden_SD, targets_S, chunk, weights=weights)

    def head_loss(self, model: Model, hidden_SD: Tensor, targets_S: Tensor, *, chunk: int = 0) -> LossSums:
        """See `Objective`."""
        return self._sums(model, hidden_SD, targets_S, chunk)

    def count(self, batch: Batch) -> int:
        """The real targets."""
        return batch.num_targets

    def resident_bytes(self, parameters: str, tokens: int) -> int:
        """None."""
        return 0

    def head_passes(self, num_tokens: int, chunk: int) -> int:
        """One per chunk."""
        return -(-num_tokens // (chunk or num_tokens))

    def _sums(
        self,
        model: Model,
        hidden_SD: Tensor,
        targets_S: Tensor,
        chunk: int,
        *,
        soft: SoftTargets | None = None,
        weights: SourceWeights | None = None,
    ) -> LossSums:
        return cross_entropy_sums(
            hidden_SD,
            model.head_weight,
            targets_S,
            chunk=chunk,
            z_loss=self.z_loss,
            planned=model.planned_head,
            vocabulary=_vocabulary(model),
            soft=soft,
            weights=weights,
        )


def _vocabulary(model: Model) -> CutVocabulary | None:
    """The words whose rows of the head this rank has; None: it has all."""
    ranks = model.tensor_ranks
    if ranks is None:
        return None
    return CutVocabulary(ranks.share(model.architecture.vocab_size), ranks.group)


NEXT_TOKEN = NextToken()
"""Without z-loss."""

"""What targets count by the source that their row comes from.

    loss     sum over targets t of -log p(t)                              as without weights: what is shown
    penalty  sum over targets t of w[source of t] (l_t) - (-log p(t))     l_t all that is minimised of t

Method   A batch has the number of each row's source, and the weight of each source (`Batch.sources_B`, `weights_G`).
         The gradient of a target's logits is multiplied by its weight where it is made. Besides, each source's sum of
         losses and its number of targets come out as metrics, of which whoever sets the weights makes means.
Limits   Weights multiply the gradient of logits in the compute type: in bf16 it is rounded twice. The account does not
         have what sums by source take for a moment, about 4 G bytes a token of a chunk, beside its V logits.
Checked  tests/objectives/test_source_weights.py: against the loss spelled out in float64

Shapes: B rows of T tokens, S = B T tokens in all, of which a chunk has Q; G sources.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from scrimp.data import IGNORED, Batch

_LOSS, _COUNT = "source-loss/", "source-targets/"


@dataclass(frozen=True)
class SourceWeights:
    """What the targets of a micro-batch count."""

    sources_B: Tensor  # noqa: N815
    """The number of each row's source."""
    weights_G: Tensor  # noqa: N815
    """What each source counts, in float32."""
    length: int
    """Tokens of a row, T."""

    @classmethod
    def of(cls, batch: Batch) -> SourceWeights | None:
        """Those of a batch; None: all targets count alike."""
        if batch.sources_B is None or batch.weights_G is None:
            return None
        return cls(batch.sources_B, batch.weights_G, batch.tokens_BT.shape[1])

    def weigh(self, grad_QV: Tensor, losses_2Q1: Tensor, rows: slice) -> tuple[Tensor, Tensor]:
        """Multiply the gradients of some tokens' logits, in place.

        Args:
            grad_QV: of the logits; without gradients it is not read.
            losses_2Q1: losses and penalties of these tokens, 0 where a target does not count.
            rows: which tokens of the micro-batch these are.

        Returns:
            the penalty with what the weights add, and the sum of losses of each source.
        """
        tokens_Q = torch.arange(rows.start, rows.stop, device=self.sources_B.device)
        sources_Q = self.sources_B[tokens_Q // self.length]
        weights_Q1 = self.weights_G[sources_Q][:, None]
        grad_QV.mul_(weights_Q1)
        loss_Q1, penalty_Q1 = losses_2Q1
        more = (weights_Q1 * (loss_Q1 + penalty_Q1) - loss_Q1).sum()
        return more, (loss_Q1 * self._one_hot(sources_Q)).sum(0)

    def metrics(self, losses_G: Tensor, targets_S: Tensor) -> dict[str, Tensor]:
        """Sums of losses and of targets by source, as an objective's metrics."""
        real_B1 = (targets_S.view(-1, self.length) != IGNORED).sum(1, keepdim=True)
        counts_G = (real_B1 * self._one_hot(self.sources_B)).sum(0).to(losses_G.dtype)
        found = {f"{_LOSS}{number}": loss for number, loss in enumerate(losses_G.unbind())}
        return found | {f"{_COUNT}{number}": count for number, count in enumerate(counts_G.unbind())}

    def _one_hot(self, sources: Tensor) -> Tensor:
        return sources[:, None] == torch.arange(len(self.weights_G), device=sources.device)


def without_sums(metrics: Mapping[str, float]) -> dict[str, float]:
    """Metrics but for those of sources."""
    return {name: one for name, one in metrics.items() if not name.startswith((_LOSS, _COUNT))}


def means_of(metrics: Mapping[str, float], sources: int) -> list[float | None]:
    """The mean loss of each source, by what a step's metrics say; None: it had no target."""
    losses = [metrics[f"{_LOSS}{number}"] for number in range(sources)]
    counts = [metrics[f"{_COUNT}{number}"] for number in range(sources)]
    return [loss / count if count else None for loss, count in zip(losses, counts, strict=True)]

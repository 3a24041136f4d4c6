"""One micro-batch: tokens, targets, and where documents begin."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from scrimp.data.shards import Int64Array

IGNORED = -100
"""Target that does not count, as in PyTorch's cross-entropy."""
Row = tuple[Int64Array, Int64Array, Int64Array]
"""Inputs, targets, and the starts of documents within the row but for 0."""


@dataclass(frozen=True)
class Batch:
    """One micro-batch."""

    tokens_BT: Tensor  # noqa: N815
    """int64 inputs."""
    targets_BT: Tensor  # noqa: N815
    """int64 targets; IGNORED does not count."""
    document_starts: Tensor | None
    """int32 on the CPU: 0, every further document start over the flattened B * T tokens, and
    B * T; None where documents are not kept apart."""
    num_targets: int
    """Targets that count."""
    sources_B: Tensor | None = None  # noqa: N815
    """int64: number of the source that a row comes from; None where there is one source."""
    weights_G: Tensor | None = None  # noqa: N815
    """float32: what targets count by their source; None: all alike."""

    @classmethod
    def of(cls, tokens_BT: Tensor, targets_BT: Tensor, document_starts: Tensor | None = None) -> Batch:
        """A batch of tensors, its targets counted."""
        return cls(tokens_BT, targets_BT, document_starts, int((targets_BT != IGNORED).sum()))

    def at(self, positions_T: Tensor) -> Batch:
        """Its rows at some positions alone, as one of the ranks that share them holds them.

        Document starts stay those of whole rows. Targets are counted: its tensors must still be on the host.

        Args:
            positions_T: int64, on the CPU.
        """
        tokens, targets = (x.index_select(1, positions_T) for x in (self.tokens_BT, self.targets_BT))
        return Batch.of(tokens, targets, self.document_starts)

    def pin(self) -> Batch:
        """The same batch in pinned host memory."""
        return replace(self, tokens_BT=self.tokens_BT.pin_memory(), targets_BT=self.targets_BT.pin_memory())

    def to(self, device: torch.device) -> Batch:
        """The same batch on a device; document starts stay on the CPU."""

        def there(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else tensor.to(device, non_blocking=True)

        return replace(
            self,
            tokens_BT=self.tokens_BT.to(device, non_blocking=True),
            targets_BT=self.targets_BT.to(device, non_blocking=True),
            sources_B=there(self.sources_B),
            weights_G=there(self.weights_G),
        )

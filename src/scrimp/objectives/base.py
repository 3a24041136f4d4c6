"""The seam "what is trained": what everything that runs a loss asks of an objective.

Problem  A loss is run in many places: in steps, in evaluations, in the proof before training, where statistics are
         measured, in the memory trace and in the timing of the model's ends. All of them must run the same one, or the
         account is of another loss than the run's.
Method   They ask an `Objective`. Its `loss` takes a model and one micro-batch; the part after the hidden states is
         `head_loss`, which the memory trace runs alone, on tensors without memory.
Sums     A loss is a sum, and `count` says over how many. Whoever runs a batch divides by the count of the whole batch,
         so that cutting it into other micro-batches changes nothing.
Limits   One forward pass of the trained model per micro-batch, whose hidden states `head_loss` gets: what the proof
         expects of the blocks' GEMMs. The objective is built from settings alone, and holds no state that a resumed
         run would need.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol

if TYPE_CHECKING:
    from torch import Tensor

    from scrimp.data import Batch
    from scrimp.models.model import Model

Reads = Literal["documents", "conversations"]


@dataclass(frozen=True)
class LossSums:
    """Sums over the counted targets of one micro-batch: scalars, differentiable together."""

    loss: Tensor
    """What is shown and recorded, such as the negative log-probabilities of the targets."""
    penalty: Tensor
    """What is minimised too, but not shown."""
    metrics: Mapping[str, Tensor] = field(default_factory=dict)
    """More sums to record, each divided by the count like the loss; without gradients."""

    @property
    def total(self) -> Tensor:
        """What to differentiate: loss + penalty."""
        return self.loss + self.penalty


class Objective(Protocol):
    """From a micro-batch to a loss. Instances are immutable and hashable: their traces are remembered."""

    def __hash__(self) -> int:
        """Equal for objectives with the same loss."""

    @property
    def reads(self) -> Reads:
        """What a batch is made of: documents of text in windows, or whole conversations with masked targets."""

    def loss(self, model: Model, batch: Batch, *, chunk: int = 0) -> LossSums:
        """Forward pass and loss of a micro-batch, its tensors on the model's device.

        Args:
            chunk: tokens whose logits exist at once; 0 for all.
        """

    def head_loss(self, model: Model, hidden_SD: Tensor, targets_S: Tensor, *, chunk: int = 0) -> LossSums:
        """The part of `loss` after the hidden states, shape (tokens, width): what the memory trace runs.

        It may read the model's head, nothing else of the model.
        """

    def count(self, batch: Batch) -> int:
        """What the sums of a micro-batch are sums over; its tensors are still on the host."""

    def resident_bytes(self, parameters: str, tokens: int) -> int:
        """Bytes that the loss has on the device all through a step, besides the trained model, such as other models.

        Args:
            parameters: format of the trained parameters.
            tokens: of a micro-batch.
        """

    def head_passes(self, num_tokens: int, chunk: int) -> int:
        """How often `loss` runs the head's fprop, and its backward pass dgrad and wgrad, for so many tokens."""

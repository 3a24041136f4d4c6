"""What optimizers make of a gradient: h(g) of the next step, for the statistics.

AdamW    With m, v before the step, t the step's number, g the gradient as the optimizer sees it::

             mh = (b1 m + (1 - b1) g) / (1 - b1^t)     vh = (b2 v + (1 - b2) g^2) / (1 - b2^t)
             h(g) = mh / (sqrt(vh) + eps)              update = -lr (h + wd W)

         Adam's weight decay is part of its gradient, g + wd W; AdamW's moves no sensitivity.
SGD      With momentum or without, the next update moves by exactly the change of the gradient: h(g) = g. Dampening and
         Nesterov's look-ahead scale the updates of a group alike, and are left out.
Checked  tests/statistics/test_sensitivity.py: against the optimizers' own steps
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from scrimp.statistics.ranks import local


@dataclass(frozen=True)
class AdamWRule:
    """One parameter of Adam or AdamW."""

    lr: float
    exp_avg: Tensor | None = None
    """m; None: zeros."""
    exp_avg_sq: Tensor | None = None
    updates: int = 0
    """Before this step."""
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    decay: Tensor | None = None
    """Added to the gradient: wd W of Adam. None: decay is decoupled, or there is none."""
    is_linear = False

    def direction(self, gradient: Tensor) -> Tensor:
        """h(g), without learning rate and decay."""
        t = self.updates + 1
        if self.decay is not None:
            gradient = gradient + self.decay
        m, v = (
            torch.zeros_like(gradient) if moment is None else moment.to(gradient.dtype)
            for moment in (self.exp_avg, self.exp_avg_sq)
        )
        mean = m.lerp(gradient, 1 - self.beta1) / (1 - self.beta1**t)
        square = (self.beta2 * v).addcmul_(gradient, gradient, value=1 - self.beta2)
        return mean / (square.div_(1 - self.beta2**t).sqrt_().add_(self.eps))

    def here(self) -> AdamWRule:
        """With what of the state lies on this rank: the update is elementwise."""
        first, second, decay = (
            None if tensor is None else local(tensor)
            for tensor in (self.exp_avg, self.exp_avg_sq, self.decay)
        )
        return replace(self, exp_avg=first, exp_avg_sq=second, decay=decay)


@dataclass(frozen=True)
class GradientRule:
    """An update that is proportional to the gradient: SGD."""

    lr: float
    is_linear = True

    def direction(self, gradient: Tensor) -> Tensor:
        """The gradient itself."""
        return gradient

    def here(self) -> GradientRule:
        """Every shard has the rule of the whole."""
        return self

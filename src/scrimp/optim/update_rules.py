"""What optimizers make of a gradient: h(g) of the next step, for the statistics.

AdamW    With m, v before the step, t the step's number, g the gradient as the optimizer sees it::

             mh = (b1 m + (1 - b1) g) / (1 - b1^t)     vh = (b2 v + (1 - b2) g^2) / (1 - b2^t)
             h(g) = mh / (sqrt(vh) + eps)              update = -lr (h + wd W)

         NAdamW takes b1 mh + (1 - b1) g / (1 - b1^t) in the place of mh, schedule-free AdamW g (b1 = 0): so z moves,
         and what is trained and what is evaluated by shares of it that are the same for all parameters.
         Adam's weight decay is part of its gradient, g + wd W; AdamW's moves no sensitivity.
SGD      With momentum or without, the next update moves by exactly the change of the gradient: h(g) = g. Dampening and
         Nesterov's look-ahead scale the updates of a group alike, and are left out.
Muon     h(g) is the orthogonalised momentum times its factor of the learning rate, as in torch.optim.Muon but in the
         gradient's own precision: in bf16 rounding would hide what a small noise changes. Differences of h are taken as
         they are, not to first order: directions that the gradient hardly has swing as far as any other.
GaLore   h(g) is the next step's P N, of Fira P N + S, times `low_rank_scale`, by the update itself on copies of its
         states (`scrimp.optim.low_rank`). P is the one that is there, also where the next step makes it anew, which one
         of `refresh_every` steps does, and plans are for all. Before the first update it is that of g.
Checked  tests/statistics/test_sensitivity.py: against the optimizers' own steps; Muon: tests/optim/test_muon_rule.py;
         GaLore: tests/optim/test_galore.py
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from scrimp.optim.low_rank import LowRankState, direction
from scrimp.optim.newton_schulz import COEFFICIENTS, EPS, STEPS, matched_rate, orthogonalised
from scrimp.optim.update import Step
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
    nesterov: bool = False
    """NAdamW: the gradient once more beside its average."""
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
        mean = m.lerp(gradient, 1 - self.beta1)
        if self.nesterov:
            mean = mean.lerp(gradient, 1 - self.beta1)
        mean = mean / (1 - self.beta1**t)
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


@dataclass(frozen=True)
class MuonRule:
    """One matrix of torch.optim.Muon."""

    lr: float
    buffer: Tensor | None = None
    """Average of the gradients; None: zeros."""
    momentum: float = 0.95
    nesterov: bool = True
    coefficients: tuple[float, float, float] = COEFFICIENTS
    """The polynomial of a Newton-Schulz step."""
    steps: int = STEPS
    eps: float = EPS
    rate: str | None = None
    """torch's `adjust_lr_fn`."""
    rows: tuple[int, ...] = ()
    """Rows of each map that is orthogonalised alone; empty: the matrix is one map."""
    is_linear = False

    def direction(self, gradient: Tensor) -> Tensor:
        """The orthogonalised momentum of each map, times its factor of the learning rate."""
        before = torch.zeros_like(gradient) if self.buffer is None else self.buffer.to(gradient.dtype)
        average = before.lerp(gradient, 1 - self.momentum)
        moved = gradient.lerp(average, self.momentum) if self.nesterov else average
        parts = moved.split(list(self.rows or (len(moved),)))
        return torch.cat([self._orthogonal(part) * self._factor(part) for part in parts])

    def here(self) -> MuonRule:
        """The same rule: a whole matrix lies here, since shards are refused where the rule is made."""
        return self

    def _factor(self, part: Tensor) -> float:
        rows, columns = part.shape
        return (
            matched_rate(rows, columns)
            if self.rate == "match_rms_adamw"
            else math.sqrt(max(1.0, rows / columns))
        )

    def _orthogonal(self, part: Tensor) -> Tensor:
        return orthogonalised(part, self.coefficients, self.steps, self.eps)


@dataclass(frozen=True)
class LowRankRule:
    """One matrix of GaLore or Fira."""

    lr: float
    scale: float
    rows: tuple[int, ...]
    """Rows of each map that has a projector of its own."""
    states: tuple[LowRankState, ...]
    """The state of each map."""
    step: Step
    """The next one."""
    is_linear = False

    def direction(self, gradient: Tensor) -> Tensor:
        """What the next step makes of each map, times the scale."""
        is_first = self.step.number == 1
        parts = zip(self.states, gradient.split(list(self.rows)), strict=True)
        found = [
            direction(state.copied(gradient.dtype), part, self.step, refresh=is_first)
            for state, part in parts
        ]
        return torch.cat(found).mul_(self.scale)

    def here(self) -> LowRankRule:
        """The same rule: a whole matrix lies here, since runs on ranks are refused."""
        return self

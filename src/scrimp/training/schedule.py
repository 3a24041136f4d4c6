"""Learning rate as a pure function of the step, so that resuming needs no scheduler state.

With w warm-up steps, n steps, peak p and final ratio r, at step s = 0 .. n-1::

    warm-up   p (s + 1) / w                                   s < w
    cosine    p [r + (1 - r) (1 + cos(pi t)) / 2]             t = (s - w) / (n - 1 - w), 1 at the last step
    linear    p [1 - (1 - r) t]
    wsd       p until the last fifth of the run, then linear to r p
    constant  p

so the first step already learns (rate p / w, not 0), and the last step runs at r p exactly, however
short the run: a warm-up as long as the run gives its last step to r p. Only a run of one step, which
is first and last, runs at p.

Where low-rank layers are factored anew every T steps (`optimizer.refactor_every`) and the averages of their factors
begin at 0, the rate recovers within R = 10 steps, or T where that is less: from step T on it is times

    min(1, (s mod T + 1) / R)

so that a last step soon after it runs at less. R is the default of the published code of Glentis et al.
(arXiv 2505.22922).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from scrimp.config import ResolvedConfig

WSD_DECAY_SHARE = 0.2
"""Last share of the run over which `wsd` decays (MiniCPM, arXiv 2404.06395, uses about a tenth to a fifth)."""

RECOVERY_STEPS = 10
"""Steps until the rate after a refactorization is that of the schedule again."""


@dataclass(frozen=True)
class Schedule:
    """Learning rate by 0-based step."""

    name: str
    """cosine, linear, wsd or constant."""
    steps: int
    """Steps of the run."""
    peak: float
    warmup_steps: int
    final_ratio: float
    """Last learning rate as a share of the peak."""
    refactor_every: int = 0
    """Steps from one refactorization of low-rank layers to the next; 0: none."""

    @classmethod
    def build(cls, config: ResolvedConfig) -> Schedule:
        """The schedule of a resolved configuration."""
        schedule, peak = config.schedule, config.optimizer.lr
        return cls(
            schedule.name,
            config.train.steps,
            peak,
            schedule.warmup_steps,
            schedule.final_lr_ratio,
            config.optimizer.refactor_every,
        )

    def __call__(self, step: int) -> float:
        """Learning rate of a step."""
        return self._shape(step) * self._recovered(step)

    def _recovered(self, step: int) -> float:
        """The share that is left of it after a refactorization."""
        every = self.refactor_every
        if every == 0 or step < every:
            return 1.0
        return min(1.0, (step % every + 1) / min(RECOVERY_STEPS, every))

    def _shape(self, step: int) -> float:
        peak, warmup, last = self.peak, self.warmup_steps, self.steps - 1
        if self.name != "constant":
            warmup = min(warmup, last)
        if step < warmup:
            return peak * (step + 1) / warmup
        if self.name == "constant" or last == 0:
            return peak
        start = warmup
        if self.name == "wsd":
            start = max(start, last - math.ceil(WSD_DECAY_SHARE * self.steps))
        progress = 1.0 if step >= last else max(0.0, (step - start) / (last - start))
        ratio = self.final_ratio
        if self.name == "cosine":
            return peak * (ratio + (1 - ratio) * 0.5 * (1 + math.cos(math.pi * progress)))
        return peak * (1 - (1 - ratio) * progress)

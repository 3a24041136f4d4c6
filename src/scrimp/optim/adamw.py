"""AdamW over the parameters of a model, or over fp32 master copies of them (`scrimp.optim.targets`).

Method   `moments` says how the averages are stored, see `scrimp.optim.moments`. Where weights and
         moments are fp32, the update is torch's fused AdamW (decoupled decay, Loshchilov & Hutter, arXiv
         1711.05101). Decay goes to matrices only, not to norms and biases.
         Without master weights bf16 parameters are rounded stochastically: they move by the right amount on average.
         Clipping waits for the update, which reads the gradients anyway.
State    Moments exist from the start, so that a checkpoint has the same tensors at every step:
         ``<parameter>.exp_avg``, ``.exp_avg_sq``, and of 8-bit moments ``.exp_avg_scale`` and ``.exp_avg_sq_scale``.
Checked  tests/optim/test_adamw.py
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from scrimp.config import OptimizerConfig
from scrimp.optim.moments import MomentFormat, Moments, dense
from scrimp.optim.stochastic_rounding import Scratch
from scrimp.optim.targets import Targets
from scrimp.optim.update import Step, is_fused, update, update_fused
from scrimp.optim.update_rules import AdamWRule
from scrimp.statistics import UpdateRule


class AdamW(Targets):
    """AdamW over the parameters of a model or their fp32 master copies.

    Args:
        parameters: float32 or bfloat16, by name.
        settings: decay rates, clipping, `master_weights` and `moments`; auto as `scrimp.config.resolve` decides it.
        seed: of the rounding noise.

    Raises:
        ConfigError: a parameter of another type.
    """

    name = "adamw"

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], settings: OptimizerConfig, *, seed: int = 0
    ) -> None:
        self._moments: dict[str, Moments] = {}
        self._clip = 1.0
        """What the next step scales gradients by."""
        super().__init__(parameters, settings, seed=seed)

    def _add(self, name: str, parameter: nn.Parameter) -> None:
        """Make the states of a parameter."""
        super()._add(name, parameter)
        target = self._targets[name]
        self._moments[name] = Moments.zeros(moment_format(self._settings, target.dtype), target.detach())

    def rule(self, name: str) -> UpdateRule:
        """How a parameter is updated, at a rate relative to `optimizer.lr`. 8-bit moments are decoded into copies."""
        moments, like, settings = self._moments[name], self._targets[name], self._settings
        averages = dense(moments.mean, like), dense(moments.square, like)
        rate, beta1, beta2 = self.relative_rate(name), settings.beta1, settings.beta2
        return AdamWRule(rate, *averages, self.num_updates, beta1, beta2, settings.eps)

    def clip(self, norm: float, limit: float) -> None:
        """Have the next step scale the gradients so that their norm, `norm` now, is at most `limit` (0: no limit)."""
        if limit > 0 and math.isfinite(norm) and norm > limit:
            self._clip = limit / norm

    def zero_grad(self) -> None:
        """Free the gradients."""
        super().zero_grad()
        self._clip = 1.0

    def _state(self, name: str) -> Iterator[tuple[str, Tensor]]:
        """End of its name and storage of every state tensor of one parameter."""
        yield from self._moments[name].tensors().items()
        yield from super()._state(name)

    def _update_by(self, gradients: Mapping[str, Tensor], lr: float) -> None:
        """Update by these gradients what they are named after, masters or parameters."""
        alike: dict[tuple[bool, float], dict[str, Tensor]] = {}
        for name, gradient in gradients.items():
            key = self._targets[name].ndim >= 2, self.relative_rate(name)
            alike.setdefault(key, {})[name] = gradient
        for (decayed, rate), some in alike.items():
            self._update(some, self._numbers(rate * lr, decayed))

    def _numbers(self, lr: float, decayed: bool) -> Step:
        settings = self._settings
        decay = settings.weight_decay if decayed else 0.0
        beta1, beta2 = settings.beta1, settings.beta2
        return Step(self.num_updates + 1, lr, beta1, beta2, settings.eps, decay, self._clip)

    def _update(self, gradients: Mapping[str, Tensor], step: Step) -> None:
        fused = [
            name for name, g in gradients.items() if is_fused(self._targets[name], g, self._moments[name])
        ]
        update_fused(
            [self._targets[name] for name in fused],
            [gradients[name] for name in fused],
            [self._moments[name] for name in fused],
            step,
        )
        scratch: dict[torch.device, Scratch] = {}
        others = sorted(gradients.keys() - set(fused), key=lambda name: (-gradients[name].numel(), name))
        for name in others:  # the largest first: arrays to work in never grow
            target, noise = self._targets[name], self._noise("update", name)
            arrays = scratch.setdefault(target.device, Scratch(target.device))
            update(target, gradients[name], self._moments[name], step, noise, scratch=arrays)


def moment_format(settings: OptimizerConfig, dtype: torch.dtype) -> MomentFormat:
    """What the averages of a target of this type are kept in."""
    if settings.moments == "auto":
        return "fp32" if dtype == torch.float32 else "bf16"
    return settings.moments

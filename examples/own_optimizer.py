"""Train with an optimizer of your own: Lion (Chen et al., arXiv 2302.06675).

    scrimp train --optimizer.name examples/own_optimizer.py:Lion --optimizer.lr 3e-4 --trust-code

With m the average of gradients::

    W = (1 - lr wd) W - lr sign(b1 m + (1 - b1) g)            m = b2 m + (1 - b2) g

Any torch.optim.Optimizer does. Its constructor gets lr, weight_decay, betas, eps and momentum of the settings, as far
as it has parameters of these names. `elementwise` is only for several ranks, each of which has some rows of a
parameter: every element moves by its own gradients and states alone. `update_rule` is only for --precision snip: what
the next step makes of a gradient.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


class Lion(torch.optim.Optimizer):
    """The sign of an average of gradients."""

    elementwise = True

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 3e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Move every parameter that has a gradient."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["average"] = torch.zeros_like(parameter)
                    state["updates"] = 0
                state["updates"] += 1
                move = self.update_rule(parameter).direction(parameter.grad)
                parameter.mul_(1 - group["lr"] * group["weight_decay"]).add_(move, alpha=-group["lr"])
                state["average"].lerp_(parameter.grad, 1 - group["betas"][1])

    def update_rule(self, parameter: Tensor) -> LionRule:
        """How this parameter moves next."""
        group = next(g for g in self.param_groups if any(p is parameter for p in g["params"]))
        return LionRule(float(group["lr"]), group["betas"][0], self.state[parameter].get("average"))


@dataclass(frozen=True)
class LionRule:
    """One parameter of Lion."""

    lr: float
    beta: float
    average: Tensor | None
    is_linear = False

    def direction(self, gradient: Tensor) -> Tensor:
        """The update without learning rate and decay."""
        if self.average is None:
            return gradient.sign()
        return self.average.to(gradient.dtype).lerp(gradient, 1 - self.beta).sign_()

    def here(self) -> LionRule:
        """The same on each rank: elements move alone."""
        return self

"""How much an error of a gradient moves the next update: what the optimizer makes of it.

Problem  AdamW divides by the history of the gradient, so that the same error moves one weight a lot and another one
         hardly. SGD does not.
Method   With m, v before the step, t the step's number, g the gradient as the optimizer sees it::

             mh = (b1 m + (1 - b1) g) / (1 - b1^t)     vh = (b2 v + (1 - b2) g^2) / (1 - b2^t)
             h(g) = mh / (sqrt(vh) + eps)              update = -lr (h + wd W)

         The sensitivity is the ratio of norms for a small random change, safe where v is tiny::

             s = rms(h(g + d n) - h(g)) / d,     n ~ N(0, 1),  d = step * rms(g)

         and lr s / |W| turns an error of the gradient into a relative change of the weight. For SGD
         with momentum the next update moves by exactly the change of the gradient: s = 1.
         Adam's weight decay is part of its gradient, g + wd W; AdamW's moves no sensitivity.
Limits   The spec's d is the error of the weight's own gradient; here it is a fixed share of rms(g), which
         ranks alike and exists for weights that are not quantized. Dampening and Nesterov's look-ahead scale the
         updates of a group of SGD alike, and are left out. Other optimizers are refused by name.
Source   SNIP (arXiv 2602.01410), eq. (3) of the reconstruction, in its finite-difference form.
Checked  tests/statistics/test_sensitivity.py: against the closed form, and the optimizer's own step.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn

from scrimp.errors import PlanError
from scrimp.statistics.ranks import Piece

STEP = 0.05
"""Size of the change as a share of rms(g)."""


@dataclass(frozen=True)
class UpdateRule:
    """What one parameter's update is made of."""

    kind: str
    """adamw or sgd."""
    lr: float
    exp_avg: Tensor | None = None
    exp_avg_sq: Tensor | None = None
    updates: int = 0
    """Before this step."""
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    decay: Tensor | None = None
    """Added to the gradient: wd W of Adam. None: decay is decoupled, or there is none."""

    def direction(self, gradient: Tensor) -> Tensor:
        """h(g): the update without learning rate and decay."""
        if self.kind == "sgd":
            return gradient
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


class OptimizerView(Protocol):
    """An optimizer as the statistics need it."""

    @property
    def name(self) -> str:
        """Name of the update rule."""
        ...

    def gradients(self) -> dict[str, Tensor]:
        """Parameter name to accumulated gradient, as the optimizer will read it before clipping."""
        ...

    def rule(self, name: str) -> UpdateRule | None:
        """How a parameter is updated; None if it is not trained."""
        ...

    def clip_factor(self, norm: float) -> float:
        """What a gradient of this global norm is multiplied by before the step."""
        ...

    def zero_grad(self) -> None:
        """Forget the gradients."""
        ...


def sensitivity(
    rule: UpdateRule,
    gradient: Tensor,
    generator: torch.Generator,
    spread: Tensor | None = None,
    *,
    piece: Piece | None = None,
    norm: float = 0.0,
) -> float:
    """rms(h(g + d n) - h(g)) / d of one parameter.

    Args:
        gradient: as the optimizer reads it, clipped.
        spread: deviation of n by element, of mean square 1; None: 1 everywhere.
        piece: what of the parameter, gradient and state lies here; the result is then this rank's part, to
            be added in squares. None: all.
        norm: of the whole gradient, where a piece is given.
    """
    if rule.kind == "sgd":
        return 1.0
    g = gradient.float()
    shape = tuple(g.shape) if piece is None else piece.shape
    root = math.sqrt(math.prod(shape))
    size = STEP * (float(torch.linalg.vector_norm(g)) if piece is None else norm) / root
    if size == 0.0:
        return 0.0
    noise = torch.randn(shape, generator=generator, device=g.device).mul_(size)
    if spread is not None:
        noise.mul_(spread)
    if piece is not None:
        noise = piece.cut(noise)
    change = rule.direction(g + noise).sub_(rule.direction(g))
    return float(torch.linalg.vector_norm(change)) / (size * root)


def _rms(gradient: Tensor) -> float:
    """Root mean square of the whole gradient; a collective where its shards lie on several ranks."""
    if not hasattr(gradient, "device_mesh"):
        return float(gradient.float().square().mean().sqrt())
    norm = cast(Any, torch.linalg.vector_norm(gradient.float())).full_tensor()
    return float(norm) / math.sqrt(gradient.numel())


_KINDS: dict[type, str] = {torch.optim.AdamW: "adamw", torch.optim.Adam: "adamw", torch.optim.SGD: "sgd"}
"""By the very class: others of the same name, and those derived from these, step in ways of their own."""


class TorchOptimizer:
    """A view of torch.optim.Adam, AdamW (fused or not) and SGD."""

    def __init__(self, optimizer: Any, model: nn.Module, *, max_norm: float = 0.0) -> None:
        """Refuse optimizers whose update is not known here."""
        kind = _KINDS.get(type(optimizer))
        odd = [
            name
            for name in ("amsgrad", "maximize")
            if kind == "adamw" and any(group.get(name) for group in optimizer.param_groups)
        ]
        if kind is None or odd:
            raise PlanError(
                "the sensitivities of this optimizer are not known",
                got=type(optimizer).__name__ + (f" with {odd[0]}" if odd else ""),
                expected="torch.optim.AdamW, Adam or SGD",
                do='give sensitivity="gradient": updates are then taken as proportional to gradients',
            )
        self._start(kind, optimizer, model, max_norm)

    @classmethod
    def as_gradients(cls, optimizer: Any, model: nn.Module, *, max_norm: float = 0.0) -> TorchOptimizer:
        """A view of any optimizer: each parameter's update is taken as its gradient over the gradient's rms."""
        view = cls.__new__(cls)
        view._start("gradient", optimizer, model, max_norm)
        return view

    def _start(self, kind: str, optimizer: Any, model: nn.Module, max_norm: float) -> None:
        self.name, self._optimizer, self._max_norm = kind, optimizer, max_norm
        self._groups = {id(p): group for group in optimizer.param_groups for p in group["params"]}
        self._parameters: Mapping[str, nn.Parameter] = dict(model.named_parameters())

    def gradients(self) -> dict[str, Tensor]:
        """The gradients of all parameters that have one, by name."""
        return {name: p.grad for name, p in self._parameters.items() if p.grad is not None}

    def rule(self, name: str) -> UpdateRule | None:
        """From the parameter's group and state; a parameter without state has not been updated yet."""
        parameter = self._parameters[name]
        group = self._groups.get(id(parameter))
        if group is None:
            return None
        lr = float(group["lr"])
        if self.name == "gradient":
            rms = 0.0 if parameter.grad is None else _rms(parameter.grad)
            return UpdateRule("sgd", lr / rms if rms else 0.0)
        if self.name == "sgd":
            return UpdateRule("sgd", lr)
        state = self._optimizer.state.get(parameter, {})
        beta1, beta2 = group["betas"]
        pull = 0.0 if group.get("decoupled_weight_decay") else group["weight_decay"]
        return UpdateRule(
            "adamw",
            lr,
            state.get("exp_avg"),
            state.get("exp_avg_sq"),
            int(state.get("step", 0)),
            float(beta1),
            float(beta2),
            float(group["eps"]),
            parameter.detach().float() * pull if pull else None,
        )

    def clip_factor(self, norm: float) -> float:
        """The factor that torch.nn.utils.clip_grad_norm_ would multiply by."""
        return min(1.0, self._max_norm / (norm + 1e-6)) if self._max_norm > 0 else 1.0

    def zero_grad(self) -> None:
        """Forget the gradients of all parameters, trained or not."""
        for parameter in self._parameters.values():
            parameter.grad = None

"""torch's own optimizers, in whatever loop they are: gradients, clipping and update rules for the statistics.

Checked  tests/statistics/test_sensitivity.py
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn

from scrimp.errors import PlanError
from scrimp.optim.update_rules import AdamWRule, GradientRule, MuonRule
from scrimp.statistics import UpdateRule

State = Mapping[str, Any]
"""What an optimizer keeps of one parameter, or the settings of a group."""


def _adamw(parameter: Tensor, group: State, state: State) -> UpdateRule:
    beta1, beta2 = group["betas"]
    pull = 0.0 if group.get("decoupled_weight_decay") else group["weight_decay"]
    return AdamWRule(
        float(group["lr"]),
        state.get("exp_avg"),
        state.get("exp_avg_sq"),
        int(state.get("step", 0)),
        float(beta1),
        float(beta2),
        float(group["eps"]),
        parameter.detach().float() * pull if pull else None,
    )


def _sgd(parameter: Tensor, group: State, state: State) -> UpdateRule:
    return GradientRule(float(group["lr"]))


def _muon(parameter: Tensor, group: State, state: State) -> UpdateRule:
    if hasattr(parameter, "device_mesh"):
        raise PlanError(
            "the update of a matrix by Muon is not known from its shards",
            got=f"a parameter of shape {tuple(parameter.shape)} on several ranks",
            do='give sensitivity="gradient", or measure in one process',
        )
    return MuonRule(
        float(group["lr"]),
        state.get("momentum_buffer"),
        group["momentum"],
        group["nesterov"],
        group["ns_coefficients"],
        group["ns_steps"],
        group["eps"],
        group["adjust_lr_fn"],
    )


RuleMaker = Callable[[Tensor, State, State], UpdateRule]
_RULES: dict[type, tuple[str, RuleMaker]] = {
    torch.optim.AdamW: ("adamw", _adamw),
    torch.optim.Adam: ("adamw", _adamw),
    torch.optim.SGD: ("sgd", _sgd),
    torch.optim.Muon: ("muon", _muon),
}
"""By the very class: others of the same name, and those derived from these, step in ways of their own."""


def rule_of(optimizer: Any) -> tuple[str, RuleMaker] | None:
    """Name and rule of an optimizer's updates; None: not known.

    An optimizer of any class may bring its own as a method ``update_rule(parameter) -> UpdateRule``.
    """
    own = getattr(optimizer, "update_rule", None)
    if own is not None:
        return type(optimizer).__name__, lambda parameter, group, state: own(parameter)
    known = _RULES.get(type(optimizer))
    if known is None or _odd(optimizer):
        return None
    return known


def has_rule(kind: type) -> bool:
    """Whether optimizers of a class have a rule, with their usual options."""
    return kind in _RULES or hasattr(kind, "update_rule")


def _odd(optimizer: Any) -> list[str]:
    """Options that change the rule."""
    names = ("amsgrad", "maximize") if isinstance(optimizer, torch.optim.Adam) else ()
    return [name for name in names if any(group.get(name) for group in optimizer.param_groups)]


class TorchOptimizer:
    """A view of an optimizer that has a rule: Adam, AdamW (fused or not), SGD or Muon of torch, or one with its own."""

    def __init__(self, optimizer: Any, model: nn.Module, *, max_norm: float = 0.0) -> None:
        """Refuse optimizers whose update is not known here."""
        found = rule_of(optimizer)
        if found is None:
            odd = _odd(optimizer) if type(optimizer) in _RULES else []
            raise PlanError(
                "the sensitivities of this optimizer are not known",
                got=type(optimizer).__name__ + (f" with {odd[0]}" if odd else ""),
                expected="torch.optim.AdamW, Adam, SGD or Muon, or one with a method update_rule",
                do='give sensitivity="gradient": updates are then taken as proportional to gradients',
            )
        self._start(*found, optimizer, model, max_norm)

    @classmethod
    def as_gradients(cls, optimizer: Any, model: nn.Module, *, max_norm: float = 0.0) -> TorchOptimizer:
        """A view of any optimizer: each parameter's update is taken as its gradient over the gradient's rms."""
        view = cls.__new__(cls)
        view._start("gradient", _as_gradient, optimizer, model, max_norm)
        return view

    def _start(self, name: str, rule: RuleMaker, optimizer: Any, model: nn.Module, max_norm: float) -> None:
        self.name, self._rule, self._optimizer, self._max_norm = name, rule, optimizer, max_norm
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
        return self._rule(parameter, group, self._optimizer.state.get(parameter, {}))

    def clip_factor(self, norm: float) -> float:
        """The factor that torch.nn.utils.clip_grad_norm_ would multiply by."""
        return min(1.0, self._max_norm / (norm + 1e-6)) if self._max_norm > 0 else 1.0

    def zero_grad(self) -> None:
        """Forget the gradients of all parameters, trained or not."""
        for parameter in self._parameters.values():
            parameter.grad = None


def _as_gradient(parameter: Tensor, group: State, state: State) -> UpdateRule:
    rms = 0.0 if parameter.grad is None else _rms(parameter.grad)
    return GradientRule(float(group["lr"]) / rms if rms else 0.0)


def _rms(gradient: Tensor) -> float:
    """Root mean square of the whole gradient; a collective where its shards lie on several ranks."""
    if not hasattr(gradient, "device_mesh"):
        return float(gradient.float().square().mean().sqrt())
    norm = cast(Any, torch.linalg.vector_norm(gradient.float())).full_tensor()
    return float(norm) / math.sqrt(gradient.numel())

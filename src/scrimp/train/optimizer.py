"""AdamW for plain and mixed-precision parameters, with state that a checkpoint can hold.

Problem  bf16 keeps 8 bits of mantissa: a weight near 1 cannot move by less than 2^-8 = 0.4 %, and
         an Adam update is about the learning rate, 0.1 % or less. It would round to nothing.
Method   `master_weights` keeps an fp32 copy of every bf16 parameter. Each bf16 gradient is
         added to the master's fp32 gradient as soon as autograd has finished it, and freed: sums
         over micro-batches are exact to fp32, and bf16 gradients never exist all at once.
         After the step the parameter is the master rounded to nearest. Without
         master weights the parameters themselves are updated, in whatever format they have.
         The update is torch's fused AdamW (decoupled decay, Loshchilov & Hutter, arXiv
         1711.05101); decay goes to matrices only, not to norms and biases.
State    Moments exist from the start, so that a checkpoint has the same tensors at every step:
         ``<parameter>.exp_avg``, ``.exp_avg_sq`` and ``.master``. The step count is one integer.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from scrimp.config import TrainConfig
from scrimp.profiler.statistics import UpdateRule


class AdamW:
    """torch's fused AdamW over the parameters of a model or their fp32 master copies."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], train: TrainConfig) -> None:
        self._parameters = dict(parameters)
        self._targets: dict[str, Tensor] = dict(parameters)
        self.num_updates = 0
        if train.master_weights:
            self._targets = {name: p.detach().float().clone() for name, p in self._parameters.items()}
            for name, parameter in self._parameters.items():
                parameter.register_post_accumulate_grad_hook(self._collect_into(self._targets[name]))
        self._has_masters = bool(train.master_weights)
        self._train = train
        matrices = [t for t in self._targets.values() if t.ndim >= 2]
        vectors = [t for t in self._targets.values() if t.ndim < 2]
        self._adamw = torch.optim.AdamW(
            [
                {"params": matrices, "weight_decay": train.weight_decay},
                {"params": vectors, "weight_decay": 0.0},
            ],
            betas=(train.beta1, train.beta2),
            eps=train.adam_eps,
            fused=True,
        )
        for target in self._targets.values():
            self._adamw.state[target] = {
                "step": torch.zeros((), dtype=torch.float32, device=target.device),
                "exp_avg": torch.zeros_like(target),
                "exp_avg_sq": torch.zeros_like(target),
            }

    @staticmethod
    def _collect_into(master: Tensor) -> Any:
        def hook(parameter: Tensor) -> None:
            assert parameter.grad is not None
            if master.grad is None:
                master.grad = parameter.grad.float()
            else:
                master.grad += parameter.grad
            parameter.grad = None

        return hook

    def gradient_norm(self) -> float:
        """Global 2-norm of the gradients; waits for the device."""
        norms = torch._foreach_norm(self._gradients(), 2, dtype=torch.float32)
        return float(torch.linalg.vector_norm(torch.stack(norms)))

    def clip(self, norm: float, limit: float) -> None:
        """Scale the gradients so that their norm, `norm` now, is at most `limit` (0: no limit)."""
        if limit > 0 and math.isfinite(norm) and norm > limit:
            torch._foreach_mul_(self._gradients(), limit / norm)

    def step(self, lr: float) -> None:
        """One update at learning rate `lr`; the gradients stay until `zero_grad`."""
        for group in self._adamw.param_groups:
            group["lr"] = lr
        self._adamw.step()
        self.num_updates += 1
        if self._has_masters:
            with torch.no_grad():
                torch._foreach_copy_(list(self._parameters.values()), list(self._targets.values()))

    def zero_grad(self) -> None:
        """Free the gradients."""
        self._adamw.zero_grad(set_to_none=True)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Name and storage of every state tensor; loading a checkpoint writes into them."""
        for name, target in self._targets.items():
            state = self._adamw.state[target]
            yield f"{name}.exp_avg", state["exp_avg"]
            yield f"{name}.exp_avg_sq", state["exp_avg_sq"]
            if self._has_masters:
                yield f"{name}.master", target

    def restore_updates(self, num_updates: int) -> None:
        """Set the count of updates that bias correction uses, after loading `tensors`."""
        self.num_updates = num_updates
        for state in self._adamw.state.values():
            state["step"].fill_(float(num_updates))

    # -- for statistics (`scrimp.profiler.statistics.OptimizerView`) ---------------------------

    name = "adamw"

    def gradients(self) -> dict[str, Tensor]:
        """Parameter name to accumulated gradient, of those that have one."""
        return {name: target.grad for name, target in self._targets.items() if target.grad is not None}

    def rule(self, name: str) -> UpdateRule:
        """How a parameter is updated: every one at the same learning rate."""
        state, train = self._adamw.state[self._targets[name]], self._train
        moments = state["exp_avg"], state["exp_avg_sq"]
        return UpdateRule("adamw", 1.0, *moments, self.num_updates, train.beta1, train.beta2, train.adam_eps)

    def clip_factor(self, norm: float) -> float:
        """What `clip` multiplies gradients of this norm by."""
        limit = self._train.clip
        return limit / norm if limit > 0 and norm > limit else 1.0

    def _gradients(self) -> list[Tensor]:
        return [target.grad for target in self._targets.values() if target.grad is not None]

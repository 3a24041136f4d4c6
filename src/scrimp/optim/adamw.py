"""AdamW over the parameters of a model, or over fp32 master copies of them.

Problem  bf16 keeps 8 bits of mantissa: a weight near 1 cannot move by less than 2^-8 = 0.4 %, and
         an Adam update is about the learning rate, 0.1 % or less. It would round to nothing.
Method   `master_weights` keeps an fp32 copy of every bf16 parameter. Each bf16 gradient is
         added to the master's fp32 gradient as soon as autograd has finished it, and freed: sums
         over micro-batches are exact to fp32, and bf16 gradients never exist all at once.
         After the step the parameter is the master rounded to nearest.
         Without master weights bf16 parameters themselves are updated and rounded stochastically, and so are
         the bf16 sums of their gradients from the second micro-batch on: both move by the right amount on average.
         `moments` says how the averages are stored, see `scrimp.optim.moments`. Where weights and
         moments are fp32, the update is torch's fused AdamW (decoupled decay, Loshchilov & Hutter, arXiv
         1711.05101). Decay goes to matrices only, not to norms and biases.
State    Moments exist from the start, so that a checkpoint has the same tensors at every step:
         ``<parameter>.exp_avg``, ``.exp_avg_sq``, ``.master``, and of 8-bit moments ``.exp_avg_scale`` and
         ``.exp_avg_sq_scale``. The count of updates is one integer, and the key of all rounding noise with the
         run's seed and the parameter's name: a resumed run rounds as it would have.
Checked  tests/optim/test_adamw.py
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from scrimp.config import OptimizerConfig
from scrimp.errors import ConfigError
from scrimp.formats import Noise
from scrimp.optim.moments import MomentFormat, Moments, as_matrix, dense
from scrimp.optim.rounding import Scratch, to_bf16
from scrimp.optim.update import Step, Workspace, is_fused, update, update_fused
from scrimp.runtime.memory.gradients import GradientSlot, OwnGradient
from scrimp.statistics import UpdateRule


class RoundedSum:
    """Where the sum of one parameter's gradients is found (a `GradientSlot`)."""

    def __init__(self, like: Tensor) -> None:
        self.like = like
        self.sum: Tensor | None = None
        self.count = 0
        """Micro-batches in it: each has noise of its own."""


class AdamW:
    """AdamW over the parameters of a model or their fp32 master copies.

    Args:
        parameters: float32 or bfloat16, by name.
        settings: decay rates, clipping, `master_weights` and `moments`; auto as `scrimp.config.resolve` decides it.
        seed: of the rounding noise.

    Raises:
        ConfigError: a parameter of another type.
    """

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], settings: OptimizerConfig, *, seed: int = 0
    ) -> None:
        _refuse_types(parameters)
        self._settings = settings
        self._seed = Noise(seed)
        self._parameters = dict(parameters)
        self._targets: dict[str, Tensor] = {}
        """What is updated: parameters, or their masters."""
        self._moments: dict[str, Moments] = {}
        self._rounded_sums: dict[str, RoundedSum] = {}
        """Sums of the gradients of bf16 parameters without masters."""
        self.num_updates = 0
        for name, parameter in self._parameters.items():
            self._add(name, parameter)

    def _add(self, name: str, parameter: nn.Parameter) -> None:
        """Make the states of a parameter, and collect its gradients where autograd is not to sum them."""
        target: Tensor = parameter
        if self._settings.master_weights:
            target = parameter.detach().float().clone()
        self._targets[name] = target
        self._moments[name] = Moments.zeros(moment_format(self._settings, target.dtype), target.detach())
        self._collect(name, parameter, OwnGradient(target))

    def _collect(self, name: str, parameter: nn.Parameter, slot: GradientSlot) -> None:
        """Sum the gradients of a parameter in a slot, where autograd is not to sum them."""
        if self._settings.master_weights:
            parameter.register_post_accumulate_grad_hook(_collect_into(slot))
        elif parameter.dtype == torch.bfloat16:
            self._rounded_sums[name] = RoundedSum(parameter)
            parameter.register_post_accumulate_grad_hook(self._collect_rounded(name))

    def will_step(self, lr: float) -> None:
        """One forward and backward pass follows, then a step at learning rate `lr` unless it is skipped: a hint,
        without use here."""

    def gradient_norm(self) -> float:
        """Global 2-norm of the gradients; waits for the device."""
        norms = torch._foreach_norm(list(self.gradients().values()), 2, dtype=torch.float32)
        return float(torch.linalg.vector_norm(torch.stack(norms)))

    def clip(self, norm: float, limit: float) -> None:
        """Scale the gradients so that their norm, `norm` now, is at most `limit` (0: no limit)."""
        gradients = list(self.gradients().values())  # none on a rank without rows
        if gradients and limit > 0 and math.isfinite(norm) and norm > limit:
            torch._foreach_mul_(gradients, limit / norm)

    def step(self, lr: float) -> None:
        """One update at learning rate `lr`; the gradients stay until `zero_grad`."""
        self._update_names(list(self._targets), lr)
        self.num_updates += 1

    def close(self) -> None:
        """Leave nothing running; the state stays readable."""

    def zero_grad(self) -> None:
        """Free the gradients."""
        for rounded in self._rounded_sums.values():
            rounded.sum, rounded.count = None, 0
        for tensor in (*self._targets.values(), *self._parameters.values()):
            tensor.grad = None

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Name and storage of every state tensor; loading a checkpoint writes into them."""
        for name in self._targets:
            for suffix, tensor in self._state(name):
                yield f"{name}.{suffix}", tensor

    def restore_updates(self, num_updates: int) -> None:
        """Set the count of updates that bias correction and noise use, after loading `tensors`."""
        self.num_updates = num_updates

    # -- for statistics (`scrimp.statistics.OptimizerView`) ---------------------------

    name = "adamw"

    def gradients(self) -> dict[str, Tensor]:
        """Parameter name to accumulated gradient, of those that have one."""
        found = {
            name: self._rounded_sums[name].sum if name in self._rounded_sums else target.grad
            for name, target in self._targets.items()
        }
        return {name: gradient for name, gradient in found.items() if gradient is not None}

    def rule(self, name: str) -> UpdateRule:
        """How a parameter is updated: every one at the same learning rate. 8-bit moments are decoded into copies."""
        moments, like, settings = self._moments[name], self._targets[name], self._settings
        averages = dense(moments.mean, like), dense(moments.square, like)
        return UpdateRule(
            "adamw", 1.0, *averages, self.num_updates, settings.beta1, settings.beta2, settings.eps
        )

    def slot(self, name: str) -> GradientSlot:
        """Where the sum of a parameter's gradients is found while it is on the device."""
        return self._rounded_sums.get(name) or OwnGradient(self._targets[name])

    def clip_factor(self, norm: float) -> float:
        """What `clip` multiplies gradients of this norm by."""
        limit = self._settings.clip
        return limit / norm if limit > 0 and norm > limit else 1.0

    # -- parts ---------------------------------------------------------------------------------

    def _state(self, name: str) -> Iterator[tuple[str, Tensor]]:
        """End of its name and storage of every state tensor of one parameter."""
        yield from self._moments[name].tensors().items()
        if self._settings.master_weights:
            yield "master", self._targets[name]

    def _update_names(self, names: Sequence[str], lr: float) -> None:
        """Update some parameters, those that have a gradient, by the step after `num_updates`."""
        gradients = self.gradients()
        self._update_by({name: gradients[name] for name in names if name in gradients}, lr)
        if self._settings.master_weights and names:
            with torch.no_grad():
                torch._foreach_copy_([self._parameters[n] for n in names], [self._targets[n] for n in names])

    def _update_by(self, gradients: Mapping[str, Tensor], lr: float) -> None:
        """Update by these gradients what they are named after, masters or parameters."""
        for decayed in (True, False):
            some = {n: g for n, g in gradients.items() if (self._targets[n].ndim >= 2) == decayed}
            self._update(some, self._numbers(lr, decayed))

    def _numbers(self, lr: float, decayed: bool) -> Step:
        settings = self._settings
        decay = settings.weight_decay if decayed else 0.0
        return Step(self.num_updates + 1, lr, settings.beta1, settings.beta2, settings.eps, decay)

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

    def _noise(self, use: str, name: str, *numbers: int) -> Noise:
        """A stream for each use, parameter and update, whatever else there is and in whatever order."""
        digest = hashlib.sha256(f"{use} {name}".encode()).digest()
        return self._seed.derive(int.from_bytes(digest[:8], "little"), self.num_updates, *numbers)

    def _collect_rounded(self, name: str) -> Callable[[Tensor], None]:
        """Sum bf16 gradients of micro-batches with stochastic rounding; autograd would round to nearest."""

        def hook(parameter: Tensor) -> None:
            gradient, parameter.grad = parameter.grad, None
            assert gradient is not None
            rounded = self._rounded_sums[name]
            rounded.count += 1
            if rounded.sum is None:
                rounded.sum = gradient
            else:
                _add_rounded(rounded.sum, gradient, self._noise("sum", name, rounded.count))

        return hook


def _collect_into(slot: GradientSlot) -> Callable[[Tensor], None]:
    def hook(parameter: Tensor) -> None:
        assert parameter.grad is not None
        if slot.sum is None:
            slot.sum = parameter.grad.float()
        else:
            slot.sum += parameter.grad
        parameter.grad = None

    return hook


@torch.no_grad()
def _add_rounded(total: Tensor, gradient: Tensor, noise: Noise) -> None:
    work = Workspace(as_matrix(total), noise)
    added = gradient.reshape(work.matrix.shape)
    for place in work.places:
        piece = work.matrix[place]
        exact = work.floats("sum", piece).add_(added[place])
        piece.copy_(to_bf16(exact, next(work.noise(place)), work.scratch))


def moment_format(settings: OptimizerConfig, dtype: torch.dtype) -> MomentFormat:
    """What the averages of a target of this type are kept in."""
    if settings.moments == "auto":
        return "fp32" if dtype == torch.float32 else "bf16"
    return settings.moments


def _refuse_types(parameters: Mapping[str, nn.Parameter]) -> None:
    for name, parameter in parameters.items():
        if parameter.dtype not in (torch.float32, torch.bfloat16):
            raise ConfigError(
                f"the optimizer cannot train {name}",
                got=str(parameter.dtype).removeprefix("torch."),
                expected="float32 or bfloat16",
                do="convert the parameter, or leave it out",
            )

"""Schedule-free AdamW: an average of the weights takes the place of a learning rate that falls.

Problem  A rate that falls to the end of a run must know where that is, and what the model is worth before cannot be
         seen: only the end of the schedule shows it.
Method   Three points. z moves as AdamW without an average of gradients does, x is the average of all z, and gradients
         are taken between them, at y. With g the gradient of step t at y, lr the rate of the step, which is constant
         after its warm-up, b1 and b2 the decay rates::

             v = b2 v + (1 - b2) g^2
             d = g / (sqrt(v) / sqrt(1 - b2^t) + eps) + wd y
             z = z - lr d
             x = (1 - c) x + c z                      c = lr^2 / (sum of the lr^2 of all steps until now)
             y = (1 - b1) z + b1 x

         x is what is evaluated, and what whoever reads the weights of a checkpoint gets. Parameters, or their masters,
         are y. Since y and z say what x is, nobody keeps it::

             x = y + (1 - 1 / b1) (z - y)
             y <- y + c (z - y) - (1 - b1 (1 - c)) lr d       the same step, with z before it

         Decay goes to matrices only, as AdamW's. Every operation is one correctly rounded IEEE operation (no fused
         multiply-add), so that numbers do not depend on where a vector register, or a rank's share, ends.
State    ``<parameter>.z`` and ``.exp_avg_sq``, both fp32 and there from the start; ``lr_squares``, the sum.
Bytes    As NAdamW's. While x is evaluated the parameters are copied, when there are no gradients, which take as much.
Limits   x is as exact as y and z are rounded, by 1 / b1. States stay on the device, masters are needed beside bf16
         parameters. What else does not go with it: `scrimp.config.schedule_free`.
Source   Defazio et al. 2024, arXiv 2405.15682, algorithm 1. There lr^2 has the factor 1 - b2^t, and so c; here v is
         corrected by it alone, as in the authors' package.
Checked  tests/optim/test_schedule_free.py: float64 by the formulas with x, the rule, the account against torch's
         allocator; tests/training/test_schedule_free_runs.py
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn

from scrimp.config import Architecture, OptimizerConfig
from scrimp.optim.nadamw import NAdamWMemory
from scrimp.optim.targets import Targets
from scrimp.optim.update import Step
from scrimp.optim.update_rules import AdamWRule
from scrimp.parts import TensorPart, part_of
from scrimp.runtime import Executable
from scrimp.statistics import UpdateRule


def build(executable: Executable, settings: OptimizerConfig, *, seed: int) -> ScheduleFree:
    """Schedule-free AdamW of a run: all of it on the device."""
    return ScheduleFree(executable.model.trained(), settings, seed=seed)


def memory(
    architecture: Architecture, settings: OptimizerConfig, parameters: str, *, ranks: int = 1
) -> NAdamWMemory:
    """What it takes for parameters in this format, fp32 or bf16: two fp32 states, two arrays in an update."""
    return NAdamWMemory(parameters, bool(settings.master_weights))


class ScheduleFree(Targets):
    """Schedule-free AdamW over fp32 parameters or masters.

    Args:
        parameters: with their first values; float32, or bfloat16 with `master_weights`, by name.
        settings: decay rates, clipping and `master_weights`.
    """

    name = "schedule-free"

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], settings: OptimizerConfig, *, seed: int = 0
    ) -> None:
        self._z: dict[str, Tensor] = {}
        self._squares: dict[str, Tensor] = {}
        self._sum = 0.0
        """The squares of all rates until now."""
        self._stored_sum = torch.zeros((), dtype=torch.float64)
        """The same as checkpoints have it, while one is written or loaded."""
        super().__init__(parameters, settings, seed=seed)

    def _add(self, name: str, parameter: nn.Parameter) -> None:
        """Make the states of a parameter: all three points are one before the first step."""
        super()._add(name, parameter)
        target = self._targets[name].detach()
        self._z[name], self._squares[name] = target.clone(), torch.zeros_like(target)

    def rule(self, name: str) -> UpdateRule:
        """How z moves; x and y move by the same times a factor that all parameters share."""
        settings, rate = self._settings, self.relative_rate(name)
        return AdamWRule(rate, None, self._squares[name], self.num_updates, 0.0, settings.beta2, settings.eps)

    def step(self, lr: float) -> None:
        """One update at learning rate `lr`, which weighs this step in the average too."""
        self._sum += lr**2
        super().step(lr)

    @torch.no_grad()
    def _update_by(self, gradients: Mapping[str, Tensor], lr: float) -> None:
        settings, share = self._settings, lr**2 / self._sum
        for name, gradient in gradients.items():
            target = self._targets[name]
            decay = settings.weight_decay if target.ndim >= 2 else 0.0
            number, beta1, beta2 = self.num_updates + 1, settings.beta1, settings.beta2
            rate = self.relative_rate(name) * lr
            step = Step(number, rate, beta1, beta2, settings.eps, decay)
            move(target, self._z[name], gradient, self._squares[name], step, share)

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[None]:
        """Parameters are x, and afterwards again y, bit for bit."""
        self._take_over()
        kept = {name: parameter.detach().clone() for name, parameter in self._parameters.items()}
        try:
            with torch.no_grad():
                for name, parameter in self._parameters.items():
                    parameter.copy_(evaluated(self._targets[name], self._z[name], self._settings.beta1))
            yield
        finally:
            with torch.no_grad():
                for name, parameter in self._parameters.items():
                    parameter.copy_(kept[name])

    def parts(self) -> Iterator[tuple[str, TensorPart]]:
        """The states of all parameters, and the sum of the rates' squares, which all ranks know."""
        yield from super().parts()
        self._stored_sum = torch.tensor(self._sum, dtype=torch.float64)
        is_first = not dist.is_initialized() or dist.get_rank() == 0
        yield "lr_squares", part_of(self._stored_sum, writes_whole=is_first)

    def restore_updates(self, num_updates: int) -> None:
        """Set the count of updates, and the sum that was loaded."""
        super().restore_updates(num_updates)
        self._sum = float(self._stored_sum)

    def _state(self, name: str) -> Iterator[tuple[str, Tensor]]:
        yield "z", self._z[name]
        yield "exp_avg_sq", self._squares[name]
        yield from super()._state(name)


def move(y: Tensor, z: Tensor, gradient: Tensor, square: Tensor, step: Step, share: float) -> None:
    """One step of one tensor, whose average of squares takes the gradient in.

    Args:
        share: c, of z in x.
    """
    other = torch.mul(gradient, gradient).mul_(1 - step.beta2)
    square.mul_(step.beta2).add_(other)
    root = square.sqrt().div_(math.sqrt(1 - step.beta2**step.number)).add_(step.eps)
    direction = torch.div(gradient, root, out=root)
    direction.add_(torch.mul(y, step.weight_decay, out=other))
    y.add_(torch.sub(z, y, out=other).mul_(share))
    z.sub_(direction.mul_(step.lr))
    y.sub_(direction.mul_(1 - step.beta1 * (1 - share)))


def evaluated(y: Tensor, z: Tensor, beta1: float) -> Tensor:
    """x in float32, of a parameter or its master, and its state z."""
    return torch.sub(z, y.detach()).mul_(1 - 1 / beta1).add_(y.detach())

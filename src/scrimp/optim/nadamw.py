"""NAdamW: AdamW with Nesterov momentum, the baseline of AlgoPerf.

Method   With g the gradient of step t::

             m = b1 m + (1 - b1) g             v = b2 v + (1 - b2) g^2
             u = b1 m + (1 - b1) g             the average as it will be if the next gradient is this one again
             w = (1 - lr wd) w - lr / (1 - b1^t) * u / (sqrt(v) / sqrt(1 - b2^t) + eps)

         Decay goes to matrices only, as AdamW's.
State    As AdamW's: ``<parameter>.exp_avg``, ``.exp_avg_sq``, both fp32 and there from the start.
Limits   States stay on the device, and masters are needed beside bf16 parameters. torch.optim.NAdam corrects u for its
         start in another way (by b1^(t+1)), and has a schedule of b1: it is another optimizer in the first steps.
Source   Dozat 2016; in this form Choi et al., arXiv 1910.05446, table 1, as AlgoPerf's NAdamW (arXiv 2306.07179).
Checked  tests/optim/test_nadamw.py: float64 by the formula, the rule, the account against torch's allocator
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

import torch
from torch import Tensor

from scrimp.config import Architecture, OptimizerConfig
from scrimp.optim.adamw import AdamW
from scrimp.optim.adamw_run import AdamWMemory
from scrimp.optim.update import Step, clip
from scrimp.optim.update_rules import AdamWRule
from scrimp.profiler.memory_trace import Tracing
from scrimp.profiler.memory_trace.stand_ins import DeviceFunctions
from scrimp.runtime import Executable
from scrimp.statistics import UpdateRule


def build(executable: Executable, settings: OptimizerConfig, *, seed: int) -> NAdamW:
    """NAdamW of a run: all of it on the device."""
    return NAdamW(executable.model.trained(), settings, seed=seed)


def memory(
    architecture: Architecture, settings: OptimizerConfig, parameters: str, *, ranks: int = 1
) -> NAdamWMemory:
    """What it takes for parameters in this format, fp32 or bf16."""
    return NAdamWMemory(parameters, bool(settings.master_weights))


class NAdamW(AdamW):
    """AdamW that looks ahead by one gradient, over fp32 parameters or masters."""

    name = "nadamw"

    def rule(self, name: str) -> UpdateRule:
        """How a parameter is updated."""
        found = super().rule(name)
        assert isinstance(found, AdamWRule)
        return dataclasses.replace(found, nesterov=True)

    @torch.no_grad()
    def _update(self, gradients: Mapping[str, Tensor], step: Step) -> None:
        clip(list(gradients.values()), step.clip)
        for name, gradient in gradients.items():
            averages = self._moments[name].tensors()
            move(self._targets[name], gradient, averages["exp_avg"], averages["exp_avg_sq"], step)


def move(target: Tensor, gradient: Tensor, mean: Tensor, square: Tensor, step: Step) -> None:
    """One step of one tensor, whose averages take the gradient in."""
    mean.lerp_(gradient, 1 - step.beta1)
    square.mul_(step.beta2).addcmul_(gradient, gradient, value=1 - step.beta2)
    ahead = mean.lerp(gradient, 1 - step.beta1)
    root = square.sqrt().div_(math.sqrt(1 - step.beta2**step.number)).add_(step.eps)
    target.mul_(1 - step.lr * step.weight_decay)
    target.addcdiv_(ahead, root, value=-step.lr / (1 - step.beta1**step.number))


class NAdamWMemory(AdamWMemory):
    """Bytes of NAdamW: those of AdamW with fp32 averages, and two arrays of the largest parameter in an update."""

    def update_peak(self, named: Mapping[str, Tensor], device: DeviceFunctions, tracing: Tracing) -> int:
        """Peak of the update of the largest parameter."""
        return max((2 * 4 * parameter.numel() for parameter in named.values()), default=0)

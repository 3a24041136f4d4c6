"""AdamW of a run: resident or with states on the host as the plan says, and what it takes.

Bytes    Per parameter, beside weights and gradient sums: both averages (`scrimp.optim.moments`), 4 for a master.
         torch's fused kernel, which updates what is all fp32, takes nothing beside that; for everything else see
         `scrimp.optim.scratch`.
Checked  tests/optim/test_adamw.py, tests/profiler/memory_trace: against torch's allocator
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from scrimp.config import Architecture, OptimizerConfig
from scrimp.formats.moment_codes import BLOCK
from scrimp.gemm.problem import DTYPES
from scrimp.models import place
from scrimp.optim.adamw import AdamW
from scrimp.optim.scratch import sum_scratch, update_scratch
from scrimp.optim.streaming import Homes, StreamedAdamW
from scrimp.optim.update import PIECE_ELEMENTS
from scrimp.profiler.memory_trace import GradientSums, Tracing
from scrimp.profiler.memory_trace.stand_ins import DeviceFunctions
from scrimp.runtime import Executable


def build(executable: Executable, settings: OptimizerConfig, *, seed: int) -> AdamW:
    """With states on the host where the plan has them there."""
    parameters, host = executable.model.trained(), executable.host
    if host is None:
        return AdamW(parameters, settings, seed=seed)
    homes = Homes(
        host.arena,
        host.link,
        lambda name: place(name)[0],
        host.weights,
        host.gradients_on_host,
        host.optimizer_on_host,
        host.optimizer_on_cpu,
        host.masters_on_host,
    )
    if not homes.away:
        return AdamW(parameters, settings, seed=seed)
    optimizer = StreamedAdamW(parameters, settings, homes, seed=seed)
    host.blocks.gradients = optimizer.host_gradients
    return optimizer


def memory(
    architecture: Architecture, settings: OptimizerConfig, parameters: str, *, ranks: int = 1
) -> AdamWMemory:
    """What it takes for parameters in this format, fp32 or bf16."""
    return AdamWMemory(parameters, bool(settings.master_weights), settings.moments)


@dataclass(frozen=True)
class AdamWMemory:
    """Bytes of AdamW (a `scrimp.profiler.memory_trace.OptimizerMemory`)."""

    parameters: str
    """Format of the trained parameters, fp32 or bf16."""
    master_weights: bool = False
    moments: str = "auto"
    """fp32, bf16, 8bit; auto: the format of what is updated."""

    @property
    def target_bytes(self) -> int:
        """Bytes of an element of what is updated."""
        return 4 if self.master_weights else DTYPES[self.parameters].itemsize

    def sums(self, device: DeviceFunctions) -> GradientSums:
        """Masters sum in fp32, bf16 parameters without masters with stochastic rounding; else autograd sums."""
        if self.master_weights:
            return GradientSums(torch.float32)
        if self.parameters == "bf16":
            piece = PIECE_ELEMENTS[device]
            return GradientSums(torch.bfloat16, lambda parameter: sum_scratch(parameter, piece))
        return GradientSums(None)

    def state_bytes(self, named: Mapping[str, Tensor]) -> int:
        """Averages and masters of some parameters."""
        masters = sum(4 * parameter.numel() for parameter in named.values()) if self.master_weights else 0
        return masters + sum(map(self._moments, named.values()))

    def update_peak(self, named: Mapping[str, Tensor], device: DeviceFunctions, tracing: Tracing) -> int:
        """Bytes that an update takes unless it is fused; fused AdamW and copies from master weights take nothing."""
        is_fused = self.target_bytes == 4 and self.moments in ("auto", "fp32")
        if is_fused or not named:
            return 0
        return update_scratch(named.values(), PIECE_ELEMENTS[device], eight_bit=self.moments == "8bit")

    def _moments(self, parameter: Tensor) -> int:
        """Both averages of a parameter."""
        if self.moments != "8bit":
            size = self.target_bytes if self.moments == "auto" else DTYPES[self.moments].itemsize
            return 2 * parameter.numel() * size
        if parameter.dim() < 2:
            return 2 * 4 * parameter.numel()
        rows, columns = parameter.shape
        return 2 * rows * (columns + 2 * math.ceil(columns / BLOCK))

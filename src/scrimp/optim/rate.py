"""How many parameters per second the CPU updates, by the update that a run would carry out.

torch's fused AdamW does a parameter in fp32 in about a nanosecond, stochastic rounding of bf16 weights or 8-bit moments
takes ten times that: a plan that took one rate for the other would be wrong by as much.

Checked  tests/optim/test_rate.py
"""

from __future__ import annotations

from functools import cache

import torch

from scrimp.config import OptimizerConfig
from scrimp.formats import Noise
from scrimp.optim.adamw import moment_format
from scrimp.optim.moments import MomentFormat, Moments
from scrimp.optim.stochastic_rounding import Scratch
from scrimp.optim.update import Step, update
from scrimp.timing import best

ROWS, COLUMNS = 1024, 4096
"""Size of the matrix that is updated: 16 MB in fp32, of which no cache holds four."""


def cpu_update_rate(parameters: str, settings: OptimizerConfig) -> float:
    """Parameters per second, all threads; measured once per process and format, in a few tenths of a second.

    Args:
        parameters: their format, fp32 or bf16.
        settings: resolved.
    """
    is_bf16 = parameters == "bf16"
    target = torch.float32 if settings.master_weights or not is_bf16 else torch.bfloat16
    return _rate(target, bool(settings.master_weights), moment_format(settings, target))


@cache
def _rate(dtype: torch.dtype, has_master: bool, moments: MomentFormat) -> float:
    target = torch.zeros(ROWS, COLUMNS, dtype=dtype)
    gradient = torch.zeros_like(target)
    weight = torch.zeros_like(target, dtype=torch.bfloat16) if has_master else None
    states = Moments.zeros(moments, target)
    scratch, step = Scratch(target.device), Step(1, 1e-3, 0.9, 0.95, 1e-8, 0.1)

    def once() -> None:
        update(target, gradient, states, step, Noise(0), scratch=scratch)
        if weight is not None:
            weight.copy_(target)

    return target.numel() / best(once, target.device)

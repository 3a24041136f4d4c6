"""The plan and its cost models: pure functions of shapes, no devices and no torch.distributed.

`flops` counts work and defines MFU and the speed of light, `memory` counts bytes, `schema` is
the file, `build` makes the plan of a run from its configuration.
"""

from scrimp.planner.build import (
    account_of,
    build_plan,
    gemm_formats,
    model_fingerprint,
    refuse_misfit,
    with_precisions,
)
from scrimp.planner.flops import (
    Flops,
    Peaks,
    count_flops,
    ideal_seconds_per_token,
    linear_layers,
    linear_shapes,
    mfu,
    peak_of_recipe,
)
from scrimp.planner.memory import MemoryAccount, account_memory
from scrimp.planner.schema import Figures, Fingerprint, GemmChoice, Plan

__all__ = [
    "Figures",
    "Fingerprint",
    "Flops",
    "GemmChoice",
    "MemoryAccount",
    "Peaks",
    "Plan",
    "account_memory",
    "account_of",
    "build_plan",
    "count_flops",
    "gemm_formats",
    "ideal_seconds_per_token",
    "linear_layers",
    "linear_shapes",
    "mfu",
    "model_fingerprint",
    "peak_of_recipe",
    "refuse_misfit",
    "with_precisions",
]

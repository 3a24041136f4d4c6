"""The plan and its cost models: pure functions of shapes, no devices and no torch.distributed.

`flops` counts work and defines MFU and the speed of light, `bytes` adds up the memory of a step and finds what fits,
`schema` is the file, `build` makes the plan of a run from its configuration.
"""

from scrimp.planner.build_plan import (
    build_plan,
    model_fingerprint,
    refuse_misfit,
    with_precisions,
)
from scrimp.planner.flops import (
    Flops,
    Peaks,
    count_flops,
    ideal_seconds_per_token,
    mfu,
    peak_of_recipe,
)
from scrimp.planner.plan import BackendChoice, Figures, Fingerprint, Plan

__all__ = [
    "BackendChoice",
    "Figures",
    "Fingerprint",
    "Flops",
    "Peaks",
    "Plan",
    "build_plan",
    "count_flops",
    "ideal_seconds_per_token",
    "mfu",
    "model_fingerprint",
    "peak_of_recipe",
    "refuse_misfit",
    "with_precisions",
]

"""How long a step of Scrimp takes as its quantization runs today.

Problem  Scrimp's own step (`softwares/scrimp.toml`) is predicted with operands quantized by one fused kernel for each
         pass. Some passes have no such kernel yet: where Triton's back end takes MX and NVFP4, the codes that are kept
         for wgrad become values operator by operator, 28 to 155 bytes for each number, so that a plan may be
         faster in the prediction than when it is trained.
Method   The same setting with the counts of `softwares/scrimp-today.toml`.
Limits   A plan is searched with fused kernels; today's best may be another one.
Checked  tests/planner/layout/test_today.py
"""

from __future__ import annotations

import dataclasses

from scrimp.planner.layout.predict import predict
from scrimp.planner.layout.setting import Setting
from scrimp.planner.layout.software import in_states, software
from scrimp.precision import HIGH_PRECISION

_EQUAL = 1.001
"""Seconds that differ by less are the same on the terminal."""


def seconds_today(setting: Setting, predicted: float) -> float | None:
    """Seconds of the step with quantization as it runs today; None: no longer, or another program's step.

    Args:
        predicted: seconds of the step with fused kernels.
    """
    formats = {setting.precision, *(recipe for one in setting.blocks for _, recipe in one.formats)}
    if setting.software.name != "scrimp" or formats <= set(HIGH_PRECISION):
        return None
    program = in_states(software("scrimp-today"), setting.software.states)
    program = dataclasses.replace(program, attention_kernel=setting.software.attention_kernel)
    today = predict(dataclasses.replace(setting, software=program)).step_seconds
    return today if today > _EQUAL * predicted else None

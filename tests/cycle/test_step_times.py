"""What a step's time is made of."""

from __future__ import annotations

import pytest

from scrimp.cycle.step_times import StepTimes
from scrimp.precision import GEMMS
from scrimp.profiler.gemm_times import GemmTimes

SHAPES = {"a": (64, 32), "b": (32, 64)}
SECONDS = {"bf16": 4e-3, "fp8": 2e-3, "nvfp4": 1e-3}
RECIPES = {"a": ("bf16", "fp8", "nvfp4"), "b": ("fp8", "fp8", "fp8")}


def times() -> StepTimes:
    """Every GEMM takes what its format takes; two micro-batches a step."""
    rows = dict.fromkeys(GEMMS, SECONDS)
    return StepTimes(GemmTimes("device", 128, dict.fromkeys(SHAPES.values(), rows)), micro_batches=2)


def test_planned_gemms_add_up_over_layers_and_micro_batches() -> None:
    assert times().of_gemms(SHAPES, RECIPES) == pytest.approx(2 * (4 + 2 + 1 + 2 + 2 + 2) / 1000)


def test_what_is_left_of_a_step_is_other_work_and_never_negative() -> None:
    assert times().with_steps([0.02], SHAPES, RECIPES).other == 0.0
    assert times().with_steps([0.126, 0.026, 0.056], SHAPES, RECIPES).other == pytest.approx(0.03)
    assert times().with_steps([], SHAPES, RECIPES).other == 0.0

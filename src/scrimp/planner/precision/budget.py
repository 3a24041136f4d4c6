"""What a plan of precision must keep, in the terms of its user.

::

    fp4_flops      at least this share of the planned layers' FLOPs in 4 bits, in every pipeline stage
    step_seconds   at most this time of a step: of the planned GEMMs, by a table of measured times, and of what a
                   step takes beside them where that is known; in every stage
    speedup        a step this many times faster than with its planned GEMMs in bf16, by the same times
    saved_bytes    at most this share of the bytes that the planned layers' inputs take in bf16 is kept of them for the
                   backward pass, in every stage
    divergence     at most this share of the predicted harm that everything in the lowest format would add: the
                   fastest plan under it, or without times the one with most FLOPs in 4 bits

Checked  tests/planner/precision/test_budget.py, test_choose.py
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from scrimp.errors import PlanError

_RANGES = {
    "fp4_flops": (0.0, 1.0, "a share from 0 to 1"),
    "step_seconds": (0.0, math.inf, "a number that is not negative"),
    "speedup": (1.0, math.inf, "a factor of 1 or more"),
    "saved_bytes": (math.ulp(0.0), 1.0, "a share above 0, to 1"),
    "divergence": (0.0, 1.0, "a share from 0 to 1, or infinity for the fastest plan of all"),
}


@dataclass(frozen=True)
class Budget:
    """One of the five; see the module."""

    fp4_flops: float | None = None
    step_seconds: float | None = None
    speedup: float | None = None
    divergence: float | None = None
    saved_bytes: float | None = None

    def __post_init__(self) -> None:
        """Refuse none or several, and values out of range."""
        given = self.given
        if len(given) != 1:
            raise PlanError(
                "a plan of precision needs one budget",
                got=", ".join(f"{name} {value}" for name, value in given.items()) or "none",
                expected="one of " + ", ".join(_RANGES),
            )
        name, value = next(iter(given.items()))
        least, most, expected = _RANGES[name]
        is_no_limit = name == "divergence" and value == math.inf
        if not (least <= value <= most or is_no_limit):
            raise PlanError(f"budget {name} is out of range", got=value, expected=expected)

    @property
    def given(self) -> dict[str, float]:
        """The entry that is set, by its name."""
        return {name: value for name, value in vars(self).items() if value is not None}

    @property
    def is_of_time(self) -> bool:
        """Whether only measured times can tell if a plan keeps it."""
        return self.step_seconds is not None or self.speedup is not None

    def seconds_left(self, other: float, in_bf16: float) -> float:
        """What planned GEMMs may take under a budget of time; never negative.

        Args:
            other: seconds of a step beside them.
            in_bf16: their seconds in bf16; counts for a speed-up.
        """
        if self.step_seconds is not None:
            return max(0.0, self.step_seconds - other)
        assert self.speedup is not None
        return max(0.0, (other + in_bf16) / self.speedup - other)

"""What a step's time is made of, for budgets in seconds and in speed-up, and which formats a plan may then give::

    seconds of a step  = other + GEMMs in the current formats         other: measured before the first plan

What a budget leaves of it to the planned GEMMs: `Budget.seconds_left`.

Checked  tests/cycle/test_step_times.py
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from scrimp.cycle.guard import Recipes
from scrimp.planner.precision import allowed_by
from scrimp.precision import GEMMS
from scrimp.profiler.gemm_times import GemmTimes

Array = NDArray[np.float64]


@dataclass(frozen=True)
class StepTimes:
    """What a step's time is made of."""

    table: GemmTimes
    micro_batches: int
    other: float | None = None
    """Seconds of a step beside the planned GEMMs; None until steps have been timed."""

    def seconds(self, shapes: Sequence[tuple[int, int]], formats: Sequence[str]) -> Array:
        """[L, 3, P] of a step."""
        return self.table.table(shapes, formats, self.micro_batches)

    def candidates(self, shapes: Sequence[tuple[int, int]], formats: Sequence[str]) -> NDArray[np.bool_]:
        """[L, 3, P], what the device gains by, or has units for."""
        return self.table.candidates(shapes, formats)

    def with_steps(
        self, steps: Sequence[float], shapes: Mapping[str, tuple[int, int]], recipes: Recipes
    ) -> StepTimes:
        """The same table, and what is left of measured steps, by their median, beside their planned GEMMs; of no step
        nothing is left."""
        gemms = self.of_gemms(shapes, recipes)
        return dataclasses.replace(self, other=max(0.0, statistics.median(steps or [gemms]) - gemms))

    def of_gemms(self, shapes: Mapping[str, tuple[int, int]], recipes: Recipes) -> float:
        """Seconds of a step's planned GEMMs in given formats."""
        total = 0.0
        for layer, row in recipes.items():
            names = tuple(dict.fromkeys(row))
            table = self.seconds([shapes[layer]], names)[0]
            total += sum(float(table[j, names.index(name)]) for j, name in enumerate(row))
        return total


def open_formats(
    candidates: Sequence[str],
    layers: Sequence[str],
    formats: Sequence[str],
    pinned: Mapping[str, Mapping[str, str]],
    useful: NDArray[np.bool_] | None = None,
) -> NDArray[np.bool_]:
    """[L, 3, P], what a plan may give each GEMM: what a rule fixes, else the candidates.

    Args:
        useful: [L, 3, P], by `StepTimes.candidates`; where none of a GEMM's candidates is useful, all of them stay.
    """
    is_candidate = np.array([name in candidates for name in formats])
    wanted = np.ones((len(layers), len(GEMMS), len(formats)), dtype=bool) if useful is None else useful
    wanted = wanted & is_candidate
    by_rule = allowed_by(layers, formats, pinned)
    is_open = by_rule.all(axis=-1, keepdims=True)
    return np.where(is_open, np.where(wanted.any(axis=-1, keepdims=True), wanted, is_candidate), by_rule)

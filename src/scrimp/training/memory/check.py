"""After the first steps: what was predicted of a step beside what was measured, and a new plan where they differ.

Method   The median of `STEPS` steps after `WARM_UP` (libraries choose their kernels, caches fill), and the peak of
         tensors: the allocator's on a GPU, counted in one step on a CPU. Where a prediction is off by more than
         `TOLERANCE`, costs and limits are corrected (`scrimp.planner.memory.correct`) and activations searched for
         anew; states stay where they are. The blocks change if what they do now no longer fits, or if the new plan
         is predicted faster by `GAIN`: less is not worth a change. No number of the run changes by it.
         Of several ranks the slowest and the fullest count.
Limits   Once per start of a run. What a user has set stays.
Checked  tests/training/memory/test_memory_check.py
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from scrimp.planner import Figures, Plan
from scrimp.planner.memory.correct import corrected
from scrimp.planner.memory.decision import MemoryDecision
from scrimp.planner.memory.search import find
from scrimp.planner.memory.search_space import Split
from scrimp.report.units import format_bytes, format_duration, format_percent
from scrimp.training.memory.kept_operands import without_operands
from scrimp.training.memory.replan import replanned
from scrimp.world import ALONE, World

WARM_UP, STEPS = 3, 5
TOLERANCE = 0.05
GAIN = 0.03


@dataclass(frozen=True)
class Comparison:
    """Predicted beside measured."""

    sentence: str
    measured: Figures
    plan: Plan | None
    """Another plan that is better by what is known now; None: the one of now stays."""


class MemoryCheck:
    """Compares once, for one start of a run.

    Args:
        memory: what was decided.
        host_bytes: that a step may take in the host memory of the run: no plan of its blocks may need more.
    """

    def __init__(self, memory: MemoryDecision, host_bytes: int, world: World = ALONE) -> None:
        self._memory, self._host_bytes, self._world = memory, host_bytes, world
        self._is_done = False

    def after_step(
        self, plan: Plan, step: int, seconds: Sequence[float], peak: int | None
    ) -> Comparison | None:
        """The comparison, as soon as enough steps were made; None before and afterwards.

        Args:
            plan: in force.
            step: number of the last step.
            seconds: of each step since the start.
            peak: bytes on the device in these steps; None: not measured.
        """
        if self._is_done or len(seconds) < WARM_UP + STEPS:
            return None
        self._is_done = True
        peaks = [one for one in self._world.gathered(peak) if one is not None]
        slowest = self._world.largest(statistics.median(seconds[WARM_UP:]))
        measured = Figures(peak_device_bytes=max(peaks, default=None), step_seconds=slowest)
        words, is_off = _compare(plan.predicted, measured)
        if not words:
            return None
        found = self._anew(plan, step, measured) if is_off else None
        return Comparison(f"predicted and measured: {'; '.join(words)}", measured, found)

    def forget_operands(self) -> None:
        """The run has given up the operands that it kept."""
        self._memory = without_operands(self._memory)

    def _anew(self, plan: Plan, step: int, measured: Figures) -> Plan | None:
        """A plan by what was measured, if it is better."""
        memory = self._memory
        if not memory.is_searched or plan.placement != memory.placement:  # its user's own
            return None
        now = corrected(memory, seconds=measured.step_seconds, device_bytes=measured.peak_device_bytes)
        machine = dataclasses.replace(now.machine, host_bytes=self._host_bytes)
        bare = without_operands(now)
        better = find(now.costs, machine, now.setup, Split.of(now.placement.states))
        if better is not None and (
            better.placement == now.placement or (bare.fits and better.seconds > (1 - GAIN) * now.seconds)
        ):
            better = bare if bare.fits and not now.fits else None
        if better is None:
            return None
        took = f"a step took {format_duration(measured.step_seconds or 0.0)}"
        if better is bare:
            took = "without quantized weights that are kept from one micro-batch to the next"
        reason = f"planned anew after step {step:,}: {took}"
        return replanned(plan, memory.account, better, reason=reason, seconds=better.seconds)


def _compare(predicted: Figures, measured: Figures) -> tuple[list[str], bool]:
    """In words, and whether one is off by more than the tolerance."""
    words, is_off = [], False
    for name, shown in (("step_seconds", "a step"), ("peak_device_bytes", "peak on the device")):
        before, after = getattr(predicted, name), getattr(measured, name)
        if not before or after is None:
            continue
        text = format_duration if name == "step_seconds" else format_bytes
        off = after / before - 1
        more = f"{format_percent(abs(off))} {'more' if off > 0 else 'less'}"
        words.append(f"{shown} {text(before)} and {text(after)}, {more}")
        is_off = is_off or abs(off) > TOLERANCE
    return words, is_off

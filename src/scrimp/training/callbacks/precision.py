"""Formats that are planned while the run trains: the cycle looks at every step."""

from __future__ import annotations

from scrimp.training.callbacks.base import Callback, Record
from scrimp.training.precision.run_cycle import RunCycle
from scrimp.training.run import Run
from scrimp.training.step import StepResult


class PlanPrecision(Callback):
    """Calls the precision cycle around each step."""

    def __init__(self, run: Run, cycle: RunCycle) -> None:
        self._run, self._cycle = run, cycle

    def before_step(self) -> None:
        """Measure, switch or probe, whichever is due."""
        self._cycle.before_step(self._run.step)

    def after_step(self, result: StepResult, record: Record) -> None:
        """Look for signs of trouble."""
        self._cycle.after_step(self._run.step - 1, result.loss, result.grad_norm, result.seconds)

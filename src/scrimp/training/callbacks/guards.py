"""Signs of trouble in the loss and the gradients: outliers are told, too many skipped steps end the run."""

from __future__ import annotations

from scrimp.training.callbacks.base import Callback, Record
from scrimp.training.guards import NonFiniteGuard, OutlierWatch
from scrimp.training.run import Run
from scrimp.training.step import StepResult


class Guards(Callback):
    """Looks at every step."""

    def __init__(self, run: Run, non_finite: NonFiniteGuard) -> None:
        self._run, self._non_finite = run, non_finite
        self._outliers = (OutlierWatch("loss"), OutlierWatch("gradient norm"))

    def after_step(self, result: StepResult, record: Record) -> None:
        """Tell of outliers, and end the run after too many skipped steps.

        Raises:
            TrainingError: too many steps in a row were not finite.
        """
        if not result.skipped:
            for watch, value in zip(self._outliers, (result.loss, result.grad_norm), strict=True):
                sentence = watch.check(value)
                if sentence:
                    self._run.tell("outlier", sentence)
        self._non_finite.stop_if_exhausted(self._run.step)

"""The form of what happens between steps."""

from __future__ import annotations

from scrimp.training.step import StepResult

Record = dict[str, float | int | None]
"""The figures of one step, as metrics.jsonl has them."""


class Callback:
    """Called between steps, in the order of the loop's list; a method that is not overridden does nothing."""

    def before_step(self) -> None:
        """A step is about to be taken."""

    def after_step(self, result: StepResult, record: Record) -> None:
        """A step was taken.

        Args:
            record: of this step; callbacks before `WriteRecord` may add figures.
        """

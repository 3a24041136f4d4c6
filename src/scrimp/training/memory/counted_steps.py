"""On a CPU the tensors of an early step of each plan are counted: no allocator knows their peak.

Method   The step is the third after a start, since the first steps make what later ones find, and the first of a later
         plan. A step that proves its plan holds copies of operands, and a checkpoint in the background holds one of
         the state: neither is part of a step, so counting waits for a later step, and for the checkpoint.
Limits   None after a step that ran out of memory: the profiler ends the process where it gets none.
Checked  tests/profiler/test_tensor_peak.py
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from scrimp.planner import Plan
from scrimp.training.precision.first_step import FirstStepProof
from scrimp.training.run import Run
from scrimp.training.step import Stepper

COUNTED_STEP = 3
"""The step, from a start on, that is counted."""


class CountedSteps:
    """Chooses the steps whose tensors are counted."""

    def __init__(
        self, run: Run, stepper: Stepper, proof: FirstStepProof, wait_for_checkpoint: Callable[[], None]
    ) -> None:
        self._run, self._stepper, self._proof = run, stepper, proof
        self._wait_for_checkpoint = wait_for_checkpoint
        self._seen: Plan | None = None
        self._at: int | None = None
        """No step before this one is counted; None: none is."""

    @contextlib.contextmanager
    def around(self) -> Iterator[None]:
        """The next step."""
        meter, number, last = self._run.meter, self._run.step + 1, self._run.train.steps
        if self._run.plans.plan is not self._seen:
            self._at = number if self._seen is not None else min(number - 1 + COUNTED_STEP, last)
            self._seen = self._run.plans.plan
        if self._stepper.ran_out_of_memory:
            self._at = None
        proves = self._proof.is_due and number < last
        if not meter.counts_steps or self._at is None or number < self._at or proves:
            yield
            return
        self._at = None
        self._wait_for_checkpoint()
        with meter.counting(number):
            yield
        if self._stepper.ran_out_of_memory:
            meter.forget_counts()  # what was counted is of two plans

"""The first step of every plan is proven: its GEMMs are those of the plan, in the plan's formats.

Method   Before a step the plan in force is compared with the one that was proven last. Where it differs, `StepProof`
         watches the step: all GEMMs where there was none before or the plan is in doubt, else those that it changed.
         What could not be told in that step, for a GEMM's numbers showed nothing, later steps tell.
Checked  tests/training/precision/test_precision_proof.py
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from scrimp.planner import Plan
from scrimp.runtime import StepProof
from scrimp.training.run import Run


class FirstStepProof:
    """Proves the plans of one run, each in its first step."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._seen: Plan | None = None
        self._proof: StepProof | None = None
        self._is_first = False

    @property
    def is_due(self) -> bool:
        """Whether the next step is the first of its plan, and so one that proves."""
        is_new = self._run.plans.plan is not self._seen
        return self._run.executable.planned is not None and (is_new or self._is_first)

    @contextlib.contextmanager
    def around(self, micro_batches: int) -> Iterator[None]:
        """The passes of a step; one that breaks off proves nothing.

        Raises:
            TrainingError: the GEMMs that ran are not those of the plan, or not in its formats.
        """
        self._follow()
        if self._proof is None:
            yield
            return
        if not self._is_first:
            yield
            self._proof.check()
            return
        run = self._run
        passes = run.executable.objective.head_passes(run.micro_batch_tokens, run.train.loss_chunk)
        with self._proof.of_step(micro_batches=micro_batches, head_passes=micro_batches * passes):
            yield
        self._is_first = False
        self._tell(self._proof)

    def _follow(self) -> None:
        """Expect the plan in force, if it is another one than before."""
        plans, executable = self._run.plans, self._run.executable
        if executable.planned is None or plans.plan is self._seen:
            return
        before, self._seen = None if plans.doubt is not None else self._seen, plans.plan
        self._is_first = True
        if self._proof is None or before is None or plans.plan.gemms != before.gemms:
            self._proof = StepProof(executable, plans.plan, before, self._proof)

    def _tell(self, proof: StepProof) -> None:
        sentence, doubt, step = proof.sentence, self._run.plans.doubt, self._run.step + 1
        if doubt is not None:
            if proof.is_complete:
                sentence += ", every planned one: the prediction was off"
            self._run.line.message(f"step {step}: {doubt}; {sentence}")
        self._run.event("proof", sentence, step=step)

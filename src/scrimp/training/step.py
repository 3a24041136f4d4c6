"""One optimizer step, and what is done where memory does not suffice for it.

A step, over micro-batches i of a batch of N targets in all, as the objective counts::

    loss = sum_i loss_i / N                 so that cutting the batch otherwise changes nothing
    backward of (loss_i + penalty_i) / N for each i, gradients add up
    skip if loss or gradient norm is not finite; clip; update; the average of the weights follows; next

A step whose passes run out of memory is given up, and taken again by a plan that takes less
(`scrimp.training.memory.oom`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from scrimp.data import Batch, Loader
from scrimp.gemm.weight_operands import keeping
from scrimp.gemm.weight_sums import adding
from scrimp.health import record
from scrimp.runtime.memory import ArenaTooSmallError
from scrimp.runtime.passes import run_passes
from scrimp.runtime.pipeline import PassSums
from scrimp.training.guards import NonFiniteGuard
from scrimp.training.memory.between_phases import TRAINING
from scrimp.training.memory.oom import MemoryTrouble, is_out_of_memory
from scrimp.training.precision.first_step import FirstStepProof
from scrimp.training.run import Run
from scrimp.training.schedule import Schedule


@dataclass(frozen=True)
class StepResult:
    """What one step measured."""

    loss: float
    grad_norm: float
    lr: float
    skipped: bool
    seconds: float
    data_wait_seconds: float
    metrics: Mapping[str, float]
    """What the objective records besides the loss, per target."""


class Stepper:
    """Takes the steps of a run.

    Args:
        run: the run.
        proof: of its plans.
        counting: entered around what ranks exchange of a step's gradients and weights.
    """

    def __init__(
        self,
        run: Run,
        proof: FirstStepProof,
        counting: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext,
    ) -> None:
        self.run, self._proof, self._counting = run, proof, counting
        self._lr = Schedule.build(run.config)
        self._trouble = MemoryTrouble(run.decisions, run.executable)
        self.guard = NonFiniteGuard(run.train.nonfinite_patience, run.decisions.world)
        self.is_updating = False
        """Whether an update was broken off: what is there must not be kept."""
        self.ran_out_of_memory = False
        self.no_plan_takes_less = False
        """Whether a step ran out of memory, and no plan that takes less was found."""

    def take(self, loader: Loader) -> StepResult:
        """The next step, on the loader's next batch."""
        run = self.run
        run.phases.switch(TRAINING)
        start = time.perf_counter()
        batches = next(loader)
        if run.weighting is not None:
            batches = run.weighting.weighed(batches)
        with record().in_step(run.step + 1):
            result = self._update(batches)
        seconds = time.perf_counter() - start
        return dataclasses.replace(result, seconds=seconds, data_wait_seconds=loader.wait_seconds)

    def _update(self, batches: list[Batch]) -> StepResult:
        """Passes and update of a step; its seconds are still to be said."""
        run, optimizer = self.run, self.run.optimizer
        counts = run.executable.mesh.gathered_rows(sum(map(run.executable.objective.count, batches)))
        num_targets, of_step = sum(counts), sum(run.executable.mesh.of_step(counts))
        with self._counting():
            total = self._passes(batches, of_step)
            while total is None:  # out of memory, and by now with a plan that takes less
                total = self._passes(batches, of_step)
            run.executable.add_up_copies(optimizer.gradients)
        norm = optimizer.gradient_norm()
        loss, metrics = self._means(total, num_targets)
        lr = self._lr(run.step)
        reason = self.guard.check(loss, norm)
        if reason is None:
            optimizer.clip(norm, run.config.optimizer.clip)
            self.is_updating = True  # from here to the end the state is of no step
            optimizer.step(lr)
            if run.average is not None:
                run.average.follow()
            self.is_updating = False
        else:
            run.event("skipped", reason, step=run.step + 1)
            run.line.message(f"step {run.step + 1} skipped: {reason}")
        optimizer.zero_grad()
        if run.weighting is not None:
            metrics = run.weighting.seen(metrics, learns=reason is None)
        run.position.step += 1
        run.position.updates = optimizer.num_updates - run.position.updates_before
        return StepResult(loss, norm, lr, reason is not None, 0.0, 0.0, metrics)

    def _means(self, total: PassSums, num_targets: int) -> tuple[float, dict[str, float]]:
        """Loss and metrics of the batch, over all ranks."""
        own = [float(total.loss), {name: float(metric) for name, metric in total.metrics.items()}]
        losses, metrics = zip(*self.run.executable.mesh.gathered(own), strict=True)
        count = max(1, num_targets)
        return sum(losses) / count, {name: sum(one[name] for one in metrics) / count for name in metrics[0]}

    def _passes(self, batches: list[Batch], num_targets: int) -> PassSums | None:
        """Forward and backward of a step's micro-batches: the sum of the losses; None if memory ran out, and the plan
        was changed to one that takes less."""
        run = self.run
        try:
            with (
                run.decisions.world.meeting_elsewhere(),
                self._proof.around(len(batches)),
                adding(len(batches) > 1 and run.executable.stages is None),
                keeping(len(batches) > 1 and run.keeps_operands),
            ):
                return run_passes(
                    run.executable, batches, num_targets, step=run.step, first_row=run.first_row
                )
        except (RuntimeError, ArenaTooSmallError) as error:
            # Of several ranks the others are in the model's collectives: they cannot take the step again.
            if not is_out_of_memory(error) or run.decisions.world.size > 1:
                raise
            # Its frames hold what the step had kept; the plan is made when they are gone.
            error.__traceback__ = None
            trouble = error
        self._take_less(trouble)
        return None

    def _take_less(self, trouble: Exception) -> None:
        """After a step that ran out of memory: activations that take less from now on.

        Raises:
            Exception: the trouble itself, where no plan takes less.
        """
        run = self.run
        run.executable.give_up()
        run.optimizer.zero_grad()
        if run.executable.device.type == "cuda":
            torch.cuda.empty_cache()
        if run.keeps_operands:  # a plan of less is one without them
            self.ran_out_of_memory = True
            run.give_up_operands(f"out of memory in step {run.step + 1:,}")
            if not isinstance(trouble, ArenaTooSmallError):
                return
        plan = self._trouble.plan_of_less(run.plans.plan, run.step + 1, trouble)
        if plan is None:
            self.no_plan_takes_less = True
            raise trouble
        self.ran_out_of_memory = True
        run.change_blocks(plan, run.step + 1)

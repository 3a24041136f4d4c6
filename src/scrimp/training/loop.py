"""The training loop: one step after another, and around each of them the callbacks in their order.

::

    PlanPrecision   before a step: measure, switch, probe; after it: signs of trouble
    MeasureStep     the figures of the step
    CheckMemory     measured beside predicted, once
    ProveLayout     the same of several ranks: seconds, peaks, collectives, bytes
    Refactorization low-rank layers, factored anew
    LocalSteps      rounds of copies that train alone; before an evaluation or a checkpoint they meet
    Evaluations     the held-out loss
    WriteRecord     all figures to metrics.jsonl: before a checkpoint, from which a run may be resumed
    Guards          outliers; the end of a run whose steps are not finite
    RankFindings    of several those that are slow
    Checkpoints     those that are complete, and the next one

A plan that changes is told to the model, the memory phases, the meter and plan.json by `PlanInForce`.
"""

from __future__ import annotations

from scrimp.errors import ScrimpError
from scrimp.files import write_whole
from scrimp.health import record
from scrimp.planner import Plan
from scrimp.training.callbacks import (
    Callback,
    CheckMemory,
    Checkpoints,
    Evaluations,
    Guards,
    LocalSteps,
    MeasureStep,
    PlanPrecision,
    ProveLayout,
    RankFindings,
    Record,
    Refactorization,
    WriteRecord,
)
from scrimp.training.callbacks.local_steps import join_copies
from scrimp.training.guards import StopSignals
from scrimp.training.memory.between_phases import TRAINING
from scrimp.training.memory.counted_steps import CountedSteps
from scrimp.training.precision.first_step import FirstStepProof
from scrimp.training.run import Run
from scrimp.training.run_folder import PLAN
from scrimp.training.step import Stepper


class Trainer:
    """Runs the steps of a run.

    Args:
        run: the run.
        began: when this process began to work on it (`time.monotonic`).
    """

    def __init__(self, run: Run, began: float) -> None:
        self.run = run
        run.plans.listen(self._carry_out)
        run.phases.plan(TRAINING, run.plans.plan.predicted.peak_device_bytes or 0)
        self.cycle = PlanPrecision(run) if run.config.is_planned else None
        """Where formats are planned while training."""
        proof = FirstStepProof(run)
        layout = ProveLayout(run, began)
        self.stepper = Stepper(run, proof, layout.counting)
        self.evaluations, self.checkpoints = Evaluations(run), Checkpoints(run, self.cycle)
        self._counted = CountedSteps(run, self.stepper, proof, self.checkpoints.wait)
        self.callbacks: list[Callback] = [
            *([] if self.cycle is None else [self.cycle]),
            MeasureStep(run),
            CheckMemory(run),
            layout,
            *([Refactorization(run)] if run.config.optimizer.refactor_every else []),
            *([] if run.outer is None else [LocalSteps(run, run.outer, self.checkpoints)]),
            self.evaluations,
            WriteRecord(run),
            Guards(run, self.stepper.guard),
            RankFindings(run),
            self.checkpoints,
        ]

    def train(self, signals: StopSignals) -> None:
        """Step until the last one or a signal.

        Raises:
            TrainingError: too many non-finite steps in a row.
        """
        run, layout = self.run, self.run.config.layout
        join_copies(run, self.checkpoints)
        is_even = layout.pp * layout.ep * layout.etp == 1
        with run.loader(run.step) as loader, record().training(self._lost, is_even=is_even):
            while (
                run.step < run.train.steps
                and not run.go_on_with
                and not (signals.should_stop() and self._may_stop())
            ):
                for callback in self.callbacks:
                    callback.before_step()
                with self._counted.around():
                    result = self.stepper.take(loader)
                figures: Record = {}
                for callback in self.callbacks:
                    callback.after_step(result, figures)

    def _may_stop(self) -> bool:
        """Copies that are jobs of their own have no common weights within a round, and so nothing to keep."""
        outer = self.run.outer
        return outer is None or outer.copies is None or not outer.in_round

    def _lost(self, error: ScrimpError) -> None:
        self.run.event("lost-rank", str(error))

    def _carry_out(self, before: Plan, plan: Plan) -> None:
        """Another plan is in force: the model, what is known of its memory, and the run's file follow."""
        run = self.run
        record().begin_anew()
        if plan.placement != before.placement:
            run.executable.change_activations(plan)
            run.meter.forget_counts()
        if plan.gemms != before.gemms:
            run.executable.change_formats(plan)
        run.phases.plan(TRAINING, plan.predicted.peak_device_bytes or 0)
        if run.decisions.world.is_writer:
            write_whole(run.dir / PLAN, plan.to_json())

    def close(self) -> None:
        """Leave nothing running."""
        if self.cycle is not None:
            self.cycle.close()
        if self.run.outer is not None:
            self.run.outer.close()
        self.run.optimizer.close()

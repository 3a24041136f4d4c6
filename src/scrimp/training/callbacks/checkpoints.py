"""Checkpoints of a run: what its state is, when it is written, and what is told of it.

The state is small: parameters that are trained, optimizer, average of the weights, random state, two integers (step and
updates), averages of sources' losses and the precision cycle's own. Everything else (data order, learning rate,
initialisation) is a function of the configuration and of these, which is why a resumed run repeats the same losses bit
for bit.
"""

from __future__ import annotations

import dataclasses

import torch

from scrimp.errors import StorageError
from scrimp.parts import TensorPart, part_of
from scrimp.training.callbacks.base import Callback, Record
from scrimp.training.callbacks.precision import PlanPrecision
from scrimp.training.checkpoint import Checkpoint
from scrimp.training.run import Run
from scrimp.training.run_folder import PLAN
from scrimp.training.run_state import RunState, read_state
from scrimp.training.step import StepResult
from scrimp.training.trained_weights import MODEL_PREFIX, OPTIMIZER_PREFIX

RANDOM_STATE = "random.torch"


class Checkpoints(Callback):
    """Writes checkpoints every `checkpoint.every` steps, and restores one."""

    def __init__(self, run: Run, cycle: PlanPrecision | None) -> None:
        self._run, self._cycle = run, cycle
        self._last_saved: int | None = None

    def after_step(self, result: StepResult, record: Record) -> None:
        """Tell of those that became complete, and write one if it is due; at the last step the run's end does."""
        self.report()
        run = self._run
        if not run.is_due(run.config.checkpoint.every) or run.step >= run.train.steps:
            return
        self.wait()  # one that failed must not keep this one from being tried
        try:
            self.save()
        except StorageError as error:
            self.failed(error)

    def parts(self) -> dict[str, TensorPart]:
        """What lies here of every tensor of the run's state, by the name it has in a checkpoint."""
        run = self._run
        trained = run.executable.model.trained()
        state = {
            f"{MODEL_PREFIX}{name}": part for name, part in run.executable.parameters() if name in trained
        }
        state |= {f"{OPTIMIZER_PREFIX}{name}": part for name, part in run.optimizer.parts()}
        if run.average is not None:
            state |= {f"average.{name}": part for name, part in run.average.parts()}
        if run.outer is not None:
            state |= {f"outer.{name}": part for name, part in run.outer.parts()}
            if run.executable.mesh.copy > 0:  # each copy's mesh is its own: its shards have writers there
                state = {name: dataclasses.replace(part, is_writer=False) for name, part in state.items()}
        # All ranks draw alike: the first one's is everybody's.
        random = part_of(torch.get_rng_state())
        state[RANDOM_STATE] = dataclasses.replace(random, is_writer=run.decisions.world.is_writer)
        return state

    def restore(self, checkpoint: Checkpoint) -> None:
        """Continue from a checkpoint: tensors are loaded in place."""
        state = read_state(checkpoint)
        self._run.optimizer.prepare(state.position.all_updates)
        parts = self.parts()
        checkpoint.load(parts, self._run.decisions.world)
        torch.set_rng_state(parts[RANDOM_STATE].local)
        self._run.position = state.position
        if self._run.weighting is not None:
            self._run.weighting.restore(state.source_losses)
        self._run.optimizer.restore_updates(state.position.all_updates)
        if self._cycle is not None:
            self._cycle.restore(state.precision, state.position.step)
        self._last_saved = checkpoint.step

    def begin_from(self, checkpoint: Checkpoint) -> None:
        """Take the optimizer's states from another run's checkpoint, and its weights, which making room may move."""
        run, updates = self._run, read_state(checkpoint).position.all_updates
        run.optimizer.prepare(updates)
        own = self.parts()  # once: an optimizer's numbers are read back from the tensors that it gave
        for prefix in (OPTIMIZER_PREFIX, MODEL_PREFIX):
            parts = {name: part for name, part in own.items() if name.startswith(prefix)}
            checkpoint.load(parts, run.decisions.world, prefix=prefix)
        run.position.updates_before = updates
        run.optimizer.restore_updates(updates)

    def save(self, *, wait: bool = False) -> None:
        """Write a checkpoint of this step, unless it has one; in the background unless `wait`."""
        run = self._run
        if self._last_saved == run.step:
            if wait:
                run.store.wait()
            return
        if run.outer is not None:
            run.outer.meet(states=True)
        state = RunState(
            run.position,
            run.decisions.architecture,
            run.record.data,
            run.train.sequence,
            run.record.digest,
            None if self._cycle is None else self._cycle.to_state(),
            None if run.base is None else run.base.digest,
            None if run.weighting is None else run.weighting.losses,
        )
        skipped = run.step - run.position.updates
        files = run.files | {PLAN: self._plan_text()}
        run.store.save(run.step, self.parts(), state.to_json(), files, skipped_steps=skipped, wait=wait)
        self._last_saved = run.step

    def _plan_text(self) -> str:
        """The plan in force, without what was timed on the machine: the same run gives the same bytes."""
        plan = self._run.plans.plan
        untimed = dataclasses.replace(plan.predicted, step_seconds=None)
        return dataclasses.replace(plan, predicted=untimed, measured=None).to_json()

    def report(self) -> None:
        """Record checkpoints that became complete; a failed one is recorded and the run goes on."""
        run = self._run
        try:
            for step in run.store.poll():
                bad = run.store.not_finite[step]
                note = f"complete, but not finite: {', '.join(bad[:3])}" if bad else "complete"
                run.event("checkpoint", note, step=step, finite=not bad)
                if bad:
                    run.line.message(f"checkpoint of step {step} {note}; the last finite one stays")
        except StorageError as error:
            self.failed(error)

    def wait(self) -> None:
        """Wait for a checkpoint that is being written; record it, or that it failed."""
        try:
            self._run.store.wait()
        except StorageError as error:
            self.failed(error)
        self.report()

    def failed(self, error: StorageError) -> None:
        """Record that a checkpoint could not be written; older ones are untouched."""
        self._last_saved = None
        self._run.event("checkpoint-failed", str(error))
        self._run.line.message(
            f"checkpoint not written: {error}; older checkpoints are untouched, training goes on"
        )

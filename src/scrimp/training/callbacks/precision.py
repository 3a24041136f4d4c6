"""Formats that are planned while a run trains: its cycle, on batches of its own order, with its plan, files and events.

Files    plan.json is the current plan; plans/step-*.json every plan, plans/step-*.precision.json the analysis
         behind it.
Ranks    One writes the files; what is measured and decided alike, `scrimp.cycle` says.
Checked  tests/training/precision/test_precision_cycle.py: kill and resume at every phase, bit-equal runs when
         nothing changes
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from scrimp.cycle import CycleSettings, Event, PrecisionCycle, Probed, Promoted, Switched
from scrimp.cycle.guard import Recipes
from scrimp.files import make_folder, write_whole
from scrimp.models import spec_of
from scrimp.planner.precision import PrecisionPlan, PrecisionProfile
from scrimp.precision import parse_rules
from scrimp.statistics import Probe
from scrimp.training.callbacks.base import Callback, Record
from scrimp.training.precision.formats_in_plan import (
    carried_on,
    planned_origins,
    planned_recipes,
    read_saved_cycle,
    replanned,
)
from scrimp.training.precision.gemm_seconds import keep_times, measured_times, shapes_of, wants_times
from scrimp.training.precision.meter import PrecisionMeter
from scrimp.training.precision.reachable import refuse_unreachable_speed
from scrimp.training.run import Run
from scrimp.training.run_folder import PLANS, drop_plans_after
from scrimp.training.step import StepResult


class PlanPrecision(Callback):
    """A run, as its cycle sees it (a `ModelInTraining`), and the cycle as the run does."""

    def __init__(self, run: Run) -> None:
        decisions, recipes = run.decisions, planned_recipes(run.decisions.plan)
        origins = spec_of(decisions.architecture).origins
        settings = CycleSettings.of_run(run.config, planned_origins(recipes, origins))
        self._run, self._world = run, decisions.world
        self._meter = PrecisionMeter(
            settings,
            run.executable,
            run.optimizer,
            run.batches,
            device_name=decisions.device.name,
            first_row=run.first_row,
        )
        self._rules = parse_rules(run.config.precision).with_base(run.config.snip.start)
        self.cycle = PrecisionCycle(settings, self, recipes, world=decisions.world, probe=self._probe)
        self._number = 0
        """Number of the step that is being taken, counted from 1 as in logs and files."""
        self._note: str | None = None
        """To be told before the next step."""

    # -- what the run asks for -----------------------------------------------------------------

    def to_state(self) -> dict[str, Any]:
        """For the checkpoint; waits for the solver, whose plan is part of it."""
        return {**self.cycle.to_state(), "plan": self._run.plans.plan.to_json()}

    def restore(self, saved: Mapping[str, Any] | None, step: int) -> None:
        """Go on from the checkpoint of a step: its plan is put in force and into the run's folder, and
        plans that came later are dropped there, as later lines of the logs are."""
        run, cycle, (state, analysis, plan) = self._run, self.cycle, read_saved_cycle(saved)
        cycle.restore(state, analysis)
        carried = carried_on(run.plans.plan, plan, trains=step < run.train.steps)
        then, now = plan.fingerprint.device, carried.fingerprint.device
        if then != now:
            self._note = cycle.state.move(cycle.settings, step, then, now, in_seconds=self._wants_times())
        if self._world.is_writer:
            drop_plans_after(run.dir, step)
        run.plans.change(carried)

    def prepare(self) -> None:
        """Before the first step: times of GEMMs, where the budget needs them.

        Raises:
            PlanError: no choice of formats keeps the budget on this device.
        """
        if not self._wants_times():
            return
        run = self._run

        def progress(label: str, done: int, total: int) -> None:
            run.line.phase(f"timing GEMMs, {done} of {total}: {label}")

        self.cycle.times = times = measured_times(run.decisions, run.dir, progress)
        refuse_unreachable_speed(run.config, times, shapes_of(run.decisions))
        if self._world.is_writer:
            keep_times(run.dir, times)

    def _wants_times(self) -> bool:
        return wants_times(self._run.config, self._run.decisions.device.torch_device.type)

    def close(self) -> None:
        """Let the thread go."""
        self.cycle.close()

    def before_step(self) -> None:
        """Switch, measure or probe, whichever is due; another plan is then in force."""
        run, cycle, times = self._run, self.cycle, self.cycle.times
        self._number, run.plans.doubt = run.step + 1, None
        note, self._note = self._note, None
        if note is not None:
            run.event("device", note, step=self._number)
            run.line.message(note)
        cycle.between_steps(run.step)
        if cycle.times is not None and cycle.times is not times and self._world.is_writer:
            keep_times(run.dir, cycle.times)

    def after_step(self, result: StepResult, record: Record) -> None:
        """Look for signs of trouble; another plan may then be in force."""
        self.cycle.after_step(self._run.step - 1, result.loss, result.grad_norm, result.seconds)

    # -- what the cycle asks for ---------------------------------------------------------------

    def measure(self, step: int, formats: Sequence[str]) -> PrecisionProfile:
        """Statistics on the batches of this step and the next ones."""
        self._run.line.phase("measuring precision")
        return self._meter.measure(step, formats)

    def _probe(self, step: int) -> Probe:
        self._run.line.phase("comparing with bf16")
        return self._meter.probe(step)

    def put_in_force(self, recipes: Recipes, analysis: PrecisionPlan) -> None:
        """Go by a plan with these formats."""
        plans, origins = self._run.plans, spec_of(self._run.decisions.architecture).origins
        plans.change(replanned(plans.plan, self._rules, recipes, analysis, origins))

    def tell(self, event: Event) -> None:
        """Into the run's files, log and console."""
        match event:
            case Switched():
                self._switched(event)
            case Probed():
                self._event("probe", event.sentence, **vars(event.found))
            case Promoted():
                self._promoted(event)

    def _switched(self, event: Switched) -> None:
        found, self._run.plans.doubt = event.analysis, event.doubt
        self._write(found)
        predicted = found.predicted
        self._event(
            "replan",
            found.reason,
            changed=event.changed,
            policy=found.policy,
            fp4_flops=predicted["fp4_flops"],
            saved_bytes=predicted.get("saved_bytes"),
            loss_divergence=predicted["loss_divergence"],
            weight_divergence=predicted["weight_divergence"],
            certainty=found.certainty,
            solver=found.solver,
            seconds=found.seconds,
        )
        if event.doubt is not None:  # the console hears of it when it is answered
            meaning = "the prediction is off, as it often is, or formats are not in force"
            self._event(
                "doubt", f"{event.doubt}; either {meaning}: every planned GEMM is proven in this step"
            )
        note = found.solver.get("note", "")
        self._run.line.message(
            f"step {self._number}: {found.reason}; {predicted['fp4_flops'] or 0.0:.1%} of FLOPs in 4 bits, inputs "
            f"kept in {predicted.get('saved_bytes') or 0.0:.1%} of their bytes in bf16"
            + (f"; {note}" if note not in found.reason else "")  # "" is in any
        )

    def _promoted(self, event: Promoted) -> None:
        self._write()  # the choices are no longer those of an analysis
        promoted = {"changed": event.changed, "alarm": event.alarm, "hold_until": event.hold_until}
        self._event("promotion", event.reason, **promoted)
        self._run.line.message(
            f"step {self._number}: {event.changed} GEMMs promoted: {event.reason}; no new plan until step "
            f"{event.hold_until:,}"
        )

    def _event(self, kind: str, sentence: str, **fields: Any) -> None:
        self._run.event(kind, sentence, step=self._number, **fields)

    # -- files ---------------------------------------------------------------------------------

    def write_start(self) -> None:
        """The plan that a run begins with, for its history."""
        self._write()

    def _write(self, analysis: PrecisionPlan | None = None) -> None:
        if not self._world.is_writer:
            return
        folder = self._run.dir / PLANS
        make_folder(folder)
        if analysis is not None:
            analysis.write(folder / f"step-{self._number:08d}.precision.json")
        write_whole(folder / f"step-{self._number:08d}.json", self._run.plans.plan.to_json())

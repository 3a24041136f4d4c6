"""Re-planning precision while training: measure, solve beside the training, switch between two steps.

::

    step s            statistics on the batches of steps s, s+1, ... (read ahead: the run's own order is untouched)
    s .. s + delay    a thread solves; training goes on
    step s + delay    the new formats are in force; waits for the thread where it is not done

Steps of measuring and switching are functions of the configuration and of what happened before, never of how long
something took: with the state in the checkpoint a run that was killed anywhere continues the same. The
state is the formats of now, the costs that the last statistics gave, what the guard has seen, what the
budget has spent, and a plan that waits for its step.

Ranks     All measure and probe; the writer solves, and tells the others its plan and what its probes found. Of a step's
          loss, norm and seconds the largest of any rank counts.
Budget    Of FLOPs in 4 bits, from the first plan on. With `snip.final_share` the last part of the run may take less of
          it and the time before more (`scrimp.planner.precision.over_time`).
Files     plan.json is the plan of now; plans/step-*.json every plan, plans/step-*.precision.json the analysis
          behind it.
Checked   tests/training/precision/test_precision_cycle.py: kill and resume at every phase, bit-equal runs when
          nothing changes
"""

from __future__ import annotations

import dataclasses
import math
import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from scrimp.files import make_folder, write_whole
from scrimp.models import spec_of
from scrimp.planner.precision import PrecisionPlan, PrecisionProfile, plan_or_nearest
from scrimp.precision import parse_rules
from scrimp.statistics import Probe
from scrimp.training.precision import guard
from scrimp.training.precision.gemm_seconds import (
    StepTimes,
    gemm_seconds,
    keep_times,
    measured_times,
    other_than_gemms,
    refuse_unreachable_speed,
    shapes_of,
    wants_times,
)
from scrimp.training.precision.meter import PrecisionMeter
from scrimp.training.precision.question import (
    Horizon,
    ask,
    formats_to_measure,
    harm_in,
    low_share,
    recipes_in,
    replanned,
    shares_of,
)
from scrimp.training.precision.state import CycleState, Waiting, carried_on, planned_recipes, read_cycle
from scrimp.training.run import Run
from scrimp.training.run_folder import PLANS, drop_plans_after


class PrecisionCycle:
    """The cycle of one run."""

    def __init__(self, run: Run) -> None:
        decisions = run.decisions
        self._decisions, self._config, self._plans = decisions, decisions.config, run.plans
        self._world, self._cadence = decisions.world, decisions.config.cadence
        self._meter = PrecisionMeter(decisions, run.executable, run.optimizer, run.batches)
        self._log, self._line, self._run_dir = run.log, run.line, run.dir
        self._rules = parse_rules(self._config.precision)
        self._layers = [layer for layer in decisions.plan.gemms if layer != "head"]
        self._shares = shares_of(decisions.architecture)
        self._solver = ThreadPoolExecutor(1, thread_name_prefix="scrimp-solver")
        self._solution: Future[PrecisionPlan] | None = None
        self._analysis: PrecisionPlan | None = None
        self._measure_seconds = 0.0
        self._times: StepTimes | None = None
        self._number = 0
        """Number of the step that is being taken, counted from 1 as in logs and files."""
        self._note: str | None = None
        """To be told before the next step."""
        self.state = CycleState(planned_recipes(decisions.plan))

    # -- checkpoints ---------------------------------------------------------------------------

    def to_state(self) -> dict[str, Any]:
        """For the checkpoint; waits for the solver, whose plan is part of it."""
        if self.state.waiting is not None and (found := self._solved()) is not None:
            self.state.waiting.plan = found.to_json()
        analysis = None if self._analysis is None else self._analysis.to_json()
        return {**dataclasses.asdict(self.state), "analysis": analysis, "plan": self._plans.plan.to_json()}

    def restore(self, saved: dict[str, Any] | None, step: int) -> None:
        """Go on from the checkpoint of a step: its plan is put in force and into the run's folder, and
        plans that came later are dropped there, as later lines of the logs are."""
        found = read_cycle(saved)
        self.state, self._analysis, plan = found.state, found.analysis, found.plan
        carried = carried_on(self._plans.plan, plan, trains=step < self._config.train.steps)
        then, now = plan.fingerprint.device, carried.fingerprint.device
        if then != now:
            self._note = self.state.move(self._config, step, then, now, in_seconds=self._wants_times())
        if self._world.is_writer:
            drop_plans_after(self._run_dir, step)
        self._plans.change(carried)

    def prepare(self) -> None:
        """Before the first step: times of GEMMs, where the budget needs them.

        Raises:
            PlanError: no choice of formats keeps the budget on this device.
        """
        if not self._wants_times():
            return

        def progress(label: str, done: int, total: int) -> None:
            self._line.phase(f"timing GEMMs, {done} of {total}: {label}")

        self._times = measured_times(self._decisions, self._run_dir, progress)
        refuse_unreachable_speed(self._config, self._times, shapes_of(self._decisions))
        self._keep_times(self._times)

    def _keep_times(self, times: StepTimes) -> None:
        if self._world.is_writer:
            keep_times(self._run_dir, times)

    def _wants_times(self) -> bool:
        return wants_times(self._config, self._decisions.device.torch_device.type)

    def close(self) -> None:
        """Let the thread go."""
        self._solver.shutdown(wait=False, cancel_futures=True)

    # -- between steps -------------------------------------------------------------------------

    def before_step(self, step: int) -> None:
        """Switch, measure or probe, whichever is due; another plan is then in force."""
        self._number, self._plans.doubt = step + 1, None
        self._tell_note()
        switches = self.state.waiting is not None and step >= self.state.waiting.at
        if switches:
            self._switch(step)
        if self.state.must_measure(self._config, step):
            self._measure(step)
        every = self._cadence.probe_every
        if self.state.first_switch is not None and every and step % every == 0 and not switches:
            self._judge(step, self._probe(step), None)

    def after_step(self, step: int, loss: float, norm: float, seconds: float) -> None:
        """Look at a step that was taken; another plan may then be in force."""
        loss, norm, seconds = map(self._world.largest, (loss, norm, seconds))
        if self._times is not None and self._times.other is None:
            self.state.step_seconds = [*self.state.step_seconds, seconds][-guard.MIN_VALUES :]
        self._number = step + 1
        if self.state.first_switch is not None:
            self.state.spent += self._low_share()
        sign = guard.sign_of_trouble(self.state.guard, step, loss, norm)
        if sign is None or self.state.first_switch is None:
            return
        if math.isfinite(loss + norm):
            self._judge(step + 1, self._probe(step), sign)
        else:
            self._promote(step + 1, sign)

    def _tell_note(self) -> None:
        note, self._note = self._note, None
        if note is not None:
            self._log.event("device", self._number, note)
            self._line.message(note)

    def _tell_doubt(self) -> None:
        if self._plans.doubt is not None:
            meaning = "the prediction is off, as it often is, or formats are not in force"
            sentence = f"{self._plans.doubt}; either {meaning}: every planned GEMM is proven in this step"
            self._log.event("doubt", self._number, sentence)  # the console hears of it when it is answered

    def _low_share(self) -> float:
        return low_share(self.state.recipes, self._shares)

    # -- measuring and switching ---------------------------------------------------------------

    def _measure(self, step: int) -> None:
        """Statistics now, a plan in the background."""
        self._line.phase("measuring precision")
        began = time.perf_counter()
        pinned = self._rules.pinned(self._layers)
        now = [name for recipes in self.state.recipes.values() for name in recipes]
        profile = self._meter.measure(step, formats_to_measure(self._config, pinned, now))
        self._measure_seconds = time.perf_counter() - began
        until_then = self._cadence.delay * self._low_share() if self.state.first_switch is not None else 0.0
        horizon = Horizon(step, self.state.first_switch, self.state.spent + until_then)
        times = self._times_of_a_step()
        state = dataclasses.replace(self.state)
        if self.state.measure_from is not None and step >= self.state.measure_from:
            self.state.measure_from = None
        self.state.waiting = Waiting(step + self._cadence.delay)
        if self._world.is_writer:
            self._solution = self._solver.submit(self._solve, profile, horizon, state, pinned, times)

    def _times_of_a_step(self) -> StepTimes | None:
        """With the seconds beside the GEMMs; before any step has been timed they count as none, for this plan."""
        if self._times is None or self._times.other is not None:
            return self._times
        gemms = gemm_seconds(self._times, shapes_of(self._decisions), self.state.recipes)
        timed = self.state.step_seconds
        times = dataclasses.replace(self._times, other=other_than_gemms(timed or [gemms], gemms))
        if timed:
            self._times, self.state.step_seconds = times, []
            self._keep_times(times)
        return times

    def _solve(
        self,
        profile: PrecisionProfile,
        horizon: Horizon,
        state: CycleState,
        pinned: dict[str, dict[str, str]],
        times: StepTimes | None,
    ) -> PrecisionPlan:
        question = ask(
            self._config,
            profile,
            horizon,
            pinned,
            state.recipes,
            state.previous if state.previous_formats == list(profile.formats) else None,
            state.guard.penalties,
            times,
        )
        return plan_or_nearest(question, step=horizon.step + self._cadence.delay)

    def _solved(self) -> PrecisionPlan | None:
        """What the solver found, when it is done; None where the plan that waits came from a checkpoint."""
        return self._world.once(
            "solving for a plan",
            lambda: None if self._solution is None else self._solution.result(),
            write=lambda found: None if found is None else found.to_json(),
            read=lambda text: None if text is None else PrecisionPlan.from_json(text),
        )

    def _switch(self, step: int) -> None:
        waiting, self.state.waiting = self.state.waiting, None
        assert waiting is not None
        began = time.perf_counter()
        found, self._solution = self._solved(), None
        if found is None:
            assert waiting.plan is not None  # it came from a checkpoint, which holds it (see `read_cycle`)
            found = PrecisionPlan.from_json(waiting.plan)
        stall = time.perf_counter() - began
        seconds = {
            "measure": self._measure_seconds,
            "solve": found.solver.get("seconds", 0.0),
            "stall": stall,
        }
        self._analysis = dataclasses.replace(found, step=self._number, seconds=seconds)
        self.state.previous = [
            [list(gemm.harm.values()) for gemm in layer.gemms.values()] for layer in found.layers.values()
        ]
        self.state.previous_formats = list(found.formats)
        if self.state.first_switch is None:
            self.state.first_switch = step
        recipes = {layer: row for layer, row in recipes_in(found).items() if layer in self.state.recipes}
        changed = self._go_on_with(recipes)
        self._measure_what_was_predicted(step)
        self._write()
        predicted = self._analysis.predicted
        self._log.event(
            "replan",
            self._number,
            found.reason,
            changed=changed,
            policy=found.policy,
            fp4_flops=predicted["fp4_flops"],
            loss_divergence=predicted["loss_divergence"],
            weight_divergence=predicted["weight_divergence"],
            certainty=found.certainty,
            solver=found.solver,
            seconds=seconds,
        )
        self._tell_doubt()
        note = found.solver.get("note", "")
        self._line.message(
            f"step {self._number}: {found.reason}; {predicted['fp4_flops'] or 0.0:.1%} of FLOPs in 4 bits"
            + (f"; {note}" if note not in found.reason else "")  # "" is in any
        )

    def _go_on_with(self, recipes: guard.Recipes) -> int:
        """Put formats in force; how many GEMMs changed."""
        changed = sum(
            old != new
            for layer, row in recipes.items()
            for old, new in zip(self.state.recipes[layer], row, strict=True)
        )
        self.state.recipes = {**self.state.recipes, **recipes}
        rules = self._rules.with_base(self._config.snip.start)
        layers = spec_of(self._decisions.architecture).origins
        recipes = self.state.recipes
        self._plans.change(replanned(self._plans.plan, rules, recipes, self._analysis, layers))
        return changed

    # -- evidence ------------------------------------------------------------------------------

    def _probe(self, step: int) -> Probe:
        self._line.phase("comparing with bf16")
        return Probe(**self._world.told(dataclasses.asdict(self._meter.probe(step))))

    def _measure_what_was_predicted(self, step: int) -> None:
        assert self._analysis is not None
        found = self._probe(step)
        measured = {"loss_divergence": abs(found.loss_gap), "weight_divergence": found.update_change}
        if all(map(math.isfinite, measured.values())):
            self._analysis = dataclasses.replace(self._analysis, measured=measured)
        self._plans.doubt = guard.doubt(self._analysis, found.update_change)

    def _judge(self, step: int, found: Probe, sign: str | None) -> None:
        """Record a probe, which a sign of trouble asked for or the calendar, and promote if the plan is to blame."""
        blame, cause = guard.verdict(found), sign or "a regular probe"
        self._log.event(
            "probe",
            self._number,
            f"{cause}: {blame or 'the plan is not to blame'}",
            **dataclasses.asdict(found),
        )
        if blame is not None:
            self._promote(step, f"{cause}; {blame}")
        elif sign is not None:  # the same trouble would only ask again
            self.state.guard.rest_until = step + guard.REST_STEPS

    def _promote(self, step: int, reason: str) -> None:
        """Higher formats at once where they cost most; no plan for a while."""
        state = self.state.guard
        state.alarms, state.hold_until = state.alarms + 1, step + guard.HOLD_STEPS
        state.rest_until = step + guard.REST_STEPS
        self.state.waiting, self._solution = None, None
        pinned = self._rules.pinned(self._layers)
        promoted = guard.promote(
            self.state.recipes,
            harm_in(self._analysis, self.state.recipes),
            self._shares,
            state.alarms,
            candidates=self._config.candidates,
            pinned=pinned,
        )
        guard.learn(state, self.state.recipes, promoted)
        changed = self._go_on_with(promoted)
        self._write(analysis=False)  # the choices are no longer those of an analysis
        self._log.event(
            "promotion",
            self._number,
            reason,
            changed=changed,
            alarm=state.alarms,
            hold_until=state.hold_until,
        )
        self._line.message(
            f"step {self._number}: {changed} GEMMs promoted: {reason}; no new plan until step {state.hold_until:,}"
        )

    # -- files ---------------------------------------------------------------------------------

    def write_start(self) -> None:
        """The plan that a run begins with, for its history."""
        self._write(analysis=False)

    def _write(self, *, analysis: bool = True) -> None:
        if not self._world.is_writer:
            return
        folder = self._run_dir / PLANS
        make_folder(folder)
        if analysis and self._analysis is not None:
            self._analysis.write(folder / f"step-{self._number:08d}.precision.json")
        write_whole(folder / f"step-{self._number:08d}.json", self._plans.plan.to_json())

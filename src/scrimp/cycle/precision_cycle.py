"""Re-planning precision while a model trains: measure, solve beside the training, switch between two steps.

::

    step s            statistics, before it is taken
    s .. s + delay    a thread solves; training goes on
    step s + delay    the new formats are in force; waits for the thread where it is not done

Steps of measuring and switching are functions of the settings and of what happened before, never of how long
something took: with the state in its checkpoints a run that was killed anywhere continues the same. The
state is the current formats, the costs that the last statistics gave, what the guard has seen, what the
budget has spent, and a plan that waits for its step.

Who trains    A `ModelInTraining`: of a run (`scrimp.training.callbacks.precision`), or of a loop that somebody else
              owns (`scrimp.api.loop_cycle`).
Ranks         All measure and probe; the writer solves, and tells the others its plan and what its probes found. Of a
              step's loss, norm and seconds the largest of any rank counts.
Probes        Where the current plan can be compared with the compute format: after each switch, by the calendar, and
              where a step looks like trouble (`scrimp.cycle.guard`). Formats that are to blame are promoted.
Budget        Of FLOPs in 4 bits, from the first plan on. With `final_share` the last part of the run may take less of
              it and the time before more (`scrimp.planner.precision.over_time`).
Checked       tests/cycle/test_one_cycle.py, and what each of the two models in training names
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from scrimp.cycle import guard
from scrimp.cycle.guard import Recipes
from scrimp.cycle.model_in_training import ModelInTraining, Probed, Promoted, Switched
from scrimp.cycle.question import ask, formats_to_measure, harm_in, low_share, recipes_in
from scrimp.cycle.settings import CycleSettings
from scrimp.cycle.state import CycleState, Waiting
from scrimp.cycle.step_times import StepTimes
from scrimp.planner.precision import PrecisionPlan, PrecisionProfile, make_plan, plan_or_nearest
from scrimp.statistics import Probe
from scrimp.world import ALONE, World


class PrecisionCycle:
    """The cycle of one model in training.

    Attributes:
        state: what checkpoints keep.
        analysis: the newest plan with its costs; None before the first.
        times: where the budget is in seconds.
        measure_seconds: what the last statistics took.
    """

    def __init__(
        self,
        settings: CycleSettings,
        model: ModelInTraining,
        recipes: Recipes,
        *,
        world: World = ALONE,
        probe: Callable[[int], Probe] | None = None,
    ) -> None:
        """Begin; nothing is measured yet.

        Args:
            recipes: of the layers that are planned now.
            world: the ranks that train the model.
            probe: compares the current plan with the compute format, on a step's batch; None: nothing is guarded.
        """
        self.settings, self.state = settings, CycleState(recipes)
        self.analysis: PrecisionPlan | None = None
        self.times: StepTimes | None = None
        self.measure_seconds = 0.0
        self._model, self._world, self._probe = model, world, probe
        self._solver = ThreadPoolExecutor(1, thread_name_prefix="scrimp-solver")
        self._solution: Future[PrecisionPlan] | None = None

    # -- checkpoints ---------------------------------------------------------------------------

    def to_state(self) -> dict[str, Any]:
        """JSON values; waits for the solver, whose plan is part of them.

        On several ranks the writer's are those to keep. It asks no other rank, so it alone may be asked.
        """
        if self.state.waiting is not None and self._solution is not None:
            self.state.waiting.plan = self._solution.result().to_json()
        analysis = None if self.analysis is None else self.analysis.to_json()
        return {**dataclasses.asdict(self.state), "analysis": analysis}

    def restore(self, state: CycleState, analysis: PrecisionPlan | None) -> None:
        """Go on from a checkpoint, as `read_cycle` gives it; putting its formats in force is left to the caller."""
        self.state, self.analysis = state, analysis

    def close(self) -> None:
        """Let the thread go; a plan that it still makes can be awaited."""
        self._solver.shutdown(wait=False)

    # -- between steps -------------------------------------------------------------------------

    def between_steps(self, step: int) -> None:
        """Switch, measure or probe before a step, whichever is due; another plan may then be in force.

        Args:
            step: number of those that were taken.
        """
        switches = self._switch_if_due(step)
        if self.state.must_measure(self.settings, step):
            self._measure(step)
            switches |= self._switch_if_due(step)
        every = self.settings.probe_every
        if self._is_guarded and every and step % every == 0 and not switches:
            self._judge(step, self._probed(step), None)

    def after_step(self, step: int, loss: float, norm: float, seconds: float) -> None:
        """Look at a step that was taken; another plan may then be in force.

        Args:
            step: of those before it.
            norm: of the gradient.
        """
        loss, norm, seconds = map(self._world.largest, (loss, norm, seconds))
        if self.times is not None and self.times.other is None:
            self.state.step_seconds = [*self.state.step_seconds, seconds][-guard.MIN_VALUES :]
        self.state.spent += self._low_share()
        sign = guard.sign_of_trouble(self.state.guard, step, loss, norm)
        if sign is None or not self._is_guarded:
            return
        if math.isfinite(loss + norm):
            self._judge(step + 1, self._probed(step), sign)
        else:
            self._promote(step + 1, sign)

    # -- measuring and switching ---------------------------------------------------------------

    def _measure(self, step: int) -> None:
        """Statistics now, a plan in the background."""
        began, delay = time.perf_counter(), self.settings.delay
        profile = self._model.measure(step, formats_to_measure(self.settings, self.state.recipes))
        self.measure_seconds = time.perf_counter() - began
        times = self._times_of_a_step(profile)
        state = dataclasses.replace(self.state, spent=self.state.spent + delay * self._low_share())
        if self.state.measure_from is not None and step >= self.state.measure_from:
            self.state.measure_from = None
        self.state.waiting = Waiting(step + delay)
        if self._world.is_writer:
            self._solution = self._solver.submit(self._solve, profile, state, step, times)

    def _times_of_a_step(self, profile: PrecisionProfile) -> StepTimes | None:
        """With the seconds beside the GEMMs; before any step has been timed they count as none, for this plan."""
        if self.times is None or self.times.other is not None:
            return self.times
        shapes = dict(zip(profile.layers, profile.shapes, strict=True))
        times = self.times.with_steps(self.state.step_seconds, shapes, self.state.recipes)
        if self.state.step_seconds:
            self.times, self.state.step_seconds = times, []
        return times

    def _solve(
        self, profile: PrecisionProfile, state: CycleState, step: int, times: StepTimes | None
    ) -> PrecisionPlan:
        question = ask(self.settings, profile, state, step, times)
        is_strict = self.settings.must_keep_budget and state.first_switch is None
        return (make_plan if is_strict else plan_or_nearest)(question, step=step + self.settings.delay)

    def _solved(self, waiting: Waiting) -> PrecisionPlan:
        """The writer's plan, on all ranks: what its solver found, when it is done, or its checkpoint held."""

        def solution() -> PrecisionPlan:
            if self._solution is not None:
                return self._solution.result()
            assert waiting.plan is not None  # a checkpoint holds it (see `read_cycle`)
            return PrecisionPlan.from_json(waiting.plan)

        return self._world.once(
            "solving for a plan", solution, write=PrecisionPlan.to_json, read=PrecisionPlan.from_json
        )

    def _switch_if_due(self, step: int) -> bool:
        waiting = self.state.waiting
        if waiting is None or step < waiting.at:
            return False
        began = time.perf_counter()
        found, self.state.waiting, self._solution = self._solved(waiting), None, None
        seconds = {
            "measure": self.measure_seconds,
            "solve": float(found.solver.get("seconds", 0.0)),
            "stall": time.perf_counter() - began,
        }
        self.analysis = dataclasses.replace(found, step=step + self.settings.counts_from, seconds=seconds)
        if self.settings.is_smoothed:
            layers = found.layers.values()
            self.state.previous = [
                [[*gemm.harm.values()] for gemm in layer.gemms.values()] for layer in layers
            ]
            self.state.previous_formats = list(found.formats)
        if self.state.first_switch is None:
            self.state.first_switch = step
        changed = self._go_on_with(recipes_in(found))
        doubt = None if self._probe is None else self._compare_with_prediction(step)
        self._model.tell(Switched(self.analysis, changed, doubt))
        return True

    def _go_on_with(self, recipes: Recipes) -> int:
        """Put formats in force; how many GEMMs changed."""
        assert self.analysis is not None
        none = ("", "", "")
        changed = sum(
            old != new
            for layer, row in recipes.items()
            for old, new in zip(self.state.recipes.get(layer, none), row, strict=True)
        )
        self.state.recipes = {**self.state.recipes, **recipes}
        self._model.put_in_force(self.state.recipes, self.analysis)
        return changed

    # -- evidence ------------------------------------------------------------------------------

    @property
    def _is_guarded(self) -> bool:
        """Whether there is a plan, and a way to compare it."""
        return self._probe is not None and self.state.first_switch is not None

    def _probed(self, step: int) -> Probe:
        assert self._probe is not None
        return Probe(**self._world.told(dataclasses.asdict(self._probe(step))))

    def _compare_with_prediction(self, step: int) -> str | None:
        """Measure what the newest plan was predicted to do; a doubt where that lies far off."""
        assert self.analysis is not None
        began = time.perf_counter()
        found = self._probed(step)
        seconds = self.analysis.seconds | {"probe": time.perf_counter() - began}
        self.analysis = dataclasses.replace(self.analysis, seconds=seconds)
        measured = {"loss_divergence": abs(found.loss_gap), "weight_divergence": found.update_change}
        if all(map(math.isfinite, measured.values())):
            self.analysis = dataclasses.replace(self.analysis, measured=measured)
        return guard.doubt(self.analysis, found.update_change)

    def _judge(self, step: int, found: Probe, sign: str | None) -> None:
        """Tell of a probe, which a sign of trouble asked for or the calendar, and promote if the plan is to blame."""
        blame, cause = guard.verdict(found), sign or "a regular probe"
        self._model.tell(Probed(found, f"{cause}: {blame or 'the plan is not to blame'}"))
        if blame is not None:
            self._promote(step, f"{cause}; {blame}")
        elif sign is not None:  # the same trouble would only ask again
            self.state.guard.rest_until = step + guard.REST_STEPS

    def _promote(self, step: int, reason: str) -> None:
        """Higher formats at once where they cost most; no plan for a while."""
        assert self.analysis is not None
        state = self.state.guard
        state.alarms, state.hold_until = state.alarms + 1, step + guard.HOLD_STEPS
        state.rest_until = step + guard.REST_STEPS
        self.state.waiting, self._solution = None, None
        promoted = guard.promote(
            self.state.recipes,
            harm_in(self.analysis, self.state.recipes),
            self._shares(),
            state.alarms,
            candidates=self.settings.formats,
            pinned=self.settings.pinned,
        )
        guard.learn(state, self.state.recipes, promoted)
        changed = self._go_on_with(promoted)
        self._model.tell(Promoted(changed, reason, state.alarms, state.hold_until))

    def _shares(self) -> dict[str, float]:
        """Each layer's share of FLOPs; empty before the first plan."""
        return (
            {} if self.analysis is None else {k: row.flops_share for k, row in self.analysis.layers.items()}
        )

    def _low_share(self) -> float:
        """Share of FLOPs in 4 bits, by the current plan."""
        return low_share(self.state.recipes, self._shares()) if self.state.first_switch is not None else 0.0

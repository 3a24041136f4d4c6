"""The cycle of precision in a loop that somebody else owns::

    cycle = LoopCycle(CycleSettings(budget=Budget(0.75), formats=("fp8", "nvfp4"), first=100, every=2000, delay=10))
    cycle.begin(model, optimizer, losses, steps=10_000)
    for step in range(1, 10_001):
        ...                                        the loop's own update
        cycle.after_update(step, recent_batches)   statistics and new formats, at the updates that are due

Statistics are taken after update `first`, then every `every`; `delay` updates later the new plan is in force.
With `to_state` in the loop's checkpoints a resumed run continues the same.

Ranks    All call everything alike, each with its own rows of the batches: the first solves, and tells the others
         (`scrimp.cycle`). The state of the first is the one to keep; it may be asked alone. Which ranks can be
         measured: `scrimp.measure`.
Limits   Nothing compares a plan with bf16, so none is promoted (`PrecisionCycle` without `probe`), and no budget is of
         seconds: what a plan does is proven in its first step alone.
Checked  tests/api/test_loop_cycle.py; in transformers' Trainer by tests/integrations/test_transformers_callback.py
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import nn

from scrimp.api.applied import planned_of, put_in_force
from scrimp.api.arguments import optimizer_from, view_of
from scrimp.api.modules import default_layers, named_layers, trained_by, unwrap
from scrimp.api.pytorch import Losses, apply, measure_accumulated, run_by
from scrimp.config.snip import POLICIES, is_policy
from scrimp.cycle import CycleSettings, Event, PrecisionCycle, Switched
from scrimp.cycle.guard import Recipes
from scrimp.cycle.question import recipes_in
from scrimp.cycle.state import read_cycle
from scrimp.errors import PlanError
from scrimp.gemm import LinearPrecision, PlannedModel
from scrimp.planner.precision import PrecisionPlan, PrecisionProfile
from scrimp.precision import GEMMS, HIGH_PRECISION, RECIPES, recipe
from scrimp.world import World

_log = logging.getLogger("scrimp")


class LoopCycle:
    """A model in a loop, as its cycle sees it (a `ModelInTraining`), and the cycle as the loop does.

    Attributes:
        planned: the model's planned layers; None while it has none.
        history: a record of each plan.
        figures: of the current plan, by name; whoever shows them may clear them.
    """

    def __init__(self, settings: CycleSettings) -> None:
        """Take settings; PlanError where they do not fit together."""
        _refuse_contradictions(settings)
        self.settings = settings
        self.planned: PlannedModel | None = None
        self.history: list[dict[str, Any]] = []
        self.figures: dict[str, float] = {}
        self._cycle: PrecisionCycle | None = None
        self._batches: Iterable[Any] = ()
        self._is_first_step = False
        """Whether no step has been taken yet by the current plan."""

    @property
    def plan(self) -> PrecisionPlan | None:
        """The current plan; None before the first."""
        return None if self._cycle is None else self._cycle.analysis

    # -- what the loop asks for ----------------------------------------------------------------

    def begin(
        self,
        model: nn.Module,
        optimizer: Any,
        losses: Losses,
        *,
        steps: int | None = None,
        max_norm: float = 0.0,
        saved: Mapping[str, Any] | None = None,
    ) -> None:
        """Take a model over, from the start or as `to_state` left it.

        Args:
            model: as the loop calls it, with its wrappers.
            losses: each micro-batch's share of the mean loss of a statistics batch.
            steps: updates of the whole run; None: not known.
            max_norm: what the loop clips the gradient's norm to; 0: it does not.
            saved: of `to_state`, in this version or an earlier one.

        Raises:
            ModelError, PlanError: what would stop the first measurement, as far as it can be seen now.
        """
        inner, settings = unwrap(model), dataclasses.replace(self.settings, steps=steps)
        view_of(optimizer_from(optimizer), inner, settings.sensitivity, 0.0)
        names = (
            default_layers(inner, trained_by(optimizer))
            if settings.layers is None
            else named_layers(inner, settings.layers)
        )
        self.settings, self.history, self.figures = settings, [], {}
        self._model, self._optimizer, self._losses, self._max_norm = model, optimizer, losses, max_norm
        self.planned = planned_of(inner)
        if settings.start is not None:
            start = dict.fromkeys(names, LinearPrecision.of(settings.start))
            self.planned = put_in_force(inner, start, seed=settings.seed)
        now = {} if self.planned is None else self.planned.layers
        recipes = {name: layer.precision.recipes for name, layer in now.items()}
        self._cycle = PrecisionCycle(settings, self, recipes, world=World.current())
        self._is_first_step = self.planned is not None
        if saved:
            self._restore(
                dict(saved if "recipes" in saved else _from_earlier_version(saved, recipes)), self._cycle
            )

    def measures_within(self, first: int, last: int) -> bool:
        """Whether statistics are due after one of these updates."""
        return any(self.settings.measures_at(step) for step in range(first, last + 1))

    def after_update(self, step: int, batches: Iterable[Any]) -> None:
        """Switch and measure, where this update is the one for it.

        Args:
            step: number of updates that were made.
            batches: statistics batches, read where statistics are due.
        """
        assert self._cycle is not None, "the cycle has not begun"
        self._look_at_proof()
        self._batches = batches
        self._cycle.between_steps(step)
        self._batches = ()

    def close(self) -> None:
        """Let the thread go; a plan that it still makes can be awaited."""
        if self._cycle is not None:
            self._cycle.close()

    def to_state(self) -> dict[str, Any]:
        """JSON values; waits for the solver, whose plan is part of them. Empty before `begin`.

        On several ranks those of the first are to be kept, and loaded by all.
        """
        if self._cycle is None:
            return {}
        clock = None if self.planned is None else list(self.planned.clock.now)
        seconds = self._cycle.measure_seconds
        return {
            **self._cycle.to_state(),
            "clock": clock,
            "history": list(self.history),
            "measure_seconds": seconds,
        }

    def _restore(self, saved: dict[str, Any], cycle: PrecisionCycle) -> None:
        clock, self.history = saved.pop("clock"), list(saved.pop("history"))
        cycle.measure_seconds = saved.pop("measure_seconds")
        cycle.restore(*read_cycle(saved))
        if cycle.analysis is not None:
            self.planned = apply(self._model, cycle.analysis, other_device=True, seed=self.settings.seed)
            self._is_first_step = True
        if clock is not None and self.planned is not None:
            self.planned.clock.begin(*clock)
            self.planned.clock.is_set = False  # it goes on ticking with every forward pass

    # -- what the cycle asks for ---------------------------------------------------------------

    def measure(self, step: int, formats: Sequence[str]) -> PrecisionProfile:
        """Statistics on the batches that the loop gives."""
        settings = self.settings
        return measure_accumulated(
            self._model,
            self._optimizer,
            self._batches,
            self._losses,
            formats=formats,
            layers=settings.layers if self.planned is None else None,
            gains=settings.gains,
            max_norm=self._max_norm,
            sensitivity=settings.sensitivity,
            seed=settings.seed + step,
        )

    def put_in_force(self, recipes: Recipes, analysis: PrecisionPlan) -> None:
        """Run by these formats from the next forward pass on."""
        precisions = {layer: LinearPrecision(*row, row[2]) for layer, row in recipes.items()}
        self.planned = run_by(unwrap(self._model), precisions, seed=self.settings.seed)
        self._is_first_step = True

    def tell(self, event: Event) -> None:
        """Keep the figures of a new plan."""
        if not isinstance(event, Switched):
            return
        plan = event.analysis
        figures = {name: float(value) for name, value in plan.predicted.items() if value is not None}
        figures |= {"plan_step": float(plan.step), "changed_gemms": float(event.changed)}
        figures |= {f"{name}_seconds": value for name, value in plan.seconds.items()}
        if plan.certainty is not None:
            figures["certainty"] = plan.certainty
        self.figures = figures
        self.history.append({"step": plan.step, "reason": plan.reason, **figures})

    def _look_at_proof(self) -> None:
        """After a plan's first step: how many GEMMs gave the numbers of their formats. One that did not has stopped the
        step; layers that ran nothing of their plan are named in a warning."""
        if not self._is_first_step or self.planned is None or self.planned.proof is None:
            return
        self._is_first_step = False
        proof, layers = self.planned.proof, self.planned.layers
        idle = [
            name
            for name, gemm in sorted(proof.pending)
            if gemm == "fprop"
            and (name, gemm) not in proof.seen
            and not all(layers[name].precision.gemm(each) in HIGH_PRECISION for each in GEMMS)
        ]
        if idle:
            _log.warning(
                "the plan says nothing of what these layers did in its first step, for they ran none of their planned "
                "GEMMs: %s",
                ", ".join(idle[:8]) + (", ..." if len(idle) > 8 else ""),
            )
        self.figures["proven_gemms"] = float(len(proof.proven))


def _from_earlier_version(saved: Mapping[str, Any], recipes: Recipes) -> dict[str, Any]:
    """An earlier version's state in today's form.

    Args:
        recipes: of the planned layers before the first plan.
    """
    plan = (
        None
        if saved["plan"] is None
        else PrecisionPlan.from_json(saved["plan"], origin="the checkpoint's plan")
    )
    return {
        "recipes": recipes if plan is None else recipes_in(plan),
        "first_switch": None if plan is None else plan.step,
        "waiting": None if saved["waiting"] is None else {"at": saved["switch_at"], "plan": saved["waiting"]},
        "analysis": saved["plan"],
        **{name: saved[name] for name in ("clock", "history", "measure_seconds")},
    }


def _refuse_contradictions(settings: CycleSettings) -> None:
    formats, budget, policy = settings.formats, settings.budget, settings.policy
    for name in ("every", "first", "batches"):
        if getattr(settings, name) < 1:
            raise PlanError(f"{name} is out of range", got=getattr(settings, name), expected="1 or more")
    if not 0 <= settings.delay < settings.every:
        raise PlanError(
            "a plan would not be in force before the next is measured",
            got=f"{settings.delay} updates from measuring to switching",
            expected=f"0 to {settings.every - 1}, fewer than every",
        )
    if budget.fp4_flops and min(recipe(name).bits for name in formats) > 4:
        raise PlanError(
            "no candidate has 4 bits, which the budget asks for",
            got=", ".join(formats),
            expected="such as fp8, nvfp4",
        )
    if budget.is_of_time:
        name, value = next(iter(budget.given.items()))
        raise PlanError(
            f"budget {name} needs measured times of the GEMMs, which this cycle has none of",
            got=f"{value:g}",
            expected="fp4_flops, saved_bytes or divergence",
        )
    if not is_policy(policy) or (policy in RECIPES and policy not in formats):
        raise PlanError(
            "there is no such policy",
            got=repr(policy),
            expected=", ".join((*POLICIES, *formats)),
            do="random takes a seed, as random:1",
        )
    if settings.start is not None:
        recipe(settings.start)

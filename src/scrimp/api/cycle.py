"""Re-planning in a loop that somebody else owns: measure, solve in a thread, switch at a fixed later update.

::

    update first, first + every, ...      statistics, after the update
    as many updates later as `delay`      the new plan is in force; waits for the solver where it is not done

Both are functions of the settings, never of how long something took. With `to_state` in the loop's checkpoints a
resumed run continues the same.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from torch import nn

from scrimp.api.applied import planned_of, put_in_force
from scrimp.api.arguments import optimizer_from, view_of
from scrimp.api.modules import default_layers, named_layers, trained_by
from scrimp.api.pytorch import Losses, apply, measure_accumulated, question_of
from scrimp.config.snip import POLICIES, is_policy
from scrimp.errors import PlanError
from scrimp.gemm import LinearPrecision, PlannedModel
from scrimp.planner.precision import Budget, PrecisionPlan, PrecisionProfile, make_plan, plan_or_nearest
from scrimp.precision import GEMMS, HIGH_PRECISION, RECIPES, recipe

_log = logging.getLogger("scrimp")


@dataclass(frozen=True)
class CycleSettings:
    """What a cycle is; steps are updates of the optimizer."""

    budget: Budget
    formats: tuple[str, ...]
    every: int
    first: int
    batches: int
    """Steps that statistics are of."""
    delay: int
    """Steps between statistics and the switch."""
    policy: str = "snip"
    start: str | None = None
    """Recipe before the first plan; None: the model as it is."""
    layers: tuple[str, ...] | None = None
    gains: str = "auto"
    sensitivity: str = "auto"
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuse what cannot be meant."""
        for name in ("every", "first", "batches"):
            if getattr(self, name) < 1:
                raise PlanError(f"{name} is out of range", got=getattr(self, name), expected="1 or more")
        if not 0 <= self.delay < self.every:
            raise PlanError(
                "a plan would not be in force before the next is measured",
                got=f"{self.delay} updates from measuring to switching",
                expected=f"0 to {self.every - 1}, fewer than every",
            )
        if self.budget.fp4_flops and min(recipe(name).bits for name in self.formats) > 4:
            raise PlanError(
                "no candidate has 4 bits, which the budget asks for",
                got=", ".join(self.formats),
                expected="such as fp8, nvfp4",
            )
        if self.budget.is_of_time:
            name, value = next(iter(self.budget.given.items()))
            raise PlanError(
                f"budget {name} needs measured times of the GEMMs, which this cycle has none of",
                got=f"{value:g}",
                expected="fp4_flops or divergence",
            )
        if not is_policy(self.policy) or (self.policy in RECIPES and self.policy not in self.formats):
            raise PlanError(
                "there is no such policy",
                got=repr(self.policy),
                expected=", ".join((*POLICIES, *self.formats)),
                do="random takes a seed, as random:1",
            )
        if self.start is not None:
            recipe(self.start)


class PlanCycle:
    """The cycle of one run.

    Attributes:
        plan: of now; None before the first.
        planned: the model's planned layers; None while it has none.
        history: a record of each plan.
    """

    def __init__(self, settings: CycleSettings) -> None:
        self.settings = settings
        self.plan: PrecisionPlan | None = None
        self.planned: PlannedModel | None = None
        self.history: list[dict[str, Any]] = []
        self._solver: ThreadPoolExecutor | None = None
        self._waiting: Future[PrecisionPlan] | PrecisionPlan | None = None
        self._switch_at: int | None = None
        self._measure_seconds = 0.0
        self._is_first_step = False
        """Whether no step has been taken yet by the plan of now."""

    def begin(self, model: nn.Module, optimizer: Any, saved: Mapping[str, Any] | None) -> None:
        """Take a model over, from the start or as `to_state` left it.

        Raises:
            ModelError, PlanError: what would stop the first measurement, as far as it can be seen now.
        """
        settings = self.settings
        view_of(optimizer_from(optimizer), model, settings.sensitivity, 0.0)
        names = (
            default_layers(model, trained_by(optimizer))
            if settings.layers is None
            else named_layers(model, settings.layers)
        )
        self.plan, self._waiting, self._switch_at, self.history = None, None, None, []
        self.planned = planned_of(model)
        if settings.start is not None:
            start = dict.fromkeys(names, LinearPrecision.of(settings.start))
            self.planned = put_in_force(model, start, seed=settings.seed)
        self._is_first_step = self.planned is not None
        if saved is not None:
            self._restore(saved, model)

    def next_measurement(self, step: int) -> int:
        """The first update from `step` on after which statistics are taken."""
        first, every = self.settings.first, self.settings.every
        return first + max(0, -(-(step - first) // every)) * every

    def measure(
        self,
        model: nn.Module,
        optimizer: Any,
        batches: Sequence[Any],
        losses: Losses,
        *,
        step: int,
        max_norm: float,
    ) -> None:
        """Statistics now, a plan in the background."""
        began, settings = time.perf_counter(), self.settings
        profile = measure_accumulated(
            model,
            optimizer,
            batches,
            losses,
            formats=settings.formats,
            layers=settings.layers if self.planned is None else None,
            gains=settings.gains,
            max_norm=max_norm,
            sensitivity=settings.sensitivity,
            seed=settings.seed + step,
        )
        self._measure_seconds = time.perf_counter() - began
        self._switch_at = step + settings.delay
        if self._solver is None:
            self._solver = ThreadPoolExecutor(1, thread_name_prefix="scrimp-solver")
        self._waiting = self._solver.submit(self._solve, profile, self.plan, self._switch_at)

    def _solve(self, profile: PrecisionProfile, current: PrecisionPlan | None, step: int) -> PrecisionPlan:
        question = question_of(profile, self.settings.budget, policy=self.settings.policy, current=current)
        # A budget that the first plan cannot keep was never possible: its user should hear so at once.
        return make_plan(question, step=step) if current is None else plan_or_nearest(question, step=step)

    def is_switch_due(self, step: int) -> bool:
        """Whether a plan begins after this update."""
        return self._switch_at == step

    def switch(self, model: nn.Module) -> dict[str, float]:
        """Run by the plan that waits; figures of it by name."""
        began = time.perf_counter()
        new = self._awaited()
        stall = time.perf_counter() - began
        self._waiting = self._switch_at = None
        solving = float(new.solver.get("seconds", 0.0))
        seconds = {"measure": self._measure_seconds, "solve": solving, "stall": stall}
        self.plan = dataclasses.replace(new, seconds=seconds)
        before = {} if self.planned is None else {k: v.precision for k, v in self.planned.layers.items()}
        self.planned = apply(model, self.plan, other_device=True, seed=self.settings.seed)
        self._is_first_step = True
        changed = sum(
            layer not in before or before[layer].gemm(gemm) != precision.gemm(gemm)
            for layer, precision in self.plan.precisions.items()
            for gemm in GEMMS
        )
        figures = {name: float(value) for name, value in new.predicted.items() if value is not None}
        figures |= {"plan_step": float(new.step), "changed_gemms": float(changed)}
        figures |= {f"{name}_seconds": value for name, value in seconds.items()}
        if new.certainty is not None:
            figures["certainty"] = new.certainty
        self.history.append({"step": new.step, "reason": new.reason, **figures})
        return figures

    def look_at_proof(self) -> dict[str, float]:
        """After a plan's first step: how many GEMMs gave the numbers of their formats. One that did not has stopped the
        step; layers that ran nothing of their plan are named in a warning."""
        if not self._is_first_step or self.planned is None or self.planned.proof is None:
            return {}
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
        return {"proven_gemms": float(len(proof.proven))}

    def close(self) -> None:
        """Let the thread go; a plan that it still makes can be awaited, and the next measurement starts another."""
        if self._solver is not None:
            self._solver.shutdown(wait=False)
            self._solver = None

    def _awaited(self) -> PrecisionPlan:
        assert self._waiting is not None
        return self._waiting.result() if isinstance(self._waiting, Future) else self._waiting

    # -- checkpoints ---------------------------------------------------------------------------

    def to_state(self) -> dict[str, Any]:
        """JSON values; waits for the solver, whose plan is part of it."""
        waiting = None if self._waiting is None else self._awaited()
        return {
            "plan": None if self.plan is None else self.plan.to_json(),
            "waiting": None if waiting is None else waiting.to_json(),
            "switch_at": self._switch_at,
            "measure_seconds": self._measure_seconds,
            "clock": None if self.planned is None else list(self.planned.clock.now),
            "history": list(self.history),
        }

    def _restore(self, saved: Mapping[str, Any], model: nn.Module) -> None:
        if saved["plan"] is not None:
            self.plan = PrecisionPlan.from_json(saved["plan"], origin="the checkpoint's plan")
            self.planned = apply(model, self.plan, other_device=True, seed=self.settings.seed)
            self._is_first_step = True
        if saved["waiting"] is not None:
            self._waiting = PrecisionPlan.from_json(saved["waiting"], origin="the checkpoint's next plan")
        self._switch_at, self.history = saved["switch_at"], list(saved["history"])
        self._measure_seconds = saved["measure_seconds"]
        if saved["clock"] is not None and self.planned is not None:
            clock = self.planned.clock
            clock.begin(*saved["clock"])
            clock.is_set = False  # it goes on ticking with every forward pass

"""The cycle by itself, of a model that is made up: when it measures, switches and promotes, and how it goes on."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Sequence
from typing import Any

import pytest
from profiles import profile

from scrimp.cycle import (
    CycleSettings,
    Event,
    PrecisionCycle,
    Probed,
    Promoted,
    Switched,
    precision_cycle,
)
from scrimp.cycle.guard import HOLD_STEPS, Recipes
from scrimp.cycle.state import read_cycle
from scrimp.errors import PlanError
from scrimp.planner.precision import Budget, PrecisionPlan, PrecisionProfile
from scrimp.statistics import Probe

LAYERS = tuple(f"blocks.{i}.layer" for i in range(4))
START: Recipes = dict.fromkeys(LAYERS, ("fp8", "fp8", "fp8"))
CALM = Probe(loss=2.0, loss_gap=0.0, gradient_cosine=1.0, gradient_to_noise=9.0, update_change=0.1)
BAD_AT = 17


class Model:
    """Statistics are a function of the step; one step is in trouble."""

    def __init__(self) -> None:
        self.now, self.measured, self.events = START, dict[int, tuple[str, ...]](), list[tuple[int, Event]]()
        self.step = 0

    def measure(self, step: int, formats: Sequence[str]) -> PrecisionProfile:
        self.measured[step] = tuple(formats)
        return profile(LAYERS, formats, seed=step, batches=2)

    def put_in_force(self, recipes: Recipes, analysis: PrecisionPlan) -> None:
        self.now = recipes

    def tell(self, event: Event) -> None:
        self.events.append((self.step, event))


def settings(**changes: Any) -> CycleSettings:
    given = {"first": 2, "every": 6, "delay": 3, "must_keep_budget": False, **changes}
    return CycleSettings(budget=Budget(fp4_flops=0.5), formats=("fp8", "nvfp4"), **given)


def run(model: Model, cycle: PrecisionCycle, steps: range) -> list[Recipes]:
    """The formats of each step."""
    found = []
    for step in steps:
        model.step = step
        cycle.between_steps(step)
        found.append(model.now)
        cycle.after_step(step, float("nan") if step == BAD_AT else 2.0, 1.0, 0.1)
    return found


def made(*, guarded: bool = False, **more: Any) -> tuple[Model, PrecisionCycle]:
    model = Model()
    return model, PrecisionCycle(
        settings(**more), model, START, probe=(lambda step: CALM) if guarded else None
    )


def steps_of(model: Model, kind: type) -> list[int]:
    return [step for step, event in model.events if isinstance(event, kind)]


@pytest.mark.parametrize("delay", [0, 1, 3, 6])
@pytest.mark.every(6)
def test_statistics_and_switches_are_at_their_steps(delay: int) -> None:
    model, cycle = made(delay=delay, steps=20)
    formats = run(model, cycle, range(20))
    at = [step for step in (2, 8, 14) if step + delay < 20]
    assert list(model.measured) == at
    assert steps_of(model, Switched) == [step + delay for step in at]
    assert formats[: 2 + delay] == [START] * (2 + delay)
    assert formats[2 + delay] != START


def test_what_is_in_force_is_measured_too_where_it_is_no_candidate() -> None:
    model = Model()
    started = dict.fromkeys(LAYERS, ("bf16", "bf16", "bf16"))
    run(model, PrecisionCycle(settings(), model, started), range(9))
    assert model.measured == {2: ("fp8", "nvfp4", "bf16"), 8: ("fp8", "nvfp4")}


@pytest.mark.slow
def test_the_step_of_a_switch_is_the_same_however_long_solving_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    model, cycle = made(delay=1)
    quick = run(model, cycle, range(6))
    ask = precision_cycle.ask

    def slow(*args: Any) -> Any:
        time.sleep(0.2)
        return ask(*args)

    monkeypatch.setattr(precision_cycle, "ask", slow)
    model, cycle = made(delay=1)
    assert run(model, cycle, range(6)) == quick
    assert cycle.analysis is not None
    assert cycle.analysis.seconds["stall"] > 0.1


@pytest.mark.parametrize("stops", [range(1, 24, 7), pytest.param(range(24), marks=pytest.mark.slow)])
@pytest.mark.parametrize("guarded", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.slow
def test_a_cycle_that_is_resumed_at_any_step_goes_on_the_same(guarded: bool, stops: range) -> None:
    more = {"guarded": guarded, "is_smoothed": guarded, "probe_every": 4, "steps": 24}
    whole_model, whole = made(**more)
    expected = run(whole_model, whole, range(24))
    for stop in stops:
        model, cycle = made(**more)
        formats = run(model, cycle, range(stop))
        saved = json.loads(json.dumps(cycle.to_state()))
        cycle.close()
        again = PrecisionCycle(cycle.settings, model, START, probe=cycle._probe)
        again.restore(*read_cycle(saved))
        assert formats + run(model, again, range(stop, 24)) == expected
        assert [kind for _, kind in map(_named, model.events)] == [
            k for _, k in map(_named, whole_model.events)
        ]
        assert {**again.to_state(), "analysis": None} == {**whole.to_state(), "analysis": None}


def _named(event: tuple[int, Event]) -> tuple[int, str]:
    return event[0], type(event[1]).__name__


@pytest.mark.slow
def test_a_step_that_is_not_finite_promotes_and_plans_pause() -> None:
    model, cycle = made(guarded=True, probe_every=4)
    formats = run(model, cycle, range(60))
    assert steps_of(model, Promoted) == [BAD_AT]
    assert formats[BAD_AT] != formats[BAD_AT + 1] == formats[-1]
    assert max(model.measured) < BAD_AT  # none until the pause is over
    assert cycle.state.guard.hold_until == BAD_AT + 1 + HOLD_STEPS
    assert set(steps_of(model, Probed)) == {step for step in range(6, 60) if step % 4 == 0}


@pytest.mark.slow
def test_without_a_probe_nothing_is_judged() -> None:
    model, cycle = made(probe_every=4, steps=20)
    run(model, cycle, range(20))
    assert {name for _, name in map(_named, model.events)} == {"Switched"}
    assert list(model.measured) == [2, 8, 14]


FIXED = {layer: dict.fromkeys(("fprop", "dgrad", "wgrad"), "fp8") for layer in LAYERS}
"""That leave no GEMM to four bits."""


def test_a_first_plan_out_of_reach_is_an_error_where_it_must_keep_the_budget() -> None:
    model, cycle = made(pinned=FIXED, must_keep_budget=True)
    with pytest.raises(PlanError, match="FLOPs in 4 bits"):
        run(model, cycle, range(6))


@pytest.mark.parametrize("is_strict", [True, False])
def test_a_later_plan_out_of_reach_is_the_nearest_and_says_so(is_strict: bool) -> None:
    model, cycle = made(must_keep_budget=is_strict)
    run(model, cycle, range(6))
    cycle.settings = dataclasses.replace(cycle.settings, pinned=FIXED)
    assert run(model, cycle, range(6, 12))[-1] == START
    assert cycle.analysis is not None
    assert "the lowest plan" in cycle.analysis.reason


def test_a_first_plan_out_of_reach_may_be_the_nearest() -> None:
    model, cycle = made(pinned=FIXED)
    assert run(model, cycle, range(6))[-1] == START

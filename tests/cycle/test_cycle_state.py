"""How a cycle goes on from a checkpoint: when it measures again."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scrimp.cycle import CycleSettings
from scrimp.cycle.guard import GuardState
from scrimp.cycle.state import TIMED_STEPS, CycleState, Waiting, read_cycle
from scrimp.errors import CheckpointError
from scrimp.planner.precision import Budget

SETTINGS = CycleSettings(
    budget=Budget(fp4_flops=0.75), formats=("fp8", "nvfp4"), first=4, every=20, delay=3, steps=60
)


def state(**changes: Any) -> CycleState:
    return CycleState({"blocks.0.mlp.down": ("fp8", "nvfp4", "bf16")}, **{"first_switch": 7, **changes})


def measurements(of: CycleState, step: int) -> list[int]:
    """Steps at which a run that goes on measures, as the cycle does: a plan waits `delay` steps for its switch."""
    found = []
    for at in range(step, 60):
        if of.waiting is not None and at >= of.waiting.at:
            of.waiting = None
        if of.must_measure(SETTINGS, at):
            found.append(at)
            if of.measure_from is not None and at >= of.measure_from:
                of.measure_from = None
            of.waiting = Waiting(at + 3)
    return found


def test_a_run_that_stays_on_its_device_measures_by_the_calendar() -> None:
    assert measurements(state(), 0) == [at for at in range(60) if SETTINGS.measures_at(at)] == [4, 24, 44]


@given(
    st.integers(0, 59),
    st.one_of(st.none(), st.integers(0, 3)),
    st.one_of(st.just(0), st.integers(0, 60)),
    st.booleans(),
)
def test_the_step_that_a_moved_run_names_is_the_one_that_it_measures_at(
    step: int, waits: int | None, hold: int, in_seconds: bool
) -> None:
    waiting = None if waits is None else Waiting(step + waits, "{}")
    moved = state(waiting=waiting, guard=GuardState(hold_until=hold))
    said = moved.move(SETTINGS, step, "an A", "a B", in_seconds=in_seconds)
    found = measurements(moved, step)
    assert said.startswith("the plan was made on an A; this is a B: ")
    assert said.endswith(f"measured anew at step {found[0]}" if found else "its formats stay")


def test_a_budget_in_seconds_is_planned_anew_as_soon_as_steps_were_timed_here() -> None:
    moved = state(step_seconds=[1.0, 2.0])
    moved.move(SETTINGS, 10, "an A", "a B", in_seconds=True)
    assert moved.step_seconds == []
    assert measurements(moved, 10) == [10 + TIMED_STEPS, 24, 44]


def test_other_budgets_wait_for_the_calendar() -> None:
    moved = state(step_seconds=[1.0, 2.0])
    moved.move(SETTINGS, 10, "an A", "a B", in_seconds=False)
    assert measurements(moved, 10) == [24, 44]
    assert moved.step_seconds == [1.0, 2.0]


def test_a_run_that_moves_before_its_first_plan_says_so() -> None:
    moved = state(first_switch=None)
    said = moved.move(SETTINGS, 2, "an A", "a B", in_seconds=True)
    assert said == "the run began on an A; this is a B: measured anew at step 4"


def test_a_plan_that_would_begin_after_the_end_is_not_measured() -> None:
    assert [at for at in range(60) if dataclasses.replace(SETTINGS, steps=47).measures_at(at)] == [4, 24]
    assert [at for at in range(60) if dataclasses.replace(SETTINGS, steps=48).measures_at(at)] == [4, 24, 44]
    moved = state(measure_from=58)
    assert not moved.must_measure(SETTINGS, 58)


def test_a_checkpoint_holds_all_of_it() -> None:
    made = state(
        first_switch=None, guard=GuardState(alarms=1, penalties={"blocks.0.mlp.down": [4.0, 1.0, 1.0]})
    )
    saved = {**dataclasses.asdict(made), "analysis": None}
    assert read_cycle(json.loads(json.dumps(saved))) == (made, None)


def test_a_checkpoint_of_before_moves_were_noticed_can_be_read() -> None:
    saved = dataclasses.asdict(state(first_switch=None))
    del saved["measure_from"]
    assert read_cycle(saved) == (state(first_switch=None), None)


def test_a_plan_in_force_that_is_missing_is_refused() -> None:
    with pytest.raises(CheckpointError, match="first_switch without a plan"):
        read_cycle(dataclasses.asdict(state(first_switch=3)))

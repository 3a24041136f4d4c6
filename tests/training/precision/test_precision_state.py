"""How a run of planned precision goes on: when it measures again, and what of its plan it keeps."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scrimp.config import Config, SnipConfig, TrainConfig, preset, resolve
from scrimp.planner import Figures, Plan
from scrimp.training.precision.guard import GuardState
from scrimp.training.precision.question import is_due
from scrimp.training.precision.state import TIMED_STEPS, CycleState, Waiting, carried_on
from scrimp.training.setup import decide

SNIP = SnipConfig(first=4, every=20, delay=3, start="fp8")
GIVEN = Config(precision="snip", train=TrainConfig(steps=60), snip=SNIP)
CONFIG = resolve(GIVEN, preset("llama-3m"), device_type="cpu").config


def state(**changes: Any) -> CycleState:
    return CycleState({"blocks.0.mlp.down": ("fp8", "nvfp4", "bf16")}, **{"first_switch": 7, **changes})


def measurements(of: CycleState, step: int) -> list[int]:
    """Steps at which a run that goes on measures, as the cycle does: a plan waits `delay` steps for its switch."""
    found = []
    for at in range(step, CONFIG.train.steps):
        if of.waiting is not None and at >= of.waiting.at:
            of.waiting = None
        if of.must_measure(CONFIG, at):
            found.append(at)
            if of.measure_from is not None and at >= of.measure_from:
                of.measure_from = None
            of.waiting = Waiting(at + 3)
    return found


def test_a_run_that_stays_on_its_device_measures_by_the_calendar() -> None:
    assert measurements(state(), 0) == [at for at in range(60) if is_due(CONFIG, at)] == [4, 24, 44]


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
    said = moved.move(CONFIG, step, "an A", "a B", in_seconds=in_seconds)
    found = measurements(moved, step)
    assert said.startswith("the plan was made on an A; this is a B: ")
    assert said.endswith(f"measured anew at step {found[0]}" if found else "its formats stay")


def test_a_budget_in_seconds_is_planned_anew_as_soon_as_steps_were_timed_here() -> None:
    moved = state(step_seconds=[1.0, 2.0])
    moved.move(CONFIG, 10, "an A", "a B", in_seconds=True)
    assert moved.step_seconds == []
    assert measurements(moved, 10) == [10 + TIMED_STEPS, 24, 44]


def test_other_budgets_wait_for_the_calendar() -> None:
    moved = state(step_seconds=[1.0, 2.0])
    moved.move(CONFIG, 10, "an A", "a B", in_seconds=False)
    assert measurements(moved, 10) == [24, 44]
    assert moved.step_seconds == [1.0, 2.0]


def test_a_run_that_moves_before_its_first_plan_says_so() -> None:
    moved = state(first_switch=None)
    said = moved.move(CONFIG, 2, "an A", "a B", in_seconds=True)
    assert said == "the run began on an A; this is a B: measured anew at step 4"


def test_a_checkpoint_holds_all_of_it() -> None:
    made = state(
        measure_from=20, guard=GuardState(alarms=1, penalties={"blocks.0.mlp.down": [4.0, 1.0, 1.0]})
    )
    assert CycleState.from_json(json.loads(json.dumps(dataclasses.asdict(made)))) == made


def test_a_checkpoint_of_before_moves_were_noticed_can_be_read() -> None:
    saved = dataclasses.asdict(state())
    del saved["measure_from"]
    assert CycleState.from_json(saved) == state()


@pytest.fixture(scope="module")
def here() -> Plan:
    plan = decide(dataclasses.replace(CONFIG, device="cpu")).plan
    return dataclasses.replace(plan, predicted=dataclasses.replace(plan.predicted, peak_device_bytes=11))


def elsewhere(here: Plan, device: str) -> Plan:
    """As a checkpoint has it: other formats and other figures."""
    choice = dataclasses.replace(here.gemms["blocks.0.mlp.down"], fprop="nvfp4", reason="snip")
    return dataclasses.replace(
        here,
        fingerprint=dataclasses.replace(here.fingerprint, device=device),
        gemms={**here.gemms, "blocks.0.mlp.down": choice},
        predicted=Figures(peak_device_bytes=22, loss_divergence=0.1, weight_divergence=0.2),
        measured=Figures(step_seconds=3.0),
    )


def test_formats_and_their_harm_are_the_checkpoints_and_memory_is_that_of_here(here: Plan) -> None:
    saved = elsewhere(here, here.fingerprint.device)
    found = carried_on(here, saved)
    assert found.gemms == saved.gemms
    assert (found.predicted.loss_divergence, found.predicted.weight_divergence) == (0.1, 0.2)
    assert found.predicted.peak_device_bytes == 11
    assert (found.blocks, found.states) == (here.blocks, here.states)
    assert found.measured == saved.measured


def test_what_was_measured_on_another_device_is_no_figure_of_this_one(here: Plan) -> None:
    found = carried_on(here, elsewhere(here, "another device"))
    assert found.fingerprint == here.fingerprint
    assert found.measured is None


def test_a_finished_run_keeps_the_device_that_its_steps_ran_on(here: Plan) -> None:
    saved = elsewhere(here, "another device")
    found = carried_on(here, saved, trains=False)
    assert (found.fingerprint, found.measured) == (saved.fingerprint, saved.measured)

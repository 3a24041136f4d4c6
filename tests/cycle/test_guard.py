"""Signs of trouble, evidence, promotion."""

from __future__ import annotations

import math

import pytest

from scrimp.cycle.guard import (
    MIN_VALUES,
    PENALTY,
    WINDOW,
    GuardState,
    doubt,
    learn,
    promote,
    sign_of_trouble,
    verdict,
)
from scrimp.planner.precision import PrecisionPlan
from scrimp.precision import RECIPES
from scrimp.statistics import Probe

CALM = [(2.0 + 0.01 * (i % 5), 1.0 + 0.1 * (i % 3)) for i in range(WINDOW)]


def after(steps: list[tuple[float, float]]) -> GuardState:
    state = GuardState()
    for step, (loss, norm) in enumerate(steps):
        assert sign_of_trouble(state, step, loss, norm) is None
    return state


def probe(**changes: float) -> Probe:
    figures = {
        "loss": 2.0,
        "loss_gap": 0.001,
        "gradient_cosine": 0.99,
        "gradient_to_noise": 8.0,
        "update_change": 0.1,
    }
    return Probe(**(figures | changes))


def test_calm_steps_are_no_sign_and_the_window_does_not_grow() -> None:
    state = after(CALM * 2)
    assert len(state.losses) == len(state.norms) == WINDOW


@pytest.mark.parametrize(
    ("loss", "norm", "says"),
    [
        (3.0, 1.0, "loss 3"),
        (2.02, 5.0, "gradient norm 5"),
        (math.nan, 1.0, "loss nan"),
        (2.0, math.inf, "norm inf"),
    ],
)
def test_outliers_and_numbers_that_are_none_are_signs(loss: float, norm: float, says: str) -> None:
    sentence = sign_of_trouble(after(CALM), WINDOW, loss, norm)
    assert sentence is not None
    assert says in sentence


def test_too_few_steps_say_nothing() -> None:
    assert sign_of_trouble(after(CALM[: MIN_VALUES - 1]), MIN_VALUES, 9.0, 9.0) is None


def test_a_sign_that_a_probe_did_not_confirm_is_not_looked_at_again_at_once() -> None:
    state = after(CALM)
    state.rest_until = WINDOW + 10
    assert sign_of_trouble(state, WINDOW + 9, 9.0, 9.0) is None


def test_steps_that_were_not_finite_do_not_enter_the_window() -> None:
    state = after(CALM)
    sign_of_trouble(state, WINDOW, math.nan, math.nan)
    assert all(map(math.isfinite, state.losses + state.norms))


@pytest.mark.parametrize(
    ("changes", "blamed"),
    [
        ({}, False),
        ({"loss_gap": 0.03}, True),
        ({"loss_gap": -0.03}, False),
        ({"gradient_to_noise": 0.4}, True),
        ({"loss_gap": math.nan}, True),
        ({"loss": math.nan, "loss_gap": math.nan}, False),
    ],
)
def test_the_plan_is_blamed_on_evidence_only(changes: dict[str, float], blamed: bool) -> None:
    assert (verdict(probe(**changes)) is not None) == blamed


CANDIDATES = ("fp8", "nvfp4")
PLAN = {"a": ("nvfp4", "nvfp4", "fp8"), "b": ("nvfp4", "fp8", "nvfp4")}
SHARES = {"a": 0.5, "b": 0.5}
HARM = {"a": (0.1, 0.9, 0.2), "b": (0.3, 0.0, 0.4)}


def test_the_first_alarm_promotes_the_costliest_by_one_format() -> None:
    promoted = promote(PLAN, HARM, SHARES, alarms=1, candidates=CANDIDATES)
    assert promoted["a"] == ("nvfp4", "fp8", "fp8")  # a sixth of the FLOPs, more than a tenth
    assert promoted["b"] == PLAN["b"]


def test_what_has_eight_bits_goes_to_sixteen() -> None:
    harm = {"a": (0.0, 0.0, 5.0), "b": (0.0, 0.0, 0.0)}
    assert promote(PLAN, harm, SHARES, alarms=1, candidates=CANDIDATES)["a"] == ("nvfp4", "nvfp4", "bf16")


def test_later_alarms_leave_no_four_bits_and_then_nothing_quantized() -> None:
    second = promote(PLAN, HARM, SHARES, alarms=2, candidates=CANDIDATES)
    assert min(RECIPES[name].bits for row in second.values() for name in row) == 8
    assert set(promote(PLAN, HARM, SHARES, alarms=3, candidates=CANDIDATES).values()) == {
        ("bf16", "bf16", "bf16")
    }


def test_a_plan_of_four_bits_alone_is_promoted_to_fp8() -> None:
    assert promote({"a": ("nvfp4",) * 3}, {}, {"a": 1.0}, alarms=2, candidates=CANDIDATES) == {
        "a": ("fp8", "fp8", "fp8")
    }


@pytest.mark.parametrize("alarms", [1, 2, 3])
def test_gemms_that_a_rule_fixes_are_left_alone_and_the_others_of_their_layers_are_not(alarms: int) -> None:
    pinned = {layer: {"fprop": "nvfp4"} for layer in PLAN}
    promoted = promote(PLAN, HARM, SHARES, alarms, candidates=CANDIDATES, pinned=pinned)
    assert {row[0] for row in promoted.values()} == {"nvfp4"}
    assert promoted["a"][1] in ("fp8", "bf16")


def test_a_plan_that_rules_fix_as_a_whole_stays() -> None:
    pinned = {layer: dict.fromkeys(("fprop", "dgrad", "wgrad"), "nvfp4") for layer in PLAN}
    assert promote(PLAN, HARM, SHARES, 3, candidates=CANDIDATES, pinned=pinned) == PLAN
    assert promote({}, {}, {}, 1, candidates=CANDIDATES) == {}


def test_four_bits_go_up_to_candidates_only() -> None:
    four = {"a": ("nvfp4", "nvfp4", "nvfp4")}
    for alarms, name in ((1, "mxfp8"), (2, "bf16")):
        promoted = promote(four, {}, {"a": 1.0}, alarms, candidates=("bf16", "mxfp8", "nvfp4"))
        assert promoted["a"][0] == name
    assert promote(four, {}, {"a": 1.0}, 2, candidates=("nvfp4", "mxfp4"))["a"][0] == "bf16"


def test_promoted_gemms_count_as_costlier_each_time() -> None:
    state = GuardState()
    learn(state, PLAN, promote(PLAN, HARM, SHARES, alarms=1, candidates=CANDIDATES))
    assert state.penalties == {"a": [1.0, PENALTY, 1.0]}
    learn(state, PLAN, promote(PLAN, HARM, SHARES, alarms=1, candidates=CANDIDATES))
    assert state.penalties["a"] == [1.0, PENALTY**2, 1.0]


def plan_with(predicted: float | None, interval: list[float] | None, batches: int) -> PrecisionPlan:
    return PrecisionPlan(
        model="m",
        device="d",
        policy="snip",
        formats=("fp8", "nvfp4"),
        budget={},
        layers={},
        predicted={"weight_divergence": predicted},
        batches=batches,
        intervals={} if interval is None else {"weight_divergence": interval},
    )


def test_a_divergence_far_from_the_predicted_one_is_doubted_on_both_sides() -> None:
    found = plan_with(0.1, [0.05, 0.2], 3)  # of one batch: four times as wide, for 3 + 1 is 2 squared
    assert doubt(found, 0.1 / 4 * 1.01) is None
    assert doubt(found, 0.1 * 4 * 0.99) is None
    assert "far below the 0.1 predicted (0.025 to 0.4 for one batch)" in str(doubt(found, 0.1 / 4 * 0.99))
    assert "far above the 0.1 predicted" in str(doubt(found, 0.1 * 4 * 1.01))


def test_without_an_interval_only_a_plan_that_changes_nothing_is_doubted() -> None:
    found = plan_with(0.1, None, 1)
    assert doubt(found, 1e-6) is None
    assert "the same in bf16" in str(doubt(found, 0.0))
    assert doubt(plan_with(0.0, [0.0, 0.0], 2), 0.0) is None
    assert doubt(plan_with(None, None, 2), 0.0) is None

"""The plan of a run with other formats, and what a resumed run keeps of its checkpoint's plan."""

from __future__ import annotations

import dataclasses

import pytest
from profiles import profile

from scrimp.config import Config, TrainConfig
from scrimp.cycle.question import recipes_in
from scrimp.planner import Figures, Plan
from scrimp.planner.precision import Budget, Question, make_plan
from scrimp.training.precision.formats_in_plan import carried_on, divergences_of
from scrimp.training.setup import decide


def test_predictions_follow_promoted_formats() -> None:
    """A root of a sum of squares over GEMMs: what the planner itself predicts of the same choice."""
    question = Question(profile(6, ("bf16", "fp8", "nvfp4")), Budget(fp4_flops=1.0))
    analysis = make_plan(question)
    safe = dict.fromkeys(question.profile.layers, ("fp8", "fp8", "fp8"))
    expected = make_plan(dataclasses.replace(question, budget=Budget(fp4_flops=0.0), policy="fp8")).predicted
    names = ("loss_divergence", "weight_divergence")
    assert divergences_of(analysis, safe) == pytest.approx([expected[name] for name in names])
    assert divergences_of(analysis, recipes_in(analysis)) == tuple(analysis.predicted[name] for name in names)


@pytest.fixture(scope="module")
def here() -> Plan:
    plan = decide(Config(precision="snip", train=TrainConfig(steps=60), device="cpu")).plan
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


@pytest.mark.slow
def test_formats_and_their_harm_are_the_checkpoints_and_memory_is_that_of_here(here: Plan) -> None:
    saved = elsewhere(here, here.fingerprint.device)
    found = carried_on(here, saved)
    assert found.gemms == saved.gemms
    assert (found.predicted.loss_divergence, found.predicted.weight_divergence) == (0.1, 0.2)
    assert found.predicted.peak_device_bytes == 11
    assert (found.blocks, found.states) == (here.blocks, here.states)
    assert found.measured == saved.measured


@pytest.mark.slow
def test_what_was_measured_on_another_device_is_no_figure_of_this_one(here: Plan) -> None:
    found = carried_on(here, elsewhere(here, "another device"))
    assert found.fingerprint == here.fingerprint
    assert found.measured is None


@pytest.mark.slow
def test_a_finished_run_keeps_the_device_that_its_steps_ran_on(here: Plan) -> None:
    saved = elsewhere(here, "another device")
    found = carried_on(here, saved, trains=False)
    assert (found.fingerprint, found.measured) == (saved.fingerprint, saved.measured)

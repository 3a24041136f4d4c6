"""From settings, statistics and the state of a run to what the planner is asked."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from profiles import profile

from scrimp.config import Config, preset, replace_values, resolve
from scrimp.cycle import CycleSettings
from scrimp.cycle.question import ask
from scrimp.cycle.state import CycleState
from scrimp.cycle.step_times import StepTimes
from scrimp.planner.precision import Budget, PrecisionProfile, Question, Weights, choose, make_plan
from scrimp.precision import GEMMS
from scrimp.profiler.gemm_times import GemmTimes

FORMATS = ("fp8", "nvfp4")
MADE = profile(6, FORMATS)
RECIPES = dict.fromkeys(MADE.layers, ("fp8", "fp8", "fp8"))


def settings(**changes: Any) -> CycleSettings:
    given = {
        "budget": Budget(fp4_flops=0.5),
        "formats": FORMATS,
        **changes,
    }
    return CycleSettings(**given, first=0, every=10, delay=1, steps=100, is_smoothed=True)


def asked(found: PrecisionProfile = MADE, previous: Any = None, **changes: Any) -> Question:
    state = CycleState(RECIPES, previous=previous, previous_formats=list(FORMATS))
    return ask(settings(**changes), found, state, 0)


@pytest.mark.parametrize("policy", ["random:1", "min-abs-err", "min-rel-err", "snip-paper"])
def test_baselines_are_not_smoothed_with_the_harm_that_snip_sees(policy: str) -> None:
    harm = np.random.default_rng(0).uniform(size=(6, 3, 2)).tolist()
    plain, again = asked(policy=policy), asked(policy=policy, previous=harm)
    np.testing.assert_array_equal(choose(plain).costs, choose(again).costs)
    assert asked(previous=harm).previous is not None


def test_phases_of_a_budget_that_nothing_keeps_are_left_to_the_solver_to_refuse() -> None:
    """Statistics that are no numbers keep a layer out of four bits: known only in the middle of a run."""
    made = profile(6, FORMATS)
    made.batches[0].x[:5] = np.nan
    assert asked(made, final_share=0.2).budget == Budget(fp4_flops=0.5)


@pytest.mark.parametrize(
    "budget",
    [{"speedup": 2.0}, {"step_seconds": 0.5}, {"divergence": 0.1}, {"fp4_flops": 0.3}, {"saved_bytes": 0.6}],
)
def test_the_planner_is_asked_for_the_users_own_budget(budget: dict[str, float]) -> None:
    rows = {gemm: {"bf16": 4e-3, "fp8": 2e-3, "nvfp4": 1e-3} for gemm in GEMMS}
    times = StepTimes(GemmTimes("device", 128, dict.fromkeys(MADE.shapes, rows)), 1, other=0.01)
    asked_for = settings(budget=Budget(**budget), weights=Weights(update=3.0))
    question = ask(asked_for, MADE, CycleState(RECIPES), 0, times)
    plan = make_plan(question)
    assert plan.budget == budget
    ends = {"speedup": (0.01 + 18 * 4e-3) / 2, "step_seconds": 0.5}
    assert plan.predicted["step_seconds"] <= ends.get(next(iter(budget)), 1.0) + 1e-9
    assert plan.predicted["step_seconds"] >= 0.01 + 18 * 1e-3 - 1e-9


def test_each_rank_of_a_pipeline_keeps_a_budget_of_flops_by_itself() -> None:
    stages = {layer: number % 2 for number, layer in enumerate(MADE.layers)}
    plan = make_plan(asked(stages=stages))
    for stage in (0, 1):
        own = [layer for layer, number in stages.items() if number == stage]
        flops = {layer: plan.layers[layer].flops_share for layer in own}
        low = {layer: plan.precisions[layer].recipes.count("nvfp4") / 3 for layer in own}
        assert sum(flops[layer] * low[layer] for layer in own) >= 0.5 * sum(flops.values()) - 1e-9


def test_the_layers_of_a_pipeline_belong_to_the_ranks_that_hold_their_blocks() -> None:
    config = replace_values(Config(), {"data.tokenizer": "bytes", "precision": "snip", "train.sequence": 64})
    found = resolve(config, preset("llama-3m"), device_type="cpu").config
    layout = dataclasses.replace(found.layout, pp=2, virtual=2, schedule="interleaved")
    layers = dict.fromkeys(
        [f"blocks.{number}.mlp.down" for number in range(preset("llama-3m").num_layers)], "made"
    )
    assert not CycleSettings.of_run(found, layers).stages
    stages = CycleSettings.of_run(dataclasses.replace(found, layout=layout), layers).stages
    assert list(stages.values()) == [0, 0, 1, 0, 1]  # of five blocks the first of four stages has two

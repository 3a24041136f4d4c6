"""From settings, statistics and the state of a run to what the planner is asked."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from profiles import profile

from scrimp.config import BudgetConfig, Config, ResolvedConfig, SnipConfig, TrainConfig, preset, resolve
from scrimp.planner.precision import Budget, PrecisionProfile, Question, choose, make_plan
from scrimp.precision import GEMMS
from scrimp.profiler.gemm_times import GemmTimes
from scrimp.training.precision.gemm_seconds import StepTimes
from scrimp.training.precision.question import Horizon, ask, divergences_of, recipes_in

FORMATS = ("fp8", "nvfp4")
MADE = profile(6, FORMATS)
RECIPES = dict.fromkeys(MADE.layers, ("fp8", "fp8", "fp8"))


def resolved(budget: BudgetConfig, snip: SnipConfig) -> ResolvedConfig:
    config = Config(precision="snip", train=TrainConfig(steps=100), budget=budget, snip=snip)
    return resolve(config, preset("llama-3m"), device_type="cpu").config


def asked(found: PrecisionProfile = MADE, previous: object = None, **snip: object) -> Question:
    settings = {"formats": "fp8,nvfp4", "start": "fp8", "first": 0, "every": 10, "delay": 1, **snip}
    config = resolved(BudgetConfig(fp4_flops=0.5), SnipConfig(**settings))  # type: ignore[arg-type]
    return ask(config, found, Horizon(0, None, 0.0), {}, RECIPES, previous, {})  # type: ignore[arg-type]


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


def test_predictions_follow_promoted_formats() -> None:
    """A root of a sum of squares over GEMMs: what the planner itself predicts of the same choice."""
    question = Question(profile(6, ("bf16", "fp8", "nvfp4")), Budget(fp4_flops=1.0))
    analysis = make_plan(question)
    safe = dict.fromkeys(question.profile.layers, ("fp8", "fp8", "fp8"))
    expected = make_plan(dataclasses.replace(question, budget=Budget(fp4_flops=0.0), policy="fp8")).predicted
    names = ("loss_divergence", "weight_divergence")
    assert divergences_of(analysis, safe) == pytest.approx([expected[name] for name in names])
    assert divergences_of(analysis, recipes_in(analysis)) == tuple(analysis.predicted[name] for name in names)


@pytest.mark.parametrize(
    "budget", [{"speedup": 2.0}, {"step_seconds": 0.5}, {"divergence": 0.1}, {"fp4_flops": 0.3}]
)
def test_the_planner_is_asked_for_the_users_own_budget(budget: dict[str, float]) -> None:
    snip = SnipConfig(formats="fp8,nvfp4", start="fp8", first=0, every=10, delay=1, update_weight=3.0)
    config = resolved(BudgetConfig(**budget), snip)
    rows = {gemm: {"bf16": 4e-3, "fp8": 2e-3, "nvfp4": 1e-3} for gemm in GEMMS}
    times = StepTimes(GemmTimes("device", 128, dict.fromkeys(MADE.shapes, rows)), 1, other=0.01)
    question = ask(config, MADE, Horizon(0, None, 0.0), {}, RECIPES, None, {}, times)
    plan = make_plan(question)
    assert plan.budget == budget
    ends = {"speedup": (0.01 + 18 * 4e-3) / 2, "step_seconds": 0.5}
    assert plan.predicted["step_seconds"] <= ends.get(next(iter(budget)), 1.0) + 1e-9
    assert plan.predicted["step_seconds"] >= 0.01 + 18 * 1e-3 - 1e-9

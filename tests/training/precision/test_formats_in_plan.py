"""The plan of a run with other formats."""

from __future__ import annotations

import dataclasses

import pytest
from profiles import profile

from scrimp.cycle.question import recipes_in
from scrimp.planner.precision import Budget, Question, make_plan
from scrimp.training.precision.formats_in_plan import divergences_of


def test_predictions_follow_promoted_formats() -> None:
    """A root of a sum of squares over GEMMs: what the planner itself predicts of the same choice."""
    question = Question(profile(6, ("bf16", "fp8", "nvfp4")), Budget(fp4_flops=1.0))
    analysis = make_plan(question)
    safe = dict.fromkeys(question.profile.layers, ("fp8", "fp8", "fp8"))
    expected = make_plan(dataclasses.replace(question, budget=Budget(fp4_flops=0.0), policy="fp8")).predicted
    names = ("loss_divergence", "weight_divergence")
    assert divergences_of(analysis, safe) == pytest.approx([expected[name] for name in names])
    assert divergences_of(analysis, recipes_in(analysis)) == tuple(analysis.predicted[name] for name in names)

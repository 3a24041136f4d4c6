"""In the middle of a run the nearest plan, with the reason, is better than none.

A budget that could be kept at the start can get out of reach: penalties after a promotion, times measured anew, a pool
of FLOPs that is spent. Before a run an impossible budget is refused; in its middle the run goes on by the
plan that comes nearest, which says so. Policy and budget in it stay those that were asked for.

Checked  tests/planner/precision/test_nearest.py
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np
from numpy.typing import NDArray

from scrimp.errors import PlanError
from scrimp.planner.precision.analysed import PrecisionPlan, make_plan
from scrimp.planner.precision.budget import Budget
from scrimp.planner.precision.choose import (
    Question,
    allowed_in,
    by_decision,
    menu_of,
    without_statistics,
)
from scrimp.planner.precision.kept_inputs import kept_bytes
from scrimp.planner.precision.policies import extremes
from scrimp.precision import RECIPES


def plan_or_nearest(question: Question, *, step: int) -> PrecisionPlan:
    """A plan by the question, or where its budget cannot be kept the nearest, with the refusal as its reason."""
    try:
        return make_plan(question, step=step)
    except PlanError as error:
        nearest, name = nearest_to(question)
        if without_statistics(question):
            name = "nearest"  # what keeps it from the lowest, or the fastest, is that nothing is known
        return dataclasses.replace(
            make_plan(nearest, step=step),
            policy=question.policy,
            budget=question.budget.given,
            reason=f"the {name} plan: {error}",
        )


def nearest_to(question: Question) -> tuple[Question, str]:
    """A question that has an answer, where the budget of this one cannot be kept, and what its plan is called: the
    fastest where it was seconds, the one with the fewest bytes where it was a share of them, the lowest where it was a
    share in 4 bits, the safest where it was harm."""
    if question.budget.is_of_time:
        return dataclasses.replace(question, budget=Budget(divergence=math.inf)), "fastest"
    if question.budget.saved_bytes is not None:
        fewest = dataclasses.replace(question, allowed=_of_fewest_bytes(question))
        return dataclasses.replace(fewest, budget=Budget(fp4_flops=0.0)), "smallest"
    formats = question.profile.formats
    _, low = extremes(formats)
    safest = max(formats, key=lambda name: RECIPES[name].bits)
    policy, name = (formats[low], "lowest") if question.budget.fp4_flops is not None else (safest, "safest")
    return dataclasses.replace(question, policy=policy), name


def _of_fewest_bytes(question: Question) -> NDArray[np.bool_]:
    """[L, 3, P], formats with which each layer keeps the fewest bytes of its input."""
    allowed, menu, profile = allowed_in(question), menu_of(question), question.profile
    kept = kept_bytes(profile, question.saved, compiled=question.is_compiled)
    amounts = by_decision(question, np.where(allowed, kept, np.inf))
    is_fewest = amounts == amounts.min(axis=1, keepdims=True)
    if menu is None:
        alone: NDArray[np.bool_] = allowed & is_fewest.reshape(allowed.shape)
        return alone
    layers, rows = np.nonzero(is_fewest)
    found = np.zeros_like(allowed)
    for gemm in range(allowed.shape[1]):
        found[layers, gemm, menu[rows, gemm]] = True
    fewest: NDArray[np.bool_] = allowed & found
    return fewest

"""Bits: which number format each GEMM runs in, chosen from measured statistics under a budget.

`profile` holds what was measured, `divergence` says what a format costs, `program` solves, `choose` brings them
together, `plan` is the result with its reasons.
"""

from scrimp.planner.precision.analysed import PrecisionPlan, describe, make_plan
from scrimp.planner.precision.budget import Budget
from scrimp.planner.precision.choose import Choice, Question, allowed_by, choose, harm_of
from scrimp.planner.precision.divergence import SNIP, Divergence, Method, Weights, divergence, mean_divergence
from scrimp.planner.precision.nearest import plan_or_nearest
from scrimp.planner.precision.over_time import Phases, split
from scrimp.planner.precision.profile import BatchStatistics, PrecisionProfile
from scrimp.planner.solver import Limit, Program, Solution, solve

__all__ = [
    "SNIP",
    "BatchStatistics",
    "Budget",
    "Choice",
    "Divergence",
    "Limit",
    "Method",
    "Phases",
    "PrecisionPlan",
    "PrecisionProfile",
    "Program",
    "Question",
    "Solution",
    "Weights",
    "allowed_by",
    "choose",
    "describe",
    "divergence",
    "harm_of",
    "make_plan",
    "mean_divergence",
    "plan_or_nearest",
    "solve",
    "split",
]

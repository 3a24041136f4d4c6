"""Precision over the rest of a run: less in four bits at the end, more before, within one budget.

Problem  While the learning rate decays, quantization noise becomes a larger part of what moves the weights. The NVFP4
         recipe went back to bf16 for the last 18 % of a 12B run, by hand, and halved its gap.
Method   The program twice over, with the policy's decisions for each of two phases. With n steps left before the last
         part and m in it, harm in the last part weighing w times as much::

             min  n V(main) + w m V(final)      s.t.  n share(main) + m share(final) >= (n + m) share

         One solve gives the share that each phase should have; the current plan is then made for its own.
Limits   Costs are those of now: what they will be at the end is not known before it is measured there.
Source   arXiv 2509.25149 for the finding.
Checked  tests/planner/precision/test_precision_phases.py
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from scrimp.errors import PlanError
from scrimp.planner.precision.budget import Budget
from scrimp.planner.precision.choose import Question, by_decision, choose, is_solved, low_flops, priced
from scrimp.planner.solver import Limit, Program, solve


@dataclass(frozen=True)
class Phases:
    """Shares of FLOPs in 4 bits."""

    main: float
    final: float


def split(question: Question, main_steps: int, final_steps: int, weight: float) -> Phases:
    """How a budget of FLOPs in 4 bits is best spread.

    Args:
        question: its budget is the share over all steps that are left.
        weight: of harm in the final phase.
    """
    share = question.budget.fp4_flops
    if share is None:
        raise PlanError("only a share of FLOPs in 4 bits is spread over phases", expected="budget fp4_flops")
    if not main_steps or not final_steps or not is_solved(question):
        return Phases(share, share)
    once = choose(question)  # refuses what cannot be reached, in the user's terms
    costs = by_decision(question, priced(question, once.costs))
    low = by_decision(question, low_flops(question))
    total = main_steps + final_steps
    program = Program(
        np.concatenate([costs * main_steps, costs * final_steps * weight]) / total,
        (
            Limit(
                "FLOPs in 4 bits", np.concatenate([low * main_steps, low * final_steps]) / total, least=share
            ),
        ),
    )
    chosen = solve(program).choices
    half = len(costs)
    spent = [float(low[np.arange(half), part].sum()) for part in (chosen[:half], chosen[half:])]
    return Phases(*spent)


def at_share(question: Question, share: float) -> Question:
    """The same question with another budget."""
    return replace(question, budget=Budget(fp4_flops=min(1.0, max(0.0, share))))

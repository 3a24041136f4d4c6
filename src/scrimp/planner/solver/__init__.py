"""Solves programs of choices: one of several options per decision, least cost, within limits.

`program` is the door: HiGHS, and where it runs out of time exact tables (`knapsack`) or a relaxation.
"""

from scrimp.planner.solver.program import SOLVERS, Limit, Program, Solution, solve
from scrimp.planner.solver.reach import UnreachableError

__all__ = ["SOLVERS", "Limit", "Program", "Solution", "UnreachableError", "solve"]

"""Solves programs of choices: one of several options per decision, least cost, within limits.

`program` is the door, HiGHS the solver.
"""

from scrimp.planner.solver.program import Limit, Program, Solution, solve
from scrimp.planner.solver.reach import UnreachableError

__all__ = ["Limit", "Program", "Solution", "UnreachableError", "solve"]

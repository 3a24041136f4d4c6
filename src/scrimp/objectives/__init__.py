"""What is trained: a batch becomes a summed loss.

The names of objectives, and the way from a name to one, need no torch: an objective is imported when it is built.
"""

from scrimp.objectives.base import LossSums, Objective
from scrimp.objectives.registry import OBJECTIVES, build, check

__all__ = ["OBJECTIVES", "LossSums", "Objective", "build", "check"]

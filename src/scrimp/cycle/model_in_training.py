"""What a cycle of precision knows of the model that it plans, and what it tells of itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from scrimp.cycle.guard import Recipes
from scrimp.planner.precision import PrecisionPlan, PrecisionProfile
from scrimp.statistics import Probe


@dataclass(frozen=True)
class Switched:
    """A new plan is in force."""

    analysis: PrecisionPlan
    """The plan with its costs and, where it was probed, what was measured."""
    changed: int
    """GEMMs that have another format now."""
    doubt: str | None = None
    """Why its formats may not be in force."""


@dataclass(frozen=True)
class Probed:
    """The plan was compared with the compute format."""

    found: Probe
    sentence: str


@dataclass(frozen=True)
class Promoted:
    """GEMMs got higher formats at once, without a plan."""

    changed: int
    reason: str
    alarm: int
    """How many there were."""
    hold_until: int
    """Step before which no plan is measured."""


Event = Switched | Probed | Promoted


class ModelInTraining(Protocol):
    """A model in training, as the cycle needs it; all ranks are asked alike."""

    def measure(self, step: int, formats: Sequence[str]) -> PrecisionProfile:
        """Statistics of these formats before a step; equal on all ranks."""

    def put_in_force(self, recipes: Recipes, analysis: PrecisionPlan) -> None:
        """Run by these formats from the next step on.

        Args:
            recipes: of all planned layers: what the analysis chose, unless some were promoted since.
            analysis: the newest plan.
        """

    def tell(self, event: Event) -> None:
        """Something happened, and is over."""

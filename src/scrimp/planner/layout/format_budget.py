"""Among which formats a search chooses, and what they may spoil.

Without statistics nobody knows how sensitive a product is, and FLOPs in 4 bits stand for harm. With statistics of the
model in training, harm is what SNIP adds up (`measured_harm`).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from scrimp.errors import PlanError
from scrimp.models.shapes import ModelSizes
from scrimp.planner.layout.block_menus import Quality, flops_in_4_bits
from scrimp.planner.layout.measured_harm import measured_quality
from scrimp.planner.precision.budget import Budget
from scrimp.planner.precision.profile import PrecisionProfile
from scrimp.precision import RECIPES

_ROUND = 1e-9


@dataclass(frozen=True, kw_only=True)
class FormatBudget:
    """Formats to choose from."""

    names: tuple[str, ...]
    """Recipes. The one of most bits runs where nothing is chosen."""
    share: float
    """Most FLOPs of the blocks' products in 4 bits; with statistics, those of the plan that does as much harm."""
    divergence: float | None = None
    """Most harm instead, as a share of that of everything in the lowest format; needs statistics."""
    statistics: PrecisionProfile | None = field(default=None, compare=False)

    @property
    def base(self) -> str:
        """The recipe of most bits."""
        return max(self.names, key=lambda name: RECIPES[name].bits)

    def quality(self, model: ModelSizes) -> Quality:
        """What low precision may spoil in one model.

        Raises:
            PlanError: the statistics do not belong to it, or the budget cannot be kept.
        """
        found = self._quality(model)
        least = found.least(model)
        if found.limit < least * (1.0 - _ROUND):
            name, given = (
                ("fp4_flops", self.share) if self.divergence is None else ("divergence", self.divergence)
            )
            raise PlanError(
                f"no choice of formats keeps to budget.{name}",
                got=f"budget.{name} {given:g}, and formats {', '.join(self.names)}, which take {least:.3g} at least",
                expected=f"budget.{name} of {least:.3g} or more, or a format of more bits among them",
                do="raise the budget, or add a format to snip.formats",
            )
        return found

    def _quality(self, model: ModelSizes) -> Quality:
        if self.statistics is None:
            return Quality(formats=self.names, harm=flops_in_4_bits(model), limit=self.share)
        by_harm = self.divergence is not None
        budget = Budget(divergence=self.divergence) if by_harm else Budget(fp4_flops=self.share)
        return measured_quality(self.statistics, self.names, budget, model)

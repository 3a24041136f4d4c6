"""What each rank of a pipeline has and in which formats it multiplies: rows of a table or a picture.

Checked  tests/planner/layout/test_stage_texts.py
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from scrimp.planner.layout.setting import FULL, BlockPlan, Setting
from scrimp.planner.layout.stages import block_plans, blocks_of_stages
from scrimp.precision import GEMMS


@dataclass(frozen=True)
class BlockText:
    """One block as it is planned."""

    number: int
    recipes: dict[str, int]
    """Recipes of its products, and how many products each has; most first."""
    is_made_again: bool
    """Whether it runs again whole in the backward pass."""

    @property
    def recipe(self) -> str:
        """That most of its products have."""
        return next(iter(self.recipes), "bf16")


@dataclass(frozen=True)
class StageText:
    """One stage of a pipeline."""

    stage: int
    rank: int
    blocks: tuple[BlockText, ...]


def stage_texts(setting: Setting) -> list[StageText]:
    """All stages, first to last."""
    found, plans = [], block_plans(setting)
    for stage, numbers in enumerate(blocks_of_stages(setting)):
        blocks = tuple(
            BlockText(number, _recipes(setting, number, plans[number]), plans[number].recompute == FULL)
            for number in numbers
        )
        found.append(StageText(stage, stage % setting.layout.pp, blocks))
    return found


def _recipes(setting: Setting, number: int, plan: BlockPlan) -> dict[str, int]:
    own = setting.in_formats(plan.formats)
    products = Counter(
        own.recipe(linear.name, gemm) for linear in setting.model.blocks[number].linears for gemm in GEMMS
    )
    return dict(products.most_common())

"""What each rank of a pipeline has and in which formats it multiplies: rows of a table or a picture.

Checked  tests/planner/layout/test_stage_texts.py
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from scrimp.planner.layout.setting import BlockPlan, Setting
from scrimp.planner.layout.stages import block_plans, blocks_of_stages, rank_of_stage
from scrimp.planner.layout.summary import block_text
from scrimp.precision import GEMMS


@dataclass(frozen=True)
class BlockText:
    """One block as it is planned."""

    number: int
    recipes: dict[str, int]
    """Recipes of its products, and how many products each has; most first."""
    does: str
    """What it makes again, sends to the host or keeps whole; none: it keeps all that its backward pass needs."""

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
            BlockText(number, _recipes(setting, number, plans[number]), block_text(plans[number]))
            for number in numbers
        )
        found.append(StageText(stage, rank_of_stage(setting.layout, stage), blocks))
    return found


def _recipes(setting: Setting, number: int, plan: BlockPlan) -> dict[str, int]:
    own = setting.in_formats(plan.formats)
    products = Counter(
        own.recipe(linear.name, gemm) for linear in setting.model.blocks[number].linears for gemm in GEMMS
    )
    return dict(products.most_common())

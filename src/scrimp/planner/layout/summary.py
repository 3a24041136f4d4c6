"""What the blocks of a setting do, in a few words and numbers."""

from __future__ import annotations

from collections import Counter

from scrimp.planner.layout.setting import NONE, BlockPlan, Setting
from scrimp.planner.layout.stages import block_plans
from scrimp.precision import GEMMS, RECIPES

_LOW_BITS = 4


def blocks_text(setting: Setting) -> str:
    """How many blocks keep all, make again or offload: "none", or "full 49, none 2, selective 29"."""
    counted = Counter(_name(plan) for plan in block_plans(setting))
    if len(counted) == 1:
        return next(iter(counted))
    return ", ".join(f"{name} {count}" for name, count in sorted(counted.items()))


def low_share(setting: Setting) -> float:
    """Share of the blocks' products, by their FLOPs, that run in 4 bits."""
    model, low, total = setting.model, 0.0, 0.0
    for block, plan in zip(model.blocks, block_plans(setting), strict=True):
        own = setting.in_formats(plan.formats)
        for linear in block.linears:
            for gemm in GEMMS:
                recipe = RECIPES.get(own.recipe(linear.name, gemm))
                total += linear.parameters_per_token
                low += linear.parameters_per_token * (recipe is not None and recipe.bits == _LOW_BITS)
    return low / total


def _name(plan: BlockPlan) -> str:
    words = [plan.recompute] if plan.recompute != NONE or not plan.offload else []
    return "+".join([*words, *(["offload"] if plan.offload else []), *(["whole"] if plan.gathered else [])])

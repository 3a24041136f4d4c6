"""Which blocks each stage of a pipeline has, and how many parameters a rank."""

from __future__ import annotations

from scrimp.models import BlockSpec
from scrimp.planner.layout.setting import FULL, Setting


def blocks_of_stages(setting: Setting) -> list[range]:
    """The blocks of each stage, first to last."""
    layout, number = setting.layout, len(setting.model.blocks)
    count = layout.pp * (layout.virtual or 1)
    if layout.stages is not None:
        sizes = [int(size) for size in layout.stages.split(",")]
    else:
        each, rest = divmod(number, count)
        # Embedding and head take a place: the stages in the middle get what is left over.
        sizes = [each + (1 <= index <= rest or index < rest - (count - 2)) for index in range(count)]
        sizes[-1] += number - sum(sizes)
    starts = [sum(sizes[:index]) for index in range(count)]
    return [range(start, start + size) for start, size in zip(starts, sizes, strict=True)]


def numbers_of_block(setting: Setting, block: BlockSpec) -> float:
    """Parameters of a block that a rank of tp and ep has."""
    layout = setting.layout
    routed = sum(linear.parameters for linear in block.linears if linear.experts > 1)
    return (block.parameters - routed) / layout.tp + routed / (layout.ep * layout.etp)


def numbers_of_rank(setting: Setting, rank: int) -> float:
    """Parameters that a rank of a pipeline has of all its stages, before copies and shards share them."""
    layout, model = setting.layout, setting.model
    stages = blocks_of_stages(setting)
    numbers = sum(
        numbers_of_block(setting, model.blocks[index])
        for blocks in stages[rank :: layout.pp]
        for index in blocks
    )
    if rank == 0:
        numbers += model.embedding_parameters / layout.tp
    if rank == layout.pp - 1 and not (model.tied and layout.pp == 1):
        numbers += model.head_parameters / layout.tp
    return numbers


def blocks_made_again(setting: Setting, number: int) -> int:
    """How many of the blocks of a stage run again whole in the backward pass.

    Args:
        number: that the stage has.
    """
    if setting.recompute == FULL:
        return number
    if isinstance(setting.recompute, int):
        return min(number, -(-setting.recompute // (setting.layout.virtual or 1)))
    return 0

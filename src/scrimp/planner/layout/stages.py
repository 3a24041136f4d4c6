"""Which blocks each stage of a pipeline has, and how many parameters a rank."""

from __future__ import annotations

from collections import Counter
from functools import lru_cache

from scrimp.models import BlockSpec
from scrimp.planner.layout.setting import FULL, NONE, BlockPlan, Setting

Kinds = Counter[tuple[int, BlockPlan]]
"""Blocks that are equal, by the number of the model's first of them, and planned alike; and how many they are."""


def blocks_of_stages(setting: Setting) -> tuple[range, ...]:
    """The blocks of each stage, first to last."""
    layout = setting.layout
    return _cut(len(setting.model.blocks), layout.pp * (layout.virtual or 1), layout.stages)


@lru_cache
def _cut(number: int, count: int, given: str | None) -> tuple[range, ...]:
    """So many blocks as so many stages, or as those that are given."""
    if given is not None:
        sizes = [int(size) for size in given.split(",")]
    else:
        each, rest = divmod(number, count)
        # Embedding and head take a place: the stages in the middle get what is left over.
        sizes = [each + (1 <= index <= rest or index < rest - (count - 2)) for index in range(count)]
        sizes[-1] += number - sum(sizes)
    starts = [sum(sizes[:index]) for index in range(count)]
    return tuple(range(start, start + size) for start, size in zip(starts, sizes, strict=True))


def kinds_of_stages(setting: Setting) -> list[Kinds]:
    """The blocks of each stage, equal ones that are planned alike counted."""
    plans, first = block_plans(setting), setting.model.first_equal
    return [Counter((first[index], plans[index]) for index in blocks) for blocks in blocks_of_stages(setting)]


def kinds_of_ranks(setting: Setting) -> list[Kinds]:
    """The same of all stages of each rank."""
    stages, ranks = kinds_of_stages(setting), setting.layout.pp
    return [sum(stages[rank::ranks], start=Counter()) for rank in range(ranks)]


def numbers_of_block(setting: Setting, block: BlockSpec) -> float:
    """Parameters of a block that a rank of tp and ep has."""
    layout = setting.layout
    routed = block.routed_parameters
    return (block.parameters - routed) / layout.tp + routed / (layout.ep * layout.etp)


def numbers_of_rank(setting: Setting, rank: int) -> float:
    """Parameters that a rank of a pipeline has of all its stages, before copies and shards share them."""
    layout, model = setting.layout, setting.model
    stages = blocks_of_stages(setting)
    numbers_of = {first: numbers_of_block(setting, model.blocks[first]) for first in set(model.first_equal)}
    numbers = sum(
        numbers_of[model.first_equal[index]] for blocks in stages[rank :: layout.pp] for index in blocks
    )
    if rank == 0:
        numbers += model.embedding_parameters / layout.tp
    if rank == layout.pp - 1 and not (model.tied and layout.pp == 1):
        numbers += model.head_parameters / layout.tp
    return numbers


def block_plans(setting: Setting) -> tuple[BlockPlan, ...]:
    """What is decided of every block. Of a number of blocks that are made again, or whose activations leave, each
    stage of a rank has its share, the first ones."""
    if setting.blocks:
        return setting.blocks
    recompute, virtual = setting.recompute, setting.layout.virtual or 1
    leaving = -(-setting.offload.activation_layers // virtual)
    again = -(-recompute // virtual) if isinstance(recompute, int) else 0
    found = []
    for blocks in blocks_of_stages(setting):
        for at in range(len(blocks)):
            counted = FULL if at < again else NONE
            found.append(
                BlockPlan(
                    recompute=counted if isinstance(recompute, int) else recompute, offload=at < leaving
                )
            )
    return tuple(found)

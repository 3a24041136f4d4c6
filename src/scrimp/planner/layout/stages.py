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
    return _split(len(setting.model.blocks), layout.pp * (layout.virtual or 1), layout.stages)


@lru_cache(maxsize=4096)
def _split(number: int, count: int, given: str | None) -> tuple[range, ...]:
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


def numbers_of_block(setting: Setting, block: BlockSpec, shards: int = 1) -> float:
    """Parameters of a block that a rank of tp and ep has, or its part where so many ranks share them.

    Args:
        shards: ranks that share what tp cuts; of experts those of them that have the same ones.
    """
    routed = block.routed_parameters
    return _of_rank(setting, block.parameters - routed, routed, shards)


def numbers_of_rank(setting: Setting, rank: int, shards: int = 1) -> float:
    """Parameters that a rank of a pipeline has of all its stages, or its part where so many ranks share them."""
    layout, model = setting.layout, setting.model
    dense, routed = model.parameters_before
    own = blocks_of_stages(setting)[rank :: layout.pp]
    cut = float(sum(dense[blocks.stop] - dense[blocks.start] for blocks in own))
    if rank == 0:
        cut += model.embedding_parameters
    if rank == layout.pp - 1 and not (model.tied and layout.pp == 1):
        cut += model.head_parameters
    return _of_rank(setting, cut, sum(routed[blocks.stop] - routed[blocks.start] for blocks in own), shards)


def _of_rank(setting: Setting, dense: float, routed: float, shards: int) -> float:
    """What a rank has of numbers that tp cuts and of experts. Ranks that share numbers are n = tp shards; ep etp of
    them have other experts already: experts are cut into n, as all else is, or into ep etp where these are more."""
    layout = setting.layout
    pieces = layout.ep * layout.etp
    return dense / (layout.tp * shards) + routed / (max(pieces, layout.tp * shards) if shards > 1 else pieces)


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

"""Which blocks each stage of a pipeline has, which stages a rank, and how many parameters."""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from scrimp.config.pipeline import V_SHAPED
from scrimp.config.resolved import ResolvedLayout
from scrimp.models import BlockSpec
from scrimp.planner.layout.pass_orders import rank_of, stages_of
from scrimp.planner.layout.setting import FULL, NONE, BlockPlan, Setting

Kinds = Counter[tuple[int, BlockPlan]]
"""Blocks that are equal, by the number of the model's first of them, and planned alike; and how many they are."""


def splits_backward(layout: ResolvedLayout) -> bool:
    """Whether the gradients of weights are passes of their own."""
    return layout.pp > 1 and layout.schedule in V_SHAPED


def rank_of_stage(layout: ResolvedLayout, stage: int) -> int:
    """The rank of the pipeline that holds a stage."""
    return rank_of(stage, layout.pp, layout.schedule)


def stages_of_rank(layout: ResolvedLayout, rank: int) -> tuple[int, ...]:
    """The stages that a rank of the pipeline holds, in order."""
    return stages_of(rank, layout.pp, layout.virtual or 1, layout.schedule)


def last_rank(layout: ResolvedLayout) -> int:
    """The rank of the pipeline that has the head."""
    return 0 if splits_backward(layout) else layout.pp - 1


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
        sizes = [each + (index < rest) for index in range(count)]
    starts = [sum(sizes[:index]) for index in range(count)]
    return tuple(range(start, start + size) for start, size in zip(starts, sizes, strict=True))


def blocks_of_ranks(setting: Setting) -> list[list[int]]:
    """The blocks of each rank, its stages in turn: what is decided of the first few is shared by all of them."""
    stages, layout = blocks_of_stages(setting), setting.layout
    own = ([stages[one] for one in stages_of_rank(layout, rank)] for rank in range(layout.pp))
    return [
        [block for row in itertools.zip_longest(*ours) for block in row if block is not None] for ours in own
    ]


def block_plans(setting: Setting) -> tuple[BlockPlan, ...]:
    """What is decided of every block. Of a number of blocks that are made again, or whose activations leave, all ranks
    have as many, the first ones of their stages."""
    if setting.blocks:
        return setting.blocks
    given, leaving = setting.recompute, setting.offload.activation_layers
    recompute, again = (NONE, given) if isinstance(given, int) else (given, 0)
    found = [BlockPlan(recompute=recompute)] * len(setting.model.blocks)
    for own in blocks_of_ranks(setting) if again or leaving else ():
        for block in own[:again]:
            found[block] = dataclasses.replace(found[block], recompute=FULL)
        for block in own[:leaving]:
            found[block] = dataclasses.replace(found[block], offload=True)
    return tuple(found)


def kinds_of_stages(setting: Setting) -> list[Kinds]:
    """The blocks of each stage, equal ones that are planned alike counted."""
    plans, stages = block_plans(setting), blocks_of_stages(setting)
    if _is_uniform(setting, plans):
        return _sized([len(blocks) for blocks in stages], plans[0])
    first, found, alike = setting.model.first_equal, [], all(plan is plans[0] for plan in plans)
    known: dict[tuple[tuple[tuple[int, int], int], ...], Kinds] = {}
    for blocks in stages:
        # Plans are slow to hash, and few: equal ones are mostly one object. Equal stages share a count.
        counted = (
            {(index, 0): (plans[0], count) for index, count in _equal(first, blocks)}
            if alike
            else _counted(blocks, first, plans)
        )
        key = tuple((kind, count) for kind, (_, count) in counted.items())
        if key not in known:
            kinds: Kinds = Counter()
            known[key] = kinds
            for (index, _), (plan, count) in counted.items():
                kinds[index, plan] += count
        found.append(known[key])
    return found


def _is_uniform(setting: Setting, plans: Sequence[BlockPlan]) -> bool:
    """Whether all blocks are equal and planned alike: those of most settings that a search looks at."""
    return not any(setting.model.first_equal) and plans.count(plans[0]) == len(plans)


def _sized(numbers: Sequence[int], plan: BlockPlan) -> list[Kinds]:
    """So many blocks planned alike, for each number; equal numbers share a count, by which callers know them."""
    counts: dict[int, Kinds] = {number: Counter({(0, plan): number}) for number in set(numbers)}
    return [counts[number] for number in numbers]


def _counted(
    blocks: range, first: Sequence[int], plans: Sequence[BlockPlan]
) -> dict[tuple[int, int], tuple[BlockPlan, int]]:
    found: dict[tuple[int, int], tuple[BlockPlan, int]] = {}
    for at in blocks:
        key, plan = (first[at], id(plans[at])), plans[at]
        found[key] = plan, found[key][1] + 1 if key in found else 1
    return found


@lru_cache(maxsize=4096)
def _equal(first: tuple[int, ...], blocks: range) -> tuple[tuple[int, int], ...]:
    """The numbers of the blocks that others equal, and how many of these do."""
    return tuple(Counter(first[at] for at in blocks).items())


def kinds_of_ranks(setting: Setting) -> list[Kinds]:
    """The same of all stages of each rank."""
    plans, layout = block_plans(setting), setting.layout
    own = [stages_of_rank(layout, rank) for rank in range(layout.pp)]
    if _is_uniform(setting, plans):
        sizes = [len(blocks) for blocks in blocks_of_stages(setting)]
        return _sized([sum(sizes[one] for one in ours) for ours in own], plans[0])
    stages = kinds_of_stages(setting)
    known: dict[tuple[int, ...], Kinds] = {}
    for ours in own:
        key = tuple(id(stages[one]) for one in ours)
        if key not in known:
            known[key] = sum((stages[one] for one in ours), start=Counter())
    return [known[tuple(id(stages[one]) for one in ours)] for ours in own]


@dataclass(frozen=True)
class Numbers:
    """Parameters of a rank of tp, pp and ep before copies and shards share them."""

    dense: float
    routed: float
    """Parameters of routed experts, which fewer ranks share: those that have the same ones."""

    @property
    def total(self) -> float:
        """Both."""
        return self.dense + self.routed

    def over(self, shards: tuple[int, int]) -> float:
        """What one of so many ranks has, of each."""
        return self.dense / shards[0] + self.routed / shards[1]


def numbers_of_block(setting: Setting, block: BlockSpec) -> Numbers:
    """Parameters of a block."""
    layout, routed = setting.layout, block.routed_parameters
    return Numbers((block.parameters - routed) / layout.tp, routed / (layout.ep * layout.etp))


def numbers_of_rank(setting: Setting, rank: int) -> Numbers:
    """Parameters of all stages of a rank of the pipeline."""
    known = setting.numbers_of_ranks
    if rank not in known:
        known[rank] = _numbers_of_rank(setting, rank)
    found: Numbers = known[rank]
    return found


def _numbers_of_rank(setting: Setting, rank: int) -> Numbers:
    layout, model = setting.layout, setting.model
    dense, routed = model.parameters_before
    ours, experts = 0.0, 0.0
    stages = blocks_of_stages(setting)
    for blocks in (stages[one] for one in stages_of_rank(layout, rank)):
        ours += (dense[blocks.stop] - dense[blocks.start]) / layout.tp
        experts += (routed[blocks.stop] - routed[blocks.start]) / (layout.ep * layout.etp)
    return Numbers(ours + numbers_of_ends(setting, rank), experts)


def numbers_that_leave(setting: Setting, rank: int) -> Numbers:
    """Parameters of a rank whose weights, gradients or states live on the host where those of the setting do."""
    found = numbers_of_rank(setting, rank)
    if not setting.software.states_by_block:
        return found
    return Numbers(found.dense - numbers_of_ends(setting, rank), found.routed)


def numbers_of_ends(setting: Setting, rank: int) -> float:
    """Parameters of embedding and head of a rank of the pipeline."""
    layout, model, found = setting.layout, setting.model, 0.0
    if rank == 0:
        found += model.embedding_parameters / layout.tp
    last = last_rank(layout)
    if rank == last and not (model.tied and last == 0):
        found += model.head_parameters / layout.tp
    return found

"""Bytes of weights, gradients and states that a rank holds, on its device and on its host.

Method   With P the parameters of a rank, S the ranks that share states, and the bytes of a number from the software's
         file::

             weights        P, shared by zero 3; whole where a block stays gathered, or a pipeline's weights do; both
                            where zero 1 and 2 gather them in every pass
             gradients      as they are added up, shared where they are reduced in each pass (zero 2 and 3)
             optimizer      master and moments, P / S of each; of routed experts S is those that have the same ones
             gathered       under zero 3 embedding, head and two blocks' weights; of zero 2 two blocks' as they are
                            reduced, and one block's gradients, embedding's and head's

         Of weights and gradients that live on the host two blocks are on the device, of states two while they are
         updated (`visiting_bytes`), and all of embedding and head, where blocks' alone leave.
Source   Rajbhandari et al., ZeRO, arXiv 1910.02054; TorchTitan 9dec370, parallelize_llama.py (reshard_after_forward)
Checked  tests/planner/layout/test_rank_bytes.py
"""

from __future__ import annotations

from scrimp.models import BlockSpec
from scrimp.planner.layout.kernels import element_bytes
from scrimp.planner.layout.setting import Setting
from scrimp.planner.layout.stages import (
    Kinds,
    Numbers,
    numbers_of_block,
    numbers_of_ends,
    numbers_of_rank,
    numbers_that_leave,
)


def weight_bytes(setting: Setting, own: Kinds, rank: int) -> float:
    """Weights that a rank of the pipeline holds between passes, but for those of blocks that are planned to stay
    gathered.

    Args:
        own: its blocks.
    """
    software, zero, numbers = setting.software, setting.layout.zero, numbers_of_rank(setting, rank)
    is_shared = zero == 3 and setting.weight_shards[0] > 1
    found = software.held_weight_bytes * numbers.over(setting.weight_shards if is_shared else (1, 1))
    if software.gathers_copies and zero in (1, 2) and setting.layout.shards > 1:
        # What a rank gathers in each pass lies beside its own part.
        found += software.held_weight_bytes * numbers.over(setting.state_shards)
    if software.held_code_bytes and not is_shared and element_bytes(setting.precision) < 2:
        blocks = _whole(setting, own)
        found = software.held_code_bytes * blocks + software.held_weight_bytes * (numbers.total - blocks)
        masters = software.held_weight_bytes * blocks / setting.state_shards[0]
        found += masters * (not setting.offload.master)
    if setting.streams_weights:
        ranks = setting.weight_shards[0] if is_shared else 1
        here = (2 * _largest(setting, own) + _stay(setting, rank)) / ranks
        found = min(found, here * software.held_weight_bytes)
    if is_shared and _is_whole(setting):
        found += setting.block_weight_bytes * _whole(setting, own)
    return found


def gathered_between_passes(setting: Setting, own: Kinds) -> float:
    """Weights of a rank's blocks that are planned to stay gathered."""
    return sum(
        count * standing_bytes(setting, setting.model.blocks[number])
        for (number, plan), count in own.items()
        if plan.gathered
    )


def standing_bytes(setting: Setting, block: BlockSpec) -> float:
    """What a block that stays gathered between its passes adds to a rank's weights, under zero 3: like them it is
    there at every moment, and without a margin (`stage_memory.STAYS`)."""
    if setting.layout.zero != 3 or setting.weight_shards[0] == 1 or _is_whole(setting):
        return 0.0
    return setting.block_weight_bytes * numbers_of_block(setting, block).total


def gradient_bytes(setting: Setting, own: Kinds, rank: int) -> float:
    """Gradients of a rank of the pipeline, when it has all."""
    software, numbers = setting.software, numbers_of_rank(setting, rank)
    found = software.held_gradient_bytes * numbers.over(setting.weight_shards)
    if _is_whole(setting):
        found += software.gradient_bytes * numbers.total
    if setting.offload.gradients:
        here = 2 * _largest(setting, own) + _stay(setting, rank) / setting.weight_shards[0]
        found = min(found, here * software.held_gradient_bytes)
    return found


def gathered_bytes(setting: Setting, own: Kinds, rank: int) -> tuple[float, float]:
    """Weights that are whole for a while, and whole gradients before they are reduced."""
    if setting.weight_shards[0] == 1:
        return 0.0, 0.0
    # Gradients of embedding and head are of the weights' type until they are reduced.
    software, largest = setting.software, _largest(setting, own)
    ends = numbers_of_ends(setting, rank) if setting.layout.zero == 3 else 0.0
    gradients = software.gradient_bytes * largest + software.weight_bytes * ends
    if software.one_end_buffer:
        ends = min(
            ends, max(setting.model.embedding_parameters, setting.model.head_parameters) / setting.layout.tp
        )
    return setting.block_weight_bytes * 2 * largest + software.weight_bytes * ends, gradients


def state_bytes(setting: Setting, rank: int) -> float:
    """Moments and master weights that stay on the device."""
    numbers, leaving = numbers_of_rank(setting, rank), numbers_that_leave(setting, rank)
    away = leaving_state_bytes(setting)
    stay = setting.software.state_bytes - away
    ends = Numbers(numbers.dense - leaving.dense, numbers.routed - leaving.routed)
    return stay * numbers.over(setting.state_shards) + away * ends.over(setting.state_shards)


def visiting_bytes(setting: Setting, own: Kinds) -> float:
    """States that are on the device while two blocks of theirs are updated, or the only one."""
    if not setting.software.states_by_block:
        return 0.0
    sizes = {
        kind: numbers_of_block(setting, setting.model.blocks[kind[0]]).over(setting.state_shards)
        for kind in own
    }
    blocks = sum(count * sizes[kind] for kind, count in own.items())
    return leaving_state_bytes(setting) * min(2 * max(sizes.values()), blocks)


def leaving_state_bytes(setting: Setting) -> float:
    """Bytes of a parameter's states that live on the host."""
    software, offload = setting.software, setting.offload
    moments = (software.state_bytes - software.master_bytes) * offload.optimizer
    return moments + software.master_bytes * offload.master


def host_bytes(setting: Setting) -> float:
    """Bytes of states that the rank with most of them has in host memory."""
    software, offload, shards = setting.software, setting.offload, setting.weight_shards
    ranks = [numbers_that_leave(setting, rank) for rank in range(setting.layout.pp)]
    states = leaving_state_bytes(setting)
    weights, gradients = (
        software.held_weight_bytes * setting.streams_weights,
        software.held_gradient_bytes * offload.gradients,
    )
    held = shards if setting.layout.zero == 3 else (1, 1)
    return max(
        states * one.over(setting.state_shards) + weights * one.over(held) + gradients * one.over(shards)
        for one in ranks
    )


def _is_whole(setting: Setting) -> bool:
    """Whether weights stay whole, and gradients add up whole, between the passes of a pipeline."""
    has_shards = setting.layout.zero == 3 and setting.weight_shards[0] > 1
    return setting.software.whole_in_pipelines and setting.layout.pp > 1 and has_shards


def _whole(setting: Setting, own: Kinds) -> float:
    """Parameters of a rank's blocks."""
    return sum(
        count * numbers_of_block(setting, setting.model.blocks[number]).total
        for (number, _), count in own.items()
    )


def _stay(setting: Setting, rank: int) -> float:
    """Parameters of a rank of which nothing leaves."""
    return numbers_of_rank(setting, rank).total - numbers_that_leave(setting, rank).total


def _largest(setting: Setting, own: Kinds) -> float:
    """Parameters of the largest of a rank's blocks."""
    return max(numbers_of_block(setting, setting.model.blocks[number]).total for number, _ in own)

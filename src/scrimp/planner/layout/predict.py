"""Seconds and bytes of a step of a setting, split by their causes.

Method   Each stage's passes are the sum of its blocks' (`block_times`), and of embedding or head; what is made again
         (`recompute`) comes to the backward pass. Stages go through the schedule (`pipeline_times`). After the last
         pass come the reductions that no pass hides, and the optimizer. Weights that are sharded in every pass (zero
         3) are gathered beside the passes of the blocks. All devices wait for the slowest of them::

             seconds = (pipeline + reductions + optimizer) (1 + step_share) (1 + spread sqrt(2 ln n))

Limits   Tokens of experts are equally shared. Seconds are predicted, whatever a hardware file's figures are from.
Checked  tests/planner/layout/test_predict.py; benchmarks/published_runs.py: against published runs
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from scrimp.models import BlockSpec
from scrimp.planner.layout.block_times import (
    BlockSeconds,
    PassSeconds,
    block_seconds,
    embedding_seconds,
    head_seconds,
)
from scrimp.planner.layout.kernels import Kernels
from scrimp.planner.layout.pipeline_times import StageSeconds, pipeline_seconds
from scrimp.planner.layout.setting import SELECTIVE, Setting
from scrimp.planner.layout.stages import (
    blocks_made_again,
    blocks_of_stages,
    numbers_of_block,
    numbers_of_rank,
)


@dataclass(frozen=True)
class Prediction:
    """A step."""

    step_seconds: float
    tokens_per_second_per_device: float
    seconds: dict[str, float]
    """By cause: compute, communication_exposed, bubble, optimizer, other; they add up to the step."""


def predict(setting: Setting) -> Prediction:
    """Seconds of a step."""
    software = setting.software
    kernels = Kernels(setting.device, software.launch_seconds, software.traffic, software.attention_kernel)
    layout, m = setting.layout, setting.micro_batches
    stages = _stages(setting, kernels)
    passes = [StageSeconds(one.forward.total, one.backward.total) for one in stages]
    virtual = layout.virtual or 1
    transfer = setting.groups["pp"].sent(
        setting.tokens * setting.model.width * setting.software.activation_bytes / layout.tp
    )
    sends = (1.0 - setting.software.hidden_sends) * transfer
    passes = [
        StageSeconds(one.forward + sends, one.backward + sends) if layout.pp > 1 else one for one in passes
    ]
    schedule = layout.schedule if layout.schedule != "auto" else "1f1b" if virtual == 1 else "interleaved"
    played = pipeline_seconds(
        passes, ranks=layout.pp, micro_batches=m, schedule=schedule, transfer=transfer - sends
    )
    busiest = max(range(layout.pp), key=lambda rank: played.busy[rank])
    own = stages[busiest :: layout.pp]
    compute = m * sum(one.forward.compute + one.backward.compute for one in own)
    exchanges = m * sum(one.forward.communication + one.backward.communication for one in own)
    exchanges += 2 * m * len(own) * sends * (layout.pp > 1)
    reductions = _reductions(setting, own, busiest)
    optimizer = _optimizer(setting, kernels, busiest)
    seconds = {
        "compute": compute,
        "communication_exposed": exchanges + reductions,
        "bubble": played.bubble,
        "optimizer": optimizer,
    }
    total = sum(seconds.values())
    slowest = (
        1.0 + setting.software.spread * math.sqrt(2.0 * math.log(layout.ranks)) if layout.ranks > 1 else 1.0
    )
    step = total * slowest * (1.0 + setting.software.step_share)
    seconds["other"] = step - total
    tokens = setting.global_batch * setting.sequence
    return Prediction(step, tokens / step / layout.ranks, seconds)


@dataclass(frozen=True)
class _Stage:
    forward: PassSeconds
    backward: PassSeconds


def _stages(setting: Setting, kernels: Kernels) -> list[_Stage]:
    model, found = setting.model, []
    times: dict[BlockSpec, BlockSeconds] = {
        block: block_seconds(block, setting, kernels) for block in model.equal_blocks
    }
    stages = blocks_of_stages(setting)
    for number, blocks in enumerate(stages):
        parts = [(times[model.blocks[index]], model.blocks[index]) for index in blocks]
        again = _made_again(setting, [one for one, _ in parts])
        zero = PassSeconds(0.0)
        forward = sum((_gathered(setting, block, one.forward, backward=False) for one, block in parts), zero)
        backward = sum((_gathered(setting, block, one.backward, backward=True) for one, block in parts), zero)
        backward += again
        if number == 0:
            ends = embedding_seconds(setting, kernels)
            forward, backward = forward + ends.forward, backward + ends.backward
        if number == len(stages) - 1:
            ends = head_seconds(setting, kernels)
            forward, backward = forward + ends.forward, backward + ends.backward
        rate = setting.software.contention
        found.append(
            _Stage(
                PassSeconds(forward.compute + rate * forward.hidden, forward.communication, forward.hidden),
                PassSeconds(
                    backward.compute + rate * backward.hidden, backward.communication, backward.hidden
                ),
            )
        )
    return found


def _made_again(setting: Setting, blocks: Sequence[BlockSeconds]) -> PassSeconds:
    """What the backward pass of a stage makes again."""
    zero = PassSeconds(0.0)
    if setting.recompute == SELECTIVE:
        software = setting.software
        attention = 1.0 if software.selective_attention else 0.0
        return PassSeconds(
            sum(
                attention * one.attention + one.cheap + software.selective_products * one.products
                for one in blocks
            )
        )
    return sum((one.forward for one in blocks[: blocks_made_again(setting, len(blocks))]), zero)


def _gathered(setting: Setting, block: BlockSpec, one: PassSeconds, *, backward: bool) -> PassSeconds:
    """A pass of a block beside the gathering of the next one's weights and the reduction of gradients."""
    layout, software = setting.layout, setting.software
    if not setting.shares_weights and not setting.gathers_copies:
        return one
    group, numbers = setting.groups["shards"], numbers_of_block(setting, block)
    seconds = 0.0
    if layout.zero == 3 or not backward:
        seconds += group.gathered(software.weight_bytes * numbers)
    if backward and setting.shares_weights:
        seconds += group.gathered(software.gradient_bytes * numbers)
    beside = min(software.hidden_gathers * seconds, one.compute)
    return PassSeconds(one.compute, one.communication + seconds - beside, one.hidden + beside)


def _reductions(setting: Setting, own: Sequence[_Stage], rank: int) -> float:
    """Seconds of what is reduced and gathered once a step, that the last and the first passes do not hide."""
    layout, software = setting.layout, setting.software
    once = layout.dp if setting.shares_weights else layout.data_ranks * layout.cp
    if once == 1:
        return 0.0
    numbers = numbers_of_rank(setting, rank)
    group = setting.groups["dp" if setting.shares_weights else "data"]
    shards = layout.shards if group is setting.groups["dp"] else 1
    weights = 0.0 if setting.gathers_copies else software.weight_bytes
    seconds = group.gathered((software.gradient_bytes + weights) * numbers / shards)
    window = own[-1].backward.compute + own[0].forward.compute
    return seconds - min(software.hidden_gathers * seconds, window)


def _optimizer(setting: Setting, kernels: Kernels, rank: int) -> float:
    numbers = numbers_of_rank(setting, rank) / setting.state_shards
    return kernels.moved(setting.software.optimizer_bytes * numbers)

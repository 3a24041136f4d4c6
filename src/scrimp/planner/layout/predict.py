"""Seconds and bytes of a step of a setting, split by their causes.

Method   Each stage's passes are the sum of its blocks' (`block_times`), and of embedding or head; what is made again
         (`recompute`) comes to the backward pass. Weights that ranks share are gathered, and gradients reduced, beside
         the passes of the blocks (`sharing`). Stages go through the schedule (`pipeline_times`). After the last pass
         come the reductions that no pass hides, and the optimizer. All devices wait for the slowest of them::

             seconds = (pipeline + reductions + optimizer) (1 + step_share) (1 + spread sqrt(2 ln n))

Limits   Tokens of experts are equally shared. Seconds are predicted, whatever a hardware file's figures are from.
Checked  tests/planner/layout/test_predict.py; benchmarks/published_runs.py: against published runs
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from scrimp.models import BlockSpec
from scrimp.planner.layout.block_activations import boundary_bytes, kept_bytes
from scrimp.planner.layout.block_times import (
    BlockSeconds,
    PassSeconds,
    block_seconds,
    embedding_seconds,
    head_seconds,
    smaller,
)
from scrimp.planner.layout.held_states import leaving_state_bytes
from scrimp.planner.layout.kernels import Kernels
from scrimp.planner.layout.pipeline_times import (
    Array,
    PlayedPass,
    StageSeconds,
    least_weights,
    pipeline_seconds,
    played_passes,
)
from scrimp.planner.layout.product_table import product_table
from scrimp.planner.layout.product_times import Products
from scrimp.planner.layout.setting import FULL, SELECTIVE, BlockPlan, Setting
from scrimp.planner.layout.sharing import (
    backward_passes,
    beside_exchanges,
    forward_pass,
    once_a_step,
    shares,
    stage_waits,
)
from scrimp.planner.layout.stages import (
    Kinds,
    Numbers,
    kinds_of_stages,
    numbers_of_block,
    numbers_of_ends,
    numbers_of_rank,
    numbers_that_leave,
    rank_of_stage,
    splits_backward,
    stages_of_rank,
)


@dataclass(frozen=True)
class Prediction:
    """A step."""

    step_seconds: float
    tokens_per_second_per_device: float
    seconds: dict[str, float]
    """By cause: compute, communication_exposed, bubble, optimizer, other; they add up to the step."""
    least: float
    """Seconds of a step at least whose blocks take as long or longer: their computing may hide more reductions."""
    passes: float
    """Seconds of the step without what is reduced after its passes."""


def kernels_of(setting: Setting) -> Kernels:
    """Those that the setting's software runs on its device."""
    software = setting.software
    return Kernels(software.on(setting.device), software.launch_seconds, software.attention_kernel)


Passes = dict[Any, tuple[PassSeconds, ...]]
"""Passes of blocks and ends of settings that differ in their stages alone."""


def predict(setting: Setting, free: Sequence[str] = (), known: Passes | None = None) -> Prediction:
    """Seconds of a step.

    Args:
        free: recipes of which each product takes the fastest; empty: those of the setting's own.
        known: what such settings have found, which is added to.
    """
    layout, m = setting.layout, setting.micro_batches
    stages = _stages(setting, free, known)
    pipeline = _pipeline(setting, stages)
    played = pipeline_seconds(
        pipeline.passes,
        ranks=layout.pp,
        micro_batches=m,
        schedule=pipeline.schedule,
        transfer=pipeline.transfer,
    )
    busiest = max(range(layout.pp), key=lambda rank: played.busy[rank])
    own = [stages[one] for one in stages_of_rank(layout, busiest)]
    passes = [one for stage in own for one in stage.passes]
    compute = m * sum(one.compute for one in passes)
    exchanges = m * sum(one.communication for one in passes)
    exchanges += 2 * m * len(own) * pipeline.sends * (layout.pp > 1)
    hidden = setting.software.hidden_gathers
    apart = [once_a_step(setting.at(rank), rank) for rank in range(layout.pp)]
    # Gradients of weights that are made last leave nothing to run beside.
    last = 0.0 if splits_backward(layout) else own[-1].passes[1].compute
    windows = (last, own[0].passes[0].compute)
    beside = sum(min(hidden * part, window) for part, window in zip(apart[busiest], windows, strict=True))
    reductions = sum(apart[busiest]) - beside
    optimizer = max(_optimizer(setting.at(rank), rank) for rank in range(layout.pp))
    seconds = {
        "compute": compute,
        "communication_exposed": exchanges + reductions,
        "bubble": played.bubble / setting.software.ranks_a_core,
        "optimizer": optimizer,
    }
    total = sum(seconds.values())
    slower, least = _slower(setting), (1.0 - hidden) * min(map(sum, apart))
    step = total * slower
    seconds["other"] = step - total
    tokens = setting.global_batch * setting.sequence
    rate = tokens / step / layout.ranks
    least_step = step - slower * max(0.0, reductions - least)
    return Prediction(step, rate, seconds, least_step, step - slower * reductions)


def least_step_seconds(
    setting: Setting, free: Sequence[str] = (), busy: Sequence[float] | None = None
) -> float:
    """A step at least, without playing the pipeline: what ranks compute and exchange, how long they wait at least
    (`least_weights`), what no pass hides of the reductions, and the update.

    Args:
        free: as of `predict`.
        busy: `rank_seconds`, where they are known.
    """
    each, layout = busy or rank_seconds(setting, free), setting.layout
    # Ranks of as many parameters on the same devices update and reduce alike.
    alike = {(setting.at(one).places, numbers_of_rank(setting, one)): one for one in range(layout.pp)}
    ranks = alike.values()
    passes = max(setting.micro_batches * max(each), float((rank_weights(setting) @ each).max()))
    optimizer = max(_optimizer(setting.at(rank), rank) for rank in ranks)
    apart = min(sum(once_a_step(setting.at(rank), rank)) for rank in ranks)
    return (passes + optimizer + (1.0 - setting.software.hidden_gathers) * apart) * _slower(setting)


def least_of_any_batch(setting: Setting, smallest: int, free: Sequence[str] = ()) -> float:
    """A step at least of a layout, whatever its micro-batch is and however large its stages are.

    No pass takes less for each of its tokens than the one that has all of a rank's: of products that are larger a
    larger share of the last wave is used, and what is launched, sent or gathered once is shared by more. A pipeline
    takes no less than its ranks do on average, and half of the least waiting (`least_rounds`) with the smallest
    micro-batch. On several kinds of devices the average depends on the stages: 0.

    Args:
        setting: with all sequences of a rank in one micro-batch.
        smallest: sequences of the smallest micro-batch.
        free: as of `predict`.
    """
    layout, pp = setting.layout, setting.layout.pp
    each = rank_seconds(setting, free)
    if pp == 1:
        return least_step_seconds(setting, free, each)
    if len(setting.cluster.groups) > 1:
        return 0.0
    counted = 0.0 if splits_backward(layout) else 1.0 / setting.software.ranks_a_core
    waits = 0.5 * counted * (pp - 1) / (layout.virtual or 1) * smallest / setting.micro_batch
    return (1.0 + waits) * sum(each) / pp * _slower(setting)


def rank_weights(setting: Setting) -> Array:
    """[W, R] A step takes no less than the ranks' seconds of a micro-batch, times any of these rows."""
    layout = setting.layout
    # Of a V it is not known how much a rank waits at least: its passes alone are counted.
    counted = 0.0 if splits_backward(layout) else 1.0 / setting.software.ranks_a_core
    return least_weights(layout.pp, layout.virtual or 1, setting.micro_batches, counted=counted)


def _slower(setting: Setting) -> float:
    """How much longer a step takes than the sum of its parts: the slowest device, and what is none of them."""
    software, ranks = setting.software, setting.layout.ranks
    slowest = 1.0 + software.spread * math.sqrt(2.0 * math.log(ranks)) if ranks > 1 else 1.0
    return slowest * (1.0 + software.step_share)


def rank_seconds(setting: Setting, free: Sequence[str] = (), known: Passes | None = None) -> list[float]:
    """How long each rank of the pipeline is busy with one micro-batch.

    Args:
        free, known: as of `predict`.
    """
    passes, layout = _pipeline(setting, _stages(setting, free, known)).passes, setting.layout
    own = ([passes[one] for one in stages_of_rank(layout, rank)] for rank in range(layout.pp))
    return [sum(one.forward + one.backward for one in ours) for ours in own]


def timeline(setting: Setting, micro_batches: int) -> list[PlayedPass]:
    """The passes of all ranks of a pipeline, as `predict` plays them.

    Args:
        micro_batches: of a step that is played; those of the setting, or fewer.
    """
    pipeline = _pipeline(setting, _stages(setting))
    return played_passes(
        pipeline.passes,
        ranks=setting.layout.pp,
        micro_batches=micro_batches,
        schedule=pipeline.schedule,
        transfer=pipeline.transfer,
    )


@dataclass(frozen=True)
class _Pipeline:
    """What a schedule is played with."""

    passes: list[StageSeconds]
    schedule: str
    sends: float
    """Seconds of a pass in which its result is sent and nothing else runs."""
    transfer: float
    """Seconds after a pass until its result has come."""


def _pipeline(setting: Setting, stages: Sequence[_Stage]) -> _Pipeline:
    layout = setting.layout
    sends = send_seconds(setting)
    transfer = _transfer(setting)
    passes = [one.seconds(sends) for one in stages]
    usual = "1f1b" if (layout.virtual or 1) == 1 else "interleaved"
    return _Pipeline(passes, usual if layout.schedule == "auto" else layout.schedule, sends, transfer - sends)


def send_seconds(setting: Setting) -> float:
    """What sending its result adds to each pass of each stage."""
    return (1.0 - setting.software.hidden_sends) * _transfer(setting) if setting.layout.pp > 1 else 0.0


def _transfer(setting: Setting) -> float:
    """Seconds of a pass's result from one stage to the next."""
    size = setting.tokens * setting.model.width * setting.software.activation_bytes / setting.layout.tp
    return setting.groups["pp"].sent(size)


@dataclass(frozen=True)
class _Stage:
    passes: tuple[PassSeconds, ...]
    """Forward and backward; of the latter both halves where the schedule splits it."""

    def seconds(self, sends: float) -> StageSeconds:
        """As they are played; each pass whose result is sent takes as long besides."""
        forward, backward, *later = (one.total for one in self.passes)
        weights = sum(later)
        return StageSeconds(forward + sends, backward + weights + sends, weights)


def _stages(setting: Setting, free: Sequence[str] = (), known: Passes | None = None) -> list[_Stage]:
    """All of them; those of the same blocks (`kinds_of_stages`) on the same devices are one."""
    kinds, found = kinds_of_stages(setting), []
    last, rate = len(kinds) - 1, setting.software.contention
    blocks: Passes = {} if known is None else known
    made: dict[tuple[tuple[int, ...], int | None, int], _Stage] = {}
    for number, counted in enumerate(kinds):
        own = setting.at(rank_of_stage(setting.layout, number))
        end = number if number in (0, last) else None
        key = (own.places, end, id(counted))
        if key not in made:
            passes = _blocks_seconds(own, counted, blocks, free)
            if end is not None:
                ends = (number == 0, number == last, own.places)
                if ends not in blocks:
                    blocks[ends] = _ends_seconds(number, len(kinds), own, kernels_of(own))
                for at, more in enumerate(blocks[ends]):
                    passes[at] += more
            made[key] = _Stage(tuple(one.slowed(rate) for one in passes))
        found.append(made[key])
    return found


def _blocks_seconds(
    setting: Setting,
    counted: Kinds,
    known: Passes,
    free: Sequence[str],
) -> list[PassSeconds]:
    """The passes of a stage's blocks."""
    kernels, place = kernels_of(setting), setting.places
    passes = [PassSeconds(0.0)] * (2 + splits_backward(setting.layout))
    for kind, count in counted.items():
        if (*kind, place) not in known:
            products = _least(kind[0], setting, kernels, free) if free else None
            known[*kind, place] = planned_seconds(*kind, setting, kernels, products)
        passes = [one + more.times(count) for one, more in zip(passes, known[*kind, place], strict=True)]
    for first in list(counted)[:1]:  # that of the stage's first block
        waits = stage_waits(setting, setting.model.blocks[first[0]])
        for at, wait in zip((0, -1), waits, strict=True):
            exposed = min(wait, known[*first, place][at].hidden)
            passes[at] += PassSeconds(0.0, exposed, -exposed)
    return passes


def _ends_seconds(
    number: int, stages: int, setting: Setting, kernels: Kernels
) -> tuple[PassSeconds, PassSeconds]:
    """Both passes of embedding and head, as far as a stage has them. As a unit of their own they are gathered in the
    forward pass, and stay until their gradients are reduced."""
    forward = backward = PassSeconds(0.0)
    if number == 0:
        words = embedding_seconds(setting, kernels)
        forward, backward = words.forward, words.backward
    if number == stages - 1:
        head = head_seconds(setting, kernels)
        forward, backward = forward + head.forward, backward + head.backward
    if not shares(setting):
        return forward, backward
    software = setting.software
    numbers = Numbers(numbers_of_ends(setting, rank_of_stage(setting.layout, number)), 0.0)
    gradients = software.gradient_bytes * setting.shares_weights
    forward = beside_exchanges(setting, numbers, forward, software.weight_bytes, 0.0)
    return forward, beside_exchanges(setting, numbers, backward, 0.0, gradients)


def planned_seconds(
    number: int,
    plan: BlockPlan,
    setting: Setting,
    kernels: Kernels,
    products: Products | None = None,
    kept: Sequence[float] = (),
) -> tuple[PassSeconds, ...]:
    """Both passes of a block as it is planned: with what is made again, and beside it what is gathered, reduced and
    moved to the host and back; of the backward pass both halves where the schedule splits it.

    Args:
        number: the block's.
        products: in other formats than the plan's; of many sets of formats, seconds are arrays.
        kept: bytes that each of these sets keeps of a pass, needed where they leave for the host.
    """
    block, own = setting.model.blocks[number], setting.in_formats(plan.formats)
    one = block_seconds(block, own, kernels, products)
    forward = forward_pass(own, block, one.forward)
    backward, *weights = backward_passes(own, block, one, plan)
    backward += _made_again(own, plan, one)
    leaves = _leaving(own, block, plan, kept)
    sizes = set(leaves)
    moved: list[Any] = []
    for is_backward in (False, True):
        known = {size: _moved_seconds(own, block, size, backward=is_backward) for size in sizes}
        moved.append(known[leaves[0]] if len(leaves) == 1 else np.array([known[size] for size in leaves]))
    waits = [PassSeconds(0.0, _read_seconds(own, block, backward=one)) for one in (False, True)]
    return beside(forward, moved[0]) + waits[0], beside(backward, moved[1]) + waits[1], *weights


def _least(number: int, setting: Setting, kernels: Kernels, free: Sequence[str]) -> Products:
    return product_table(setting.model.blocks[number], setting, kernels, free).least


def _leaving(setting: Setting, block: BlockSpec, plan: BlockPlan, kept: Sequence[float]) -> Sequence[float]:
    """Bytes of a pass that go to the host and come back; one number for each set of formats, or for all."""
    if not plan.offload:
        return [boundary_bytes(setting) * setting.offload.residuals]
    return kept or [kept_bytes(block, setting)]


def _moved_seconds(setting: Setting, block: BlockSpec, kept: float, *, backward: bool) -> float:
    """Seconds of what a pass of a block sends to the host, or gets from there, whichever takes longer.

    Args:
        kept: bytes that leave in the forward pass and come back.
    """
    offload, software = setting.offload, setting.software
    numbers = numbers_of_block(setting, block).over(setting.weight_shards)
    hidden = software.hidden_host_weights * setting.streams_weights
    comes = setting.block_weight_bytes * numbers * hidden
    if backward:
        leaves = software.held_gradient_bytes * numbers * software.hidden_host_gradients * offload.gradients
        comes += kept + leaves
    else:
        leaves = kept
    link = setting.device.host_link
    rate = link.bytes_per_second * (link.both_ways if comes and leaves else 1.0)
    return max(comes, leaves) / rate


def _read_seconds(setting: Setting, block: BlockSpec, *, backward: bool) -> float:
    """Seconds in which kernels of a pass read a block's weights from the host, and add its gradients up there."""
    software, link = setting.software, setting.device.host_link
    numbers = numbers_of_block(setting, block).over(setting.weight_shards)
    weights = (1.0 - software.hidden_host_weights) * setting.streams_weights * software.held_weight_bytes
    gradients = (1.0 - software.hidden_host_gradients) * (backward and setting.offload.gradients)
    added = gradients * software.held_gradient_bytes / link.both_ways
    return (weights + added) * numbers / link.bytes_per_second


def beside(one: PassSeconds, moved: Any) -> PassSeconds:
    """A pass beside which so many seconds of copies to the host or back run, over a link of their own: beside what
    it computes, and what it waits for."""
    hidden = smaller(moved, one.total)
    return PassSeconds(one.compute, one.communication + moved - hidden, one.hidden + hidden)


def _made_again(setting: Setting, plan: BlockPlan, one: BlockSeconds) -> PassSeconds:
    """What the backward pass of a block makes again."""
    software = setting.software
    if plan.recompute == FULL:
        if software.again_by_level:
            return one.again
        return PassSeconds(one.forward.compute - one.last, one.forward.communication, one.forward.hidden)
    if plan.recompute == SELECTIVE:
        if setting.recompute_parts:
            return PassSeconds(one.parts)
        if software.again_by_level:
            return PassSeconds(one.norms)
        attention = one.attention if software.selective_attention else 0.0
        made = PassSeconds(attention + one.cheap + software.selective_products * one.products)
        gathers = software.selective_gathers * one.forward.communication
        return made + PassSeconds(0.0, gathers)
    return PassSeconds(0.0)


def _optimizer(setting: Setting, rank: int) -> float:
    """Seconds of the update; states on the host come to the device and go back while it updates others."""
    software, link = setting.software, setting.device.host_link
    numbers = numbers_of_rank(setting, rank).over(setting.state_shards)
    leave = numbers_that_leave(setting, rank).over(setting.state_shards)
    visits = leaving_state_bytes(setting) * leave / (link.bytes_per_second * link.both_ways)
    return max(kernels_of(setting).moved(software.optimizer_bytes * numbers), visits)

"""Seconds of gathering weights and reducing gradients, among ranks that share states (ZeRO 1, 2, 3).

Problem  Ranks that share weights gather them before a block runs and reduce its gradients after. In a pipeline this
         goes on in every pass of every micro-batch, in stages of few blocks, with little beside which it can run.
Method   Of a block of W bytes of weights and G of gradients on S ranks, m micro-batches in a step::

             zero    gathers           reductions      gathered weights live
             1       m W               G, once         from the forward to the backward pass
             2       m W               m G             likewise
             3       2 m W             m G             in a pass (`BlockPlan.gathered`: m W, as of zero 2)

         Copies beside shards (dp) add up what their shards have reduced, G / S each, in an all-reduce: once a step or,
         of ZeRO 2 and 3 by FSDP2, in every backward pass (`adds_copies_in_passes`).
         Whatever the schedule, FSDP2 frees what was gathered when a block's backward pass is over, and a forward pass
         that finds it there gathers nothing; so in 1F1B, where all micro-batches in flight share it, there is one
         gather to each backward pass. A share of `hidden_gathers` runs beside the pass's computing. In a pipeline two
         exchanges of each stage do not::

             of its first block    gathered when its forward pass begins: the streams of all-gathers wait for all that
                                   was computed before (FSDPState._root_pre_forward)
                                   reduced when its backward pass ends: the next pass waits for it
                                   (FSDPState._root_post_backward_final_callback)

         Where gradients of weights are a pass of their own (zbv, dualpipev), it is this one beside which they are
         reduced, block by block, and after which none of zero 1 are left to run beside.
Limits   Without a pipeline the two are part of `hidden_gathers`, which was set beside runs of whole models. Programs
         that keep weights whole between the passes of a pipeline (`whole_in_pipelines`) are taken to gather in each.
Source   ZeRO, arXiv 1910.02054; PyTorch, fsdp/_fully_shard/_fsdp_state.py (2.13)
Checked  tests/planner/layout/test_sharing.py; tests/parity/: gathers and bytes of ranks that run
"""

from __future__ import annotations

from scrimp.models import BlockSpec
from scrimp.planner.layout.block_times import BlockSeconds, PassSeconds, smaller
from scrimp.planner.layout.collectives import Group
from scrimp.planner.layout.setting import BlockPlan, Setting
from scrimp.planner.layout.stages import Numbers, numbers_of_block, numbers_of_rank, splits_backward

_SHARDS = "shards", "expert_shards"


def shares(setting: Setting) -> bool:
    """Whether weights are gathered, or gradients reduced, in every pass."""
    return setting.shares_weights or setting.gathers_copies


def forward_pass(setting: Setting, block: BlockSpec, one: PassSeconds) -> PassSeconds:
    """A block's forward pass beside the gathering of the next one's weights."""
    if not shares(setting):
        return one
    return beside_exchanges(setting, numbers_of_block(setting, block), one, setting.block_weight_bytes, 0.0)


def backward_passes(
    setting: Setting, block: BlockSpec, one: BlockSeconds, plan: BlockPlan
) -> tuple[PassSeconds, ...]:
    """A block's backward pass beside gathers and the reduction of gradients; its halves where a schedule splits it:
    for inputs, which needs weights, and for weights, which makes gradients."""
    whole, later = one.backward, PassSeconds(one.weights)
    is_split = splits_backward(setting.layout)
    if is_split:
        whole = PassSeconds(whole.compute - one.weights, whole.communication, whole.hidden)
    if shares(setting):
        numbers = numbers_of_block(setting, block)
        weights = setting.block_weight_bytes * (setting.layout.zero == 3 and not plan.gathered)
        gradients = setting.software.gradient_bytes * setting.shares_weights
        whole = beside_exchanges(setting, numbers, whole, weights, gradients * (not is_split))
        later = beside_exchanges(setting, numbers, later, 0.0, gradients) if is_split else later
    return (whole, later) if is_split else (whole,)


def stage_waits(setting: Setting, block: BlockSpec) -> tuple[float, float]:
    """Seconds of a stage's first gather and of its last reduction that would run beside computing elsewhere.

    Args:
        block: the stage's first.
    """
    software = setting.software
    if setting.layout.pp == 1 or not shares(setting) or software.whole_in_pipelines:
        return 0.0, 0.0
    numbers, gradients = numbers_of_block(setting, block), software.gradient_bytes * setting.shares_weights
    gathered = _exchanged(setting, numbers, setting.block_weight_bytes, 0.0)
    return software.hidden_gathers * gathered, software.hidden_gathers * _exchanged(
        setting, numbers, 0.0, gradients
    )


def beside_exchanges(
    setting: Setting, numbers: Numbers, one: PassSeconds, weights: float, gradients: float
) -> PassSeconds:
    """A pass beside which weights are gathered and gradients reduced, so many bytes for each number."""
    software = setting.software
    seconds = _exchanged(setting, numbers, weights, gradients)
    copied = software.unit_copies * (weights + gradients) * numbers.total / setting.device.bandwidth
    beside = smaller(software.hidden_gathers * seconds, one.compute)
    return PassSeconds(one.compute, one.communication + copied + seconds - beside, one.hidden + beside)


def _exchanged(setting: Setting, numbers: Numbers, weights: float, gradients: float) -> float:
    seconds = 0.0
    for group, count in _each(setting, numbers, _SHARDS):
        seconds += group.gathered(weights * count) + group.reduced(gradients * count)
    if gradients and _adds_in_passes(setting):
        seconds += setting.groups["dp"].added(gradients * numbers.over(setting.weight_shards))
    return seconds


def _adds_in_passes(setting: Setting) -> bool:
    """Whether copies beside shards add up the gradients of every micro-batch."""
    return setting.software.adds_copies_in_passes and setting.shares_weights and setting.layout.dp > 1


def once_a_step(setting: Setting, rank: int) -> tuple[float, float]:
    """Seconds of what a rank reduces once a step, and gathers; the last passes and the first ones hide a part of it."""
    groups, numbers, copies = setting.groups, numbers_of_rank(setting, rank), 0.0
    gradients, over = setting.software.gradient_bytes, ("data", "edp")
    if _adds_in_passes(setting):
        return 0.0, 0.0
    if setting.shares_weights:
        return groups["dp"].added(gradients * numbers.over(setting.weight_shards)), 0.0
    if setting.state_shards[0] == 1:
        return sum(group.added(gradients * count) for group, count in _each(setting, numbers, over)), 0.0
    if setting.state_shards[0] < groups["data"].ranks:
        # Copies of shards add up what each of these has reduced.
        over, copies = _SHARDS, groups["dp"].added(gradients * numbers.over(setting.state_shards))
    among = _each(setting, numbers, over)
    reduced = sum(group.reduced(gradients * count) for group, count in among)
    again = setting.block_weight_bytes * (not setting.gathers_copies)
    return reduced + copies, sum(group.gathered(again * count) for group, count in among)


def _each(setting: Setting, numbers: Numbers, axes: tuple[str, str]) -> tuple[tuple[Group, float], ...]:
    """The ranks that exchange parameters outside of routed experts, and those of experts, each with how many."""
    dense, routed = (setting.groups[axis] for axis in axes)
    return (dense, numbers.dense), (routed, numbers.routed)

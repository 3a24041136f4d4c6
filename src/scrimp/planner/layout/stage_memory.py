"""Bytes that each rank of a pipeline takes at most, by what takes them.

Method   With P the parameters of a rank, S the ranks that share states, n the tokens of a pass, t = tp::

             weights        2 P, shared by zero 3
             gradients      as they are added up, shared where they are reduced in each pass (zero 2 and 3)
             optimizer      master and moments, P / S of each; of routed experts S is those that have the same ones
             gathered       two blocks' weights and one block's gradients, where these are shared; under zero 3
                            embedding and head too, with their gradients
             activations    of each block and pass in flight: inputs of products, of norms and of gates, queries, keys,
                            values, results (`kept_bytes`); the first 1f1b rank has as many passes in flight as ranks
             logits         of the last stage's passes, in bf16 and float32, and their gradients

         A block that is made again keeps its input alone, and one block all of it while its backward pass runs.
         Of what leaves for the host two blocks are still here.
Limits   `MARGIN` on top, for what an allocator cannot use. Tokens of experts are equally shared.
Source   Korthikanti et al., arXiv 2205.05198, section 4; flash attention keeps no scores
Checked  tests/planner/layout/test_rank_bytes.py
"""

from __future__ import annotations

from dataclasses import dataclass

from scrimp.models import BlockSpec
from scrimp.models.shapes import value_width
from scrimp.planner.layout.kernels import UNFUSED, element_bytes
from scrimp.planner.layout.setting import FULL, NONE, SELECTIVE, BlockPlan, Setting
from scrimp.planner.layout.stages import (
    Kinds,
    kinds_of_ranks,
    numbers_of_block,
    numbers_of_ends,
    numbers_of_rank,
)

MARGIN = 0.03
"""Share of all that a caching allocator cannot use, and what libraries take: an estimate."""


@dataclass(frozen=True)
class RankBytes:
    """The peak of one rank."""

    categories: dict[str, float]

    @property
    def total(self) -> float:
        """All of it."""
        return sum(self.categories.values())


def peak_bytes(setting: Setting) -> list[RankBytes]:
    """The peaks of the ranks of a pipeline, first to last."""
    return [_rank(setting, kinds, rank) for rank, kinds in enumerate(kinds_of_ranks(setting))]


def kept_bytes(block: BlockSpec, setting: Setting) -> float:
    """What a block keeps of one pass for its backward pass, with nothing made again."""
    attends, layout, software = block.attention, setting.layout, setting.software
    keys = attends.num_kv_heads * (attends.head_size + (attends.value_size or attends.head_size))
    found = 2.0 * (attends.width + keys + value_width(attends))
    found += (
        2.0 * (software.held_rotations - 1.0) * (attends.width + attends.num_kv_heads * attends.head_size)
    )
    whole = 0.0
    for linear in block.linears:
        # What the level mlp makes again, gates read; what attention keeps is counted.
        if linear.again == "mlp":
            found += 2.0 * linear.chosen * linear.outputs
        if linear.origin != "kept":
            size = element_bytes(setting.recipe(linear.name, "wgrad")) * linear.chosen * linear.inputs
            is_whole = software.keeps_gathered and linear.cut == "outputs" and linear.experts == 1
            found, whole = found + size * (not is_whole), whole + size * is_whole
    stream = 2.0 * 2.0 * setting.model.width
    shared = layout.tp if setting.sequence_parallel else 1
    return setting.tokens * (found / layout.tp + whole + stream / shared) + score_bytes(block, setting)


def score_bytes(block: BlockSpec, setting: Setting) -> float:
    """What attention keeps of its scores where they are in memory: their softmax, that after dropout, and its mask."""
    if setting.software.attention_kernel != UNFUSED:
        return 0.0
    return 5.0 * setting.tokens * setting.sequence * block.attention.num_heads / setting.layout.tp


def _rank(setting: Setting, own: Kinds, rank: int) -> RankBytes:
    layout, software, whole = setting.layout, setting.software, (1, 1)
    numbers, shards = numbers_of_rank(setting, rank), setting.weight_shards
    numbers_of = {kind: numbers_of_block(setting, setting.model.blocks[kind[0]]).total for kind in own}
    largest = max(numbers_of.values())
    weights = software.held_weight_bytes * numbers.over(shards if layout.zero == 3 else whole)
    gradients = software.held_gradient_bytes * numbers.over(shards)
    gathered = 0.0
    if shards[0] > 1:
        gathered = largest * (2 * software.weight_bytes + software.gradient_bytes)
    if shards[0] > 1 and layout.zero == 3:
        # Embedding and head are gathered from the forward pass to the end of the backward one, where their gradients
        # are of the same type until they are reduced.
        ends = numbers_of_ends(setting, rank)
        gathered += 2.0 * ends * software.weight_bytes
        stay = sum(count * numbers_of[kind] for kind, count in own.items() if kind[1].gathered)
        weights += software.weight_bytes * stay
    if setting.streams_weights:
        weights = min(weights, 2 * largest * software.held_weight_bytes)
    if setting.offload.gradients:
        gradients = min(gradients, 2 * largest * software.held_gradient_bytes)
    found = {
        "weights": weights,
        "gradients": gradients,
        "optimizer": _state_bytes(setting) * numbers.over(setting.state_shards),
        "gathered": gathered,
        "activations": _activations(setting, own, rank),
        "logits": _logits(setting) if rank == layout.pp - 1 else 0.0,
    }
    return RankBytes(found | {"margin": MARGIN * sum(found.values())})


def _state_bytes(setting: Setting) -> float:
    """Bytes for each number of moments and master weight that stay on the device."""
    software, offload = setting.software, setting.offload
    moments = software.state_bytes - software.master_bytes
    return moments * (not offload.optimizer) + software.master_bytes * (not offload.master)


def host_bytes(setting: Setting) -> float:
    """Bytes of states that the rank with most of them has in host memory."""
    software, offload, shards = setting.software, setting.offload, setting.weight_shards
    ranks = [numbers_of_rank(setting, rank) for rank in range(setting.layout.pp)]
    moments = (software.state_bytes - software.master_bytes) * offload.optimizer
    states = moments + software.master_bytes * offload.master
    weights, gradients = (
        software.held_weight_bytes * setting.streams_weights,
        software.held_gradient_bytes * offload.gradients,
    )
    held = shards if setting.layout.zero == 3 else (1, 1)
    return max(
        states * one.over(setting.state_shards) + weights * one.over(held) + gradients * one.over(shards)
        for one in ranks
    )


def passes_in_flight(setting: Setting, rank: int) -> float:
    """How many passes of all its blocks a rank holds when they are most."""
    layout, m = setting.layout, setting.micro_batches
    virtual = layout.virtual or 1
    if virtual == 1:
        return m if layout.schedule == "gpipe" else min(m, layout.pp - rank)
    return min(2 * (layout.pp - 1 - rank) + (virtual - 1) * layout.pp + 1, m * virtual) / virtual


def boundary_bytes(setting: Setting) -> float:
    """The residual stream of a pass between two blocks."""
    shared = setting.layout.tp if setting.sequence_parallel else 1
    return 2.0 * setting.tokens * setting.model.width / shared


def waiting_bytes(block: BlockSpec, plan: BlockPlan, setting: Setting) -> float:
    """What a block holds on the device of each pass in flight."""
    if plan.offload:
        return 0.0
    boundary = boundary_bytes(setting)
    stays = 0.0 if setting.offload.residuals else boundary
    if plan.recompute == FULL:
        return stays
    kept = kept_bytes(block, setting)
    if plan.recompute == SELECTIVE:
        kept = _selective_bytes(block, setting, kept - score_bytes(block, setting))
    return kept - boundary + stays


def _drops(setting: Setting) -> bool:
    """Whether selective recomputation makes more again than scores."""
    return setting.software.selective_drops_mlp or setting.software.selective_keeps < 1.0


def _selective_bytes(block: BlockSpec, setting: Setting, kept: float) -> float:
    """What selective recomputation keeps of what else is kept, scores left out."""
    software, attends = setting.software, block.attention
    if not software.selective_drops_mlp:
        return software.selective_keeps * kept
    keys = attends.num_kv_heads * (attends.head_size + (attends.value_size or attends.head_size))
    of_attention = 2.0 * (attends.width + keys + value_width(attends)) / setting.layout.tp
    return setting.tokens * of_attention + 2.0 * boundary_bytes(setting)


def made_again_bytes(block: BlockSpec, plan: BlockPlan, setting: Setting) -> float:
    """What a block has on the device besides while its backward pass runs: what is made again, or comes back."""
    has_all = plan.recompute == NONE or (
        plan.recompute == SELECTIVE and setting.software.selective_keeps >= 1
    )
    if has_all:
        return 2.0 * kept_bytes(block, setting) if plan.offload else 0.0
    return kept_bytes(block, setting)


def _activations(setting: Setting, own: Kinds, rank: int) -> float:
    """Bytes kept by the passes in flight when there are most of them."""
    waiting, most = 0.0, 0.0
    for (index, plan), count in own.items():
        block, like = setting.model.blocks[index], setting.in_formats(plan.formats)
        waiting += count * waiting_bytes(block, plan, like)
        most = max(most, made_again_bytes(block, plan, like))
    return passes_in_flight(setting, rank) * waiting + most


def _logits(setting: Setting) -> float:
    """In bf16, and in float32 with their gradient."""
    tokens = setting.software.loss_tokens or setting.tokens
    return (
        min(tokens, setting.tokens)
        * setting.model.vocab_size
        / setting.layout.tp
        * setting.software.held_logit_bytes
    )

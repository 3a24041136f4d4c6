"""Bytes that each rank of a pipeline takes at most, by what takes them.

Method   With P the parameters of a rank, S the ranks that share states, n the tokens of a pass, t = tp::

             weights        2 P, shared by zero 3
             gradients      as they are added up, shared where they are reduced in each pass (zero 2 and 3)
             optimizer      master and moments, P / S of each
             gathered       two blocks' weights and one block's gradients, where these are shared
             activations    of each block and pass in flight: inputs of products, of norms and of gates, queries, keys,
                            values, results (`kept_bytes`); the first 1f1b rank has as many passes in flight as ranks
             logits         of the last stage's passes, in bf16 and float32, and their gradients

         A block that is made again keeps its input alone, and one block all of it while its backward pass runs.
         Of what leaves for the host two blocks are still here.
Limits   `MARGIN` on top, for what an allocator cannot use. Tokens of experts are equally shared.
Source   Korthikanti et al., arXiv 2205.05198, section 4, with flash attention, which keeps no scores
Checked  tests/planner/layout/test_rank_bytes.py
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from scrimp.models import BlockSpec
from scrimp.models.shapes import value_width
from scrimp.planner.layout.kernels import element_bytes
from scrimp.planner.layout.setting import SELECTIVE, Setting
from scrimp.planner.layout.stages import (
    blocks_made_again,
    blocks_of_stages,
    numbers_of_block,
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
    stages = blocks_of_stages(setting)
    return [_rank(setting, stages, rank) for rank in range(setting.layout.pp)]


def kept_bytes(block: BlockSpec, setting: Setting) -> float:
    """What a block keeps of one pass for its backward pass, with nothing made again."""
    attends, layout = block.attention, setting.layout
    width = setting.model.width
    keys = attends.num_kv_heads * (attends.head_size + (attends.value_size or attends.head_size))
    found = 2.0 * (attends.width + keys + value_width(attends))
    for linear in block.linears:
        # What the level mlp makes again, gates read; what attention keeps is counted.
        if linear.again == "mlp":
            found += 2.0 * linear.chosen * linear.outputs
        if linear.origin != "kept":
            found += element_bytes(setting.recipe(linear.name, "wgrad")) * linear.chosen * linear.inputs
    stream = 2.0 * 2.0 * width
    shared = layout.tp if setting.sequence_parallel else 1
    return setting.tokens * (found / layout.tp + stream / shared)


def _rank(setting: Setting, stages: Sequence[range], rank: int) -> RankBytes:
    layout, software, model = setting.layout, setting.software, setting.model
    own = [model.blocks[index] for blocks in stages[rank :: layout.pp] for index in blocks]
    numbers = numbers_of_rank(setting, rank)
    sharded = layout.shards if setting.shares_weights else 1
    largest = max(numbers_of_block(setting, block) for block in own)
    weights = software.held_weight_bytes * numbers / (sharded if layout.zero == 3 else 1)
    gradients = software.held_gradient_bytes * numbers / sharded
    gathered = largest * (2 * software.weight_bytes + software.gradient_bytes) if sharded > 1 else 0.0
    if setting.offload.weights:
        weights = min(weights, 2 * largest * software.held_weight_bytes)
    if setting.offload.gradients:
        gradients = min(gradients, 2 * largest * software.held_gradient_bytes)
    found = {
        "weights": weights,
        "gradients": gradients,
        "optimizer": _state_bytes(setting) * numbers / setting.state_shards,
        "gathered": gathered,
        "activations": _activations(setting, stages, rank),
        "logits": _logits(setting) if rank == layout.pp - 1 else 0.0,
    }
    return RankBytes(found | {"margin": MARGIN * sum(found.values())})


def _state_bytes(setting: Setting) -> float:
    """Bytes for each number of moments and master weight that stay on the device."""
    software, offload = setting.software, setting.offload
    moments = software.state_bytes - software.master_bytes
    return moments * (not offload.optimizer) + software.master_bytes * (not offload.master)


def _activations(setting: Setting, stages: Sequence[range], rank: int) -> float:
    """Bytes kept by the passes in flight when there are most of them."""
    layout, model = setting.layout, setting.model
    virtual, m = layout.virtual or 1, setting.micro_batches
    boundary = 2.0 * setting.tokens * model.width / (layout.tp if setting.sequence_parallel else 1)
    stays = 0.0 if setting.offload.residuals else boundary
    keeps = setting.software.selective_keeps if setting.recompute == SELECTIVE else 1.0
    kept, whole = [], [0.0]
    for blocks in stages[rank :: layout.pp]:
        again = blocks_made_again(setting, len(blocks))
        sizes = [kept_bytes(model.blocks[index], setting) for index in blocks]
        whole += sizes if keeps < 1.0 else sizes[:again]
        kept.append(
            sum(stays if at < again else keeps * size - boundary + stays for at, size in enumerate(sizes))
        )
    if virtual == 1:
        flying = m if layout.schedule == "gpipe" else min(m, layout.pp - rank)
        found = flying * kept[0]
    else:
        ahead = min(2 * (layout.pp - 1 - rank) + (virtual - 1) * layout.pp + 1, m * virtual)
        found = ahead * sum(kept) / virtual
    leaving = setting.offload.activation_layers
    if leaving:
        blocks_here = sum(len(blocks) for blocks in stages[rank :: layout.pp])
        found *= 1.0 - max(0, leaving - 2) / blocks_here
    return found + max(whole)


def _logits(setting: Setting) -> float:
    """In bf16, and in float32 with their gradient."""
    tokens = setting.software.loss_tokens or setting.tokens
    return (
        min(tokens, setting.tokens)
        * setting.model.vocab_size
        / setting.layout.tp
        * setting.software.held_logit_bytes
    )

"""The costs of a step on one rank of a pipeline: its blocks, and the micro-batches that it holds at a time.

Problem  A rank has the states of its own blocks alone, but keeps what they need of several micro-batches at once, as
         many as its schedule lets be between their forward and their backward pass.
Method   One stage of the rank is taken as the chain of blocks that runs; what all of its stages hold besides is
         resident. With f[s] the micro-batches of stage s in flight, K[s] what its blocks keep of one, and n[s] those
         that wait for gradients of weights (zbv, dualpipev), at the moment at which it is most::

             resident   + sum over the rank's stages of f[s] K[s] + n[s] x what waits, without the one that runs
                        + tables of positions and masks, of each micro-batch in flight
                        + boundaries that have arrived and wait, and one that is sent each way
                        + f W of the last stage, where it holds several losses: each has made its head's gradient, of W

         What waits are the inputs of linear layers and the gradients of their results.
         A stage's own input is one boundary, and so is its last block's result, which goes when it is sent. Blocks of
         other ranks cost nothing; embedding and head have the share of their numbers. The rank's peak is that of the
         stage for which it is largest.
Limits   Every stage of a rank is taken to run at that moment. Of `layout.tp` as in `shared_costs`.
Checked  tests/planner/memory/test_stage_costs.py; tests/runtime/pipeline/test_stage_memory.py: real ranks
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from scrimp.config.pipeline import Pipeline
from scrimp.models import ModelSpec
from scrimp.planner.memory.costs import BlockClass, BlockCost, EndsCost, StepCosts, chosen_costs

NOTHING = BlockCost(0, 0, 0)


@dataclass(frozen=True)
class Held:
    """What a rank holds at a moment, by its order of passes."""

    in_flight: Mapping[int, int]
    """Stage to micro-batches between forward pass and the end of the backward pass, of weights that wait of that for
    inputs."""
    waiting: Mapping[int, int]
    """Stage to micro-batches whose gradients of weights are still to be made."""
    arrived: int
    """Boundaries that other ranks have sent, and nobody has read; at most."""


def part_of_costs(costs: StepCosts, pipeline: Pipeline, rank: int, spec: ModelSpec) -> StepCosts:
    """A rank's states: blocks of others cost nothing."""
    own = set(pipeline.blocks_of(rank))
    nothing = [_nothing(kind) for kind in costs.classes]
    blocks = [number if i in own else len(nothing) + number for i, number in enumerate(costs.blocks)]
    stages = pipeline.stages_of(rank)
    share = _share_of_ends(spec, 0 in stages, pipeline.num_stages - 1 in stages)
    ends = dataclasses.replace(
        costs.ends,
        **{name: round(getattr(costs.ends, name) * share) for name in ("weights", "gradients", "optimizer")},
    )
    return dataclasses.replace(costs, classes=(*costs.classes, *nothing), blocks=tuple(blocks), ends=ends)


def stage_costs(
    costs: StepCosts,
    pipeline: Pipeline,
    rank: int,
    stage: int,
    held: Sequence[Held],
    activations: Sequence[str],
    spec: ModelSpec,
    *,
    tokens: int,
    compute_bytes: int,
) -> StepCosts:
    """The costs while a stage runs.

    Args:
        costs: of the rank (`part_of_costs`).
        held: at each moment.
        activations: of all blocks.
        tokens: of a micro-batch.
        compute_bytes: of a number of the activations.
    """
    chosen, last = chosen_costs(costs, activations), pipeline.num_stages - 1
    stages = pipeline.stages_of(rank)
    kept = {one: sum(chosen[i].kept for i in pipeline.stages[one]) for one in stages}
    waits = {one: _numbers_waiting(spec, pipeline.stages[one]) * tokens * compute_bytes for one in stages}
    loss = costs.boundary + spec.head.parameters * compute_bytes

    def bytes_of(moment: Held) -> int:
        flying = moment.in_flight
        found = sum(
            flying.get(one, 0) * kept[one] + moment.waiting.get(one, 0) * waits[one] for one in stages
        )
        found += (sum(flying.values()) - 1) * costs.tables + (moment.arrived + 2) * costs.boundary
        return found + max(0, flying.get(last, 0) - 1) * loss

    more = max(map(bytes_of, held)) - kept[stage]
    silent = [_silent(kind) for kind in costs.classes]
    blocks = [
        number if i in pipeline.stages[stage] else len(silent) + number
        for i, number in enumerate(costs.blocks)
    ]
    is_tied = 0 in kept and last in kept
    return dataclasses.replace(
        costs,
        classes=(*costs.classes, *silent),
        blocks=tuple(blocks),
        resident=costs.resident + more,
        ends=_ends_of(costs.ends, has_embedding=stage == 0, has_head=stage == last, waits=is_tied),
    )


def _numbers_waiting(spec: ModelSpec, blocks: range) -> int:
    """For each token, of a micro-batch whose gradients of weights are still to be made."""
    linears = [linear for number in blocks for linear in spec.blocks[number].linears]
    return sum((linear.inputs + linear.outputs) * linear.chosen for linear in linears)


def _share_of_ends(spec: ModelSpec, is_first: bool, is_last: bool) -> float:
    """A rank's part of the numbers that are no block's."""
    words, width = spec.head.parameters, spec.architecture.width
    if spec.architecture.tied_embeddings:
        return (words * (is_first or is_last) + width * is_last) / (words + width)
    return (words * (is_first + is_last) + width * is_last) / (2 * words + width)


def _ends_of(ends: EndsCost, *, has_embedding: bool, has_head: bool, waits: bool) -> EndsCost:
    """What passes over embedding and head take, where the running stage has them."""
    none: dict[str, int | None] = {}
    if not has_head:
        none |= {"head_peak": 0, "accumulating_head_peak": 0, "head_gradients": 0}
    if not has_embedding:
        none |= {"embedding_peak": 0, "accumulating_embedding_peak": 0}
    if not waits:
        none["waiting"] = 0
    return dataclasses.replace(ends, **none)  # type: ignore[arg-type]


def _nothing(kind: BlockClass) -> BlockClass:
    """A block of another rank."""
    return BlockClass(0, 0, 0, dict.fromkeys(kind.choices, NOTHING))


def _silent(kind: BlockClass) -> BlockClass:
    """A block of this rank that does not run."""
    return dataclasses.replace(kind, choices=dict.fromkeys(kind.choices, NOTHING))

"""The costs of a step on one of the ranks that share a model: its parts of all states, and what it gathers.

Problem  A trace gives the bytes of a step that has all of the model. Of several ranks each keeps 1/F of weights,
         gradients and optimizer states (F ranks of `layout.fsdp` and `layout.cp`), and for a while holds whole what its
         passes read and make. Of all of these `layout.tp` leaves a rank its pieces: 1/tp.
Method   With W, G, O a unit's bytes of weights, gradients, optimizer states, R those of its gradients in float32, in
         which they are reduced, FSDP2 holds of every block beside W/F, G/F, O/F::

             forward     W, and W that its gather has put there, which goes when the next block has gathered
             backward    W, W of the block before it, which is gathered meanwhile, R of the block after it, which is
                         being reduced, and one more W and R that the threads of the last gather and reduction may
                         still hold; its own whole G the trace counts already
             copies      (`layout.dp`) twice R/F, which is being added up over them
             zero 2      W stays from its forward to its backward pass, like an activation that it keeps; so it does
                         under zero 3 in the blocks of `layout.gathered`. A block before it that keeps its own is not
                         gathered once more
             zbv, dualpipev: weights' gradients come when W is gone. So backward takes either three times W without
                         the block's own G, or twice R with it and twice W that gathers may still hold
             zero 1      so do whole sums of gradients in float32, from the first micro-batch to the last

         Weights that are frozen are gathered as others are, and have no G, O and R.
         Embedding, final norm and head are one unit, gathered as long as the passes last; their whole gradients wait
         for the end of the backward pass, where they are reduced.
         Ranks without shards (fsdp x cp = 1) gather nothing. Copies add up their gradients in float32, one bucket at a
         time beside the gradients that it is made of (`scrimp.runtime.parallel.gradient_sums`).
         Routed experts are shared otherwise (`scrimp.models.expert_ranks`): of the n ranks of a stage each
         keeps 1/n of them, and gathers 1/(ep etp).
Limits   Parts are rounded up: ranks get equal numbers of rows or fewer. Blocks are taken to be as large as their
         neighbours. Of `layout.tp`, activations are counted as those of whole layers, and copies of norms as pieces:
         the account is above what ranks take. What gloo and NCCL take for themselves is not counted, nor is a gather
         that FSDP2 begins earlier on a GPU whose host runs ahead, nor what rings and Ulysses hold, nor more
         tokens at the experts of a rank than it has itself.
         Seconds are those of the passes alone, without communication: none are predicted.
Source   torch.distributed.fsdp._fully_shard, torch 2.13
Checked  tests/planner/memory/test_shared_costs.py; tests/runtime/parallel/test_shared_memory.py: real ranks
"""

from __future__ import annotations

import dataclasses

from scrimp.config.gathered import gathered_blocks
from scrimp.config.pipeline import V_SHAPED
from scrimp.config.resolved import ResolvedLayout
from scrimp.planner.memory.costs import BlockClass, BlockCost, EndsCost, StepCosts

REDUCED_BYTES = 4
"""Bytes of a gradient's number while it is reduced."""
BUCKET_BYTES = 25 * 2**20
"""Most of several gradients of whole copies that are reduced together: torch's DistributedDataParallel has as much, and
smaller buckets cost more than they hide (docs/lab-log.md)."""


def shared_costs(
    costs: StepCosts, layout: ResolvedLayout, *, parameter_bytes: int, micro_batches: int
) -> StepCosts:
    """The costs of a rank.

    Args:
        costs: of a process that has all of the model.
        parameter_bytes: of one number of the weights that are trained.
        micro_batches: of a rank in a step.
    """
    if layout.ranks == 1:
        return costs
    if layout.ranks == layout.pp:
        return dataclasses.replace(costs, is_shared=True)
    with_experts = layout.ranks > layout.pp and any(kind.routed for kind in costs.classes)
    if layout.shards == 1 and not with_experts:
        return _of_copy(costs, layout, parameter_bytes)
    sums_whole = layout.zero == 1 and micro_batches > 1
    stay = gathered_blocks(layout, len(costs.blocks))
    # By class, whether a block's own weights stay, and those of the block before it, which may stand for none.
    kinds = [(number, i in stay, max(i - 1, 0) in stay) for i, number in enumerate(costs.blocks)]
    known = {kind: place for place, kind in enumerate(dict.fromkeys(kinds))}
    gathered = _piece(costs.ends.weights, layout)
    return dataclasses.replace(
        costs,
        classes=tuple(
            _block(costs.classes[number], layout, parameter_bytes, sums_whole, stays=stays, before=before)
            for number, stays, before in known
        ),
        blocks=tuple(known[kind] for kind in kinds),
        ends=_ends(costs.ends, layout, parameter_bytes, sums_whole),
        # Like the tables they end with the backward pass.
        resident=costs.resident + gathered,
        tables=costs.tables + gathered,
        is_shared=True,
    )


def _of_copy(costs: StepCosts, layout: ResolvedLayout, parameter_bytes: int) -> StepCosts:
    """The costs of a rank that has all of a copy, or all pieces that tp leaves it."""
    states: list[BlockClass | EndsCost] = [costs.ends, *(costs.classes[number] for number in costs.blocks)]
    numbers = sum(_piece(one.trained, layout) for one in states) // parameter_bytes
    bucket = min(BUCKET_BYTES, numbers * REDUCED_BYTES) * (layout.dp > 1)

    def gradients(one: BlockClass | EndsCost) -> int:
        own = _piece(one.gradients, layout)
        return max(own, _reduced(_piece(one.trained, layout), parameter_bytes)) if layout.dp > 1 else own

    def cost(one: BlockCost) -> BlockCost:
        most = one.accumulating_peak
        return dataclasses.replace(
            one,
            backward_peak=one.backward_peak + bucket,
            accumulating_peak=None if most is None else most + bucket,
        )

    classes = tuple(
        dataclasses.replace(
            kind,
            weights=_piece(kind.weights, layout),
            frozen=_piece(kind.frozen, layout),
            gradients=gradients(kind),
            optimizer=_piece(kind.optimizer, layout),
            choices={name: cost(one) for name, one in kind.choices.items()},
            parameters=_piece(kind.parameters, layout),
        )
        for kind in costs.classes
    )
    ends, most = costs.ends, costs.ends.accumulating_embedding_peak
    ends = dataclasses.replace(
        ends,
        weights=_piece(ends.weights, layout),
        frozen=_piece(ends.frozen, layout),
        gradients=gradients(ends),
        optimizer=_piece(ends.optimizer, layout),
        embedding_peak=ends.embedding_peak + bucket,
        accumulating_embedding_peak=None if most is None else most + bucket,
    )
    return dataclasses.replace(costs, classes=classes, ends=ends, is_shared=True)


def _block(
    kind: BlockClass,
    layout: ResolvedLayout,
    parameter_bytes: int,
    sums_whole: bool,
    *,
    stays: bool,
    before: bool,
) -> BlockClass:
    share = kind.routed / kind.parameters if kind.parameters else 0.0
    whole = _piece(kind.weights, layout, share)
    reduced = _reduced(_piece(kind.trained, layout, share), parameter_bytes)
    own = whole if stays else 0
    over_copies = 2 * -(-reduced // layout.fsdp) * (layout.dp > 1)
    # Its own weights, those gathered for the block before (none where they stay), and what is not let go of yet.
    gathers, reduces = whole + whole * (not before) + whole, 2 * reduced + over_copies
    still = 2 * whole * (layout.shards > 1)
    apart = max(gathers - _piece(kind.gradients, layout, share), still + reduces)
    extra = apart if layout.schedule in V_SHAPED else gathers + reduces

    def cost(one: BlockCost) -> BlockCost:
        accumulating = one.accumulating_peak
        return dataclasses.replace(
            one,
            kept=one.kept + own,
            forward_peak=one.forward_peak + 2 * whole,
            backward_peak=one.backward_peak + extra,
            accumulating_peak=None if accumulating is None else accumulating + extra,
        )

    return dataclasses.replace(
        kind,
        weights=_part(kind.weights, layout, share),
        frozen=_part(kind.frozen, layout, share),
        gradients=reduced if sums_whole else _part(kind.gradients, layout, share),
        optimizer=_part(kind.optimizer, layout, share),
        choices={name: cost(one) for name, one in kind.choices.items()},
        parameters=_part(kind.parameters, layout, share),
        routed=_part(kind.routed, layout, 1.0),
    )


def _ends(ends: EndsCost, layout: ResolvedLayout, parameter_bytes: int, sums_whole: bool) -> EndsCost:
    reduced = _reduced(_piece(ends.trained, layout), parameter_bytes)
    # One copy in float32, and this rank's part of the sums.
    reducing = reduced + -(-reduced // layout.fsdp) * (1 + 2 * (layout.dp > 1))
    accumulating = ends.accumulating_embedding_peak
    return dataclasses.replace(
        ends,
        weights=_part(ends.weights, layout),
        frozen=_part(ends.frozen, layout),
        gradients=reduced if sums_whole else _part(ends.gradients, layout),
        optimizer=_part(ends.optimizer, layout),
        waiting=max(ends.waiting, ends.head_gradients),
        embedding_peak=ends.embedding_peak + reducing,
        accumulating_embedding_peak=None if accumulating is None else accumulating + reducing,
    )


def _reduced(weights: int, parameter_bytes: int) -> int:
    return weights // parameter_bytes * REDUCED_BYTES


def _piece(num_bytes: int, layout: ResolvedLayout, routed: float = 0.0) -> int:
    """What a rank has of tensors while they are gathered.

    Args:
        routed: share of routed experts in them.
    """
    experts = round(routed * num_bytes)
    return -(-(num_bytes - experts) // layout.tp) - (-experts // (layout.ep * layout.etp))


def _part(num_bytes: int, layout: ResolvedLayout, routed: float = 0.0) -> int:
    """What a rank keeps of them; arguments as of `_piece`."""
    experts = round(routed * num_bytes)
    return -(-(num_bytes - experts) // (layout.shards * layout.tp)) - (
        -experts // (layout.ranks // layout.pp)
    )

"""The bytes of a step with its states and activations placed: all formulas of the peak.

Problem  Model states are most of the memory of a large model. Each class can leave the device for some of the blocks,
         and each block has a choice of its own for its activations. Gradients appear while activations go, so that a
         sum "saved bytes times blocks" is wrong by a quarter as soon as no large head hides it.
Method   Per block and class, device or host::

             weights    come in twice per micro-batch, before forward and before backward, one block ahead; the two
                        used last in forward are still there for backward
             gradients  leave after the block's backward pass; with several micro-batches their sums come in before it
             optimizer  update "device": states (and gradients, weights, if on the host) stream through, two blocks at a
                        time
                        update "cpu": gradients go to the host, Adam runs there, new weights come back

         Device bytes of a step with blocks i = 0 .. L-1, the residual stream between two of them one `boundary`::

             Z          resident + weights and states that live on the device
                        (+ all gradients there, where several micro-batches add to them)
             at[i]      boundary + sum of kept[j] for j < i     live when block i begins
             casts[i]   sum of cast[j] for j < i
             flight[i]  host[i - 1]                             on its way down, or back up: a block's copies down are
                                                                over when the next block's forward pass is (the last
                                                                block's before the head), and come up while the next
                                                                block runs backward (`scrimp.runtime.memory.offload`)
             G[i]       gradients on the device that exist before block i's backward pass and are not in Z
             V, M       weights and gradients that live on the host and are on the device just then (`visits`)

             forward of i   Z + V[i] + at[i] + flight[i] + casts[i] + forward_peak[i]
             head, loss     Z + V + at[L] + casts[L] + head_peak
             backward of i  Z + V[i] + M[i] + G[i] + at[i] + boundary + flight[i] + backward_peak[i]
             its end        the same with the norm of its gradients, where they leave, instead of the pass
             embedding      Z + M + G[all] + boundary + embedding_peak
             norm           Z - tables + all gradients on the device + norm_peak
             update         Z - tables + all gradients on the device + optimizer_peak + two neighbours of the
                            streamed blocks

         G[i] holds the gradients of the head and of the blocks after i. Where gradients exist already (`accumulates`)
         they belong to Z, and G holds only what waits for a second gradient of the same weight (a tied head's).
         backward_peak holds the gradients that the pass makes.

         Evaluation has no line of its own: of the same micro-batch it holds a part of what the forward passes and the
         head hold, since nothing is saved for backward and no gradients exist.

         Host bytes are those of all that is there; CPU Adam needs the weights there too. Only CPU Adam's
         states need not be pinned.
Limits   Embedding and head stay on the device. Live bytes of tensors: the allocator's slack comes on top. Every
         micro-batch has the size that was traced.
Source   docs/memory.md; LLMQ's switches, ProTrain's chunks; differences of a trace (`scrimp.profiler.memory_trace`).
Checked  tests/planner/memory/test_step_moments.py, test_states.py: a simulation of every allocation, and
         lists of what is there;
         tests/profiler/memory_trace/test_peaks.py, test_host_states.py, test_placements.py, test_evaluation.py: real
         steps.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from scrimp.errors import PlanError
from scrimp.planner.memory.costs import BlockClass, StepCosts, chosen_costs
from scrimp.planner.memory.placement import Placement, States
from scrimp.planner.memory.visits import (
    MovingGradients,
    VisitingWeights,
    moving_gradients,
    streamed_peak,
    visiting_weights,
)


@dataclass(frozen=True)
class Floor:
    """Bytes of a step that the activations do not change, by moment."""

    forward: NDArray[np.int64]
    """[L]: beside at[i], flight[i], casts[i] and forward_peak[i]."""
    backward: NDArray[np.int64]
    """[L]: beside at[i], flight[i] and backward_peak[i]."""
    sent: NDArray[np.int64]
    """[L]: beside at[i] and flight[i], when the norms of gradients are taken that leave; 0 where none do."""
    head: int
    embedding: int
    """Its backward pass."""
    update: int
    host: int
    pinned: int

    @property
    def rest(self) -> int:
        """The larger of the embedding's backward pass and the update: whatever the activations are."""
        return max(self.embedding, self.update)


@dataclass(frozen=True)
class Moment:
    """One moment of a step."""

    phase: str
    """forward, head, backward, embedding or update."""
    block: int | None
    bytes: int
    """On the device."""
    activations: int
    """The part of `bytes` that waits for its backward pass or is on its way."""
    gradients: int
    """The part of `bytes` that is gradients, without those being made right now."""
    weights: int
    """The part of `bytes` that is weights whose home is the host."""

    @property
    def name(self) -> str:
        """For people: "backward pass of block 3"."""
        outside = {"head": "head and loss", "embedding": "backward pass of the embedding"}
        outside["update"] = "optimizer step"
        return outside.get(self.phase) or f"{self.phase} pass of block {self.block}"


def class_of(costs: StepCosts, block: int) -> BlockClass:
    """The class of one block."""
    return costs.classes[costs.blocks[block]]


def floor_of(costs: StepCosts, states: States, accumulates: bool) -> Floor:
    """What the states take, device and host.

    Raises:
        PlanError: states of another number of blocks.
    """
    if len(states.weights) != len(costs.blocks):
        raise PlanError(
            "states of another model", got=f"{len(states.weights)} blocks", expected=f"{len(costs.blocks)}"
        )
    kinds = [class_of(costs, i) for i in range(len(costs.blocks))]
    ends, boundary = costs.ends, costs.boundary
    own = np.array(_gradients_here(costs, states), np.int64)
    gradients = int(own.sum()) + ends.gradients
    resident = _resident(costs, kinds, states)
    always = resident + (gradients if accumulates else 0)
    before_all = ends.waiting if accumulates else ends.head_gradients + int(own.sum())
    later = before_all - (0 if accumulates else np.cumsum(own))
    weights, moving = _visits(kinds, states, accumulates)
    host, pinned = _host(kinds, states)
    return Floor(
        forward=always + weights.forward,
        backward=always + weights.backward + later + moving.backward + boundary,
        sent=_sent(kinds, states, always + weights.backward + later + moving.coming + boundary),
        head=always + weights.head + ends.peak_of_head(accumulates),
        embedding=always + before_all + moving.embedding + boundary + ends.peak_of_embedding(accumulates),
        update=_update(costs, kinds, states, resident - costs.tables + gradients),
        host=host,
        pinned=pinned,
    )


def _visits(
    kinds: Sequence[BlockClass], states: States, accumulates: bool
) -> tuple[VisitingWeights, MovingGradients]:
    return (
        visiting_weights([kind.weights for kind in kinds], states.weights),
        moving_gradients([kind.gradients for kind in kinds], states.gradients, accumulates),
    )


def _sent(kinds: Sequence[BlockClass], states: States, beside: NDArray[np.int64]) -> NDArray[np.int64]:
    """When the norms are taken of gradients that leave: the block's own weights have left, its gradients have not."""
    found = np.zeros(len(kinds), np.int64)
    for i, kind in enumerate(kinds):
        if states.gradients[i]:
            found[i] = beside[i] - kind.weights * states.weights[i] + kind.gradients + kind.norm_peak
    return found


def device_peak(costs: StepCosts, placement: Placement, accumulates: bool) -> int:
    """Most bytes on the device at any moment of a step."""
    return max(moment.bytes for moment in moments(costs, placement, accumulates))


def moments(
    costs: StepCosts, placement: Placement, accumulates: bool, floor: Floor | None = None
) -> Iterator[Moment]:
    """Every moment that can be the largest of a step.

    Args:
        accumulates: several micro-batches add to the same gradients: the moments of a step but its first, which needs
            less.
        floor: what its states take, where that is known.

    Raises:
        PlanError: a placement of another model.
    """
    states, ends = placement.states, costs.ends
    floor = floor or floor_of(costs, states, accumulates)
    kinds = [class_of(costs, i) for i in range(len(costs.blocks))]
    weights, moving = _visits(kinds, states, accumulates)
    everything = ends.gradients + sum(_gradients_here(costs, states))
    existing = everything if accumulates else 0
    resident = _resident(costs, kinds, states) + existing
    at, flight, cast = costs.boundary, 0, 0
    for i, block in enumerate(chosen_costs(costs, placement.activations)):
        live, visits = at + flight, int(weights.backward[i])
        before = int(floor.forward[i]) + live + cast
        yield Moment(
            "forward", i, before + block.forward_peak, live + cast, existing, int(weights.forward[i])
        )
        gradients = int(floor.backward[i]) - resident - visits - costs.boundary + existing
        making = block.peak_of_backward(accumulates)
        if making + int(floor.backward[i]) >= int(floor.sent[i]):
            yield Moment("backward", i, int(floor.backward[i]) + live + making, live, gradients, visits)
        else:
            own = kinds[i].gradients
            gradients += own - int(moving.backward[i] - moving.coming[i])
            visits -= kinds[i].weights * states.weights[i]
            yield Moment("backward", i, int(floor.sent[i]) + live, live, gradients, visits)
        at, flight, cast = at + block.kept, block.host, cast + block.cast
    yield Moment("head", None, floor.head + at + cast, at + cast, existing, weights.head)
    making = costs.boundary + ends.peak_of_embedding(accumulates)
    yield Moment("embedding", None, floor.embedding, 0, floor.embedding - resident - making + existing, 0)
    yield Moment("update", None, floor.update, 0, everything, 0)


def host_bytes(costs: StepCosts, placement: Placement) -> tuple[int, int]:
    """All and pinned bytes in host memory."""
    kinds = [class_of(costs, i) for i in range(len(costs.blocks))]
    host, pinned = _host(kinds, placement.states)
    offloaded = sum(block.host for block in chosen_costs(costs, placement.activations))
    return host + offloaded, pinned + offloaded


def _gradients_here(costs: StepCosts, states: States) -> list[int]:
    """Gradient bytes that each block keeps on the device: 0 where they leave."""
    return [0 if host else class_of(costs, i).gradients for i, host in enumerate(states.gradients)]


def _where(kinds: Sequence[BlockClass], flags: Sequence[bool], wanted: bool) -> list[BlockClass]:
    return [kind for kind, flag in zip(kinds, flags, strict=True) if flag is wanted]


def _resident(costs: StepCosts, kinds: Sequence[BlockClass], states: States) -> int:
    """Z without gradients."""
    weights = sum(kind.weights for kind in _where(kinds, states.weights, False))
    optimizer = sum(kind.optimizer for kind in _where(kinds, states.optimizer, False))
    norms = sum(kind.norms for kind in _where(kinds, states.gradients, True))
    return costs.resident + costs.ends.weights + costs.ends.optimizer + weights + optimizer + norms


def _update(costs: StepCosts, kinds: Sequence[BlockClass], states: States, beside: int) -> int:
    """The larger of the norm, which is over before anything streams, and the update."""
    sizes, scratch = [], []
    for i, kind in enumerate(kinds):
        if states.streams(i):
            away = kind.weights * states.weights[i] + kind.gradients * states.gradients[i]
            sizes.append(away + kind.optimizer * states.optimizer[i])
            scratch.append(kind.update_peak)
    return beside + max(costs.norm_peak, streamed_peak(sizes, scratch, costs.optimizer_peak))


def _host(kinds: Sequence[BlockClass], states: States) -> tuple[int, int]:
    total = pageable = 0
    for i, kind in enumerate(kinds):
        cpu = states.on_cpu(i)
        total += kind.weights * (states.weights[i] or cpu)
        total += kind.gradients * states.gradients[i] + kind.optimizer * states.optimizer[i]
        pageable += kind.optimizer * cpu
    return total, total - pageable

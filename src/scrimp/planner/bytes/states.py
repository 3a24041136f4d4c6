"""Where weights, gradients and optimizer states of each block live, and the bytes of a step: all formulas of the peak.

Problem  Model states are most of the memory of a large model. Each class can leave the device for some of the blocks,
         and each block has a choice of its own for its activations. Gradients appear while activations go, so that a
         sum "saved bytes times blocks" is wrong by a quarter as soon as no large head hides it.
Method   Per block and class, device or host::

             weights    come in twice per micro-batch, before forward and before backward, into one of two buffers of
                        the largest such block; the two used last in forward are still there for backward
             gradients  leave after the block's backward pass; with several micro-batches their sums come in before it
             optimizer  update "device": states (and gradients, weights, if on the host) stream through two buffers
                        update "cpu": gradients go to the host, Adam runs there, new weights come back
                        update "cpu early": the same from within the backward pass, so that it may have to be undone

         Device bytes of a step with blocks i = 0 .. L-1, the residual stream between two of them one `boundary`::

             Z          resident + weights and states on the device + weight buffers
                        (+ all gradients on the device, where several micro-batches add to them)
             at[i]      boundary + sum of kept[j] for j < i     live when block i begins
             casts[i]   sum of cast[j] for j < i
             flight[i]  host[i - 1]                             on its way down, or back up: a block's copies down are
                                                                over when the next block's forward pass is (the last
                                                                block's before the head), and come up while the next
                                                                block runs backward (`scrimp.runtime.memory.offload`)
             G[i]       gradients on the device that exist before block i's backward pass and are not in Z
             leaving    largest gradients on their way

             forward of i   Z + at[i] + flight[i] + casts[i] + forward_peak[i]
             head, loss     Z + at[L] + casts[L] + head_peak
             backward of i  Z + G[i] + leaving + at[i] + boundary + flight[i] + backward_peak[i]
             embedding      Z + G[all] + leaving + boundary + embedding_peak
             update         Z + all gradients + optimizer_peak + stream buffers

         G[i] holds the gradients of the head and of the blocks after i. Where gradients exist already (`accumulates`)
         they belong to Z, and G holds only what waits for a second gradient of the same weight (a tied head's).
         backward_peak holds the gradients that the pass makes. Without accumulation those that leave are one further
         block; with it, the sum that came in is one more, and the one that comes for the block before another.

         Evaluation has no line of its own: of the same micro-batch it holds a part of what the forward passes and the
         head hold, since nothing is saved for backward and no gradients exist.

         Host bytes are those of all that is there; CPU Adam needs the weights there too, and to be early a copy of
         weights and states. Only CPU Adam's states and copies need not be pinned.
Limits   Embedding and head stay on the device. Live bytes of tensors: the allocator's slack comes on top. Every
         micro-batch has the size that was traced.
Source   docs/memory.md; LLMQ's switches, ProTrain's chunks; differences of a trace (`scrimp.profiler.memory_trace`).
Checked  tests/planner/bytes/test_step_moments.py, test_states.py: a simulation of every allocation, and
         lists of what is there;
         tests/profiler/memory_trace/test_peaks.py, test_host_states.py, test_evaluation.py: real steps.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from scrimp.errors import PlanError
from scrimp.planner.bytes.costs import BlockClass, StepCosts, chosen_costs
from scrimp.planner.bytes.machine import Update

CLASSES = ("weights", "gradients", "optimizer")
_UPDATED: dict[Update, str] = {
    "device": "",
    "cpu": "; the CPU updates them after the backward pass",
    "cpu early": "; the CPU updates them under the backward pass, and takes back what does not stand",
}


@dataclass(frozen=True)
class States:
    """Of each block, first to last: whether a class lives on the host."""

    weights: tuple[bool, ...]
    gradients: tuple[bool, ...]
    optimizer: tuple[bool, ...]
    update: Update = "device"
    """Who updates the blocks whose optimizer states are on the host."""

    def __post_init__(self) -> None:
        if not len(self.weights) == len(self.gradients) == len(self.optimizer):
            raise PlanError("the classes of states have different numbers of blocks", got=str(self))
        if self.update != "device" and any(
            o and not g for o, g in zip(self.optimizer, self.gradients, strict=True)
        ):
            raise PlanError("CPU Adam needs the gradients of its blocks on the host", got=str(self))

    @classmethod
    def split(
        cls,
        blocks: int,
        *,
        weights: int = 0,
        gradients: int = 0,
        optimizer: int = 0,
        update: Update = "device",
    ) -> States:
        """As many blocks of each class on the host.

        Weights of the first blocks: the last are used again first. Gradients and optimizer states of the last: their
        gradients come first, so that least accumulates, and CPU Adam's tail is shortest.
        """
        if update != "device":
            gradients = max(gradients, optimizer)
        return cls(
            weights=tuple(i < weights for i in range(blocks)),
            gradients=tuple(i >= blocks - gradients for i in range(blocks)),
            optimizer=tuple(i >= blocks - optimizer for i in range(blocks)),
            update=update if optimizer else "device",
        )

    def on_cpu(self, block: int) -> bool:
        """Whether the CPU updates this block."""
        return self.update != "device" and self.optimizer[block]

    @property
    def is_early(self) -> bool:
        """Whether the CPU begins its updates before it is known that they stand."""
        return self.update == "cpu early"

    def streams(self, block: int) -> bool:
        """Whether the device updates this block with something that comes from the host and goes back."""
        anything = self.weights[block] or self.gradients[block] or self.optimizer[block]
        return anything and not self.on_cpu(block)

    @property
    def is_resident(self) -> bool:
        """Whether nothing lives on the host."""
        return not (any(self.weights) or any(self.gradients) or any(self.optimizer))

    def of(self, block: int) -> dict[str, str]:
        """Class to "device" or "host", as in a plan; optimizer states that the CPU updates are "cpu"."""
        found = {name: "host" if getattr(self, name)[block] else "device" for name in CLASSES}
        return found | {"optimizer": "cpu"} if self.on_cpu(block) else found

    def __str__(self) -> str:
        counts = [f"{name} of {sum(getattr(self, name))}" for name in CLASSES if any(getattr(self, name))]
        if not counts:
            return "all states on the device"
        return f"{', '.join(counts)} blocks on the host" + _UPDATED[self.update]


@dataclass(frozen=True)
class Floor:
    """Bytes of a step that the activations do not change, by moment."""

    resident: int
    """Z: there all the time."""
    backward: NDArray[np.int64]
    """[L]: beside at[i], flight[i] and backward_peak[i]; of forward it is Z."""
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
    """Of these, what waits for its backward pass or is on its way."""
    gradients: int
    """Of these, gradients that are not being made right now."""

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
    ends = costs.ends
    own = np.array(_gradients_here(costs, states), np.int64)
    gradients = int(own.sum()) + ends.gradients
    resident = _resident(costs, kinds, states) + (gradients if accumulates else 0)
    if accumulates:
        before_all, later = ends.waiting, np.full_like(own, ends.waiting)
    else:
        before_all = ends.head_gradients + int(own.sum())
        later = before_all - np.cumsum(own)
    leaving = max((k.gradients for k in _where(kinds, states.gradients)), default=0) * (
        3 if accumulates else 1
    )
    embedding = before_all + leaving + costs.boundary + ends.peak_of_embedding(accumulates)
    update = (0 if accumulates else gradients) + costs.optimizer_peak + _stream_buffers(kinds, states)
    host, pinned = _host(kinds, states)
    return Floor(
        resident=resident,
        backward=resident + later + leaving + costs.boundary,
        head=resident + ends.peak_of_head(accumulates),
        embedding=resident + embedding,
        update=resident + update,
        host=host,
        pinned=pinned,
    )


def device_peak(costs: StepCosts, states: States, activations: Sequence[str], accumulates: bool) -> int:
    """Most bytes on the device at any moment of a step."""
    return max(moment.bytes for moment in moments(costs, states, activations, accumulates))


def moments(
    costs: StepCosts, states: States, activations: Sequence[str], accumulates: bool
) -> Iterator[Moment]:
    """Every moment that can be the largest of a step.

    Args:
        activations: choices by block.
        accumulates: several micro-batches add to the same gradients: the moments of a step but its first, which needs
            less.

    Raises:
        PlanError: choices or states of another model.
    """
    floor, ends = floor_of(costs, states, accumulates), costs.ends
    everything = ends.gradients + sum(_gradients_here(costs, states))
    existing = everything if accumulates else 0
    at, flight, cast = costs.boundary, 0, 0
    for i, block in enumerate(chosen_costs(costs, activations)):
        live, held = at + flight, int(floor.backward[i])
        yield Moment("forward", i, floor.resident + live + cast + block.forward_peak, live + cast, existing)
        making = block.peak_of_backward(accumulates)
        gradients = held - floor.resident - costs.boundary + existing
        yield Moment("backward", i, held + live + making, live, gradients)
        at, flight, cast = at + block.kept, block.host, cast + block.cast
    yield Moment("head", None, floor.head + at + cast, at + cast, existing)
    making = costs.boundary + ends.peak_of_embedding(accumulates)
    yield Moment("embedding", None, floor.embedding, 0, floor.embedding - floor.resident - making + existing)
    yield Moment("update", None, floor.update, 0, everything)


def host_bytes(costs: StepCosts, states: States, activations: Sequence[str]) -> tuple[int, int]:
    """All and pinned bytes in host memory."""
    kinds = [class_of(costs, i) for i in range(len(costs.blocks))]
    host, pinned = _host(kinds, states)
    offloaded = sum(block.host for block in chosen_costs(costs, activations))
    return host + offloaded, pinned + offloaded


def undo_bytes(costs: StepCosts, states: States) -> int:
    """Host bytes of the copies from which early updates are taken back."""
    if not states.is_early:
        return 0
    blocks = [class_of(costs, i) for i in range(len(costs.blocks)) if states.on_cpu(i)]
    return sum(kind.weights + kind.optimizer for kind in blocks)


def _gradients_here(costs: StepCosts, states: States) -> list[int]:
    """Of each block, 0 where they leave."""
    return [0 if host else class_of(costs, i).gradients for i, host in enumerate(states.gradients)]


def _where(kinds: Sequence[BlockClass], flags: Sequence[bool], wanted: bool = True) -> list[BlockClass]:
    return [kind for kind, flag in zip(kinds, flags, strict=True) if flag is wanted]


def _resident(costs: StepCosts, kinds: Sequence[BlockClass], states: States) -> int:
    """Z without gradients."""
    weights = sum(kind.weights for kind in _where(kinds, states.weights, False))
    optimizer = sum(kind.optimizer for kind in _where(kinds, states.optimizer, False))
    buffers = weight_buffers(costs, states)
    return costs.resident + costs.ends.weights + costs.ends.optimizer + weights + optimizer + buffers


def weight_buffers(costs: StepCosts, states: States) -> int:
    """Bytes of the device in which weights that live on the host visit it."""
    return _two([class_of(costs, i).weights for i, leaves in enumerate(states.weights) if leaves])


def _two(sizes: Sequence[int]) -> int:
    """Bytes of two buffers, or of one if only one block uses them."""
    return min(len(sizes), 2) * max(sizes, default=0)


def _stream_buffers(kinds: Sequence[BlockClass], states: States) -> int:
    """Gradients and states of streamed blocks during the update; weights have buffers already."""
    sizes = []
    for i, kind in enumerate(kinds):
        if states.streams(i):
            sizes.append(kind.optimizer * states.optimizer[i] + kind.gradients * states.gradients[i])
    return _two(sizes)


def _host(kinds: Sequence[BlockClass], states: States) -> tuple[int, int]:
    total = pageable = 0
    for i, kind in enumerate(kinds):
        cpu = states.on_cpu(i)
        total += kind.weights * (states.weights[i] or cpu)
        total += kind.gradients * states.gradients[i] + kind.optimizer * states.optimizer[i]
        undo = (kind.weights + kind.optimizer) * (cpu and states.is_early)
        total += undo
        pageable += kind.optimizer * cpu + undo
    return total, total - pageable

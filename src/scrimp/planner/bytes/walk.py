"""Peak bytes of one training step from what its blocks cost: an event walk, in one file.

Problem  Each block has a choice of its own for its activations, and gradients appear while activations go. A sum
         "saved bytes times blocks" is wrong by a quarter as soon as no large head hides it.
Method   Z is what is there all the time: weights, optimizer states, resident buffers, and the gradients too where
         several micro-batches add to them. Blocks i = 0 .. L-1, the residual stream between two of them is one
         `boundary`::

             at[i]     = boundary + sum of kept[j] for j < i       live when block i begins
             casts[i]  = sum of cast[j] for j < i
             flight[i] = host[i - 1]                               on its way to the host, or back

             forward of i    Z + at[i] + flight[i] + casts[i] + forward_peak[i]
             head and loss   Z + at[L] + flight[L] + casts[L] + head_peak
             backward of i   Z + G[i] + at[i] + flight[i] + boundary + backward_peak[i]
             embedding       Z + G[-1] + boundary + embedding_peak
             optimizer       Z + all gradients + optimizer_peak

         G[i] holds the gradients of the head and of the blocks after i. Where gradients exist already
         (`accumulates`) they belong to Z and G holds only what waits for a second gradient of the same weight (a
         tied head's); every moment then has a peak of its own, because the gradients that
         come are added and freed.
Limits   Live bytes of tensors: the allocator's slack comes on top. Every micro-batch has the size that was traced.
         What the last block offloads is counted until its backward pass, which follows at once
         (`scrimp.runtime.memory`: `keep_last`). States on the host: `scrimp.planner.bytes.states`.
Source   docs/memory.md; differences of a trace (`scrimp.profiler.memory_trace`).
Checked  tests/planner/bytes/test_walk.py: a simulation of every allocation;
         tests/profiler/memory_trace/test_peaks.py: within 2 % of real steps.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from scrimp.errors import PlanError
from scrimp.planner.bytes.costs import BlockClass, BlockCost, EndsCost, StepCosts


@dataclass(frozen=True)
class Moment:
    """The largest moment of one phase."""

    bytes: int
    """Live on the device."""
    block: int | None = None
    """In which block's pass; None: outside the blocks."""


@dataclass(frozen=True)
class StepPeaks:
    """Largest moments of a step by phase."""

    forward: Moment
    head: Moment
    """Final norm, head and loss with their backward pass."""
    backward: Moment
    """Of the blocks and the embedding."""
    optimizer: Moment
    host: int
    """Bytes of activations in host memory, when the forward pass is over."""

    @property
    def peak(self) -> int:
        """Most bytes of the device at once."""
        return max(self.forward.bytes, self.head.bytes, self.backward.bytes, self.optimizer.bytes)

    @property
    def phase(self) -> str:
        """Where the peak lies: forward, head, backward or optimizer."""
        moments = {name: getattr(self, name).bytes for name in ("forward", "head", "backward", "optimizer")}
        return max(moments, key=lambda name: moments[name])


def walk(costs: StepCosts, choices: Sequence[str], *, accumulates: bool = False) -> StepPeaks:
    """The peaks of a step.

    Args:
        costs: as traced.
        choices: activations by block, names of `BlockClass.choices`.
        accumulates: several micro-batches add to the same gradients: those of a step but its first, which
            needs less.

    Raises:
        PlanError: not one choice per block, or a choice without costs.
    """
    blocks = chosen_costs(costs, choices)
    fixed = fixed_bytes(costs, accumulates=accumulates)
    kept = accumulate((block.kept for block in blocks), initial=costs.boundary)
    flight = [0, *(block.host for block in blocks)]
    live = [at + moving for at, moving in zip(kept, flight, strict=True)]
    casts = list(accumulate((block.cast for block in blocks), initial=0))
    forward = _largest(
        (fixed + at + cast + block.forward_peak, i)
        for i, (block, at, cast) in enumerate(zip(blocks, live, casts, strict=False))
    )
    ends = costs.ends
    head = fixed + live[-1] + casts[-1] + ends.peak_of_head(accumulates)
    optimizer = fixed_bytes(costs, accumulates=True) + costs.optimizer_peak
    return StepPeaks(
        forward=forward,
        head=Moment(head),
        backward=_backward(costs, blocks, live, fixed, accumulates),
        optimizer=Moment(optimizer),
        host=sum(block.host for block in blocks),
    )


def chosen_costs(costs: StepCosts, choices: Sequence[str]) -> list[BlockCost]:
    """What each block costs under its choice; arguments and errors as of `walk`."""
    if len(choices) != len(costs.blocks):
        raise PlanError(
            "a step has one choice per block", got=f"{len(choices)} choices", expected=str(len(costs.blocks))
        )
    found = []
    for index, (number, choice) in enumerate(zip(costs.blocks, choices, strict=True)):
        known = costs.classes[number].choices
        if choice not in known:
            raise PlanError(
                f"no costs were traced for the activations of block {index}",
                got=repr(choice),
                expected=", ".join(known),
            )
        found.append(known[choice])
    return found


def fixed_bytes(costs: StepCosts, *, accumulates: bool) -> int:
    """Z: on the device during the whole step; all gradients where `accumulates`."""
    parts: list[EndsCost | BlockClass] = [costs.ends, *(costs.classes[number] for number in costs.blocks)]
    states = sum(part.weights + part.optimizer for part in parts)
    return costs.resident + states + (sum(part.gradients for part in parts) if accumulates else 0)


def _backward(
    costs: StepCosts, blocks: list[BlockCost], live: list[int], fixed: int, accumulates: bool
) -> Moment:
    """The largest moment between the head's and the optimizer's."""
    gradients = costs.ends.waiting if accumulates else costs.ends.head_gradients
    moments = []
    for i in reversed(range(len(blocks))):
        moments.append(
            (fixed + gradients + live[i] + costs.boundary + blocks[i].peak_of_backward(accumulates), i)
        )
        gradients += 0 if accumulates else costs.classes[costs.blocks[i]].gradients
    embedding = fixed + gradients + costs.boundary + costs.ends.peak_of_embedding(accumulates)
    found = _largest(moments)
    return Moment(embedding) if embedding > found.bytes else found


def _largest(moments: Iterable[tuple[int, int]]) -> Moment:
    """The first of the largest; nothing where there is no block."""
    return max((Moment(*moment) for moment in moments), key=lambda moment: moment.bytes, default=Moment(0))

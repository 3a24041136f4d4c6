"""What of the states that live on the host is on the device, moment by moment.

Problem  Which block's weights and gradients visit the device depends on where the blocks are that have any on the host:
         copies run one such block ahead, however far away it is. Buffers "of the largest block" count bytes that are
         never there together.
Method   The runtime's own rules (`scrimp.runtime.memory`), walked block by block; W and S are the blocks whose weights
         and gradients live on the host::

             weights    forward of i    i itself, the next one of W once any has run; the last two of W stay
                        head            the last two of W
                        backward of i   i itself and the one of W before it; above the last of W both that stayed,
                                        between two of W the one that comes
             gradients  backward of i   those of i + 1, if they leave; where sums exist: those of i, which came in, and
                                        those of the one of S before it, which come as soon as any of S has begun
                        embedding       those of block 0, if they leave
             update     two neighbours among the blocks that are streamed, with all that comes for them

Source   scrimp.runtime.memory.weights, gradients; scrimp.optim.streaming
Checked  tests/profiler/memory_trace/test_placements.py: real steps; tests/planner/memory/test_visits.py
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.int64]
"""[L], by block."""


@dataclass(frozen=True)
class VisitingWeights:
    """Bytes of weights that live on the host and are on the device."""

    forward: Bytes
    """While each block runs forward."""
    backward: Bytes
    """While each block runs backward."""
    head: int


@dataclass(frozen=True)
class MovingGradients:
    """Bytes of gradients that live on the host and are on the device."""

    backward: Bytes
    """While each block runs backward, without those that its pass makes."""
    coming: Bytes
    """The part of `backward` that is sums of the block before, on their way."""
    embedding: int


def visiting_weights(sizes: Sequence[int], leaves: Sequence[bool]) -> VisitingWeights:
    """Follow the weights through both passes.

    Args:
        sizes: bytes of each block's weights.
        leaves: whether they live on the host.
    """
    order = [size for size, away in zip(sizes, leaves, strict=True) if away]
    last, stay = len(order), len(order) - 2
    order += [0, 0]  # behind the last there is nothing, and before the first (index -1) neither
    forward, backward = np.zeros(len(sizes), np.int64), np.zeros(len(sizes), np.int64)
    seen = 0
    for i, here in enumerate(leaves):
        seen += here
        if seen:
            forward[i] = order[seen] + order[seen - 1] * (here or seen - 1 >= stay)
            forward[i] += order[seen - 2] * (seen == last)
        backward[i] = order[seen - 1] * (seen > 0) + order[seen - 2] * (seen > 1 and (here or seen == last))
    return VisitingWeights(forward, backward, int(order[last - 1] + order[last - 2]) if last else 0)


def moving_gradients(sizes: Sequence[int], leaves: Sequence[bool], accumulates: bool) -> MovingGradients:
    """Follow the gradients through the backward pass.

    Args:
        sizes: bytes of each block's gradients.
        leaves: whether they live on the host.
        accumulates: sums of earlier micro-batches exist.
    """
    own = np.array([size if away else 0 for size, away in zip(sizes, leaves, strict=True)], np.int64)
    leaving, coming = np.append(own[1:], 0), np.zeros_like(own)
    if accumulates:
        numbers = [i for i, away in enumerate(leaves) if away]
        for before, block in pairwise(numbers):
            coming[before + 1 : block + 1] = own[before]
        leaving = leaving + own
    return MovingGradients(leaving + coming, coming, int(own[0]))


def streamed_peak(sizes: Sequence[int], scratch: Sequence[int], resident_scratch: int) -> int:
    """Most bytes of the update that are not there all the time.

    Args:
        sizes: of all that comes for each streamed block's update, in the order of the updates; a block's neighbour
            comes while it is updated.
        scratch: temporary memory of each one's update.
        resident_scratch: of the update of what lives on the device, while the first two come.
    """
    both = [one + other for one, other in pairwise([*sizes, 0])]
    updates = [pair + work for pair, work in zip(both, scratch, strict=True)]
    return max([(both[0] if both else 0) + resident_scratch, *updates])

"""Whether anything fits at all: every placement of states, before a plan is refused.

Problem  The search looks at few placements, and thins its labels. At the edge of a budget the one plan that fits is
         then missed, and a run is refused that has room: 22 of 135 such budgets of small problems.
Method   Device and host bytes of a placement (w, g, o) are sums over its three numbers, so that all (L + 1)^3 of them
         are judged at once, in arrays: what blocks must offload at least is the lower convex hull of their choices'
         (kept, offloaded) bytes, at what head, last backward pass and update leave of the device. A placement whose
         host bytes are then above the host's is impossible. The others are solved by `activation_dp` for bytes
         alone, those with most room first.
Limits   Complete as long as no more placements are possible than `MOST` and no labels were thinned; `Answer.is_certain`
         says so. Weights of the first blocks, gradients and states of the last, one updater for all.
Checked  tests/planner/memory/test_feasible.py: all placements and activations of small problems, at their edges.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from scrimp.planner.memory.activation_dp import SECONDS, fastest
from scrimp.planner.memory.costs import BlockClass, StepCosts
from scrimp.planner.memory.machine import Machine, Setup, Update
from scrimp.planner.memory.search_space import Split
from scrimp.planner.memory.states import class_of, floor_of

Array = NDArray[np.float64]
MOST = 600
"""Placements that are solved; more are judged."""
_EFFORT = 2048


@dataclass(frozen=True)
class Answer:
    """A plan that fits, or none."""

    split: Split | None
    activations: tuple[str, ...]
    """By block; empty where nothing fits."""
    is_certain: bool
    """Whether nothing fits for sure, where nothing was found."""


def any_that_fits(costs: StepCosts, machine: Machine, setup: Setup, only: Split | None = None) -> Answer:
    """Look for any plan within the machine's memory.

    Args:
        only: the placement of states, where the user decided; None: any.
    """
    if only is not None:
        splits = [only]
    else:
        splits = [split for _, split in sorted(_possible(costs, machine, setup), key=lambda one: -one[0])]
    is_certain = len(splits) <= MOST
    for split in splits[:MOST]:
        states = split.states(len(costs.blocks))
        floor = floor_of(costs, states, setup.accumulates)
        left = min(machine.host_bytes - floor.host, machine.pinnable - floor.pinned)
        if left < 0 or floor.rest > machine.device_bytes:
            continue
        front = fastest(
            costs,
            floor,
            accumulates=setup.accumulates,
            device_bytes=machine.device_bytes,
            host_bytes=left,
            effort=_EFFORT,
            free=(SECONDS,),
        )
        if front.choices:
            return Answer(split, front.choices[0], True)
        is_certain &= front.is_exact
    return Answer(None, (), is_certain)


def _possible(costs: StepCosts, machine: Machine, setup: Setup) -> Iterator[tuple[float, Split]]:
    """Room that is left on the host, and placement, of all that are not impossible."""
    blocks = len(costs.blocks)
    offloaded = _least_offloaded(costs)
    for update in dict.fromkeys(("device", *setup.updaters_on(machine))):
        room = _room(costs, machine, setup.accumulates, update, offloaded)
        for w, g, o in zip(*np.nonzero(room >= 0), strict=True):
            is_device = update == "device"
            if (o and is_device and "device" not in setup.updaters_on(machine)) or (not is_device and not o):
                continue
            split = Split(int(w), int(g), int(o), update if o else "device")
            if split == split.within(blocks):
                yield float(room[w, g, o]), split


def _room(
    costs: StepCosts, machine: Machine, accumulates: bool, update: Update, offloaded: tuple[Array, Array]
) -> Array:
    """[L + 1, L + 1, L + 1] most host bytes that can be left beside w, g and o; below 0: impossible."""
    kinds = [class_of(costs, i) for i in range(len(costs.blocks))]
    ends, boundary = costs.ends, costs.boundary
    w = _prefix([kind.weights for kind in kinds])[:, None, None]
    g = _prefix([kind.gradients for kind in reversed(kinds)])[None, :, None]
    o = _prefix([kind.optimizer for kind in reversed(kinds)])[None, None, :]
    weights, gradients, optimizer = w.max(), g.max(), o.max()
    always = costs.resident + ends.weights + ends.optimizer + weights - w + optimizer - o
    here = ends.gradients + gradients - g
    exist = here if accumulates else 0.0
    waiting = ends.waiting if accumulates else ends.head_gradients
    last = costs.classes[costs.blocks[-1]].choices.values()
    backward = min(cost.peak_of_backward(accumulates) for cost in last) - max(cost.kept for cost in last)
    rest = always + here - costs.tables + max(costs.norm_peak, costs.optimizer_peak)
    embedding = boundary + ends.peak_of_embedding(accumulates)
    embedding = always + exist + embedding + (waiting if accumulates else waiting + gradients - g)
    taken = np.maximum(
        always + exist + boundary + ends.peak_of_head(accumulates),
        always + exist + waiting + 2 * boundary + backward,
    )
    free = machine.device_bytes - taken
    least = np.interp(free, *offloaded)
    impossible = (free < offloaded[0][0]) | (np.maximum(rest, embedding) > machine.device_bytes)
    host, pageable = w + g + o + 0.0, np.zeros(1)
    if update != "device":
        host = w + _both(kinds) + g + o
        pageable = o
    room = np.minimum(machine.host_bytes - host, machine.pinnable - host + pageable) - least
    room = np.broadcast_to(room, (len(kinds) + 1,) * 3).copy()
    room[np.broadcast_to(impossible, room.shape)] = -1.0
    return room


def _both(kinds: list[BlockClass]) -> Array:
    """[L + 1, 1, L + 1] bytes of weights of the last o blocks that are none of the first w."""
    sums = _prefix([kind.weights for kind in kinds])
    numbers = np.arange(len(sums))
    begins = np.maximum(numbers[:, None], len(kinds) - numbers[None, :])
    found: Array = (sums[-1] - sums[begins])[:, None, :]
    return found


def _prefix(sizes: list[int]) -> Array:
    return np.concatenate([[0.0], np.cumsum(np.array(sizes, np.float64))])


def _least_offloaded(costs: StepCosts) -> tuple[Array, Array]:
    """Bytes that all blocks keep, rising, and the least that they offload then, if choices could be mixed."""
    kept = offloaded = 0.0
    steps: list[tuple[float, float]] = []
    for number in costs.blocks:
        points = sorted(
            {(cost.kept + cost.cast, cost.host) for cost in costs.classes[number].choices.values()}
        )
        hull: list[tuple[float, float]] = []
        for point in points:
            if hull and point[1] >= hull[-1][1]:
                continue
            while len(hull) > 1 and _is_above(hull[-2], hull[-1], point):
                hull.pop()
            hull.append(point)
        kept, offloaded = kept + hull[0][0], offloaded + hull[0][1]
        steps += [(b[0] - a[0], a[1] - b[1]) for a, b in pairwise(hull)]
    steps.sort(key=lambda step: -step[1] / step[0])
    more, less = (np.array([0.0, *(step[k] for step in steps)]) for k in range(2))
    return kept + np.cumsum(more), offloaded - np.cumsum(less)


def _is_above(a: tuple[float, float], b: tuple[float, float], c: tuple[float, float]) -> bool:
    """Whether b is on or above the line from a to c."""
    return (b[1] - a[1]) * (c[0] - a[0]) >= (c[1] - a[1]) * (b[0] - a[0])

"""ProTrain's small space of plans: all of its points, so cheap that every one can be looked at.

Problem  A search by steps can miss a plan that two numbers describe.
Method   The first s blocks offload what they would keep, the next c make all of it again, the others keep it: copies
         of the first blocks have most computing to hide under, and what the last keep is used again first. Per block
         the three modes are, of its choices::

             keep       the fastest without offload
             recompute  the one without offload that keeps least
             offload    the fastest with offload

         Sums over blocks are differences of running sums, so that a point's seconds, offloaded bytes and bytes before
         the head cost no walk over the blocks. Its placement of states, n blocks of every class, is `search`'s.
Source   ProTrain (arXiv 2406.08334), its search over (persistent chunks, buffers, swapped, checkpointed blocks).
Checked  tests/planner/memory/test_search.py: no point is faster than what is found.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import accumulate

from scrimp.planner.memory.costs import BlockClass, BlockCost, StepCosts


@dataclass(frozen=True)
class Point:
    """How many of the first blocks offload, how many of the next recompute, and the sums of all blocks."""

    offloaded: int
    recomputed: int
    passes: float
    """Seconds, forward and backward."""
    host: int
    """Bytes that are offloaded."""
    before_head: int
    """Bytes kept and cast when the head begins, without the first boundary."""


class Points:
    """All points of a model; empty where a block has no choice without offload."""

    def __init__(self, costs: StepCosts) -> None:
        modes = [_modes(kind) for kind in costs.classes]
        self._names = [[modes[number][m] for number in costs.blocks] for m in range(3)]
        self._may_offload = all(name is not None for name in self._names[0])
        self._is_empty = any(name is None for name in self._names[1])
        self._blocks = len(costs.blocks)
        self._costs = costs

    def __iter__(self) -> Iterator[Point]:
        if self._is_empty:
            return
        passes = self._sums(lambda cost: cost.forward_seconds + cost.backward_seconds)
        host, kept = self._sums(lambda cost: cost.host), self._sums(lambda cost: cost.kept + cost.cast)

        def total(sums: list[list[float]], s: int, r: int) -> float:
            return sums[0][s] + sums[1][r] - sums[1][s] + sums[2][-1] - sums[2][r]

        for s in range(self._blocks + 1 if self._may_offload else 1):
            for r in range(s, self._blocks + 1):
                yield Point(s, r - s, total(passes, s, r), int(total(host, s, r)), int(total(kept, s, r)))

    def names(self, point: Point) -> tuple[str, ...]:
        """Choices by block."""
        s, r = point.offloaded, point.offloaded + point.recomputed
        offload, recompute, keep = self._names
        return tuple(str(name) for name in (*offload[:s], *recompute[s:r], *keep[r:]))

    def _sums(self, figure: Callable[[BlockCost], float]) -> list[list[float]]:
        """Per mode, of the first 0, 1, ... blocks."""
        found = []
        for names in self._names:
            chosen = zip(self._costs.blocks, names, strict=True)
            figures = (
                0.0 if name is None else figure(self._costs.classes[number].choices[name])
                for number, name in chosen
            )
            found.append(list(accumulate(figures, initial=0.0)))
        return found


def _modes(kind: BlockClass) -> tuple[str | None, str | None, str | None]:
    """Names of the choices that offload, recompute and keep."""
    choices = kind.choices

    def seconds(name: str) -> tuple[float, int]:
        return choices[name].forward_seconds + choices[name].backward_seconds, choices[name].kept

    away = [name for name in choices if choices[name].host]
    here = [name for name in choices if not choices[name].host]
    least = min(here, key=lambda name: (choices[name].kept, seconds(name)), default=None)
    return min(away, key=seconds, default=None), least, min(here, key=seconds, default=None)

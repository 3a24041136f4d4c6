"""Coordinate descent: settings sought one after the other, each beside its neighbours, until none of these is better.

Problem  Rate, epochs and decay depend on one another, and a grid of all of them is mostly runs that nobody needs.
Method   A study has a list of values for each setting, in order::

             [descent]
             optimizer.lr = [1e-3, 3e-3, 1e-2]
             optimizer.weight_decay = [0.1, 0.4, 1.6, 3.2]

         It begins in the middle of every list. Along one setting it runs both neighbours, and goes on from the best of
         the three by the mean over seeds, along the same setting until staying is best; then along the next one. It
         ends where no neighbour along any setting is better. What is done follows from rows alone.
Limits   The end is a local one, and the best of several noisy numbers: its loss is a little too good. A run that fails
         is worse than any.
Source   Kim et al., "Pre-training under infinite compute" (2025, arXiv 2509.14786), who seek rate, epochs and decay so
Checked  tests/study/test_descent.py
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Point = tuple[int, ...]
"""Which value of each list."""


@dataclass(frozen=True)
class Descent:
    """What is sought. The variants of the study are all points, the last list's values next to one another."""

    values: Mapping[str, Sequence[Any]]
    """Values by setting."""

    @property
    def shape(self) -> Point:
        """How many values each setting has."""
        return tuple(map(len, self.values.values()))

    @property
    def start(self) -> Point:
        """The middle of every list; of two the first."""
        return tuple((size - 1) // 2 for size in self.shape)

    def number(self, point: Point) -> int:
        """The place of a point among the study's variants."""
        found = 0
        for index, size in zip(point, self.shape, strict=True):
            found = found * size + index
        return found

    def neighbours(self, point: Point, axis: int) -> list[Point]:
        """The points one value lower and one higher along a setting, where there are such."""
        found = [(*point[:axis], point[axis] + by, *point[axis + 1 :]) for by in (-1, 1)]
        return [one for one in found if 0 <= one[axis] < self.shape[axis]]

    def least(self) -> list[Point]:
        """The points that are run where the start is the end."""
        around = (self.neighbours(self.start, axis) for axis in range(len(self.shape)))
        return [self.start, *itertools.chain.from_iterable(around)]

    def path(self, loss: Callable[[Point], float]) -> Iterator[list[Point]]:
        """Where it stands and its neighbours, which have to have run before it goes on; ends where none is better.

        Args:
            loss: of a point that has run; infinite where it failed.
        """
        at, axis, unmoved = self.start, 0, 0
        while unmoved < len(self.shape):
            points = [at, *self.neighbours(at, axis)]
            yield points
            best = min(points, key=loss)  # the first where several are equal
            if best == at:
                axis, unmoved = (axis + 1) % len(self.shape), unmoved + 1
            else:
                at, unmoved = best, 0

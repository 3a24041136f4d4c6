"""The least seconds of each rank's blocks at prices of harm, whatever they choose within the rank's bytes.

Problem  A search asks of thousands of layouts whether they can lead; to decide what their blocks do takes longer
         than all else.
Method   With a price for harm, lambda, and one for the bytes of the rank, mu, no choices that fit take less than::

             g(mu) = sum over blocks of min over k of (seconds + lambda harm + mu bytes) - mu room

         which is concave in mu and consists of lines. Two tangents enclose the top of g, at first those of bytes that
         cost nothing and of bytes that cost all; g where they cross is the top, or gives a closer tangent. Every g that
         was met is a bound. All ranks and all prices of harm are asked at once.
         The bound is concave in lambda too: between two prices it is above the line between them. So ranks may count
         differently much (`weighted`)::

             sum_r c_r t_r >= max over lambda of sum_r c_r bound_r(lambda / c_r) - lambda limit
Source   Everett, Operations Research 11, 1963; cutting planes: Kelley, SIAM Journal 8, 1960
Checked  tests/planner/layout/test_priced_bound.py: all choices of small cases

Shapes: E kinds of blocks of all ranks, rank by rank, R ranks, K choices, P prices.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from scrimp.planner.layout.knapsack import Choices

Array = NDArray[np.float64]
_CUTS = 12
_ROUND = 1e-12
_SLACK = 1e-9


@dataclass(frozen=True)
class RankKinds:
    """The blocks of one rank."""

    kinds: Sequence[tuple[Choices, int]]
    """Choices, and how many blocks have them; those of infinite seconds are none."""
    room: float


def least_at_prices(ranks: Sequence[RankKinds], prices: Array) -> Array:
    """[R, P] seconds, priced harm included; infinite where a rank has no room."""
    kinds = _Kinds(ranks, prices)
    left, right = kinds.at(np.zeros((len(ranks), len(prices)))), kinds.leanest()
    found = left.value
    for _ in range(_CUTS):
        # Slopes and heights of ranks without room, or without choices, are infinite: nothing is taken from one another.
        is_open = (left.slope > 0) & (right.slope <= 0) & np.isfinite(left.height) & np.isfinite(right.height)
        gap = np.subtract(left.slope, right.slope, where=is_open, out=np.ones_like(left.slope))
        mu = np.subtract(right.height, left.height, where=is_open, out=np.zeros_like(gap)) / gap
        crossing = left.height + mu * left.slope
        here = kinds.at(mu)
        found = np.where(is_open, np.maximum(found, here.value), found)
        closed = np.subtract(crossing, _ROUND * np.abs(crossing), where=is_open, out=np.zeros_like(gap))
        is_open &= here.value < closed
        if not is_open.any():
            break
        rises = here.slope > 0
        left, right = left.where(~(is_open & rises), here), right.where(~(is_open & ~rises), here)
    return np.where(kinds.leanest().slope > _SLACK * kinds.room, np.inf, found)


def weighted(bounds: Array, prices: Array, limit: float, weights: Array) -> float:
    """The least of the ranks' seconds, each times its weight, with so much harm in all.

    Args:
        bounds: [R, P] of `least_at_prices`.
        prices: [P], ascending.
        weights: [R]
    """
    if not np.isfinite(bounds).all():
        return np.inf
    counted = np.flatnonzero(weights > 0)
    some = weights[counted]
    asked = np.unique(np.outer([some.min(), some.mean(), some.max()], prices))
    found = -limit * asked
    for rank, weight in zip(counted.tolist(), some.tolist(), strict=True):
        with np.errstate(over="ignore"):  # a rank that hardly counts: beyond the last price
            own = asked / weight
        found = found + weight * np.interp(own, prices, bounds[rank])
    return float(found.max())


@dataclass(frozen=True)
class _Lines:
    """[R, P] tangents of g, and g where they touch."""

    height: Array
    """At mu = 0."""
    slope: Array
    value: Array

    def where(self, stays: NDArray[np.bool_], other: _Lines) -> _Lines:
        """These where they stay, others elsewhere."""
        return _Lines(
            np.where(stays, self.height, other.height),
            np.where(stays, self.slope, other.slope),
            np.where(stays, self.value, other.value),
        )


class _Kinds:
    """All kinds of all ranks in one array."""

    def __init__(self, ranks: Sequence[RankKinds], prices: Array) -> None:
        rows = [(choices, count) for rank in ranks for choices, count in rank.kinds]
        widest = max(len(choices.seconds) for choices, _ in rows)
        seconds, harm, self.bytes = (np.zeros((len(rows), widest)) for _ in range(3))
        seconds += np.inf
        for at, (choices, _) in enumerate(rows):
            number = len(choices.seconds)
            seconds[at, :number], harm[at, :number] = choices.seconds, choices.harm
            self.bytes[at, :number] = choices.bytes
        self.costs = seconds[:, None] + prices[:, None] * harm[:, None]
        """[E, P, K]"""
        self.counts = np.array([float(count) for _, count in rows])[:, None]
        numbers = [len(rank.kinds) for rank in ranks]
        self.rank_of = np.repeat(np.arange(len(ranks)), numbers)
        self.starts = np.concatenate([[0], np.cumsum(numbers)[:-1]]).astype(np.int64)
        self.room = np.array([rank.room for rank in ranks])[:, None]

    def at(self, mu: Array) -> _Lines:
        """The tangents at [R, P] prices of bytes."""
        return self._lines((self.costs + mu[self.rank_of, :, None] * self.bytes[:, None]).argmin(axis=2), mu)

    def leanest(self) -> _Lines:
        """Those at prices that nothing else counts beside."""
        sizes = np.where(np.isfinite(self.costs), self.bytes[:, None], np.inf)
        least = np.where(sizes == sizes.min(axis=2, keepdims=True), self.costs, np.inf).argmin(axis=2)
        return self._lines(least, np.zeros((len(self.room), self.costs.shape[1])))

    def _lines(self, chosen: NDArray[np.int64], mu: Array) -> _Lines:
        costs = np.take_along_axis(self.costs, chosen[:, :, None], axis=2)[:, :, 0]
        sizes = np.take_along_axis(self.bytes, chosen, axis=1)
        height, slope = (np.add.reduceat(self.counts * one, self.starts) for one in (costs, sizes))
        slope -= self.room
        return _Lines(height, slope, height + mu * slope)

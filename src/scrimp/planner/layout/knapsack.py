"""Which of its choices each block of a stage takes, at prices for bytes and harm.

Problem  Each of n blocks takes one of K choices (formats of its products, what is made again, what leaves), each with
         seconds, bytes and harm. The bytes of a stage have a limit of their own; harm has one over all stages; and the
         slowest stage counts in every micro-batch, the others once::

             minimise  (m - 1) max_s t_s + sum_s t_s    with  bytes_s <= room_s,  sum_s harm_s <= limit

Method   Within a stage harm has a price. Where equal blocks leave few ways to share out choices, all ways are looked at
         (`_counted_out`). Else bytes get a price too, mu, at which the blocks' cheapest choices just fit. That gives
         a bound of all that fits, and with what is left of the room filled up a plan (`_enclosed`). Where these are
         further apart than `GAP`, what a choice costs over its block's cheapest at mu tells which ones no better plan
         has; of the others labels of (bytes, cost) are extended block by block, without those that another beats in
         both, or that the plan beats (`_labelled`).
         The price of harm that makes two plans equal finds one between them, or proves that no price does; so, from the
         ends, the two that enclose a harm that is wanted. Between two plans one block after the other goes from its
         choice in the one to that in the other, those that free bytes first: every step has room as both ends have
         (`Stage.frontier`).
         Between stages harm is shared out by `shared_harm`.
Limits   A plan costs at most `GAP` more than the best at its price, in shares of the blocks' least seconds, unless
         labels were more than `_LABELS`. Plans between two prices are mixtures: by less than one block from the best.
Source   prices: Everett, Operations Research 11, 1963; what is
         left once choices are ruled out: the core of Kellerer, Pferschy, Pisinger, Knapsack Problems, chapter 11
Checked  tests/planner/layout/test_knapsack.py: all choices of small cases

Shapes: E kinds of blocks, K choices of a block, n blocks, P plans of a stage.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Indices = NDArray[np.int64]
_ROUND = 1e-9
_LEAST_HARM = 1e9
_FEW = 20_000
"""Ways to share out equal blocks, up to which all are looked at."""
_FEW_KINDS = 4
GAP = 2e-3
"""By how much a plan of a stage may cost more than the best: well below what predictions are off by."""
_LABELS = 32
_CUTS = 40


@dataclass(frozen=True, eq=False)
class Choices:
    """What one block can take: [K] of each."""

    seconds: Array
    bytes: Array
    harm: Array


@dataclass(frozen=True, eq=False)
class Frontier:
    """Plans of a stage."""

    seconds: Array
    """[P]"""
    harm: Array
    """[P]"""
    choices: Indices
    """[P, n]: what each block takes."""


@dataclass(frozen=True, eq=False)
class Plan:
    """What a stage does at a price of harm."""

    choices: Indices
    seconds: float
    harm: float

    def cost(self, price: float) -> float:
        """Its seconds, with priced harm."""
        return self.seconds + price * self.harm


def falling(costs: Array, sizes: Array) -> Indices:
    """Those that cost less than all that are as small."""
    order = np.lexsort((costs, sizes))
    before = np.minimum.accumulate(np.concatenate([[np.inf], costs[order][:-1]]))
    return order[costs[order] < before]


class Stage:
    """The blocks of a stage of a pipeline, and the room that it has for them.

    Args:
        blocks: equal ones share their choices; those of infinite seconds are none.
    """

    def __init__(self, blocks: Sequence[Choices], room: float) -> None:
        kinds = {id(one): one for one in blocks}
        numbers = {name: number for number, name in enumerate(kinds)}
        self.kind_of = np.array([numbers[id(one)] for one in blocks], dtype=np.int64)
        """[n]"""
        self.counts = np.bincount(self.kind_of)
        shape = len(kinds), max(len(one.seconds) for one in kinds.values())
        self.seconds, self.harm, self.bytes = np.full(shape, np.inf), np.zeros(shape), np.full(shape, np.inf)
        for own, one in enumerate(kinds.values()):
            number = len(one.seconds)
            self.seconds[own, :number], self.harm[own, :number] = one.seconds, one.harm
            self.bytes[own, :number] = np.where(np.isfinite(one.seconds), one.bytes, np.inf)
        least = self.bytes.min(axis=1)
        has_room = np.isfinite(least)[:, None]  # else none of a block's choices has
        self.steps = np.subtract(self.bytes, least[:, None], where=has_room, out=np.full(shape, np.inf))
        """[E, K] bytes over the least of the block."""
        self.spare = room - float(self.counts @ least)
        self._known: dict[float, Plan] = {}

    def plan(self, price: float) -> Plan:
        """The cheapest plan at a price of harm, of a stage that has room for any."""
        if price not in self._known:
            choices = _in_order(self.kind_of, self.cheapest(price))
            taken = self.kind_of, choices
            self._known[price] = Plan(
                choices, float(self.seconds[taken].sum()), float(self.harm[taken].sum())
            )
        return self._known[price]

    def cheapest(self, price: float) -> Indices:
        """[n] choices of least seconds and priced harm, as near as the module says, whose bytes have room."""
        costs = self.seconds + price * self.harm
        free = _first_least(costs, self.steps)
        if self.counts @ _at(self.steps, free) <= self.spare:
            return free[self.kind_of]
        found = self._counted_out(costs, np.isfinite(costs))
        return self._enclosed(costs, free) if found is None else found

    def frontier(self, target: float) -> Frontier | None:
        """Plans from the least harm to the fewest seconds; None where its bytes have no room.

        Args:
            target: harm near which plans lie close together.
        """
        if self.spare < 0:
            return None
        with np.errstate(invalid="ignore"):
            spans = np.where(np.isfinite(self.seconds), self.seconds, self.seconds.min(axis=1, keepdims=True))
        seconds, harm = (float(self.counts @ np.ptp(one, axis=1)) for one in (spans, self.harm))
        # At this price no seconds are worth a billionth of all harm.
        beyond = _LEAST_HARM * (seconds or 1.0) / harm if harm else 0.0
        low, high = self.plan(beyond), self.plan(0.0)
        found = [low, high]
        while low.harm <= target < high.harm:
            price = (low.seconds - high.seconds) / (high.harm - low.harm)
            middle = self.plan(price)
            if middle.cost(price) >= low.cost(price) * (1.0 - _ROUND):
                break  # Nothing lies below the line between the two.
            found.append(middle)
            low, high = (middle, high) if middle.harm <= target else (low, middle)
        found.sort(key=lambda one: one.harm)
        plans = [found[0].choices[None]]
        plans += [self._between(one.choices, other.choices) for one, other in itertools.pairwise(found)]
        choices = np.unique(np.concatenate(plans), axis=0)
        times, harms = (one[self.kind_of, choices].sum(axis=1) for one in (self.seconds, self.harm))
        kept = falling(times, harms)
        return Frontier(times[kept], harms[kept], choices[kept])

    def _between(self, one: Indices, other: Indices) -> Indices:
        """[P, n]: all steps from one plan to the other, the other included."""
        changed = np.flatnonzero(one != other)
        own = self.kind_of[changed]
        more = self.bytes[own, other[changed]] - self.bytes[own, one[changed]]
        changed = changed[np.argsort(more, kind="stable")]
        found = np.repeat(one[None], len(changed) + 1, axis=0)
        for step, at in enumerate(changed.tolist(), start=1):
            found[step:, at] = other[at]
        return found[1:]

    def _given_out(self, taken: Sequence[Indices]) -> Indices:
        """[n] choices, those of the blocks of each kind in their order."""
        found = np.empty(len(self.kind_of), dtype=np.int64)
        for own, choices in enumerate(taken):
            found[self.kind_of == own] = choices
        return found

    def _enclosed(self, costs: Array, free: Indices) -> Indices:
        """Choices that fit, near the best of all.

        Args:
            free: the cheapest, which do not fit.
        """
        steps, counts = self.steps, self.counts
        over, fits = free, _first_least(steps, costs)
        price = 0.0
        for _ in range(_CUTS):
            sizes, sums = ([float(counts @ _at(of, one)) for one in (over, fits)] for of in (steps, costs))
            price = (sums[1] - sums[0]) / (sizes[0] - sizes[1])
            priced = costs + price * np.where(np.isfinite(steps), steps, 0.0)
            here = priced.argmin(axis=1)
            if counts @ _at(priced, here) >= (sums[0] + price * sizes[0]) * (1.0 - _ROUND):
                break
            over, fits = (over, here) if counts @ _at(steps, here) <= self.spare else (here, fits)
        extra = priced - priced.min(axis=1, keepdims=True)
        bound = float(counts @ priced.min(axis=1)) - price * self.spare
        found = self._filled(costs, fits, over)
        gap = float(_sum(costs, self.kind_of, found)) - bound
        if gap <= GAP * float(counts @ self.seconds.min(axis=1)):
            return found
        better = self._counted_out(costs, extra < gap)
        return self._labelled(extra, price, gap, found) if better is None else better

    def _counted_out(self, costs: Array, may: NDArray[np.bool_]) -> Indices | None:
        """The best choices of all that there are; None where these are many.

        Args:
            may: [E, K] those that are looked at, among which some have room.
        """
        if len(costs) > _FEW_KINDS:
            return None
        kept = []
        for cost, step, own in zip(costs, self.steps, may, strict=True):
            some = np.flatnonzero(own)
            kept.append(some[falling(cost[some], step[some])])
        if ways_number(self.counts.tolist(), kept) > _FEW:
            return None
        return self._given_out(_counted_out(self.counts, costs, self.steps, kept, self.spare))

    def _filled(self, costs: Array, fits: Indices, over: Indices) -> Indices:
        """Choices that fit: as many blocks as have room go to those of another plan that cost the same with priced
        bytes; what room is left is spent block by block where that saves most."""
        found = fits[self.kind_of]
        left = self.spare - float(self.counts @ _at(self.steps, fits))
        for own in np.flatnonzero(fits != over).tolist():
            more = float(self.steps[own, over[own]] - self.steps[own, fits[own]])
            number = int(self.counts[own]) if more <= 0.0 else min(int(left / more), int(self.counts[own]))
            found[np.flatnonzero(self.kind_of == own)[:number]] = over[own]
            left -= number * more
        own_costs, own_steps = costs[self.kind_of], self.steps[self.kind_of]
        blocks = np.arange(len(found))
        for _ in range(2 * len(found)):
            saved = own_costs[blocks, found][:, None] - own_costs
            more = own_steps - own_steps[blocks, found][:, None]
            saved[more > left] = 0.0
            block, choice = divmod(int(saved.argmax()), saved.shape[1])
            if saved[block, choice] <= 0.0:
                break
            left -= float(more[block, choice])
            found[block] = choice
        return found

    def _labelled(self, extra: Array, price: float, gap: float, found: Indices) -> Indices:
        """The best choices of all that cost less than those found, as far as labels go.

        Args:
            extra: [E, K] costs over the cheapest choice of each kind at a price of bytes.
            gap: what the found ones cost over the bound at that price.
        """
        kept = [np.flatnonzero(own < gap) for own in extra]
        steps = [own[some] for own, some in zip(self.steps, kept, strict=True)]
        chosen = np.array([own[0] for own in kept])[self.kind_of]
        # Those with one choice left are decided; costs are over the bound, but for what room is left over.
        open_ones = np.flatnonzero([len(kept[own]) > 1 for own in self.kind_of])
        least = np.array([float(own[0]) if len(own) == 1 else 0.0 for own in steps])
        size, cost = np.array([least[self.kind_of].sum()]), np.zeros(1)
        kinds = self.kind_of[open_ones].tolist()
        most = np.cumsum([0.0, *(float(steps[own].max()) for own in kinds[::-1])])[::-1]
        history: list[tuple[Indices, Indices]] = []
        for at, own in enumerate(kinds):
            number = len(kept[own])
            sizes = (size[:, None] + steps[own]).ravel()
            sums = (cost[:, None] + extra[own, kept[own]]).ravel()
            # Room that no rest can fill costs its price.
            bound = sums + price * np.maximum(self.spare - sizes - most[at + 1], 0.0)
            alive = np.flatnonzero((sizes <= self.spare * (1.0 + _ROUND)) & (bound < gap))
            alive = alive[falling((sums - price * sizes)[alive], sizes[alive])]
            if len(alive) > _LABELS:
                alive = alive[np.argsort(bound[alive], kind="stable")[:_LABELS]]
            if not len(alive):
                return found
            size, cost = sizes[alive], sums[alive]
            history.append((alive // number, kept[own][alive % number]))
        label = int((cost - price * size).argmin())
        if size[label] > self.spare * (1.0 + _ROUND):
            return found
        for block, (parents, taken) in zip(open_ones[::-1].tolist(), reversed(history), strict=True):
            chosen[block] = taken[label]
            label = int(parents[label])
        return chosen


def _at(table: Array, choices: Indices) -> Array:
    """[E] of each kind the entry of its choice."""
    found: Array = table[np.arange(len(table)), choices]
    return found


def _sum(table: Array, kinds: Indices, choices: Indices) -> Array:
    found: Array = table[kinds, choices].sum()
    return found


def _first_least(costs: Array, then: Array) -> Indices:
    """[E] the cheapest choice of each kind; of equal ones that with the least of another figure."""
    found: Indices = np.where(costs == costs.min(axis=1, keepdims=True), then, np.inf).argmin(axis=1)
    return found


def _counted_out(
    counts: Indices, costs: Array, steps: Array, kept: Sequence[Indices], spare: float
) -> list[Indices]:
    """The choices of the blocks of each kind: of all ways that have room the one that costs least.

    Args:
        kept: those that each kind chooses from.
    """
    ways = [ways_to_share(n, len(own)) for n, own in zip(counts.tolist(), kept, strict=True)]
    cost, size = np.zeros(1), np.zeros(1)
    for each, own, of_cost, of_size in zip(ways, kept, costs, steps, strict=True):
        cost, size = (
            (before[:, None] + each @ of[own]).ravel() for before, of in ((cost, of_cost), (size, of_size))
        )
    best = int(np.where(size <= spare * (1.0 + _ROUND), cost, np.inf).argmin())
    places = np.unravel_index(best, [len(each) for each in ways])
    return [
        np.repeat(own, each[at].astype(np.int64)) for each, own, at in zip(ways, kept, places, strict=True)
    ]


def undominated(figures: Array) -> Indices:
    """The choices, by their figures [F, K], that no other beats in one and equals in the rest; of equal ones the
    first."""
    order = np.lexsort(figures[::-1])
    rows = figures[:, order].T
    # In this order none is beaten by a later one.
    beats = np.tril((rows[None] <= rows[:, None]).all(axis=2), -1)
    found: Indices = np.sort(order[~beats.any(axis=1)])
    return found


def ways_number(counts: Sequence[int], kept: Sequence[Indices]) -> int:
    """How many ways there are to share out choices among so many equal blocks of each kind."""
    return math.prod(math.comb(n + len(own) - 1, n) for n, own in zip(counts, kept, strict=True))


@lru_cache(maxsize=64)
def ways_to_share(blocks: int, choices: int) -> Array:
    """[N, choices] all ways to share out equal blocks."""
    bars = np.array(list(itertools.combinations(range(blocks + choices - 1), choices - 1)), dtype=np.float64)
    ends = np.full((len(bars), 1), -1.0), np.full((len(bars), 1), blocks + choices - 1.0)
    found: Array = np.diff(np.concatenate([ends[0], bars, ends[1]], axis=1), axis=1) - 1.0
    return found


def _in_order(kinds: Indices, choices: Indices) -> Indices:
    """The same with the choices of equal blocks sorted, so that two plans differ in few blocks."""
    found = np.empty_like(choices)
    found[np.argsort(kinds, kind="stable")] = choices[np.lexsort((choices, kinds))]
    return found

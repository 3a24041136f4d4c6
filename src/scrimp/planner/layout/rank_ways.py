"""How a rank of a pipeline can have room for its blocks, at each of its moments.

Problem  What blocks keep adds up over a rank. What the backward pass of one block has besides does not: the block that
         has most decides. A knapsack knows sums alone.
Method   Of a rank's n blocks, with f passes in flight and the allocator's share s, a plan fits where::

             backward   (1 + s) (f sum waiting + max again) + sum standing  <=  what the rank has left then
             loss       (1 + s)  f sum waiting              + sum standing  <=  (on the last rank)
             end        (1 + s)  max (waiting + again)      + sum standing  <=
             update                                           sum standing  <=
             host                f sum leaving                              <=  what its host has left

         f sum waiting is that of the moment when passes in flight are most: the stages of a V have an f each, and what
         waits for gradients of weights then is among what the rank holds.

         waiting, of each pass; again, what its backward pass has besides; standing, weights that stay gathered, which
         have no margin; and leaving, what waits on the host, are figures of a block's choice (`Menu`), its formats
         included. For each value A that `again` takes there is a way: choices with more than A are left out, and the
         sums may be as large as A leaves them room. The best plan of all is that of one of the ways, with A as its own
         maximum: where all blocks keep all, A is least; what is made again takes more, what comes back from the host
         most. `waiting + again` has levels of its own where the end of a step may be its worst moment.
         Where a rank has few blocks all plans are looked at instead (`Rank.every_plan`).
         Sums that hardly ever bind are numbers of blocks: the first ones may offload, as many as their host has room
         for, and the last ones may stay gathered.
Limits   Blocks that may offload, or stay gathered, are counted by the largest of them. Of more than `_LEVELS` values of
         A, or of `waiting + again`, that leave any room so many are tried, evenly, the least and the most among them.
         Another moment of a V may hold more of a plan whose stages differ: `Blocks.solve` then asks again with less
         room.
Checked  tests/planner/layout/test_rank_ways.py: brute force over whole settings
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from scrimp.planner.layout.block_menus import Limits, Menu
from scrimp.planner.layout.knapsack import (
    Choices,
    Frontier,
    Indices,
    Stage,
    falling,
    undominated,
    ways_number,
    ways_to_share,
)
from scrimp.planner.layout.priced_bound import RankKinds
from scrimp.planner.layout.stage_memory import MOMENTS, Moment, Outside

Array = NDArray[np.float64]

_LEVELS = 6


@dataclass(frozen=True, eq=False)
class Way:
    """One of them: what the rank's blocks may do at most, and the room of their sums."""

    menus: Sequence[Menu]
    """The menu of each of its blocks."""
    counted: Sequence[float]
    """How often the bytes of one pass of each of them count."""
    again: float
    """Most bytes that the backward pass of a block has besides."""
    alone: float
    """The same with what waits of that pass."""
    leaving: int
    """How many of its blocks may offload: the first ones."""
    gathering: int
    """How many may stay gathered: the last ones."""
    room: float

    @cached_property
    def _limits(self) -> list[Limits]:
        """The limits of each block; those of equal blocks are one object."""
        number, known = len(self.menus), dict[tuple[float, bool, bool], Limits]()
        found = []
        for at, counted in enumerate(self.counted):
            key = counted, at < self.leaving, at >= number - self.gathering
            if key not in known:
                known[key] = Limits(counted, self.again, self.alone, *key[1:])
            found.append(known[key])
        return found

    @cached_property
    def tables(self) -> list[tuple[Choices, Indices]]:
        """What each block can do, and which entries of its menu that is."""
        return [menu.table(own) for menu, own in zip(self.menus, self._limits, strict=True)]

    @cached_property
    def stage(self) -> Stage:
        """The rank's blocks and its room."""
        return Stage([one for one, _ in self.tables], self.room)

    @cached_property
    def kinds(self) -> RankKinds:
        """The same with equal blocks counted."""
        counted: dict[tuple[int, int], int] = {}
        known: dict[tuple[int, int], tuple[Menu, Limits]] = {}
        for menu, own in zip(self.menus, self._limits, strict=True):
            key = id(menu), id(own)
            counted[key] = counted.get(key, 0) + 1
            known[key] = menu, own
        return RankKinds(
            [(known[key][0].table(known[key][1])[0], n) for key, n in counted.items()], self.room
        )


@dataclass(frozen=True, eq=False)
class Rank:
    """The blocks of a rank, and what it has left for them."""

    menus: Sequence[Menu]
    """The menu of each of its blocks."""
    outside: Outside
    """What it holds besides them."""
    memory: float
    """Bytes of its device."""
    host_room: float
    """Bytes that its host has left for it."""
    flights: Sequence[float]
    """Passes of each of its blocks that it holds at once."""

    @cached_property
    def ways(self) -> list[Way]:
        """All of them, that with the least bytes of a backward pass first."""
        number, outside = len(self.menus), self.outside
        names = "again", "waiting", "leaving", "standing"
        each = np.array([np.concatenate([getattr(menu, name) for menu in self._kinds]) for name in names])
        again, waiting, leaving, standing = each[:, outside.flight * each[2] <= self.host_room]
        margin, most_standing, left = 1.0 + outside.share, float(standing.max()), self._left
        alone = waiting + again
        has_end = margin * float(alone.max()) + number * most_standing > left["end"]
        ends = _levels(alone[margin * alone <= left["end"]]) if has_end else [float(alone.max())]
        levels, found = _levels(again[margin * again <= left["backward"]]), []
        for most, end in itertools.product(levels, ends):
            may = (again <= most) & (alone <= end)
            largest = float(leaving[may].max(initial=0.0))
            offloads = int(min(self.host_room / (outside.flight * largest), number)) if largest else 0
            is_new = (again[may] == most) & ((leaving[may] == 0.0) | (offloads > 0))
            room = min(left["backward"] - margin * most, left["loss"])
            rest = min(left["update"], left["end"] - margin * end * has_end)
            if is_new.any() and room >= 0 and rest >= 0:
                gathers = int(min(rest / most_standing, number)) if most_standing else number
                found.append(Way(self.menus, self._counted, most, end, offloads, gathers, room))
        return found

    @cached_property
    def free(self) -> Way:
        """With nothing that is not allowed."""
        number = len(self.menus)
        return Way(self.menus, self._counted, np.inf, np.inf, number, number, np.inf)

    def every_plan(self, most: int) -> Frontier | None:
        """All plans that fit and that no other beats in seconds or harm, as choices of `free`; None where there are
        more than so many to look at, or none fits."""
        kinds = self._kinds
        figures = [
            np.array([one.seconds, one.waiting, one.standing, one.again, one.leaving, one.harm])
            for one in kinds
        ]
        kept = [undominated(one) for one in figures]
        counts = [sum(menu is one for menu in self.menus) for one in kinds]
        if ways_number(counts, kept) > most:
            return None
        sums, tops = np.zeros((5, 1)), np.zeros((2, 1))
        shares = [ways_to_share(count, len(own)) for count, own in zip(counts, kept, strict=True)]
        for share, own, one in zip(shares, kept, figures, strict=True):
            seconds, waiting, standing, again, leaving, harm = one[:, own]
            more = share @ np.stack([seconds, waiting, standing, leaving, harm], axis=1)
            sums = (sums[:, :, None] + more.T[:, None]).reshape(5, -1)
            peaks = np.stack(
                [np.where(share > 0, each, 0.0).max(axis=1) for each in (again, again + waiting)]
            )
            tops = np.maximum(tops[:, :, None], peaks[:, None]).reshape(2, -1)
        fit = self._fit(sums[1:4], tops)
        some = fit[falling(sums[0, fit], sums[4, fit])]
        if not len(some):
            return None
        places = np.unravel_index(some, [len(share) for share in shares])
        choices = np.empty((len(some), len(self.menus)), dtype=np.int64)
        for menu, share, own, at in zip(kinds, shares, kept, places, strict=True):
            ours = [number for number, one in enumerate(self.menus) if one is menu]
            # The first blocks of a kind take its first choice, as many as the share says, and so on.
            before = np.cumsum(share[at], axis=1)[:, None] <= np.arange(len(ours))[:, None]
            choices[:, ours] = own[before.sum(axis=2)]
        return Frontier(sums[0, some], sums[4, some], choices)

    def _fit(self, sums: Array, tops: Array) -> Indices:
        """Which plans fit.

        Args:
            sums: [3, N] of waiting, standing and leaving.
            tops: [2, N] most that a block's backward pass has besides, and with what waits of it.
        """
        (waiting, standing, leaving), (again, alone) = sums, tops
        left, margin, flight = self._left, 1.0 + self.outside.share, self.outside.flight
        fits = margin * (flight * waiting + again) + standing <= left["backward"]
        fits &= margin * flight * waiting + standing <= left["loss"]
        fits &= margin * alone + standing <= left["end"]
        fits &= (standing <= left["update"]) & (flight * leaving <= self.host_room)
        return np.flatnonzero(fits)

    @cached_property
    def _kinds(self) -> list[Menu]:
        return list({id(menu): menu for menu in self.menus}.values())

    @property
    def _counted(self) -> list[float]:
        return [(1.0 + self.outside.share) * flight for flight in self.flights]

    @cached_property
    def _left(self) -> dict[Moment, float]:
        """Bytes that the rank has at each moment; infinite at those that it does not have."""
        return {moment: self.memory - self.outside.bytes(moment) for moment in MOMENTS}


def _levels(figures: Array) -> list[float]:
    """The values that are tried as the largest."""
    every = np.unique(figures)
    some = np.linspace(0, len(every) - 1, min(len(every), _LEVELS)).round().astype(int)
    levels: list[float] = every[some].tolist()
    return levels


def relaxed(ways: Sequence[Way]) -> list[Way]:
    """At most two of which one has all plans that any of these has: that of the least level, and another which may do
    what any may, and has as much room as any: bounds need no more."""
    if len(ways) <= 2:
        return list(ways)
    first, *others = ways
    widest = {
        name: max(getattr(one, name) for one in others)
        for name in ("again", "alone", "leaving", "gathering", "room")
    }
    return [first, dataclasses.replace(others[0], **widest)]

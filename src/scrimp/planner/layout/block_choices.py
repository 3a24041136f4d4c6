"""What each block of a layout does, decided together: formats, recomputation, offload and gathered weights.

Problem  A format saves seconds and bytes, and costs quality; what is made again or moved saves bytes, and costs
         seconds; and a stage of a pipeline has bytes of its own, and counts by how slow it is. Decided one after the
         other, each spends what another needed.
Method   Each block takes one choice of its menu (`block_menus`), so that every rank's bytes have room and all harm
         stays under its limit; `knapsack` finds the fastest. What it found is counted again, whole (`peak_bytes`).
         Most layouts need not be solved: with prices for harm and for the bytes of each rank r, lambda and mu_r, no
         choices take less than::

             sum_r t_r >= sum_r ( sum_blocks min over k of (seconds + lambda harm + mu_r bytes) - mu_r room_r )
                          - lambda limit                                          (`Blocks.least_seconds`)

         (`priced_bound`); lambda is tried at some of the prices at which two choices cost the same.
         Ranks of few blocks have all their plans looked at; what others may keep is said in `rank_ways`.
Limits   Ranks are taken to be as slow as the sum of their stages' passes; what a schedule makes of it is predicted
         after. Of 3,699 random pipelines of two stages and two to four blocks all plans were the best by that sum; as
         played, 7 were slower than the best by more than 0.2 %, the worst by 2.5 %. What is reduced once a step hides
         beside the last backward pass, which is longer where more is made again: of a step of few micro-batches over
         slow links plans are up to 1 % from the best for want of it.
Source   The bound: Lagrangian relaxation (Fisher, Management Science 27, 1981)
Checked  tests/planner/layout/test_block_choices.py, test_rank_ways.py: all choices of small models
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from scrimp.planner.layout.block_activations import kept_bytes
from scrimp.planner.layout.block_menus import Formats, Menu, Quality, menus_of
from scrimp.planner.layout.block_times import embedding_seconds, head_seconds
from scrimp.planner.layout.held_states import host_bytes
from scrimp.planner.layout.in_flight import fullest, passes_in_flight
from scrimp.planner.layout.kernels import element_bytes
from scrimp.planner.layout.knapsack import Frontier
from scrimp.planner.layout.predict import kernels_of
from scrimp.planner.layout.priced_bound import least_at_prices, weighted
from scrimp.planner.layout.rank_ways import Rank, Way, relaxed
from scrimp.planner.layout.setting import FULL, NONE, BlockPlan, Setting
from scrimp.planner.layout.shared_harm import spread
from scrimp.planner.layout.stage_memory import Outside, RankBytes, outside_blocks, peak_bytes
from scrimp.planner.layout.stages import (
    block_plans,
    blocks_of_ranks,
    blocks_of_stages,
    last_rank,
    splits_backward,
    stages_of_rank,
)

Array = NDArray[np.float64]
_PRICES = 12
_ASKED = 8
_TRIES, _ROUNDS = 3, 2
_FEW = 20_000
"""Plans of all ranks' blocks, up to which all are looked at."""
_CELLS = 128
"""Cells that all harm is split into: how finely it is shared out between stages."""
_ROUND = 1e-9
HOST_SHARE = 0.9
"""Share of host memory that the system and the program itself leave: an estimate."""


def leanest(setting: Setting, formats: Formats = (), outside: Sequence[Outside] | None = None) -> Setting:
    """With blocks that keep as little as they can on the device: all are made again or, where that has no room and
    this takes less, as many offload as the host has room for. What waits at each block's border adds up over a rank,
    and what comes back from the host is there once: of many blocks, or passes in flight, offload takes less.

    Args:
        formats: of all blocks.
        outside: as of `peak_bytes`.
    """
    again = BlockPlan(recompute=FULL, formats=formats)
    away = dataclasses.replace(again, recompute=NONE, offload=True)
    one, first = setting.in_formats(formats), setting.model.first_equal
    room, plans, others = _host_room(setting), [again] * len(first), [again] * len(first)
    ranks = blocks_of_ranks(setting)
    for rank, own in enumerate(ranks):
        largest = max(kept_bytes(setting.model.blocks[block], one) for block in {first[at] for at in own})
        for block in own[: max(0, int(room / (passes_in_flight(setting, rank) * largest)))]:
            others[block] = away
    outside = outside or outside_blocks(setting)
    lean, lent = (dataclasses.replace(setting, blocks=tuple(each)) for each in (plans, others))
    here = peak_bytes(lean, outside)
    if others != plans and max(_over(setting, [one.total for one in here])) > 0:
        there = peak_bytes(lent, outside)
        for rank, own in enumerate(ranks):
            for block in own if there[rank].total < here[rank].total else ():
                plans[block] = others[block]
    return dataclasses.replace(setting, blocks=tuple(plans))


def has_room(setting: Setting) -> bool:
    """Whether its devices and hosts hold it where it is leanest."""
    over = _over(setting, [one.total for one in peak_bytes(leanest(setting))])
    return max(over) <= 0 and _host_room(setting) >= 0


def may_have_room(setting: Setting, quality: Quality | None) -> bool:
    """Whether its devices would hold it, in the fewest bits, if all hosts had room for all activations. Where they do
    not, they hold no larger micro-batch either, but for all sequences in one, of which no gradients wait."""
    formats = _in_fewest_bits(setting, quality)
    outside, number = outside_blocks(setting, formats), len(setting.model.blocks)
    again = BlockPlan(recompute=FULL, formats=formats)
    plans = [again, dataclasses.replace(again, recompute=NONE, offload=True)][: 1 + (setting.layout.pp == 1)]
    sizes = [
        [one.total for one in peak_bytes(dataclasses.replace(setting, blocks=(plan,) * number), outside)]
        for plan in plans
    ]
    return max(_over(setting, [min(each) for each in zip(*sizes, strict=True)])) <= 0


def has_room_as_planned(setting: Setting, memory: Sequence[RankBytes]) -> bool:
    """Whether its devices and hosts hold it with its blocks as they are planned.

    Args:
        memory: its peaks, by rank.
    """
    blocks, plans = setting.model.blocks, block_plans(setting)
    leaving = max(
        passes_in_flight(setting, rank)
        * sum(
            kept_bytes(blocks[block], setting.in_formats(plans[block].formats))
            for block in own
            if plans[block].offload
        )
        for rank, own in enumerate(blocks_of_ranks(setting))
    )
    return max(_over(setting, [one.total for one in memory])) <= 0 and _host_left(setting) >= leaving


class Blocks:
    """The choices of all blocks of one layout.

    Args:
        setting: its blocks are not decided yet; its precision is the base of the quality's formats.
        quality: None: all products run in the setting's precision.

    Attributes:
        leanest_bytes: the least that a device needs.
        has_room: whether devices and hosts hold that.
    """

    def __init__(self, setting: Setting, quality: Quality | None) -> None:
        self.setting, self._quality = setting, quality
        self.blocks = blocks_of_ranks(setting)
        lean = _in_fewest_bits(setting, quality)
        self._outside, self._host_room = outside_blocks(setting, lean), _host_room(setting)
        self._known: dict[int, Frontier | None] = {}
        least = [one.total for one in self._leanest(lean)]
        self.leanest_bytes = max(least)
        self.has_room = max(_over(setting, least)) <= 0 and self._host_room >= 0

    def _leanest(self, formats: Formats) -> list[RankBytes]:
        return peak_bytes(leanest(self.setting, formats, self._outside), self._outside)

    @property
    def leanest_memory(self) -> tuple[RankBytes, ...]:
        """The least that each rank needs, in the setting's own formats."""
        return tuple(self._leanest(()))

    @cached_property
    def places(self) -> list[Rank]:
        """The ranks, each with its blocks' menus and what it has left for them."""
        found: list[Rank] = []
        menus: dict[tuple[int, ...], list[Menu]] = {}
        for rank, own in enumerate(self.blocks):
            place = self.setting.at(rank)
            if place.places not in menus:
                menus[place.places] = menus_of(place, self._quality)
            some = [menus[place.places][block] for block in own]
            flights = self._flights(rank)
            found.append(Rank(some, self._outside[rank], place.memory_bytes, self._host_room, flights))
        return found

    def _flights(self, rank: int) -> list[float]:
        """Passes of each block of a rank that it holds at once."""
        setting, own = self.setting, self.blocks[rank]
        if not splits_backward(setting.layout):
            return [self._outside[rank].flight] * len(own)
        stages = [blocks_of_stages(setting)[one] for one in stages_of_rank(setting.layout, rank)]
        flying = fullest(setting, rank).flying
        return [float(flying[block in stages[1]]) for block in own]

    @cached_property
    def ends(self) -> list[float]:
        """Seconds of embedding and head on each rank, for one micro-batch."""
        return _ends(self.setting)

    @cached_property
    def spare(self) -> float:
        """Harm that may be done beside the least."""
        least = sum(menu.least for place in self.places for menu in place.menus)
        limit = self._quality.limit if self._quality else 0.0
        return 0.0 if limit < least <= limit * (1.0 + _ROUND) else limit - least

    @property
    def _may_fit(self) -> bool:
        return self.has_room and self.spare >= 0 and all(place.ways for place in self.places)

    def least_seconds(self, weights: Array | None = None, sends: float = 0.0) -> float:
        """Seconds that the passes of one micro-batch take at least, of all ranks together; infinite where the limit
        of harm cannot be kept, or a rank has no room.

        Args:
            weights: [W, R] how much each rank counts; the largest of these bounds. None: all count once.
            sends: seconds of each rank that passes take besides blocks, embedding and head.
        """
        if not self._may_fit:
            return math.inf
        prices = self._prices()
        bounds = np.full((len(self.places), len(prices)), np.inf)
        few = [relaxed(place.ways) for place in self.places]
        for number in range(2):
            own = [rank for rank, ways in enumerate(few) if len(ways) > number]
            if own:
                found = least_at_prices([few[rank][number].kinds for rank in own], prices)
                bounds[own] = np.minimum(bounds[own], found)
        rows = np.ones((1, len(self.places))) if weights is None else weights
        return max(
            float(row @ np.add(self.ends, sends)) + weighted(bounds, prices, self.spare, row) for row in rows
        )

    def _prices(self) -> Array:
        """Prices of harm that are tried: 0, and some of those at which two choices cost the same."""
        menus = list({id(menu): menu for place in self.places for menu in place.menus}.values())
        # Any prices bound: of many menus a few are asked.
        bends = np.unique(np.concatenate([menu.bends for menu in menus[:: -(-len(menus) // _ASKED)]]))
        some = np.linspace(0, len(bends) - 1, min(len(bends), _PRICES)).round().astype(int)
        return np.unique(np.append(bends[some], 0.0))

    def solve(self) -> Setting | None:
        """The setting with its blocks decided; None where they fit in no way."""
        if not self._may_fit:
            return None
        ranks = [place.ways for place in self.places]
        for _ in range(_TRIES):
            found = self._solved(ranks)
            if found is None:
                return None
            setting, used = found
            over = _over(setting, [one.total for one in peak_bytes(setting)])
            if max(over) <= 0:
                return setting
            # Different blocks may gather or offload together what none of them does alone; another moment of a V may
            # have more.
            ranks = [
                [dataclasses.replace(way, room=min(way.room, size - excess)) for way in ways]
                if excess > 0
                else ways
                for ways, size, excess in zip(ranks, used, over, strict=True)
            ]
        return None

    def _solved(self, ranks: list[list[Way]]) -> tuple[Setting, list[float]] | None:
        """The fastest choices, and the bytes that they add up to on each rank."""
        number = len(self.setting.model.blocks)
        targets = [self.spare * len(own) / number for own in self.blocks]
        found = self._fronts(ranks, targets)
        if not all(found):
            found = self._fronts(ranks, targets, all_ways=True)
        if not all(found):
            return None
        taken: list[int] = []
        for step in range(_ROUNDS if len(ranks) > 1 else 1):
            if step:
                found = self._nearer(found, taken, targets)
            merged, shares = self._spread(found)
            if shares is None and not step:
                # Ways that others beat at all prices that were tried may be the only ones of so little harm.
                found = self._fronts(ranks, targets, all_ways=True)
                merged, shares = self._spread(found)
            if shares is None:
                return None
            taken = shares
            targets = [float(one.harm[plan]) for one, plan in zip(merged, taken, strict=True)]
        plans, used = [BlockPlan()] * len(self.setting.model.blocks), [0.0] * len(ranks)
        for rank, (fronts, plan) in enumerate(zip(found, taken, strict=True)):
            at, plan = _place_of(fronts, plan)
            way, front = fronts[at]
            for block, menu, (choices, entries), choice in zip(
                self.blocks[rank], way.menus, way.tables, front.choices[plan].tolist(), strict=True
            ):
                plans[block] = menu.plan(int(entries[choice]))
                used[rank] += float(choices.bytes[choice])
        return dataclasses.replace(self.setting, blocks=tuple(plans)), used

    def _spread(self, found: list[list[tuple[Way, Frontier]]]) -> tuple[list[Frontier], list[int] | None]:
        """The plans of all ways of each rank, and which of them each takes."""
        merged = [_merged([front for _, front in fronts]) for fronts in found]
        return merged, spread(merged, self.ends, self.setting.micro_batches, self.spare, _CELLS)

    def _bounds(self, ranks: list[list[Way]], prices: Array) -> list[Array]:
        """Seconds [W, P] of each rank's ways with harm at these prices, but for ranks whose plans are all known."""
        asked = [[] if self._every_plan(rank) else ways for rank, ways in enumerate(ranks)]
        kinds = [way.kinds for ways in asked for way in ways]
        each = least_at_prices(kinds, prices) if kinds else np.empty((0, len(prices)))
        return np.split(each, np.cumsum([len(ways) for ways in asked])[:-1])

    def _fronts(
        self, ranks: list[list[Way]], targets: Sequence[float], *, all_ways: bool = False
    ) -> list[list[tuple[Way, Frontier]]]:
        """Plans of each rank: all of few; else those of the ways whose bound is least at some price of harm and, of a
        rank alone, of all ways that may have a better one. Or all plans of all ways."""
        found: list[list[tuple[Way, Frontier]]] = []
        prices = self._prices()
        bounds = self._bounds(ranks, prices)
        for rank, (ways, own, target) in enumerate(zip(ranks, bounds, targets, strict=True)):
            every = self._every_plan(rank)
            if every:
                found.append([(self.places[rank].free, every)])
                continue
            # The way that is least at most prices first: it beats most of the others.
            wins = np.bincount(own.argmin(axis=0), minlength=len(ways))
            order = np.lexsort((own[:, 0], -wins))
            fronts: list[tuple[Way, Frontier]] = []
            some = len(ways) if all_ways or len(ranks) == 1 else np.count_nonzero(wins)
            for at in order[:some].tolist():
                if not all_ways and self._is_beaten(own[at], prices, [front for _, front in fronts]):
                    continue
                front = ways[at].stage.frontier(target)
                if front is not None:
                    fronts.append((ways[at], front))
            found.append(fronts)
        return found

    def _nearer(
        self, found: list[list[tuple[Way, Frontier]]], taken: Sequence[int], targets: Sequence[float]
    ) -> list[list[tuple[Way, Frontier]]]:
        """The same with plans of the ways that were taken closer together where these do their harm."""
        nearer = [list(fronts) for fronts in found]
        for rank, (fronts, plan, target) in enumerate(zip(nearer, taken, targets, strict=True)):
            at, _ = _place_of(fronts, plan)
            way = fronts[at][0]
            front = None if self._every_plan(rank) else way.stage.frontier(target)
            if front is not None:
                fronts[at] = way, front
        return nearer

    def _every_plan(self, rank: int) -> Frontier | None:
        # Of a V one moment alone is known here.
        if splits_backward(self.setting.layout):
            return None
        if rank not in self._known:
            self._known[rank] = self.places[rank].every_plan(_FEW // len(self.places))
        return self._known[rank]

    def _is_beaten(self, bound: Array, prices: Array, fronts: list[Frontier]) -> bool:
        """Whether plans of a way are no faster than known ones, however much harm a rank may do: one alone may do all.

        Args:
            bound: [P] seconds of the way with harm at these prices.
        """
        if not fronts:
            return False
        known = _merged(fronts)
        order = np.argsort(known.harm, kind="stable")
        order = order[known.harm[order] <= self.spare * (1.0 + _ROUND)]
        if not len(order) or known.harm[order[0]] > _ROUND * self.spare:
            return False
        # With harm from one plan's up to the next one's, the fastest of those so far is there.
        seconds = np.minimum.accumulate(known.seconds[order])
        most = np.append(known.harm[order[1:]], self.spare)
        some = slice(-1, None) if len(self.places) == 1 else slice(None)
        return bool(((bound[:, None] - prices[:, None] * most[some]).max(axis=0) >= seconds[some]).all())


def _in_fewest_bits(setting: Setting, quality: Quality | None) -> Formats:
    """The recipes in which blocks keep least."""
    if quality is None:
        return ()
    least = min(quality.formats, key=element_bytes)
    names = {linear.name for block in setting.model.blocks for linear in block.linears}
    return tuple((f"{name}.wgrad", least) for name in sorted(names))


def _over(setting: Setting, sizes: Sequence[float]) -> list[float]:
    """How much more each rank needs than its devices have."""
    return [size - setting.at(rank).memory_bytes for rank, size in enumerate(sizes)]


def _host_room(setting: Setting) -> float:
    """What a search may have of it for activations: Scrimp sends them there without pipelines alone."""
    left = _host_left(setting)
    return left if setting.layout.pp == 1 else min(0.0, left)


def _host_left(setting: Setting) -> float:
    """What states leave of host memory for the activations of a device, on the host that has least."""
    room = min(group.node.host_memory_bytes / group.used for group in setting.cluster.groups)
    return HOST_SHARE * room - host_bytes(setting)


def _ends(setting: Setting) -> list[float]:
    """Seconds of embedding and head on each rank, for one micro-batch."""
    found = [0.0] * setting.layout.pp
    for rank, ends in ((0, embedding_seconds), (last_rank(setting.layout), head_seconds)):
        own = setting.at(rank)
        one = ends(own, kernels_of(own))
        found[rank] += one.forward.total + one.backward.total
    return found


def _place_of(fronts: Sequence[tuple[Way, Frontier]], plan: int) -> tuple[int, int]:
    """Which way has one of all their plans, as `_merged` counts them, and its number there."""
    ends = np.cumsum([0, *(len(front.seconds) for _, front in fronts)])
    at = int(np.searchsorted(ends, plan, side="right")) - 1
    return at, plan - int(ends[at])


def _merged(fronts: list[Frontier]) -> Frontier:
    """The plans of all of them, one after the other."""
    if len(fronts) == 1:
        return fronts[0]
    seconds, harm = (np.concatenate([getattr(one, name) for one in fronts]) for name in ("seconds", "harm"))
    return Frontier(seconds, harm, np.concatenate([one.choices for one in fronts]))

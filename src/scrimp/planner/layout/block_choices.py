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
Limits   Ranks are taken to be as slow as the sum of their stages' passes; what a schedule makes of it is predicted
         after.
Source   The bound: Lagrangian relaxation (Fisher, Management Science 27, 1981)
Checked  tests/planner/layout/test_block_choices.py: all choices of small models
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from scrimp.planner.layout.block_activations import kept_bytes, waiting_bytes
from scrimp.planner.layout.block_menus import Menu, Quality, menus_of
from scrimp.planner.layout.block_times import embedding_seconds, head_seconds
from scrimp.planner.layout.held_states import host_bytes
from scrimp.planner.layout.in_flight import passes_in_flight
from scrimp.planner.layout.knapsack import Choices, Frontier, Indices, Stage, spread
from scrimp.planner.layout.predict import kernels_of
from scrimp.planner.layout.priced_bound import RankKinds, least_at_prices, weighted
from scrimp.planner.layout.setting import FULL, NONE, BlockPlan, Setting
from scrimp.planner.layout.stage_memory import RankBytes, margin_of, peak_bytes
from scrimp.planner.layout.stages import blocks_of_stages, last_rank, stages_of_rank

Array = NDArray[np.float64]
_PRICES = 12
_ASKED = 8
_TRIES, _ROUNDS = 3, 2
_CELLS = 128
"""Of all harm: how finely it is shared out between stages."""
_HOST_SHARE = 0.9
"""Of host memory, what the system and the program itself leave: an estimate."""


def leanest(setting: Setting, *, keeps_all: bool = False) -> Setting:
    """With blocks that keep as little as they can on the device.

    Args:
        keeps_all: nothing is made again or leaves, so that no room is needed for what comes back.
    """
    plan = BlockPlan(recompute=NONE if keeps_all else FULL)
    return dataclasses.replace(setting, blocks=(plan,) * len(setting.model.blocks))


def has_room(setting: Setting) -> bool:
    """Whether its devices and hosts hold it where it is leanest."""
    over = _over(setting, [one.total for one in peak_bytes(leanest(setting))])
    return max(over) <= 0 and _host_room(setting) >= 0


def has_room_as_planned(setting: Setting, memory: Sequence[RankBytes]) -> bool:
    """The same with its blocks as they are planned.

    Args:
        memory: its peaks, by rank.
    """
    leaving = max(
        passes_in_flight(setting, rank)
        * sum(
            kept_bytes(setting.model.blocks[block], setting) for block in own if setting.blocks[block].offload
        )
        for rank, own in enumerate(_blocks_of_ranks(setting))
    )
    return max(_over(setting, [one.total for one in memory])) <= 0 and _host_room(setting) >= leaving


@dataclass(frozen=True, eq=False)
class _Way:
    """How a rank can have room for its blocks: all of them keep all, or some make again or offload."""

    menus: list[Menu]
    """Of each of its blocks."""
    flight: float
    """Passes that the rank holds at once."""
    leaving: int
    """How many of its blocks may offload."""
    room: float

    @cached_property
    def tables(self) -> list[tuple[Choices, Indices]]:
        """What each block can do, and which entries of its menu that is."""
        return [menu.table(self.flight, offload=at < self.leaving) for at, menu in enumerate(self.menus)]

    @cached_property
    def stage(self) -> Stage:
        """The rank's blocks and its room."""
        return Stage([one for one, _ in self.tables], self.room)

    @cached_property
    def kinds(self) -> RankKinds:
        """The same with equal blocks counted."""
        counted: Counter[tuple[int, bool]] = Counter()
        for at, menu in enumerate(self.menus):
            counted[id(menu), at < self.leaving] += 1
        known = {id(menu): menu for menu in self.menus}
        return RankKinds(
            [(known[one].table(self.flight, offload=may)[0], count) for (one, may), count in counted.items()],
            self.room,
        )


class Blocks:
    """The choices of all blocks of one layout.

    Args:
        setting: its blocks are not decided yet; its precision is the base of the quality's formats.
        quality: None: all products run in the setting's precision.

    Attributes:
        leanest_bytes: the least that a device needs.
    """

    def __init__(self, setting: Setting, quality: Quality | None) -> None:
        self.setting = setting
        self.blocks = _blocks_of_ranks(setting)
        self.ends = _ends(setting)
        self.host_room = _host_room(setting)
        self.ranks: list[list[_Way]] = [[] for _ in self.blocks]
        self.leanest_bytes = 0.0
        for keeps_all in (False, True):
            least = peak_bytes(leanest(setting, keeps_all=keeps_all))
            self.leanest_bytes = self.leanest_bytes or max(one.total for one in least)
            over = _over(setting, [one.total for one in least])
            # What blocks keep is there in passes alone: an update may take more, and leave them as much room.
            passing = _over(setting, [one.passing for one in least])
            if not keeps_all and (max(over) > 0 or self.host_room < 0):
                break
            menus: dict[int, list[Menu]] = {}
            plan = BlockPlan(recompute=NONE if keeps_all else FULL)
            for rank, ways in enumerate(self.ranks):
                own = setting.at(rank)
                if own.place_number not in menus:
                    menus[own.place_number] = menus_of(own, quality, keeps_all=keeps_all)
                if over[rank] <= 0:
                    ways.append(self._way(rank, menus[own.place_number], plan, -passing[rank]))
            least_harm = sum(menu.least for menu in next(iter(menus.values())))
            self.spare = (quality.limit if quality else 0.0) - least_harm

    def least_seconds(self, weights: Array | None = None, sends: float = 0.0) -> float:
        """Seconds that the passes of one micro-batch take at least, of all ranks together; infinite where the limit
        of harm cannot be kept, or a rank has no room.

        Args:
            weights: [W, R] how much each rank counts; the largest of these bounds. None: all count once.
            sends: seconds of each rank that passes take besides blocks, embedding and head.
        """
        if not all(self.ranks) or self.spare < 0:
            return math.inf
        prices = self._prices()
        bounds = np.full((len(self.ranks), len(prices)), np.inf)
        for number in range(2):
            own = [rank for rank, ways in enumerate(self.ranks) if len(ways) > number]
            if own:
                found = least_at_prices([self.ranks[rank][number].kinds for rank in own], prices)
                bounds[own] = np.minimum(bounds[own], found)
        rows = np.ones((1, len(self.ranks))) if weights is None else weights
        return max(
            float(row @ np.add(self.ends, sends)) + weighted(bounds, prices, self.spare, row) for row in rows
        )

    def _prices(self) -> Array:
        """Prices of harm that are tried: 0, and some of those at which two choices cost the same."""
        menus = list({id(menu): menu for ways in self.ranks for way in ways for menu in way.menus}.values())
        # Any prices bound: of many menus a few are asked.
        bends = np.unique(np.concatenate([menu.bends for menu in menus[:: -(-len(menus) // _ASKED)]]))
        some = np.linspace(0, len(bends) - 1, min(len(bends), _PRICES)).round().astype(int)
        return np.unique(np.append(bends[some], 0.0))

    def solve(self) -> Setting | None:
        """The setting with its blocks decided; None where they fit in no way."""
        if not all(self.ranks) or self.spare < 0:
            return None
        ranks = self.ranks
        for _ in range(_TRIES):
            found = self._solved(ranks)
            if found is None:
                return None
            setting, used = found
            over = _over(setting, [one.total for one in peak_bytes(setting)])
            if max(over) <= 0:
                return setting
            # What comes back at once may be more than what the leanest plan has room for.
            ranks = [
                [dataclasses.replace(way, room=min(way.room, size - excess)) for way in ways]
                if excess > 0
                else ways
                for ways, size, excess in zip(ranks, used, over, strict=True)
            ]
        return None

    def _solved(self, ranks: list[list[_Way]]) -> tuple[Setting, list[float]] | None:
        """The fastest choices, and the bytes that they add up to on each rank."""
        number = len(self.setting.model.blocks)
        targets = [self.spare * len(own) / number for own in self.blocks]
        found: list[list[tuple[_Way, Frontier]]] = []
        taken: list[int] = []
        for _ in range(_ROUNDS if len(ranks) > 1 else 1):
            found = []
            for ways, target in zip(ranks, targets, strict=True):
                fronts = [(way, front) for way in ways if (front := way.stage.frontier(target)) is not None]
                if not fronts:
                    return None
                found.append(fronts)
            merged = [_merged([front for _, front in fronts]) for fronts in found]
            shares = spread(merged, self.ends, self.setting.micro_batches, self.spare, _CELLS)
            if shares is None:
                return None
            taken = shares
            targets = [float(one.harm[plan]) for one, plan in zip(merged, taken, strict=True)]
        plans, used = [BlockPlan()] * len(self.setting.model.blocks), [0.0] * len(ranks)
        for rank, (fronts, plan) in enumerate(zip(found, taken, strict=True)):
            way, front = fronts[0]
            if plan >= len(front.seconds):
                plan, (way, front) = plan - len(front.seconds), fronts[1]
            for block, menu, (choices, entries), choice in zip(
                self.blocks[rank], way.menus, way.tables, front.choices[plan].tolist(), strict=True
            ):
                plans[block] = menu.plan(int(entries[choice]))
                used[rank] += float(choices.bytes[choice])
        return dataclasses.replace(self.setting, blocks=tuple(plans)), used

    def _way(self, rank: int, menus: Sequence[Menu], plan: BlockPlan, left: float) -> _Way:
        setting, own, first = self.setting, self.blocks[rank], self.setting.model.first_equal
        flight = passes_in_flight(setting, rank)
        leaving = self._leaving(own, flight)
        counted = Counter(first[block] for block in own)
        held = sum(
            count * waiting_bytes(setting.model.blocks[block], plan, setting)
            for block, count in counted.items()
        )
        return _Way(
            [menus[block] for block in own],
            flight,
            leaving,
            left / (1.0 + margin_of(setting)) + flight * held,
        )

    def _leaving(self, own: Sequence[int], flight: float) -> int:
        """How many of these blocks the host has room for."""
        model = self.setting.model
        largest = max(
            kept_bytes(model.blocks[block], self.setting) for block in {model.first_equal[one] for one in own}
        )
        return int(self.host_room / (flight * largest))


def _over(setting: Setting, sizes: Sequence[float]) -> list[float]:
    """How much more each rank needs than its devices have."""
    return [size - setting.at(rank).memory_bytes for rank, size in enumerate(sizes)]


def _host_room(setting: Setting) -> float:
    """What host memory has left for a device, of the host that has least."""
    room = min(group.node.host_memory_bytes / group.used for group in setting.cluster.groups)
    return _HOST_SHARE * room - host_bytes(setting)


def _blocks_of_ranks(setting: Setting) -> list[list[int]]:
    """The blocks of each rank, its stages in turn: what is decided of the first few is shared by all of them."""
    stages, layout = blocks_of_stages(setting), setting.layout
    own = ([stages[one] for one in stages_of_rank(layout, rank)] for rank in range(layout.pp))
    return [
        [block for row in itertools.zip_longest(*ours) for block in row if block is not None] for ours in own
    ]


def _ends(setting: Setting) -> list[float]:
    """Seconds of embedding and head on each rank, for one micro-batch."""
    found = [0.0] * setting.layout.pp
    for rank, ends in ((0, embedding_seconds), (last_rank(setting.layout), head_seconds)):
        own = setting.at(rank)
        one = ends(own, kernels_of(own))
        found[rank] += one.forward.total + one.backward.total
    return found


def _merged(fronts: list[Frontier]) -> Frontier:
    """The plans of all of them, one after the other."""
    if len(fronts) == 1:
        return fronts[0]
    seconds, harm = (np.concatenate([getattr(one, name) for one in fronts]) for name in ("seconds", "harm"))
    return Frontier(seconds, harm, np.concatenate([one.choices for one in fronts]))

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

         The right side is concave in each price and bends only where two choices cost the same: mu is tried at all
         of these, lambda at some.
Limits   Ranks are taken to be as slow as the sum of their stages' passes; what a schedule makes of it is predicted
         after.
Source   The bound: Lagrangian relaxation (Fisher, Management Science 27, 1981)
Checked  tests/planner/layout/test_block_choices.py: all choices of small models
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from scrimp.planner.layout.block_menus import Menu, Quality, menus_of
from scrimp.planner.layout.block_times import embedding_seconds, head_seconds
from scrimp.planner.layout.knapsack import Cells, Choices, cell, frontier, spread
from scrimp.planner.layout.predict import kernels_of
from scrimp.planner.layout.setting import FULL, NONE, BlockPlan, Setting
from scrimp.planner.layout.stage_memory import MARGIN, kept_bytes, passes_in_flight, peak_bytes, waiting_bytes
from scrimp.planner.layout.stages import blocks_of_stages

Array = NDArray[np.float64]
_PRICES = 12
FINE, WITH_HARM = Cells(bytes=4096, harm=0), Cells()


class Blocks:
    """The choices of all blocks of one layout.

    Args:
        setting: its blocks are not decided yet.
        quality: None: all products run in the setting's precision.
        keeps_all: nothing is made again or leaves, so that no room is needed for what comes back.
    """

    def __init__(self, setting: Setting, quality: Quality | None, *, keeps_all: bool = False) -> None:
        self.setting = dataclasses.replace(setting, precision=quality.base) if quality else setting
        self.ranks = _ranks(self.setting)
        menus = menus_of(self.setting, quality, keeps_all=keeps_all)
        self.menus: dict[int, Menu] = {id(menu): menu for menu in menus}
        leanest = BlockPlan(recompute=NONE if keeps_all else FULL)
        least = sum(menu.least for menu in menus)
        self.spare = (quality.limit if quality else 0.0) - least
        self.leanest_bytes = [
            one.total
            for one in peak_bytes(
                dataclasses.replace(self.setting, blocks=(leanest,) * len(self.setting.model.blocks))
            )
        ]
        self.tables: list[list[tuple[Choices, list[BlockPlan]]]] = []
        self.rooms: list[float] = []
        for rank, own in enumerate(self.ranks):
            flight = passes_in_flight(self.setting, rank)
            leaving = self._leaving(own, flight)
            self.tables.append(
                [menus[block].table(flight, offload=at < leaving) for at, block in enumerate(own)]
            )
            held = sum(
                waiting_bytes(self.setting.model.blocks[block], leanest, self.setting) for block in own
            )
            spare = (self.setting.device.memory_bytes - self.leanest_bytes[rank]) / (1.0 + MARGIN)
            self.rooms.append(spare + flight * held)
        self.ends = _ends(self.setting)

    def least_seconds(self) -> float:
        """Seconds that the passes of one micro-batch take at least, of all ranks together; infinite where one has no
        room."""
        if self.spare < 0 or any(
            sum(float(choices.bytes.min()) for choices, _ in own) > room
            for own, room in zip(self.tables, self.rooms, strict=True)
        ):
            return np.inf
        counted = [Counter(id(choices) for choices, _ in own) for own in self.tables]
        known = {id(choices): choices for own in self.tables for choices, _ in own}
        prices = {0.0} | {price for one in known.values() for price in _bends(one.seconds, one.harm).tolist()}
        return sum(self.ends) + max(
            sum(
                _least_of_rank([(known[one], count) for one, count in own.items()], price, room)
                for own, room in zip(counted, self.rooms, strict=True)
            )
            - price * self.spare
            for price in prices
        )

    def solve(self, cells: Cells | None = None) -> Setting | None:
        """The setting with its blocks decided; None where it fits in no way."""
        if self.spare < 0:
            return None
        harms = np.concatenate([menu.harm for menu in self.menus.values()])
        has_harm = harms.max() > 0
        cells = cells or (WITH_HARM if has_harm else FINE)
        unit = cell(harms, self.spare, cells.harm)
        cells = dataclasses.replace(cells, harm=int(self.spare / unit + 1e-9) if has_harm else 0)
        frontiers = [
            frontier([choices for choices, _ in own], room, unit, cells)
            for own, room in zip(self.tables, self.rooms, strict=True)
        ]
        shares = spread(frontiers, self.ends, self.setting.micro_batches)
        if shares is None:
            return None
        plans = [BlockPlan()] * len(self.setting.model.blocks)
        for own, rows, one, share in zip(self.ranks, self.tables, frontiers, shares, strict=True):
            for block, (_, menu), choice in zip(own, rows, one.choices(share), strict=True):
                plans[block] = menu[choice]
        best = dataclasses.replace(self.setting, blocks=tuple(plans))
        fits = max(one.total for one in peak_bytes(best)) <= self.setting.device.memory_bytes
        return best if fits else None

    def _leaving(self, own: Sequence[int], flight: float) -> int:
        """How many of these blocks the host has room for."""
        room = self.setting.cluster.groups[0].node.host_memory_per_device
        each = max(flight * kept_bytes(self.setting.model.blocks[block], self.setting) for block in own)
        return int(room / each)


def _ranks(setting: Setting) -> list[list[int]]:
    """The blocks of each rank, its stages in turn: what is decided of the first few is shared by all of them."""
    stages, pp = blocks_of_stages(setting), setting.layout.pp
    return [
        [block for row in itertools.zip_longest(*stages[rank::pp]) for block in row if block is not None]
        for rank in range(pp)
    ]


def _ends(setting: Setting) -> list[float]:
    """Seconds of embedding and head on each rank, for one micro-batch."""
    kernels, found = kernels_of(setting), [0.0] * setting.layout.pp
    for rank, ends in ((0, embedding_seconds), (-1, head_seconds)):
        one = ends(setting, kernels)
        found[rank] += one.forward.total + one.backward.total
    return found


def _least_of_rank(blocks: list[tuple[Choices, int]], price: float, room: float) -> float:
    """The bound of one rank at a price of harm, at the best price of its bytes."""
    costs = [(one.seconds + price * one.harm, one.bytes, count) for one, count in blocks]
    prices = np.unique(np.concatenate([np.zeros(1), *(_bends(cost, sizes) for cost, sizes, _ in costs)]))
    found = -prices * room
    for cost, sizes, count in costs:
        found = found + count * (cost + prices[:, None] * sizes).min(axis=1)
    return float(found.max())


def _bends(seconds: Array, amounts: Array) -> Array:
    """Prices of an amount at which two choices cost the same."""
    more = amounts[None] - amounts[:, None]
    saved = seconds[:, None] - seconds[None]
    is_traded = (more > 0) & (saved > 0)
    return np.unique(saved[is_traded] / more[is_traded])

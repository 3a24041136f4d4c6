"""What each block of a layout does, decided together: formats, recomputation, offload and gathered weights.

Problem  A format saves seconds and bytes, and costs quality; what is made again or moved saves bytes, and costs
         seconds; and a stage of a pipeline has bytes of its own, and counts by how slow it is. Decided one after the
         other, each spends what another needed.
Method   1. For each kind of block a few sets of formats (`profiles`): products go to a lower format in the order of
            seconds saved for harm, and every so many of them a set is kept.
         2. A choice of a block is a set of formats, times recomputation, times what leaves for the host, times whether
            weights stay gathered; choices that are not better than another in anything are left out.
         3. `knapsack` takes one of each block, for every rank's bytes and all ranks' harm.
         4. What it found is counted again, whole (`peak_bytes`, `predict`).
Harm     Without statistics: FLOPs of the blocks' products in 4 bits. With statistics: SNIP's cost of every product and
         format (`planner.precision.divergence`), in which equal blocks differ.
Limits   Ranks are taken to be as slow as the sum of their stages' passes; what a schedule makes of it is predicted
         after. A set of formats is one of at most `_PROFILES`.
Checked  tests/planner/layout/test_block_choices.py: all choices of small models
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from scrimp.models import BlockSpec
from scrimp.models.shapes import ModelSizes
from scrimp.planner.layout.block_times import block_seconds, embedding_seconds, head_seconds
from scrimp.planner.layout.kernels import Kernels
from scrimp.planner.layout.knapsack import Cells, Choices, cell, frontier, spread, useful
from scrimp.planner.layout.predict import kernels_of, planned_seconds
from scrimp.planner.layout.setting import FULL, NONE, SELECTIVE, BlockPlan, Setting
from scrimp.planner.layout.stage_memory import (
    MARGIN,
    kept_bytes,
    passes_in_flight,
    peak_bytes,
    waiting_bytes,
)
from scrimp.planner.layout.stages import blocks_of_stages, numbers_of_block
from scrimp.precision import GEMMS, RECIPES

Formats = tuple[tuple[str, str], ...]
Harm = Callable[[int, str, str, str], float]
"""Of a block, a linear layer in it, one of its products and a recipe."""
_PROFILES = 6
_LEANEST = BlockPlan(recompute=FULL)


@dataclass(frozen=True, kw_only=True)
class Quality:
    """What low precision may spoil."""

    formats: tuple[str, ...]
    """Recipes to choose from. The one of most bits runs where nothing is chosen."""
    harm: Harm
    limit: float
    """Most harm of all products together."""

    @property
    def base(self) -> str:
        """The recipe of most bits."""
        return max(self.formats, key=lambda name: RECIPES[name].bits)


def flops_in_4_bits(model: ModelSizes) -> Harm:
    """Share of the FLOPs of all blocks' products that one of them has, where it runs in 4 bits."""
    total = len(GEMMS) * sum(block.parameters_per_token for block in model.blocks)
    sizes = {
        (index, linear.name): linear.parameters_per_token / total
        for index in set(model.first_equal)
        for linear in model.blocks[index].linears
    }
    first = model.first_equal

    def harm(block: int, linear: str, gemm: str, recipe: str) -> float:
        return sizes[first[block], linear] if RECIPES[recipe].bits == 4 else 0.0

    return harm


def with_best_blocks(setting: Setting, quality: Quality | None, cells: Cells | None = None) -> Setting | None:
    """The setting with what its blocks do decided; None where it fits in no way.

    Args:
        quality: None: all products run in the setting's precision.
    """
    cells = cells or (Cells() if quality else Cells(bytes=4096, harm=0))
    setting = dataclasses.replace(setting, precision=quality.base) if quality else setting
    ranks = _ranks(setting)
    menus = _menus(setting, quality)
    spare = quality.limit - sum(menus[block].least for own in ranks for block in own) if quality else 0.0
    if spare < 0:
        return None
    harms = np.concatenate([menu.harm for menu in {id(menu): menu for menu in menus}.values()])
    unit = cell(harms, spare, cells.harm)
    cells = dataclasses.replace(cells, harm=int(spare / unit + 1e-9) if harms.max() > 0 else 0)
    found = _solved(setting, ranks, menus, unit, cells)
    if found is None:
        return None
    plans = [BlockPlan()] * len(setting.model.blocks)
    for own, taken in zip(ranks, found, strict=True):
        for block, plan in zip(own, taken, strict=True):
            plans[block] = plan
    best = dataclasses.replace(setting, blocks=tuple(plans))
    fits = max(one.total for one in peak_bytes(best)) <= setting.device.memory_bytes
    return best if fits else None


@dataclass(frozen=True, eq=False)
class _Menu:
    """All that one block can do."""

    plans: list[BlockPlan]
    seconds: np.ndarray
    waiting: np.ndarray
    """Bytes of each pass in flight."""
    standing: np.ndarray
    """Bytes whatever is in flight."""
    harm: np.ndarray
    """Above the least of all formats."""
    least: float
    """That least."""
    tables: dict[tuple[float, bool], tuple[Choices, list[BlockPlan]]] = field(default_factory=dict)

    def table(self, flight: float, *, offload: bool) -> tuple[Choices, list[BlockPlan]]:
        """What a block of a rank that holds so many passes can do, without what another choice beats in all."""
        if (flight, offload) not in self.tables:
            may = np.array([offload or not plan.offload for plan in self.plans])
            rows = Choices(
                np.where(may, self.seconds, np.inf), flight * self.waiting + self.standing, self.harm
            )
            kept = [at for at in useful(rows).tolist() if may[at]]
            found = Choices(rows.seconds[kept], rows.bytes[kept], rows.harm[kept])
            self.tables[flight, offload] = found, [self.plans[at] for at in kept]
        return self.tables[flight, offload]


def _ranks(setting: Setting) -> list[list[int]]:
    """The blocks of each rank, its stages in turn: what is decided of the first few is shared by all of them."""
    stages, pp = blocks_of_stages(setting), setting.layout.pp
    return [
        [block for row in itertools.zip_longest(*stages[rank::pp]) for block in row if block is not None]
        for rank in range(pp)
    ]


def _menus(setting: Setting, quality: Quality | None) -> list[_Menu]:
    """One of each block; equal blocks of equal harm share theirs."""
    kernels, model = kernels_of(setting), setting.model
    found: dict[tuple[object, ...], _Menu] = {}
    menus = []
    for index, first in enumerate(model.first_equal):
        block = model.blocks[first]
        harms = _harms(index, block, quality) if quality else {}
        key = (first, tuple(harms.values()))
        if key not in found:
            found[key] = _menu(block, setting, kernels, harms)
        menus.append(found[key])
    return menus


def _harms(index: int, block: BlockSpec, quality: Quality) -> dict[tuple[str, str], float]:
    """Harm of each product, as mlp.down.wgrad, in each recipe."""
    return {
        (f"{linear.name}.{gemm}", recipe): quality.harm(index, linear.name, gemm, recipe)
        for linear in block.linears
        for gemm in GEMMS
        for recipe in quality.formats
    }


def _menu(block: BlockSpec, setting: Setting, kernels: Kernels, harms: dict[tuple[str, str], float]) -> _Menu:
    plans, rows = [], []
    sharded = setting.shares_weights and setting.layout.zero == 3
    for formats, harm in profiles(block, setting, kernels, harms):
        for recompute, offload, gathered in itertools.product(
            (NONE, SELECTIVE, FULL), (False, True), (False, True) if sharded else (False,)
        ):
            plan = BlockPlan(recompute=recompute, offload=offload, gathered=gathered, formats=formats)
            own = setting.in_formats(formats)
            forward, backward = planned_seconds(block, plan, own, kernels)
            rate = setting.software.contention
            whole = setting.software.weight_bytes * numbers_of_block(setting, block) if gathered else 0.0
            rows.append(
                (
                    forward.slowed(rate).total + backward.slowed(rate).total,
                    waiting_bytes(block, plan, own),
                    whole,
                    harm,
                )
            )
            plans.append(plan)
    figures = np.array(rows)
    least = float(figures[:, 3].min())
    return _Menu(plans, figures[:, 0], figures[:, 1], figures[:, 2], figures[:, 3] - least, least)


def profiles(
    block: BlockSpec, setting: Setting, kernels: Kernels, harms: dict[tuple[str, str], float]
) -> list[tuple[Formats, float]]:
    """A few sets of formats of a block with their harm, from the setting's own to the fastest.

    Args:
        harms: of each product in each recipe; empty: there is nothing to choose.
    """
    if not harms:
        return [((), 0.0)]
    base = setting.precision
    plain = _both(block, setting, kernels)
    moves = []
    for (product, recipe), harm in harms.items():
        saved = plain - _both(block, setting.in_formats(((product, recipe),)), kernels)
        if recipe != base and saved > 0:
            more = max(harm - harms[product, base], 1e-30)
            moves.append((saved / more, saved, product, recipe))
    moves.sort(key=lambda one: (-one[0], one[2]))
    taken: dict[str, tuple[str, float]] = {}
    steps: list[tuple[Formats, float]] = []
    for _, saved, product, recipe in moves:
        if taken.get(product, ("", 0.0))[1] >= saved:
            continue
        taken[product] = (recipe, saved)
        formats = tuple(sorted((name, one) for name, (one, _) in taken.items()))
        names = {product for product, _ in harms}
        steps.append((formats, sum(harms[name, taken.get(name, (base, 0.0))[0]] for name in sorted(names))))
    first = ((), sum(harm for (_, recipe), harm in harms.items() if recipe == base))
    return [first, *_evenly(steps, _PROFILES - 1)]


def _evenly(steps: Sequence[tuple[Formats, float]], number: int) -> list[tuple[Formats, float]]:
    """At most so many of them, the last one among them, about equally far apart in harm."""
    if len(steps) <= number:
        return list(steps)
    harms = np.array([harm for _, harm in steps])
    wanted = harms[0] + (harms[-1] - harms[0]) * np.arange(1, number + 1) / number
    return [steps[at] for at in sorted({int(np.abs(harms - one).argmin()) for one in wanted})]


def _both(block: BlockSpec, setting: Setting, kernels: Kernels) -> float:
    one = block_seconds(block, setting, kernels)
    return one.forward.total + one.backward.total


def _solved(
    setting: Setting, ranks: list[list[int]], menus: list[_Menu], unit: float, cells: Cells
) -> list[list[BlockPlan]] | None:
    """What the blocks of each rank do."""
    leanest = peak_bytes(dataclasses.replace(setting, recompute=FULL, blocks=()))
    tables, frontiers = [], []
    for rank, own in enumerate(ranks):
        flight = passes_in_flight(setting, rank)
        leaving = _leaving(setting, own, flight)
        tables.append([menus[block].table(flight, offload=at < leaving) for at, block in enumerate(own)])
        held = sum(waiting_bytes(setting.model.blocks[block], _LEANEST, setting) for block in own)
        room = (setting.device.memory_bytes - leanest[rank].total) / (1.0 + MARGIN) + flight * held
        frontiers.append(frontier([choices for choices, _ in tables[-1]], room, unit, cells))
    shares = spread(frontiers, _ends(setting), setting.micro_batches)
    if shares is None:
        return None
    return [
        [table[1][choice] for table, choice in zip(rows, one.choices(share), strict=True)]
        for rows, one, share in zip(tables, frontiers, shares, strict=True)
    ]


def _leaving(setting: Setting, own: Sequence[int], flight: float) -> int:
    """How many of these blocks the host has room for."""
    room = setting.cluster.groups[0].node.host_memory_per_device
    each = max(flight * kept_bytes(setting.model.blocks[block], setting) for block in own)
    return int(room / each)


def _ends(setting: Setting) -> list[float]:
    """Seconds of embedding and head on each rank, for one micro-batch."""
    kernels, found = kernels_of(setting), [0.0] * setting.layout.pp
    for rank, ends in ((0, embedding_seconds), (-1, head_seconds)):
        one = ends(setting, kernels)
        found[rank] += one.forward.total + one.backward.total
    return found

"""All that a block of a layout can do: formats, recomputation, offload, gathered weights; each with its price.

Problem  A block with a dozen products that may each run in one of two formats, three ways to recompute, and its
         activations here or on the host, has some hundred thousand choices.
Method   A few sets of formats stand for all (`profiles`): products go to a lower format in the order of seconds saved
         for harm done, and every so many of them a set is kept. Each set comes with every way to recompute, to offload
         and to keep weights gathered; what another choice is as good as in everything is left out (`Menu.table`).
Harm     Without statistics: FLOPs of the blocks' products in 4 bits. With statistics: SNIP's cost of every product and
         format (`planner.precision.divergence`), in which equal blocks differ.
Limits   A set of formats is one of at most `_PROFILES`. Seconds saved are those of one product moved alone.
Checked  tests/planner/layout/test_block_choices.py
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from scrimp.models import BlockSpec
from scrimp.models.shapes import ModelSizes
from scrimp.planner.layout.block_times import block_seconds
from scrimp.planner.layout.kernels import Kernels
from scrimp.planner.layout.knapsack import Choices, useful
from scrimp.planner.layout.predict import kernels_of, planned_seconds
from scrimp.planner.layout.setting import FULL, NONE, SELECTIVE, BlockPlan, Setting
from scrimp.planner.layout.stage_memory import waiting_bytes
from scrimp.planner.layout.stages import numbers_of_block
from scrimp.precision import GEMMS, RECIPES

Array = NDArray[np.float64]
Formats = tuple[tuple[str, str], ...]
Harm = Callable[[int, str, str, str], float]
"""Of a block, a linear layer in it, one of its products and a recipe."""
_PROFILES = 6


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


@dataclass(frozen=True, eq=False)
class Menu:
    """All that one block can do."""

    plans: list[BlockPlan]
    seconds: Array
    waiting: Array
    """Bytes of each pass in flight."""
    standing: Array
    """Bytes whatever is in flight."""
    harm: Array
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


def menus_of(setting: Setting, quality: Quality | None, *, keeps_all: bool = False) -> list[Menu]:
    """One of each block; equal blocks of equal harm share theirs.

    Args:
        keeps_all: whether nothing may be made again or leave.
    """
    kernels, model = kernels_of(setting), setting.model
    found: dict[tuple[object, ...], Menu] = {}
    menus = []
    for index, first in enumerate(model.first_equal):
        block = model.blocks[first]
        harms = _harms(index, block, quality) if quality else {}
        key = (first, tuple(harms.values()))
        if key not in found:
            found[key] = _menu(block, setting, kernels, harms, keeps_all)
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


def _menu(
    block: BlockSpec,
    setting: Setting,
    kernels: Kernels,
    harms: dict[tuple[str, str], float],
    keeps_all: bool,
) -> Menu:
    plans, rows = [], []
    ways = [(NONE, False)] if keeps_all else list(itertools.product((NONE, SELECTIVE, FULL), (False, True)))
    sharded = setting.shares_weights and setting.layout.zero == 3
    for formats, harm in profiles(block, setting, kernels, harms):
        for (recompute, offload), gathered in itertools.product(ways, (False, True) if sharded else (False,)):
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
    return Menu(plans, figures[:, 0], figures[:, 1], figures[:, 2], figures[:, 3] - least, least)


def fastest_plan(block: BlockSpec, setting: Setting, quality: Quality | None, number: int) -> BlockPlan:
    """What a block would do if bytes and harm were free.

    Args:
        number: the block's, by which its harm is known.
    """
    harms = _harms(number, block, quality) if quality else {}
    formats, _ = profiles(block, setting, kernels_of(setting), harms)[-1]
    return BlockPlan(gathered=True, formats=formats)


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

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

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from scrimp.models.shapes import ModelSizes
from scrimp.planner.layout.block_activations import kept_bytes, waiting_bytes
from scrimp.planner.layout.knapsack import Choices, Indices, falling, useful
from scrimp.planner.layout.predict import kernels_of, planned_seconds
from scrimp.planner.layout.product_table import Sets, product_table
from scrimp.planner.layout.product_times import Products
from scrimp.planner.layout.setting import FULL, NONE, SELECTIVE, BlockPlan, Setting
from scrimp.planner.layout.stages import numbers_of_block
from scrimp.precision import GEMMS, RECIPES

Array = NDArray[np.float64]
Formats = tuple[tuple[str, str], ...]
Harms = tuple[tuple[tuple[str, str], float], ...]
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

    known: dict[Any, Any] = field(default_factory=dict, compare=False, repr=False)
    """Sets of formats that were found before, by what they follow from."""

    menus: dict[Any, Menu] = field(default_factory=dict, compare=False, repr=False)
    """Those that were found before, likewise."""

    @cached_property
    def base(self) -> str:
        """The recipe of most bits."""
        return max(self.formats, key=lambda name: RECIPES[name].bits)

    def harms(self, setting: Setting, number: int) -> Harms:
        """Of a block: each product, as mlp.down.wgrad, in each recipe, with its harm."""
        if number not in self._harms:
            self._harms[number] = tuple(
                ((f"{linear.name}.{gemm}", recipe), self.harm(number, linear.name, gemm, recipe))
                for linear in setting.model.blocks[number].linears
                for gemm in GEMMS
                for recipe in self.formats
            )
        return self._harms[number]

    def kind(self, setting: Setting, number: int) -> int:
        """A number that blocks of equal harm share."""
        if number not in self._kinds:
            harms = self.harms(setting, number)
            self._kinds[number] = min(one for one in range(number + 1) if self.harms(setting, one) == harms)
        return self._kinds[number]

    @cached_property
    def _harms(self) -> dict[int, Harms]:
        return {}

    @cached_property
    def _kinds(self) -> dict[int, int]:
        return {}


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
            every = self.every(flight, offload=offload)
            kept = useful(every)
            plans = self.plans if offload else [one for one in self.plans if not one.offload]
            found = Choices(every.seconds[kept], every.bytes[kept], every.harm[kept])
            self.tables[flight, offload] = found, [plans[at] for at in kept.tolist()]
        return self.tables[flight, offload]

    def every(self, flight: float, *, offload: bool) -> Choices:
        """The same with what another choice beats."""
        may = slice(None) if offload else self._stays
        return Choices(self.seconds[may], flight * self.waiting[may] + self.standing[may], self.harm[may])

    @cached_property
    def _stays(self) -> Indices:
        return np.array([at for at, plan in enumerate(self.plans) if not plan.offload])

    @cached_property
    def bends(self) -> Array:
        """Prices of harm at which two of the choices that are fastest for their harm cost the same."""
        kept = falling(self.seconds, self.harm)
        seconds, harm = self.seconds[kept], self.harm[kept]
        more, saved = harm[None] - harm[:, None], seconds[:, None] - seconds[None]
        is_traded = (more > 0) & (saved > 0)
        return saved[is_traded] / more[is_traded]


def menus_of(setting: Setting, quality: Quality | None, *, keeps_all: bool = False) -> list[Menu]:
    """One of each block; equal blocks of equal harm share theirs.

    Args:
        keeps_all: whether nothing may be made again or leave.
    """
    # What is found is good for all layouts that differ in nothing that menus follow from.
    found = quality.menus if quality else {}
    place = _place(setting)
    keys = [
        (keeps_all, first, quality.kind(setting, number) if quality else 0, *place)
        for number, first in enumerate(setting.model.first_equal)
    ]
    missing = {key: number for number, key in enumerate(keys) if key not in found}
    for first in {key[1] for key in missing}:
        own = {key: number for key, number in missing.items() if key[1] == first}
        found |= zip(own, _menus(setting, quality, list(own.values()), keeps_all=keeps_all), strict=True)
    return [found[key] for key in keys]


@dataclass(frozen=True, eq=False)
class Profiles:
    """A few sets of formats of a block, from that of least harm to the fastest: [S] of each."""

    formats: list[Formats]
    harm: Array
    sets: Sets


def profiles(setting: Setting, quality: Quality, number: int, recompute: str) -> Profiles:
    """A few sets of formats that stand for all of a block.

    Args:
        number: the block's.
        recompute: what it makes again: products of a forward pass that runs twice save twice as much.
    """
    place = (setting.model.first_equal[number], *_place(setting), recompute)
    kind = quality.kind(setting, number), place
    if kind not in quality.known:
        if place not in quality.known:
            quality.known[place] = _Moves.of(setting, quality, number, BlockPlan(recompute=recompute))
        harms = np.array([one for _, one in quality.harms(setting, number)])
        quality.known[kind] = _profiles(quality.known[place], quality, harms)
    found: Profiles = quality.known[kind]
    return found


def _place(setting: Setting) -> tuple[object, ...]:
    """All that seconds and bytes of a block follow from, of what differs between layouts."""
    layout = setting.layout
    degrees = layout.tp, layout.cp, layout.cp_method, layout.ep, layout.etp, layout.zero
    shards = setting.groups["shards"], setting.shares_weights, setting.gathers_copies
    return *degrees, *shards, setting.place_number, setting.micro_batch, setting.offload


@dataclass(frozen=True, eq=False)
class _Moves:
    """What a block saves where one of its products alone goes to another recipe."""

    products: Indices
    """[M] numbers of products, those of a layer after one another."""
    recipes: Indices
    """[M]"""
    saved: Array
    """[M] seconds of both passes."""
    names: list[str]
    """Of the products."""
    seconds: Callable[[Sets], Array]
    """Of sets."""

    @classmethod
    def of(cls, setting: Setting, quality: Quality, number: int, plan: BlockPlan) -> _Moves:
        """Those of a block that is planned like this."""
        block, base = setting.model.blocks[number], quality.formats.index(quality.base)
        table = product_table(block, setting, kernels_of(setting), quality.formats)

        def seconds(sets: Sets) -> Array:
            return _seconds(setting, number, plan, table.of(sets))

        names = [f"{linear.name}.{gemm}" for linear in block.linears for gemm in GEMMS]
        every = [
            (product, recipe)
            for product in range(len(names))
            for recipe in range(len(quality.formats))
            if recipe != base
        ]
        products, recipes = np.array(every, dtype=np.int64).reshape(-1, 2).T
        sets = np.full((1 + len(every), len(names)), base)
        sets[np.arange(1, len(sets)), products] = recipes
        each = seconds(sets.reshape(len(sets), -1, len(GEMMS)))
        return cls(products, recipes, each[0] - each[1:], names, seconds)


def _profiles(moves: _Moves, quality: Quality, harms: Array) -> Profiles:
    """Those of a block with these harms, [products * recipes]."""
    names, base = moves.names, quality.formats.index(quality.base)
    harm = harms.reshape(len(names), -1)
    more = np.maximum(harm[moves.products, moves.recipes] - harm[moves.products, base], 1e-30)
    # What is equal but for rounding is a tie.
    ratio, amount = ((-one).astype(np.float32) for one in (moves.saved / more, more))
    order = np.lexsort((moves.recipes, moves.products, amount, ratio))
    rows = [np.full(len(names), base)]
    taken: dict[int, float] = {}
    # What saves nothing alone may do so when others have been moved.
    for at in order.tolist():
        product, saved = int(moves.products[at]), float(moves.saved[at])
        if product not in taken or taken[product] < saved:
            taken[product] = saved
            rows.append(rows[-1].copy())
            rows[-1][product] = moves.recipes[at]
    steps = np.array(rows)
    sets, harm_of = steps.reshape(len(steps), -1, len(GEMMS)), harm[np.arange(len(names)), steps].sum(axis=1)
    kept = np.sort(falling(moves.seconds(sets), harm_of))
    kept = kept[_evenly(harm_of[kept], _PROFILES)]
    formats = [
        tuple(sorted((names[at], quality.formats[row[at]]) for at in np.flatnonzero(row != base)))
        for row in steps[kept]
    ]
    return Profiles(formats, harm_of[kept], sets[kept])


def _seconds(
    setting: Setting, number: int, plan: BlockPlan, products: Products | None, kept: Sequence[float] = ()
) -> Array:
    """Both passes of a block, an entry for each set of formats; arguments are those of `planned_seconds`."""
    rate, first = setting.software.contention, setting.model.first_equal[number]
    passes = planned_seconds(first, plan, setting, kernels_of(setting), products, kept)
    return np.atleast_1d(sum(one.slowed(rate).total for one in passes))


def _menus(
    setting: Setting, quality: Quality | None, numbers: Sequence[int], *, keeps_all: bool
) -> list[Menu]:
    """Of blocks that are equal but for their harm."""
    block = setting.model.blocks[numbers[0]]
    whole = (False, True) if setting.shares_weights and setting.layout.zero == 3 else (False,)
    parameters = setting.block_weight_bytes * numbers_of_block(setting, block).total
    plans: list[list[BlockPlan]] = [[] for _ in numbers]
    rows: list[list[Array]] = [[] for _ in numbers]
    for recompute in (NONE,) if keeps_all else (NONE, SELECTIVE, FULL):
        each, products = _sets(setting, quality, numbers, FULL if recompute == FULL else NONE)
        formats = [one for own, _ in each for one in own]
        ends = np.cumsum([len(own) for own, _ in each])[:-1]
        like = {one: setting.in_formats(one) for one in formats}
        for offload, gathered in itertools.product((False,) if keeps_all else (False, True), whole):
            plan = BlockPlan(recompute=recompute, offload=offload, gathered=gathered)
            kept = {one: kept_bytes(block, own) for one, own in like.items()} if offload else {}
            left = {one: waiting_bytes(block, plan, own) for one, own in like.items()}
            known = {one: dataclasses.replace(plan, formats=one) for one in like}
            seconds = _seconds(setting, numbers[0], plan, products, [kept[one] for one in formats if kept])
            waiting = np.array([left[one] for one in formats])
            stays = np.full(len(formats), parameters * gathered)
            columns = (np.split(one, ends) for one in (seconds, waiting, stays))
            for at, (own, *of_own) in enumerate(zip(each, *columns, strict=True)):
                rows[at].append(np.array([*of_own, own[1]]))
                plans[at] += [known[one] for one in own[0]]
    return [_menu(*one) for one in zip(plans, rows, strict=True)]


def _menu(plans: list[BlockPlan], rows: Sequence[Array]) -> Menu:
    figures = np.concatenate(rows, axis=1)
    least = float(figures[3].min())
    return Menu(plans, figures[0], figures[1], figures[2], figures[3] - least, least)


def _sets(
    setting: Setting, quality: Quality | None, numbers: Sequence[int], recompute: str
) -> tuple[list[tuple[list[Formats], Array]], Products | None]:
    """The sets of formats that equal blocks choose from with their harm, and what the products of all of them take."""
    if quality is None:
        return [([()], np.zeros(1))], None
    found = [profiles(setting, quality, number, recompute) for number in numbers]
    table = product_table(setting.model.blocks[numbers[0]], setting, kernels_of(setting), quality.formats)
    return [(one.formats, one.harm) for one in found], table.of(np.concatenate([one.sets for one in found]))


def _evenly(harms: Array, number: int) -> list[int]:
    """At most so many of them, the first and the last one among them, about equally far apart in harm."""
    if len(harms) <= number:
        return list(range(len(harms)))
    wanted = np.linspace(harms[0], harms[-1], number)
    return sorted({int(np.abs(harms - one).argmin()) for one in wanted})

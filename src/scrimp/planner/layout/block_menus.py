"""All that a block of a layout can do: formats, recomputation, offload, gathered weights; each with its price.

Problem  A block with a dozen products that may each run in one of two formats, three ways to recompute, and its
         activations here or on the host, has some hundred thousand choices.
Method   A few sets of formats stand for all (`profiles`): products go to a lower format in the order of seconds saved
         for harm done, and every so many of them a set is kept. Each set comes with every way to recompute, to offload
         and to keep weights gathered (`Menu`). Blocks that are equal but for their harm are worked out together, in
         arrays; what one of them does is spelt out where it is chosen.
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
from scrimp.planner.layout.block_activations import backward_bytes, kept_bytes, waiting_bytes
from scrimp.planner.layout.held_states import standing_bytes
from scrimp.planner.layout.knapsack import Choices, Indices, falling
from scrimp.planner.layout.predict import kernels_of, planned_seconds
from scrimp.planner.layout.product_table import Sets, product_table
from scrimp.planner.layout.product_times import Products
from scrimp.planner.layout.setting import FULL, NONE, SELECTIVE, BlockPlan, Setting
from scrimp.precision import GEMMS, RECIPES

Array = NDArray[np.float64]
Formats = tuple[tuple[str, str], ...]
Harms = tuple[tuple[tuple[str, str], float], ...]
Harm = Callable[[int, str, str, str], float]
"""Harm of a product in a recipe, by block number, linear layer, product and recipe."""
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

    menus: dict[Any, dict[int, Menu]] = field(default_factory=dict, compare=False, repr=False)
    """Those that were found before, likewise, by the blocks' kinds."""

    @cached_property
    def base(self) -> str:
        """The recipe of most bits."""
        return max(self.formats, key=lambda name: RECIPES[name].bits)

    def least(self, model: ModelSizes) -> float:
        """Harm that is done at least: that of each product in the recipe that does least."""
        return sum(
            min(self.harm(number, linear.name, gemm, recipe) for recipe in self.formats)
            for number, block in enumerate(model.blocks)
            for linear in block.linears
            for gemm in GEMMS
        )

    def harms(self, setting: Setting, number: int) -> Harms:
        """Harm of each product of a block, as mlp.down.wgrad, in each recipe."""
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

    def alike(self, setting: Setting, first: int) -> list[int]:
        """Blocks that are equal but for their harm, one of each kind.

        Args:
            first: the first of the equal blocks.
        """
        if first not in self._alike:
            own = [number for number, one in enumerate(setting.model.first_equal) if one == first]
            self._alike[first] = [number for number in own if self.kind(setting, number) == number]
        return self._alike[first]

    @cached_property
    def _alike(self) -> dict[int, list[int]]:
        return {}

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
class Profiles:
    """A few sets of formats of a block, from that of least harm to the fastest: [S] of each."""

    harm: Array
    sets: Sets
    products: Sequence[str] = ()
    """Names, as mlp.down.wgrad; none where formats are given."""
    recipes: Sequence[str] = ()
    base: int = 0
    """The recipe where nothing is chosen."""

    @property
    def formats(self) -> list[Formats]:
        """All of them, spelt out."""
        return [self.spelt_out(at) for at in range(len(self.harm))]

    def spelt_out(self, at: int) -> Formats:
        """What one of the sets chooses."""
        row = self.sets[at].reshape(-1)
        chosen = np.flatnonzero(row != self.base).tolist()
        return tuple(sorted((self.products[one], self.recipes[row[one]]) for one in chosen))


@dataclass(frozen=True)
class Limits:
    """What a block of a rank may do."""

    counted: float
    """How often the bytes of a pass count: passes in flight, with what an allocator loses."""
    again: float
    """Most bytes besides, while its backward pass runs."""
    alone: float
    """Most bytes of one pass while its backward pass runs."""
    offload: bool
    """Whether something may leave for the host."""
    gathers: bool
    """Whether its weights may stay gathered."""


@dataclass(frozen=True, eq=False)
class Menu:
    """All that one block can do: each of a few ways with each of its sets of formats, [K] in all."""

    ways: list[tuple[BlockPlan, Profiles]]
    stays: NDArray[np.bool_]
    """Whether nothing leaves for the host."""
    seconds: Array
    waiting: Array
    """Bytes of each pass in flight."""
    standing: Array
    """Bytes whatever is in flight."""
    again: Array
    """Bytes besides while the backward pass of the block runs."""
    leaving: Array
    """Bytes of each pass in flight on the host."""
    harm: Array
    """Above the least of all formats."""
    least: float
    """That least."""
    tables: dict[Limits, tuple[Choices, Indices]] = field(default_factory=dict)
    plans: dict[int, BlockPlan] = field(default_factory=dict)

    def table(self, limits: Limits) -> tuple[Choices, Indices]:
        """What a block within these limits can do, and which entries that is."""
        if limits not in self.tables:
            may = (self.again <= limits.again) & (self.again + self.waiting <= limits.alone)
            if not limits.offload:
                may &= self.stays
            if not limits.gathers:
                may &= self.standing == 0.0
            some = np.flatnonzero(may)
            sizes = limits.counted * self.waiting[some] + self.standing[some]
            self.tables[limits] = Choices(self.seconds[some], sizes, self.harm[some]), some
        return self.tables[limits]

    def plan(self, at: int) -> BlockPlan:
        """One entry, spelt out."""
        if at not in self.plans:
            ends = np.cumsum([len(profiles.harm) for _, profiles in self.ways])
            way = int(np.searchsorted(ends, at, side="right"))
            plan, profiles = self.ways[way]
            formats = profiles.spelt_out(at - int(ends[way]))
            self.plans[at] = dataclasses.replace(plan, formats=formats)
        return self.plans[at]

    @cached_property
    def bends(self) -> Array:
        """Prices of harm at which two of the choices that are fastest for their harm cost the same."""
        kept = falling(self.seconds, self.harm)
        seconds, harm = self.seconds[kept], self.harm[kept]
        more, saved = harm[None] - harm[:, None], seconds[:, None] - seconds[None]
        is_traded = (more > 0) & (saved > 0)
        return saved[is_traded] / more[is_traded]


def menus_of(setting: Setting, quality: Quality | None) -> list[Menu]:
    """One of each block; equal blocks of equal harm share theirs."""
    # What is found is good for all layouts that differ in nothing that menus follow from.
    found = quality.menus if quality else {}
    place, menus = _place(setting), []
    for number, first in enumerate(setting.model.first_equal):
        key = (first, *place)
        if key not in found:
            alike = quality.alike(setting, first) if quality else [first]
            found[key] = dict(zip(alike, _menus(setting, quality, alike), strict=True))
        menus.append(found[key][quality.kind(setting, number) if quality else first])
    return menus


def profiles(setting: Setting, quality: Quality, number: int, recompute: str) -> Profiles:
    """A few sets of formats that stand for all of a block.

    Args:
        number: the block's.
        recompute: what it makes again: products of a forward pass that runs twice save twice as much.
    """
    alike = quality.alike(setting, setting.model.first_equal[number])
    return _profiles_of(setting, quality, alike, recompute)[alike.index(quality.kind(setting, number))]


def _profiles_of(setting: Setting, quality: Quality, alike: Sequence[int], recompute: str) -> list[Profiles]:
    """Those of all blocks that are equal but for their harm."""
    key = (alike[0], *_place(setting), recompute)
    if key not in quality.known:
        moves = _Moves.of(setting, quality, alike[0], BlockPlan(recompute=recompute))
        harms = np.array([[one for _, one in quality.harms(setting, number)] for number in alike])
        quality.known[key] = _profiles(moves, quality, harms.reshape(len(alike), len(moves.names), -1))
    found: list[Profiles] = quality.known[key]
    return found


def _place(setting: Setting) -> tuple[object, ...]:
    """All that seconds and bytes of a block follow from, of what differs between layouts."""
    layout = setting.layout
    degrees = layout.tp, layout.cp, layout.cp_method, layout.ep, layout.etp, layout.zero
    shards = setting.groups["shards"], setting.shares_weights, setting.gathers_copies
    is_piped = layout.zero == 3 and layout.pp > 1
    return *degrees, *shards, is_piped, setting.places, setting.micro_batch, setting.offload


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
    """Names of the products, as mlp.down.wgrad."""
    seconds: Callable[[Sets], Array]
    """[S] seconds of both passes in [S, L, G] sets of recipes."""

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


def _profiles(moves: _Moves, quality: Quality, harm: Array) -> list[Profiles]:
    """Those of B blocks with these harms, [B, products, recipes]."""
    names, base = moves.names, quality.formats.index(quality.base)
    blocks, every = np.arange(len(harm)), np.arange(len(names))
    more = np.maximum(harm[:, moves.products, moves.recipes] - harm[:, moves.products, base], 1e-30)
    # What is equal but for rounding is a tie.
    ratio, amount = ((-one).astype(np.float32) for one in (moves.saved / more, more))
    ties = [np.broadcast_to(one, more.shape) for one in (moves.recipes, moves.products)]
    order = np.lexsort(np.stack([*ties, amount, ratio]))
    rows = np.full((len(harm), order.shape[1] + 1, len(names)), base)
    taken = np.full((len(harm), len(names)), -np.inf)
    # What saves nothing alone may do so when others have been moved.
    for step, at in enumerate(order.T, start=1):
        product, saved = moves.products[at], moves.saved[at]
        moved = np.flatnonzero(taken[blocks, product] < saved)
        rows[:, step] = rows[:, step - 1]
        taken[moved, product[moved]] = saved[moved]
        rows[moved, step, product[moved]] = moves.recipes[at][moved]
    harms = harm[blocks[:, None, None], every, rows].sum(axis=2)
    seconds = moves.seconds(rows.reshape(-1, len(names) // len(GEMMS), len(GEMMS))).reshape(harms.shape)
    stays = _evenly(_falling(seconds, harms), harms, _PROFILES)
    found = []
    for own, of, kept in zip(rows, harms, stays, strict=True):
        sets = own[kept].reshape(-1, len(names) // len(GEMMS), len(GEMMS))
        found.append(Profiles(of[kept], sets, names, quality.formats, base))
    return found


def _falling(costs: Array, sizes: Array) -> NDArray[np.bool_]:
    """[B, S] of each row whether it costs less than all that are as small; of equal ones the first."""
    order = np.lexsort((costs, sizes))
    in_order = np.take_along_axis(costs, order, axis=1)
    before = np.minimum.accumulate(in_order, axis=1)
    is_kept = np.ones(costs.shape, dtype=np.bool_)
    is_kept[:, 1:] = in_order[:, 1:] < before[:, :-1]
    found = np.empty_like(is_kept)
    np.put_along_axis(found, order, is_kept, axis=1)
    return found


def _evenly(kept: NDArray[np.bool_], harms: Array, number: int) -> NDArray[np.bool_]:
    """[B, S] of those that are kept at most so many of each row, the first and the last among them, about equally far
    apart in harm."""
    blocks = np.arange(len(kept))
    first, last = kept.argmax(axis=1), kept.shape[1] - 1 - kept[:, ::-1].argmax(axis=1)
    wanted = np.linspace(harms[blocks, first], harms[blocks, last], number, axis=1)
    apart = np.where(kept[:, None], np.abs(harms[:, None] - wanted[:, :, None]), np.inf)
    found = np.zeros_like(kept)
    found[blocks[:, None], apart.argmin(axis=2)] = True
    few = kept.sum(axis=1) <= number
    found[few] = kept[few]
    return found


def _seconds(
    setting: Setting, number: int, plan: BlockPlan, products: Products | None, kept: Sequence[float] = ()
) -> Array:
    """Both passes of a block, an entry for each set of formats; arguments are those of `planned_seconds`."""
    rate, first = setting.software.contention, setting.model.first_equal[number]
    passes = planned_seconds(first, plan, setting, kernels_of(setting), products, kept)
    return np.atleast_1d(sum(one.slowed(rate).total for one in passes))


def _menus(setting: Setting, quality: Quality | None, numbers: Sequence[int]) -> list[Menu]:
    """Menus of blocks that are equal but for their harm, one for each block."""
    block = setting.model.blocks[numbers[0]]
    whole = (False, True) if setting.shares_weights and setting.layout.zero == 3 else (False,)
    standing = standing_bytes(setting, block)
    ways: list[list[tuple[BlockPlan, Profiles]]] = [[] for _ in numbers]
    rows: list[list[Array]] = [[] for _ in numbers]
    for recompute in (NONE, SELECTIVE, FULL):
        if recompute != SELECTIVE:  # which has the sets of the one before
            each, products = _sets(setting, quality, numbers, recompute)
            ends = np.cumsum([0, *(len(one.harm) for one in each)]).tolist()
            settings, which = _in_distinct_formats(setting, each)
            kept = np.array([kept_bytes(block, one) for one in settings])
        # What leaves is not made again: it comes back.
        for offload, gathered in itertools.product((False, True)[: 1 + (recompute == NONE)], whole):
            plan = BlockPlan(recompute=recompute, offload=offload, gathered=gathered)
            leaving = kept[which] * offload
            seconds = _seconds(setting, numbers[0], plan, products, leaving.tolist() if offload else ())
            waiting, again = (
                np.array([of(block, plan, one) for one in settings])[which]
                for of in (waiting_bytes, backward_bytes)
            )
            harm = np.concatenate([one.harm for one in each])
            stays = np.full(len(which), standing * gathered)
            figures = np.array([seconds, waiting, stays, again, leaving, harm])
            for at, own in enumerate(each):
                rows[at].append(figures[:, ends[at] : ends[at + 1]])
                ways[at].append((plan, own))
    return [_menu(*one) for one in zip(ways, rows, strict=True)]


def _menu(ways: list[tuple[BlockPlan, Profiles]], rows: Sequence[Array]) -> Menu:
    seconds, waiting, standing, again, leaving, harm = np.concatenate(rows, axis=1)
    least = float(harm.min())
    stays = np.repeat([not plan.offload for plan, _ in ways], [one.shape[1] for one in rows])
    return Menu(ways, stays, seconds, waiting, standing, again, leaving, harm - least, least)


def _sets(
    setting: Setting, quality: Quality | None, numbers: Sequence[int], recompute: str
) -> tuple[list[Profiles], Products | None]:
    """The sets of formats that equal blocks choose from, and what the products of all of them take."""
    if quality is None:
        return [Profiles(np.zeros(1), np.zeros((1, 0, len(GEMMS)), np.int64))], None
    found = _profiles_of(setting, quality, numbers, recompute)
    table = product_table(setting.model.blocks[numbers[0]], setting, kernels_of(setting), quality.formats)
    return found, table.of(np.concatenate([one.sets for one in found]))


def _in_distinct_formats(setting: Setting, each: Sequence[Profiles]) -> tuple[list[Setting], Indices]:
    """The setting in sets of formats of which no two keep other bytes for want of another recipe of a wgrad product,
    which reads what is kept; and which of these stands for each set."""
    sets = np.concatenate([one.sets[:, :, -1] for one in each])
    _, first, which = np.unique(sets, axis=0, return_index=True, return_inverse=True)
    owners = [(one, at) for one in each for at in range(len(one.harm))]
    return [
        setting.in_formats(one.spelt_out(at)) for one, at in (owners[k] for k in first.tolist())
    ], which.ravel()

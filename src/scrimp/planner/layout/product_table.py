"""Seconds of every product of a block in every recipe that it may run in.

Problem  A search over formats asks for the passes of a block in hundreds of sets of formats, of which each differs from
         the one before in a single product.
Method   A block's passes need no more of its formats than sums over its products (`product_times.Products`). Each
         product's seconds in each recipe are counted once for a block and what it follows from; sums of many sets are
         then one gather of an array, and the sum of each product's least is below that of every set.
Checked  tests/planner/layout/test_product_table.py: sets one at a time

Shapes: S sets, L layers, R recipes, G = 3 products of a layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
from numpy.typing import NDArray

from scrimp.models import BlockSpec
from scrimp.planner.layout.host_times import layer_ops
from scrimp.planner.layout.kernels import Kernels
from scrimp.planner.layout.product_times import (
    Case,
    Products,
    case_of_products,
    product_seconds,
)
from scrimp.planner.layout.setting import Setting
from scrimp.precision import GEMMS

Array = NDArray[np.float64]
Sets = NDArray[np.int64]
"""[S, L, G] numbers of recipes."""


@dataclass(frozen=True, eq=False)
class ProductTable:
    """Seconds and host operations of one block's products in each recipe, where the block runs."""

    seconds: Array
    """[L, G, R]"""
    ops: Array
    """[L, R], by the recipe of the forward product."""
    is_once: NDArray[np.bool_]
    """[L] whether no level of recomputation makes the forward product again."""

    def of(self, sets: Sets) -> Products:
        """[S] of each."""
        layers = np.arange(len(self.ops))
        each = self.seconds[layers[:, None], np.arange(len(GEMMS)), sets]
        ops = self.ops[layers, sets[:, :, 0]].sum(axis=1)
        forward = each[:, :, 0]
        once = forward[:, self.is_once].sum(axis=1)
        weights = each[:, :, 2].sum(axis=1)
        return Products(forward.sum(axis=1), each[:, :, 1:].sum(axis=(1, 2)), ops, once, weights)

    @cached_property
    def least(self) -> Products:
        """No set takes less of any."""
        least = self.seconds.min(axis=2)
        forward, *backward = least.sum(axis=0).tolist()
        once = float(least[self.is_once, 0].sum())
        return Products(forward, sum(backward), float(self.ops.min(axis=1).sum()), once, backward[-1])


def product_table(
    block: BlockSpec, setting: Setting, kernels: Kernels, recipes: Sequence[str]
) -> ProductTable:
    """The table of a block on a rank of the setting."""
    return _counted(case_of_products(block, setting, kernels), *recipes)


@lru_cache(maxsize=4096)
def _counted(case: Case, *recipes: str) -> ProductTable:
    block, setting, kernels = case.what, case.setting, case.kernels
    assert isinstance(block, BlockSpec)
    seconds = [
        [[product_seconds(linear, gemm, recipe, setting, kernels) for recipe in recipes] for gemm in GEMMS]
        for linear in block.linears
    ]
    ops = [[layer_ops(linear, recipe, setting) for recipe in recipes] for linear in block.linears]
    is_once = np.array([not linear.again for linear in block.linears])
    return ProductTable(np.array(seconds), np.array(ops, dtype=np.float64), is_once)

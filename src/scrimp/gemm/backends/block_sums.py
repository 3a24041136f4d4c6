"""Products of operands with fp32 scales inside the summed axis: a product for each 128 numbers, scaled, summed in fp32.

Problem  A value of `tile` (1 x 128) or `block` (128 x 128) scaling is an element's value times an fp32 number, which no
         bf16 number holds. The element's values alone are exact in bf16.
Method   With q the values of elements, s their scales, and B the groups of 128 along the summed axis::

             y[m, n] = sum over B of  s_a[m, B] s_b[n, B]  sum over k in B of q_a[m, k] q_b[n, k]

         The inner sum is a bf16 product; all of them together have the FLOPs of one. The outer sum is fp32, as in
         hardware (DeepSeek-V3, arXiv 2412.19437, section 3.3). Rows of the result are made in chunks, which bounds
         memory and keeps sums near the core while products are added to them. Where groups of the first operand fell
         back, the product of what they left, times scales of its own, is added after that of their block.
Limits   A CPU rounds each product to bf16, which errors of independent signs make no worse than one rounding.
Checked  tests/gemm/test_reference.py against float64, tests/gemm/test_numba_backend.py
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from scrimp.formats.grouping import cut
from scrimp.formats.quantized import INNER_GROUP, FakeQuantized
from scrimp.gemm.problem import AXES, COLUMNS, ROWS
from scrimp.tracing import has_memory

CHUNK_NUMBERS = {"cpu": 2**20, "cuda": 2**24}
"""Numbers of a chunk: of fewer rows products are slow, of more rows sums leave the cache (CPU, measured)."""
Adder = Callable[[Tensor, Tensor, list[Tensor | None], list[Tensor | None]], None]
"""Adds to a total [m, N] in float32 products [g, m, N], each times scales of its rows [m], then of its columns [N]."""
Product = Callable[[Tensor, int, Tensor, int], Tensor]
"""Multiplies two matrices; with each comes the axis that it is summed over."""


@dataclass(frozen=True)
class _Part:
    """One product of the sum: operands [m, k] and [N, k], and scales of its rows and columns."""

    left: Tensor
    right: Tensor
    of_rows: Tensor | None
    of_columns: Tensor | None


def sum_of_blocks(
    gemm: str,
    a: FakeQuantized,
    b: FakeQuantized,
    dtype: torch.dtype,
    product: Product,
    add: Adder,
    *,
    at_once: int = 1,
) -> Tensor:
    """The result [M, N] of a GEMM, without outer scales.

    Args:
        a, b: bf16 values, one of them or both with inner scales; a may have a rest.
        dtype: of the result.
        product: of bf16 matrices.
        add: `add_scaled`, or what does the same faster.
        at_once: products that are added in one go; several where a product is in bf16.
    """
    (a_axis, b_axis), values = AXES[gemm], a.values
    num_rows = values.shape[0 if a_axis == COLUMNS else 1]
    num_columns = b.values.shape[0 if b_axis == COLUMNS else 1]
    of_columns = scales_by_block(b, b_axis)
    found = values.new_empty(num_rows, num_columns, dtype=dtype)
    limit = CHUNK_NUMBERS["cpu" if values.device.type == "cpu" else "cuda"]
    for rows in cut(num_rows, max(1, limit // max(1, num_columns))):
        total = values.new_zeros(rows.stop - rows.start, num_columns, dtype=torch.float32)
        parts = _parts(a, a_axis, rows, b.values if b_axis == COLUMNS else b.values.T, of_columns)
        while group := list(itertools.islice(parts, at_once)):
            if at_once == 1:
                products = product(group[0].left, COLUMNS, group[0].right, COLUMNS)[None]
            else:
                products = values.new_empty(len(group), *total.shape)
                for place, part in zip(products, group, strict=True):
                    torch.mm(part.left, part.right.T, out=place)
            add(total, products, [part.of_rows for part in group], [part.of_columns for part in group])
            del products  # before the next ones are made
        found[rows] = total
    return found


def _parts(
    a: FakeQuantized, axis: int, rows: slice, right: Tensor, of_columns: Tensor | None
) -> Iterator[_Part]:
    """The products of some rows in the order of their sum: that of each block, then that of its rest."""
    left, of_rows = _matrix(a, axis), scales_by_block(a, axis)
    rest, of_rest = (None, None) if a.rest is None else (_matrix(a.rest, axis), scales_by_block(a.rest, axis))
    for block in cut(right.shape[1], INNER_GROUP):
        number = block.start // INNER_GROUP
        own_columns = None if of_columns is None else of_columns[number]
        own_rows = None if of_rows is None else of_rows[number, rows]
        yield _Part(left[rows, block], right[:, block], own_rows, own_columns)
        if rest is not None and of_rest is not None and _is_rest(of_rest[number, rows]):
            yield _Part(rest[rows, block], right[:, block], of_rest[number, rows], own_columns)


def _matrix(x: FakeQuantized, axis: int) -> Tensor:
    """Values [M, K]."""
    return x.values if axis == COLUMNS else x.values.T


def _is_rest(scales: Tensor) -> bool:
    """Whether one of these groups has a rest. Asked where that is no wait for a device, and there are numbers; a
    product with scales of 0 adds nothing."""
    return scales.device.type != "cpu" or not has_memory(scales) or bool(scales.any())


def scales_by_block(matrix: FakeQuantized, axis: int) -> Tensor | None:
    """float32 [blocks of the summed axis, rows or columns of the result]; None: the values have no inner scales."""
    if matrix.inner is None:
        return None
    scales, size = matrix.inner, matrix.values.shape[0 if axis == COLUMNS else 1]
    scales = scales if axis == ROWS else scales.T
    if scales.shape[1] < size:  # square groups
        scales = scales.repeat_interleave(INNER_GROUP, 1)[:, :size]
    return scales.contiguous()


def add_scaled(
    total: Tensor, products: Tensor, of_rows: list[Tensor | None], of_columns: list[Tensor | None]
) -> None:
    """Add products [g, m, N] to a total in float32, times scales of their rows, then of their columns."""
    for product, own_rows, own_columns in zip(products, of_rows, of_columns, strict=True):
        scaled = product.float()
        if own_rows is not None:
            scaled.mul_(own_rows[:, None])
        if own_columns is not None:
            scaled.mul_(own_columns)
        total.add_(scaled)

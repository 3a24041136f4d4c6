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


@dataclass(frozen=True)
class Part:
    """One product of a sum: operands [m, k] and [N, k] in bf16, and float32 scales of its rows [m] and columns [N]."""

    left: Tensor
    right: Tensor
    of_rows: Tensor | None
    of_columns: Tensor | None


Adder = Callable[[Tensor, Iterator[Part], int], None]
"""Adds to a total [m, N] in float32 products, each times scales of its rows, then of its columns. Not more of them come
than the number says, by which buffers are made: a trace leaves some out."""


def sum_of_blocks(gemm: str, a: FakeQuantized, b: FakeQuantized, dtype: torch.dtype, add: Adder) -> Tensor:
    """The result [M, N] of a GEMM, without outer scales.

    Args:
        a, b: bf16 values, one of them or both with inner scales; a may have a rest.
        dtype: of the result.
        add: multiplies and adds.
    """
    a_axis, b_axis = AXES[gemm]
    payloads = [
        (_matrix(one, a_axis), scales_by_block(one, a_axis)) for one in (a, a.rest) if one is not None
    ]
    right, of_columns = _matrix(b, b_axis), scales_by_block(b, b_axis)
    num_rows, num_columns = len(payloads[0][0]), len(right)
    found = right.new_empty(num_rows, num_columns, dtype=dtype)
    limit = CHUNK_NUMBERS["cpu" if right.device.type == "cpu" else "cuda"]
    count = len(payloads) * -(-right.shape[1] // INNER_GROUP)
    for rows in cut(num_rows, max(1, limit // max(1, num_columns))):
        total = right.new_zeros(rows.stop - rows.start, num_columns, dtype=torch.float32)
        add(total, _parts(payloads, rows, right, of_columns), count)
        found[rows] = total
    return found


def _parts(
    payloads: list[tuple[Tensor, Tensor | None]], rows: slice, right: Tensor, of_columns: Tensor | None
) -> Iterator[Part]:
    """The products of some rows in the order of their sum: that of each block, then that of its rest."""
    for block in cut(right.shape[1], INNER_GROUP):
        number = block.start // INNER_GROUP
        own_columns = None if of_columns is None else of_columns[number]
        for payload, (left, of_rows) in enumerate(payloads):
            own_rows = None if of_rows is None else of_rows[number, rows]
            if payload == 0 or (own_rows is not None and _is_rest(own_rows)):
                yield Part(left[rows, block], right[:, block], own_rows, own_columns)


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

"""Quantizing passes over whole tensors on a CPU: what `cpu_kernels` does to rows, in as many threads as torch has.

Threads  as in `scrimp.cpu.rows`.
Limits   Tensors without memory get results of the right sizes, and no kernel runs: a trace counts the same bytes.
Checked  tests/gemm/test_numba_backend.py, against the reference bit for bit
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from scrimp.cpu.rows import as_numpy, by_rows
from scrimp.formats.codes import BYTES
from scrimp.formats.codes import decode as decode_codes
from scrimp.formats.grouping import Groups
from scrimp.formats.scales import GroupScales
from scrimp.gemm import cpu_kernels
from scrimp.precision.formats import Element, Scaling
from scrimp.tracing import has_memory

if TYPE_CHECKING:
    from scrimp.gemm.backends.block_sums import Part

AT_ONCE = 4
"""Products of a sum that are added in one pass over it."""
_CHUNK = 64
"""Rows of which one pass finds the largest of each column, where groups span more."""


def scaled_product(
    product: Tensor, of_rows: Tensor | None, of_columns: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """A product, in float32, times scales of rows, then of columns.

    Args:
        product: [M, N] in bfloat16.
        of_rows: M scales in float32, or one for all; None: none.
        of_columns: the same of N columns.
        dtype: of the result, float32 or bfloat16.
    """
    shape = product.shape
    out = torch.empty(shape, dtype=dtype)
    arrays = (
        None if one is None else as_numpy(one.reshape(-1).expand(size).contiguous())
        for one, size in zip((of_rows, of_columns), shape, strict=True)
    )
    by_rows(cpu_kernels.times_scales, as_numpy(product), *shape, *arrays, as_numpy(out))
    return out


def add_products(total: Tensor, parts: Iterator[Part], count: int) -> None:
    """Multiply, and add products in bf16, several in one pass over their sum (`block_sums.Adder`)."""
    # Made once, and as large as `count` says: a trace has fewer parts than a run.
    places = min(AT_ONCE, count)
    products = torch.empty(places, *total.shape, dtype=torch.bfloat16)
    buffers = [torch.empty(places, size) for size in total.shape]
    while group := list(itertools.islice(parts, AT_ONCE)):
        for number, part in enumerate(group):
            torch.mm(part.left, part.right.T, out=products[number])
        of_parts = [part.of_rows for part in group], [part.of_columns for part in group]
        scales = [
            None if of[0] is None else torch.stack(cast("list[Tensor]", of), out=buffer[: len(group)])
            for of, buffer in zip(of_parts, buffers, strict=True)
        ]
        arrays = (None if one is None else as_numpy(one) for one in scales)
        sizes = len(total), total.shape[1] * len(group)
        by_rows(
            cpu_kernels.add_times_scales, as_numpy(products[: len(group)]), *sizes, *arrays, as_numpy(total)
        )


def largest_magnitudes(x: Tensor, groups: Groups) -> Tensor:
    """The largest of each group's magnitudes; NaN where one is NaN.

    Args:
        x: [R, C] in float32 or bfloat16, row-major.

    Returns:
        float32 [ceil(R / r), ceil(C / c)].
    """
    (num_rows, num_columns), numbers = x.shape, as_numpy(x)
    if groups.columns == 1:
        r = groups.rows if groups.rows < num_rows else min(num_rows, _CHUNK)
        found = torch.empty(-(-num_rows // r), num_columns, dtype=torch.int32)
        by_rows(cpu_kernels.largest_in_columns, numbers, len(found), r * num_columns, r, as_numpy(found))
        return (found if groups.rows == r else found.amax(0, keepdim=True)).view(torch.float32)
    found = torch.empty(num_rows, -(-num_columns // groups.columns), dtype=torch.int32)
    by_rows(cpu_kernels.largest_in_rows, numbers, num_rows, num_columns, groups.columns, as_numpy(found))
    if groups.rows > 1:
        pad = -num_rows % groups.rows
        found = (F.pad(found, (0, 0, 0, pad)) if pad else found).unflatten(0, (-1, groups.rows)).amax(1)
    return found.view(torch.float32)


def scales_of(
    amax: Tensor,
    kind: Scaling,
    element: Element,
    tensor_scale: Tensor | None,
    *,
    lift: float = 1.0,
    no_clip: bool,
) -> GroupScales:
    """What `scrimp.formats.scales.scales_of` gives, of magnitudes [A, B] in float32; `lift` by `scales.lift_of`."""
    decode, numbers, size = torch.empty_like(amax), as_numpy(amax), amax.shape
    largest = np.float32(element.max_value)
    if kind.scale_type == "fp32":
        by_rows(cpu_kernels.fp32_scales, numbers, *size, largest, as_numpy(decode))
        return GroupScales(decode, decode, decode)
    stored, encode = torch.empty(size, dtype=torch.uint8), torch.empty_like(amax)
    results = as_numpy(stored), as_numpy(decode), as_numpy(encode)
    if tensor_scale is None:
        top = np.int32(element.max_exponent)
        by_rows(cpu_kernels.e8m0_scales, numbers, *size, largest, top, no_clip, results)
        return GroupScales(stored, decode, encode)
    if has_memory(amax):
        scale = np.float32(tensor_scale.item())
        reciprocal = np.float32(1.0) / (scale * np.float32(lift))
        by_rows(cpu_kernels.e4m3_scales, numbers, *size, scale, reciprocal, no_clip, results)
    return GroupScales(stored.view(torch.float8_e4m3fn), decode, encode)


def rounded_values(
    x: Tensor,
    groups: Groups,
    element: Element,
    encode: Tensor,
    decode: Tensor | None,
    carrier: torch.dtype,
    *,
    is_divided: bool,
    lift: float = 1.0,
    hashes: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Numbers over their scales, rounded to the element's values, times the scales.

    Args:
        x: [R, C] in float32 or bfloat16, row-major.
        encode: what each group is divided by, or multiplied by after `lift`; float32 [R / r, C / c].
        decode: what each group's values are multiplied by; None: by nothing.
        carrier: float32 or bfloat16.
        hashes: of rows and of columns, for stochastic rounding; None: to nearest.
    """
    out = torch.empty(x.shape, dtype=carrier)
    by_rows(
        cpu_kernels.to_values,
        as_numpy(x),
        len(x),
        x.shape[1],
        (groups.rows, groups.columns),
        as_numpy(encode),
        None if decode is None else as_numpy(decode),
        _rule(element, is_divided, lift, hashes is not None),
        (None, None) if hashes is None else (as_numpy(hashes[0]), as_numpy(hashes[1])),
        as_numpy(out),
    )
    return out


def rounded_codes(
    x: Tensor,
    groups: Groups,
    element: Element,
    encode: Tensor,
    *,
    is_divided: bool,
    lift: float = 1.0,
    hashes: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """The same as codes, uint8 [R, C], one a byte whatever its bits."""
    out, m = torch.empty(x.shape, dtype=torch.uint8), element.mantissa_bits
    is_integer = element.name == "int8"
    code = (
        np.int32((127 + element.min_exponent - 1) << m),
        np.float32(2.0 ** (m - element.min_exponent)),
        np.int32(23 - m),
        # Below zero an integer's bits are turned over and 1 is added; a float's sign is a bit beside its magnitude.
        np.int32(-1 if is_integer else 0),
        np.int32(1 if is_integer else 1 << (element.bits - 1)),
        # E2M1 and integers have no NaN.
        np.int32(0x7F if element.bits == 8 and not is_integer else 0),
    )
    by_rows(
        cpu_kernels.to_codes,
        as_numpy(x),
        len(x),
        x.shape[1],
        (groups.rows, groups.columns),
        as_numpy(encode),
        _rule(element, is_divided, lift, hashes is not None),
        (None, None) if hashes is None else (as_numpy(hashes[0]), as_numpy(hashes[1])),
        code,
        as_numpy(out),
    )
    return out


def values_of(
    payload: Tensor,
    element: Element,
    length: int,
    groups: Groups,
    scales: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """What codes stand for, [R, length].

    Args:
        payload: codes along the last axis, two in a byte where they have four bits.
        scales: float32, of each group; None: of none.
        dtype: of the result, float32 or bfloat16.
    """
    out = torch.empty(len(payload), length, dtype=dtype)
    kernel = cpu_kernels.from_pairs if element.bits == 4 else cpu_kernels.from_codes
    if not has_memory(payload):
        return out
    table = as_numpy(_values_of_codes(element))
    codes, of_groups = as_numpy(payload.view(torch.uint8)), None if scales is None else as_numpy(scales)
    numbers = (groups.rows, groups.columns), table, of_groups, as_numpy(out)
    by_rows(kernel, codes, len(out), length, *numbers)
    return out


@functools.cache
def _values_of_codes(element: Element) -> Tensor:
    """The value of each code."""
    if element.bits == 4:
        return decode_codes(torch.arange(16, dtype=torch.uint8)[:, None], element, 1)[:, 0].contiguous()
    return torch.arange(256, dtype=torch.uint8).view(BYTES[element.name]).to(torch.float32)


def _rule(element: Element, is_divided: bool, lift: float, is_stochastic: bool) -> tuple[Any, ...]:
    """How numbers are scaled and rounded, as the kernels take it."""
    unit = 2.0**-element.mantissa_bits if is_stochastic else 1.5 * 2.0 ** (23 - element.mantissa_bits)
    numbers = (lift, element.max_value, 2.0**element.min_exponent, unit)
    return (is_divided, *(np.float32(one) for one in numbers))

"""Kernels that quantize on a CPU, compiled by Numba: each number is read and written once.

Problem  An emulated format divides, rounds and multiplies every number of every operand. As torch's operators these
         are a dozen passes over a piece in cache, and several times the product itself.
Method   Two passes over memory. The first finds the largest magnitude of each group; scales are then made by
         `scrimp.formats.scales`, of numbers that are few. The second does the rest in registers::

             x, scale -> divide, clamp, round (rounding.py), noise (noise.py) -> values, or codes

         Two more multiply a product by its scales, into a result or on top of a sum.
         bfloat16 is read and written as the upper half of a float32's bits. Magnitudes are compared as integers, in
         which order NaN lies above infinity, so that it is seen. The bits are those of `scrimp.formats`. Each kernel
         takes a range of rows; `cpu_passes` runs them over tensors.
Cache    Compiled at first use, a second or two for each kernel and type, and kept in the user's cache folder.
Limits   LLVM fuses no multiplication with an addition here: sums round as they do in torch.
Checked  tests/gemm/test_numba_backend.py, against the reference bit for bit
"""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any

import numba
import numpy as np
from numba import types
from numba.extending import overload

from scrimp.errors import StorageError
from scrimp.files import make_folder, user_cache
from scrimp.formats.noise import MULTIPLIERS, UNIT

_EXPONENT, _MAGNITUDE = np.int32(0x7F800000), np.int32(0x7FFFFFFF)
_FIRST, _SECOND = (np.int32(number) for number in MULTIPLIERS)
_UNIT, _HALF, _OWN_BITS = np.float32(UNIT), np.float32(0.5), np.float32(2.0**23)
_BF16_NAN = np.int32(0x7FC0)


def _cache_folder() -> Path | None:
    """Where compiled kernels are kept; None: nothing can be written there, and each process compiles its own."""
    settings: Any = numba.config
    folder = Path(settings.CACHE_DIR or user_cache() / "numba")
    try:
        make_folder(folder)
    except StorageError:
        return None
    if not os.access(folder, os.W_OK):
        return None
    settings.CACHE_DIR = str(folder)
    return folder


CACHE = _cache_folder()
_compiled = functools.partial(
    numba.njit, nogil=True, cache=CACHE is not None, error_model="numpy", boundscheck=False
)


@_compiled()
def _bits(v: Any) -> Any:
    """A float32 as int32."""
    return np.float32(v).view(np.int32)


@_compiled()
def _float(bits: Any) -> Any:
    """The float32 of some bits."""
    return np.int32(bits).view(np.float32)


def _wide(bits: Any) -> Any:
    """A number as float32: bfloat16 comes as int16."""
    raise NotImplementedError


@overload(_wide)
def _wide_of(bits: Any) -> Any:
    def same(bits: Any) -> Any:
        return bits

    def of_bf16(bits: Any) -> Any:
        return _float(np.int32(bits) << 16)

    return same if isinstance(bits, types.Float) else of_bf16


def _narrow(value: Any, out: Any) -> Any:
    """A float32 in the type of `out`: float32, or bfloat16 as int16, to nearest even."""
    raise NotImplementedError


@overload(_narrow)
def _narrow_for(value: Any, out: Any) -> Any:
    def same(value: Any, out: Any) -> Any:
        return value

    def to_bf16(value: Any, out: Any) -> Any:
        bits = _bits(value)
        up = np.int32(0x7FFF) + ((bits >> 16) & np.int32(1))
        return np.int16(_BF16_NAN) if value != value else np.int16(np.int32(bits + up) >> 16)

    return same if isinstance(out.dtype, types.Float) else to_bf16


@_compiled()
def _uniform(row: Any, column: Any) -> Any:
    """In [0, 1), as `noise.combine`."""
    h = np.int32(row + column)
    h = np.int32((h ^ (h >> 15)) * _FIRST)
    h = np.int32((h ^ (h >> 12)) * _SECOND)
    return np.float32(h >> 12) * _UNIT + _HALF


@_compiled()
def _rounded(v: Any, most: Any, least: Any, unit: Any) -> Any:
    """To nearest even, as `rounding.round_`; `unit` is 1.5 * 2^(23 - mantissa bits)."""
    v = most if v > most else v
    v = -most if v < -most else v
    power = np.float32(abs(v))
    power = least if power < least else power
    large = _float(_bits(power) & _EXPONENT) * unit
    return (v + large) - large


@_compiled()
def _rounded_by_noise(v: Any, most: Any, least: Any, unit: Any, u: Any) -> Any:
    """Up with the probability of the distance; `unit` is 2^-mantissa bits; u as `rounding.round_` cuts it."""
    v = most if v > most else v
    v = -most if v < -most else v
    power = np.float32(abs(v))
    power = least if power < least else power
    step, bits_of_noise = _float(_bits(power) & _EXPONENT) * unit, _OWN_BITS * unit
    u = np.float32(np.floor(u * bits_of_noise)) / bits_of_noise
    v = np.float32(np.floor(v / step + u)) * step
    v = most if v > most else v
    return -most if v < -most else v


@_compiled()
def largest_in_rows(x: Any, first: int, last: int, c: int, out: Any) -> None:
    """Find the largest magnitude, as bits, of every c neighbours in a row."""
    for i in range(first, last):
        for group in range(out.shape[1]):
            own, most = x[i, group * c : group * c + c], np.int32(0)
            for j in range(own.shape[0]):
                most = max(most, np.int32(_bits(_wide(own[j])) & _MAGNITUDE))
            out[i, group] = most


@_compiled()
def largest_in_columns(x: Any, first: int, last: int, r: int, out: Any) -> None:
    """Find the largest magnitude, as bits, of every r neighbours in a column, for a range of groups."""
    rows, columns = x.shape
    for group in range(first, last):
        for j in range(columns):
            out[group, j] = 0
        for i in range(group * r, min(rows, group * r + r)):
            for j in range(columns):
                out[group, j] = max(out[group, j], np.int32(_bits(_wide(x[i, j])) & _MAGNITUDE))


@_compiled()
def _spread(scales: Any, c: int, row: Any) -> None:
    """A scale for every number of a row."""
    if c == 1:
        row[:] = scales
        return
    for group in range(scales.shape[0]):
        # A slice begins at 0: an index that might be negative would keep the loop from vector units.
        own, scale = row[group * c : group * c + c], scales[group]
        for j in range(own.shape[0]):
            own[j] = scale


@_compiled()
def _round_row(x: Any, i: int, by: Any, rule: Any, hash_of_row: Any, hashes: Any, row: Any) -> None:
    """One row of x over its scales, rounded."""
    is_divided, lift, most, least, unit = rule
    for j in range(row.shape[0]):
        v = _wide(x[i, j])
        row[j] = v / by[j] if is_divided else (v * lift) * by[j]
    if hashes is None:
        for j in range(row.shape[0]):
            row[j] = _rounded(row[j], most, least, unit)
    else:
        for j in range(row.shape[0]):
            row[j] = _rounded_by_noise(row[j], most, least, unit, _uniform(hash_of_row[i], hashes[j]))


@_compiled()
def to_values(
    x: Any,
    first: int,
    last: int,
    groups: Any,
    encode: Any,
    decode: Any,
    rule: Any,
    noise: Any,
    out: Any,
) -> None:
    """Rounded numbers times their scales (no scales: None), in the type of `out`."""
    (r, c), (hash_of_row, hashes), columns, last_group = groups, noise, x.shape[1], -1
    row, by, back = (
        np.empty(columns, np.float32),
        np.empty(columns, np.float32),
        np.empty(columns, np.float32),
    )
    for i in range(first, last):
        if i // r != last_group:
            last_group = i // r
            _spread(encode[last_group], c, by)
            if decode is not None:
                _spread(decode[last_group], c, back)
        _round_row(x, i, by, rule, hash_of_row, hashes, row)
        if decode is not None:
            for j in range(columns):
                row[j] *= back[j]
        for j in range(columns):
            out[i, j] = _narrow(row[j], out)


@_compiled()
def to_codes(
    x: Any, first: int, last: int, groups: Any, encode: Any, rule: Any, noise: Any, code: Any, out: Any
) -> None:
    """Codes of rounded numbers, one a byte."""
    (r, c), (hash_of_row, hashes), columns, last_group = groups, noise, x.shape[1], -1
    lowest, subnormal, shift, flip, negative, nan = code
    row, by = np.empty(columns, np.float32), np.empty(columns, np.float32)
    normal = np.int32(1 << (23 - shift))
    for i in range(first, last):
        if i // r != last_group:
            last_group = i // r
            _spread(encode[last_group], c, by)
        _round_row(x, i, by, rule, hash_of_row, hashes, row)
        own = out[i]
        for j in range(columns):
            bits = np.int32(_bits(row[j]) & _MAGNITUDE)
            code = np.int32(np.int32(bits >> shift) - lowest)
            small = np.int32(_float(bits) * subnormal)
            code = code if code >= normal else small
            code = nan if bits > _EXPONENT else code
            sign = np.int32(_bits(row[j]) >> 31)  # -1 below zero
            own[j] = np.uint8(np.int32(code ^ np.int32(sign & flip)) + np.int32(sign & negative))


@_compiled()
def _finish_row(row: Any, back: Any, scales: Any, out: Any) -> None:
    """A row of values times its scales (no scales: None), in the type of `out`."""
    if scales is not None:
        for j in range(row.shape[0]):
            row[j] *= back[j]
    for j in range(row.shape[0]):
        out[j] = _narrow(row[j], out)


@_compiled()
def from_codes(codes: Any, first: int, last: int, groups: Any, table: Any, scales: Any, out: Any) -> None:
    """Values of codes of a byte, times their scales (no scales: None)."""
    (r, c), columns, last_group = groups, out.shape[1], -1
    back, row = np.empty(columns, np.float32), np.empty(columns, np.float32)
    for i in range(first, last):
        if scales is not None and i // r != last_group:
            last_group = i // r
            _spread(scales[last_group], c, back)
        own, found = codes[i], out[i]
        for j in range(columns):
            row[j] = table[own[j]]
        _finish_row(row, back, scales, found)


@_compiled()
def from_pairs(codes: Any, first: int, last: int, groups: Any, table: Any, scales: Any, out: Any) -> None:
    """The same for two codes in a byte; `table` has 16 entries."""
    (r, c), columns, last_group = groups, out.shape[1], -1
    back, row = np.empty(columns, np.float32), np.empty(columns, np.float32)
    for i in range(first, last):
        if scales is not None and i // r != last_group:
            last_group = i // r
            _spread(scales[last_group], c, back)
        own, found = codes[i], out[i]
        for j in range(columns // 2):
            row[2 * j] = table[own[j] & 15]
            row[2 * j + 1] = table[own[j] >> 4]
        if columns % 2:
            row[columns - 1] = table[own[columns // 2] & 15]
        _finish_row(row, back, scales, found)


@_compiled()
def times_scales(x: Any, first: int, last: int, of_rows: Any, of_columns: Any, out: Any) -> None:
    """A product times scales of rows and of columns (None: there are none), in the type of `out`."""
    row = np.empty(x.shape[1], np.float32)
    for i in range(first, last):
        for j in range(row.shape[0]):
            row[j] = _wide(x[i, j])
        if of_rows is not None:
            row *= of_rows[i]
        if of_columns is not None:
            row *= of_columns
        for j in range(row.shape[0]):
            out[i, j] = _narrow(row[j], out)


@_compiled()
def add_times_scales(x: Any, first: int, last: int, of_rows: Any, of_columns: Any, total: Any) -> None:
    """The same, added to a total in float32."""
    for i in range(first, last):
        own, found = x[i], total[i]
        by = np.float32(1.0) if of_rows is None else of_rows[i]
        if of_columns is None:
            for j in range(found.shape[0]):
                found[j] += _wide(own[j]) * by
        else:
            for j in range(found.shape[0]):
                found[j] += (_wide(own[j]) * by) * of_columns[j]

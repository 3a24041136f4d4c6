"""Kernels that quantize on a CPU, compiled by Numba: each number is read and written once.

Problem  An emulated format divides, rounds and multiplies every number of every operand. As torch's operators these
         are a dozen passes over a piece in cache, and several times the product itself.
Method   Two passes over memory. The first finds the largest magnitude of each group; of these, which are few, scales
         are made by the rules of `scrimp.formats.scales`. The second does the rest in registers::

             x, scale -> divide, clamp, round (rounding.py), noise (noise.py) -> values, or codes

         Two more multiply a product by its scales, into a result or on top of a sum.
         Magnitudes are compared as integers, in which order NaN lies above infinity, so that it is seen. The bits are
         those of `scrimp.formats`. Each kernel takes a range of rows; `cpu_passes` runs them over tensors.
Stubs    as in `scrimp.cpu.numbers`, which says how kernels are compiled.
Limits   LLVM fuses no multiplication with an addition here: sums round as they do in torch.
Checked  tests/gemm/test_numba_backend.py, against the reference bit for bit
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from numba import types
from numba.extending import overload

from scrimp.cpu.numbers import ONE, bits, compiled, narrow, of_bits, over_exact_rows, wide
from scrimp.formats.noise import MULTIPLIERS, UNIT
from scrimp.formats.scales import E4M3_MAX, SMALLEST_NORMAL

_EXPONENT, _MAGNITUDE, _MANTISSA = np.int32(0x7F800000), np.int32(0x7FFFFFFF), np.int32(0x007FFFFF)
_FIRST, _SECOND = (np.int32(number) for number in MULTIPLIERS)
_UNIT, _HALF, _OWN_BITS = np.float32(UNIT), np.float32(0.5), np.float32(2.0**23)
_INVERSE = np.int32(254 << 23)
_NAN, _SMALLEST_NORMAL = np.float32(np.nan), np.float32(SMALLEST_NORMAL)
_E2M1_MAX, _E4M3_MAX = np.float32(6.0), np.float32(E4M3_MAX)
_E4M3_NORMAL, _E4M3_UNIT, _E4M3_SMALL = (np.float32(number) for number in (2.0**-6, 1.5 * 2.0**20, 2.0**9))


@compiled()
def _is_finite(v: Any) -> Any:
    """No infinity, no NaN."""
    return np.int32(bits(v) & _EXPONENT) != _EXPONENT


@compiled()
def _uniform(row: Any, column: Any) -> Any:
    """In [0, 1), as `noise.combine`."""
    h = np.int32(row + column)
    h = np.int32((h ^ (h >> 15)) * _FIRST)
    h = np.int32((h ^ (h >> 12)) * _SECOND)
    return np.float32(h >> 12) * _UNIT + _HALF


@compiled()
def _rounded(v: Any, most: Any, least: Any, unit: Any) -> Any:
    """To nearest even, as `rounding.round_`; `unit` is 1.5 * 2^(23 - mantissa bits)."""
    v = most if v > most else v
    v = -most if v < -most else v
    power = np.float32(abs(v))
    power = least if power < least else power
    large = of_bits(bits(power) & _EXPONENT) * unit
    return (v + large) - large


@compiled()
def _rounded_by_noise(v: Any, most: Any, least: Any, unit: Any, u: Any) -> Any:
    """Up with the probability of the distance; `unit` is 2^-mantissa bits; u as `rounding.round_` cuts it."""
    v = most if v > most else v
    v = -most if v < -most else v
    power = np.float32(abs(v))
    power = least if power < least else power
    step, bits_of_noise = of_bits(bits(power) & _EXPONENT) * unit, _OWN_BITS * unit
    # Powers of two: a product with the inverse, whose exponent is the negative, is the quotient.
    inverse = of_bits(_INVERSE - bits(step))
    u = np.float32(np.floor(u * bits_of_noise)) * (ONE / bits_of_noise)
    v = np.float32(np.floor(v * inverse + u)) * step
    v = most if v > most else v
    return -most if v < -most else v


@over_exact_rows()
def largest_in_rows(x: Any, first: int, last: int, c: int, out: Any) -> None:
    """Find the largest magnitude, as bits, of every c neighbours in a row."""
    for i in numba.prange(first, last):
        for group in range(out.shape[1]):
            own, most = x[i, group * c : group * c + c], np.int32(0)
            for j in range(own.shape[0]):
                most = max(most, np.int32(bits(wide(own[j])) & _MAGNITUDE))
            out[i, group] = most


@over_exact_rows()
def largest_in_columns(x: Any, first: int, last: int, r: int, out: Any) -> None:
    """Find the largest magnitude, as bits, of every r neighbours in a column, for a range of groups."""
    rows, columns = x.shape
    for group in numba.prange(first, last):
        for j in range(columns):
            out[group, j] = 0
        for i in range(group * r, min(rows, group * r + r)):
            for j in range(columns):
                out[group, j] = max(out[group, j], np.int32(bits(wide(x[i, j])) & _MAGNITUDE))


@over_exact_rows()
def fp32_scales(amax: Any, first: int, last: int, largest: Any, out: Any) -> None:
    """As `scales.fp32_scales`; `largest` is the element's."""
    for i in numba.prange(first, last):
        own, found = amax[i], out[i]
        for j in range(own.shape[0]):
            most = own[j]
            scale = most / largest
            scale = _SMALLEST_NORMAL if scale < _SMALLEST_NORMAL else scale
            scale = ONE if most == 0 else scale
            found[j] = scale if _is_finite(most) else _NAN


@over_exact_rows()
def e8m0_scales(
    amax: Any, first: int, last: int, largest: Any, top: Any, no_clip: bool, results: Any
) -> None:
    """As `scales.e8m0_scales`; `top` is the element's largest exponent."""
    exponents, decode, encode = results
    for i in numba.prange(first, last):
        own = amax[i]
        for j in range(own.shape[0]):
            wanted = bits(own[j] / largest if no_clip else own[j])
            biased = (wanted >> 23) + np.int32(wanted & _MANTISSA != 0) if no_clip else (wanted >> 23) - top
            biased = min(max(np.int32(biased), np.int32(0)), np.int32(254))
            value = of_bits(np.int32(1 << 22)) if biased == 0 else of_bits(np.int32(biased << 23))
            is_finite = _is_finite(own[j])
            value = value if is_finite else _NAN
            exponents[i, j], decode[i, j] = np.uint8(biased if is_finite else 255), value
            encode[i, j] = ONE / value


@over_exact_rows()
def e4m3_scales(
    amax: Any, first: int, last: int, tensor_scale: Any, reciprocal: Any, no_clip: bool, results: Any
) -> None:
    """As `scales.e4m3_scales`; `reciprocal` is 1 / the lifted scale of the tensor."""
    codes, decode, encode = results
    for i in numba.prange(first, last):
        own = amax[i]
        for j in range(own.shape[0]):
            wanted = (own[j] / _E2M1_MAX) / tensor_scale
            is_number = wanted == wanted
            wanted = wanted if is_number else np.float32(0.0)  # NaN is no integer, in no defined way
            wanted = _E4M3_MAX if wanted > _E4M3_MAX else wanted
            value = _rounded(wanted, _E4M3_MAX, _E4M3_NORMAL, _E4M3_UNIT)
            code = np.int32(bits(value) >> 20) - np.int32(120 << 3)
            code = code if value >= _E4M3_NORMAL else np.int32(value * _E4M3_SMALL)
            code += np.int32(no_clip and value < wanted)  # the next code up is the next value up
            value = of_bits(np.int32(code + np.int32(120 << 3)) << 20)
            value = value if code >= 8 else np.float32(code) / _E4M3_SMALL
            value = value if is_number else _NAN
            codes[i, j], decode[i, j] = np.uint8(code if is_number else 127), value
            encode[i, j] = np.float32(0.0) if value == 0 else reciprocal / value


def _taken(x: Any, index: Any) -> Any:
    """What lies there in x; None of None."""
    raise NotImplementedError


@overload(_taken, inline="always")
def _taken_of(x: Any, index: Any) -> Any:
    def found(x: Any, index: Any) -> Any:
        return x[index]

    def nothing(x: Any, index: Any) -> Any:
        return None

    return nothing if isinstance(x, types.NoneType) else found


def _times(v: Any, scales: Any, j: Any) -> Any:
    """A number times the scale of its place, or the one that all of a piece share; of None itself."""
    raise NotImplementedError


@overload(_times, inline="always")
def _times_of(v: Any, scales: Any, j: Any) -> Any:
    def by_own(v: Any, scales: Any, j: Any) -> Any:
        return v * scales[j]

    def by_shared(v: Any, scales: Any, j: Any) -> Any:
        return v * scales

    def same(v: Any, scales: Any, j: Any) -> Any:
        return v

    if isinstance(scales, types.NoneType):
        return same
    return by_own if isinstance(scales, types.Array) else by_shared


@compiled()
def _quantized(v: Any, by: Any, rule: Any, hash_of_row: Any, hashes: Any, j: int) -> Any:
    """A number over its scale, rounded."""
    is_divided, lift, most, least, unit = rule
    v = v / by if is_divided else (v * lift) * by
    if hashes is None:
        return _rounded(v, most, least, unit)
    return _rounded_by_noise(v, most, least, unit, _uniform(hash_of_row, hashes[j]))


@over_exact_rows()
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
    (r, c), (hashes_of_rows, hashes) = groups, noise
    for i in numba.prange(first, last):
        hash_of_row, by, back = _taken(hashes_of_rows, i), encode[i // r], _taken(decode, i // r)
        if c == 1:
            own, found = x[i], out[i]
            for j in range(own.shape[0]):
                v = _quantized(wide(own[j]), by[j], rule, hash_of_row, hashes, j)
                found[j] = narrow(_times(v, back, j), found)
            continue
        for group in range(by.shape[0]):
            begin, end, scale = group * c, group * c + c, _taken(back, group)
            own, found, noise_of = x[i, begin:end], out[i, begin:end], _taken(hashes, slice(begin, end))
            for j in range(own.shape[0]):
                v = _quantized(wide(own[j]), by[group], rule, hash_of_row, noise_of, j)
                found[j] = narrow(_times(v, scale, j), found)


@compiled()
def _code_of(v: Any, code: Any) -> Any:
    """The byte that stands for a rounded number."""
    lowest, subnormal, shift, flip, negative, nan = code
    magnitude = np.int32(bits(v) & _MAGNITUDE)
    found = np.int32(np.int32(magnitude >> shift) - lowest)
    small = np.int32(of_bits(magnitude) * subnormal)
    found = found if found >= np.int32(1 << (23 - shift)) else small
    found = nan if magnitude > _EXPONENT else found
    sign = np.int32(bits(v) >> 31)  # -1 below zero
    return np.uint8(np.int32(found ^ np.int32(sign & flip)) + np.int32(sign & negative))


@over_exact_rows()
def to_codes(
    x: Any, first: int, last: int, groups: Any, encode: Any, rule: Any, noise: Any, code: Any, out: Any
) -> None:
    """Codes of rounded numbers, one a byte."""
    (r, c), (hashes_of_rows, hashes) = groups, noise
    for i in numba.prange(first, last):
        hash_of_row, by = _taken(hashes_of_rows, i), encode[i // r]
        if c == 1:
            own, found = x[i], out[i]
            for j in range(own.shape[0]):
                found[j] = _code_of(_quantized(wide(own[j]), by[j], rule, hash_of_row, hashes, j), code)
            continue
        for group in range(by.shape[0]):
            begin, end = group * c, group * c + c
            own, found, noise_of = x[i, begin:end], out[i, begin:end], _taken(hashes, slice(begin, end))
            for j in range(own.shape[0]):
                v = _quantized(wide(own[j]), by[group], rule, hash_of_row, noise_of, j)
                found[j] = _code_of(v, code)


@compiled()
def _finish_row(row: Any, scales: Any, c: int, out: Any) -> None:
    """Values times the scales of groups of c (None: there are none), in the type of `out`."""
    if scales is None or c == 1:
        for j in range(row.shape[0]):
            out[j] = narrow(_times(row[j], scales, j), out)
        return
    for group in range(scales.shape[0]):
        begin, end = group * c, group * c + c
        own, found, scale = row[begin:end], out[begin:end], scales[group]
        for j in range(own.shape[0]):
            found[j] = narrow(own[j] * scale, found)


@over_exact_rows()
def from_codes(codes: Any, first: int, last: int, groups: Any, table: Any, scales: Any, out: Any) -> None:
    """Values of codes of a byte, times their scales (no scales: None)."""
    (r, c), columns = groups, out.shape[1]
    for i in numba.prange(first, last):
        own, row = codes[i], np.empty(columns, np.float32)
        for j in range(columns):
            row[j] = table[own[j]]
        _finish_row(row, _taken(scales, i // r), c, out[i])


@over_exact_rows()
def from_pairs(codes: Any, first: int, last: int, groups: Any, table: Any, scales: Any, out: Any) -> None:
    """The same for two codes in a byte; `table` has 16 entries."""
    (r, c), columns = groups, out.shape[1]
    for i in numba.prange(first, last):
        own, row = codes[i], np.empty(columns, np.float32)
        for j in range(columns // 2):
            row[2 * j] = table[own[j] & 15]
            row[2 * j + 1] = table[own[j] >> 4]
        if columns % 2:
            row[columns - 1] = table[own[columns // 2] & 15]
        _finish_row(row, _taken(scales, i // r), c, out[i])


@over_exact_rows()
def times_scales(x: Any, first: int, last: int, of_rows: Any, of_columns: Any, out: Any) -> None:
    """A product times scales of rows and of columns (None: there are none), in the type of `out`."""
    for i in numba.prange(first, last):
        row = np.empty(x.shape[1], np.float32)
        for j in range(row.shape[0]):
            row[j] = wide(x[i, j])
        if of_rows is not None:
            row *= of_rows[i]
        if of_columns is not None:
            row *= of_columns
        for j in range(row.shape[0]):
            out[i, j] = narrow(row[j], out)


@over_exact_rows()
def add_times_scales(x: Any, first: int, last: int, of_rows: Any, of_columns: Any, total: Any) -> None:
    """Products, each times scales of its rows and of its columns, added to a total in float32 one after the other."""
    for i in numba.prange(first, last):
        found = total[i]
        for part in range(x.shape[0]):
            own, columns = x[part, i], _taken(of_columns, part)
            by = ONE if of_rows is None else of_rows[part, i]
            for j in range(found.shape[0]):
                found[j] += _times(wide(own[j]) * by, columns, j)

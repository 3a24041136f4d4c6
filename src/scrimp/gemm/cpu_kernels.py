"""Kernels that quantize on a CPU, compiled by Numba: each number is read and written once.

Problem  An emulated format divides, rounds and multiplies every number of every operand. As torch's operators these
         are a dozen passes over a piece in cache, and several times the product itself.
Method   Two passes over memory. The first finds the largest magnitude of each group; scales are then made by
         `scrimp.formats.scales`, of numbers that are few. The second does the rest in registers::

             x, scale -> divide, clamp, round (rounding.py), noise (noise.py) -> values, or codes

         bfloat16 is read and written as the upper half of a float32's bits. Magnitudes are compared as integers, in
         which order NaN lies above infinity, so that it is seen. The bits are those of `scrimp.formats`.
Threads  Each kernel takes a range of rows and lets go of Python's lock; `_by_rows` gives torch's number of threads a
         range each.
Cache    Compiled at first use, a second or two for each kernel and type, and kept in the user's cache folder. Numba
         writes there without a lock: processes that compile at once would spoil each other's files, so one waits.
Limits   LLVM fuses no multiplication with an addition here: sums round as they do in torch.
Checked  tests/gemm/test_numba_backend.py, against the reference bit for bit
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import itertools
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numba
import numpy as np
import torch
import torch.nn.functional as F
from numba import types
from numba.extending import overload
from torch import Tensor

from scrimp.errors import StorageError
from scrimp.files import folder_lock, make_folder, user_cache
from scrimp.formats.codes import FLOAT8
from scrimp.formats.codes import decode as decode_codes
from scrimp.formats.grouping import Groups
from scrimp.formats.noise import MULTIPLIERS, UNIT
from scrimp.precision.formats import Element

FEW = 2**15
"""Numbers that one thread is through with before another has begun."""
_CHUNK = 64
"""Rows of which one pass finds the largest of each column, where groups span more."""
_EXPONENT, _MAGNITUDE = np.int32(0x7F800000), np.int32(0x7FFFFFFF)
_FIRST, _SECOND = (np.int32(number) for number in MULTIPLIERS)
_UNIT, _HALF = np.float32(UNIT), np.float32(0.5)
_BF16_NAN = np.int32(0x7FC0)

_TYPES: dict[torch.dtype, Any] = {
    torch.float32: np.float32,
    torch.bfloat16: np.int16,
    torch.int32: np.int32,
    torch.uint8: np.uint8,
}


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


_CACHE = _cache_folder()
_compiled = functools.partial(
    numba.njit, nogil=True, cache=_CACHE is not None, error_model="numpy", boundscheck=False
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
    """Up with the probability of the distance; `unit` is 2^-mantissa bits."""
    v = most if v > most else v
    v = -most if v < -most else v
    power = np.float32(abs(v))
    power = least if power < least else power
    step = _float(_bits(power) & _EXPONENT) * unit
    v = np.float32(np.floor(v / step + u)) * step
    v = most if v > most else v
    return -most if v < -most else v


@_compiled()
def _largest_in_rows(x: Any, first: int, last: int, c: int, out: Any) -> None:
    """Find the largest magnitude, as bits, of every c neighbours in a row."""
    for i in range(first, last):
        for group in range(out.shape[1]):
            own, most = x[i, group * c : group * c + c], np.int32(0)
            for j in range(own.shape[0]):
                most = max(most, np.int32(_bits(_wide(own[j])) & _MAGNITUDE))
            out[i, group] = most


@_compiled()
def _largest_in_columns(x: Any, first: int, last: int, r: int, out: Any) -> None:
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
def _to_values(
    x: Any,
    first: int,
    last: int,
    groups: Any,
    encode: Any,
    decode: Any,
    rule: Any,
    noise: Any,
    out: Any,
    rest: Any,
) -> None:
    """Rounded numbers times their scales (no scales: None), in the type of `out`; `rest` is what bfloat16 leaves."""
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
        if rest is not None:
            for j in range(columns):
                rest[i, j] = _narrow(row[j] - _wide(out[i, j]), rest)


@_compiled()
def _to_codes(
    x: Any, first: int, last: int, groups: Any, encode: Any, rule: Any, noise: Any, code: Any, out: Any
) -> None:
    """Codes of rounded numbers, one a byte."""
    (r, c), (hash_of_row, hashes), columns, last_group = groups, noise, x.shape[1], -1
    lowest, subnormal, shift, sign, negative, nan = code
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
            own[j] = np.uint8(code | np.int32(np.int32(_bits(row[j]) >> sign) & negative))


@_compiled()
def _from_codes(codes: Any, first: int, last: int, groups: Any, table: Any, scales: Any, out: Any) -> None:
    """Values of codes of a byte, times their scales (no scales: None)."""
    (r, c), columns, last_group = groups, out.shape[1], -1
    back = np.empty(columns, np.float32)
    for i in range(first, last):
        if scales is not None and i // r != last_group:
            last_group = i // r
            _spread(scales[last_group], c, back)
        own, found = codes[i], out[i]
        for j in range(columns):
            found[j] = table[own[j]]
        if scales is not None:
            for j in range(columns):
                found[j] *= back[j]


@_compiled()
def _from_pairs(codes: Any, first: int, last: int, groups: Any, table: Any, scales: Any, out: Any) -> None:
    """The same for two codes in a byte; `table` has 16 entries."""
    (r, c), columns, last_group = groups, out.shape[1], -1
    back = np.empty(columns, np.float32)
    for i in range(first, last):
        if scales is not None and i // r != last_group:
            last_group = i // r
            _spread(scales[last_group], c, back)
        own, found = codes[i], out[i]
        for j in range(columns // 2):
            found[2 * j] = table[own[j] & 15]
            found[2 * j + 1] = table[own[j] >> 4]
        if columns % 2:
            found[columns - 1] = table[own[columns // 2] & 15]
        if scales is not None:
            for j in range(columns):
                found[j] *= back[j]


def largest_magnitudes(x: Tensor, groups: Groups) -> Tensor:
    """The largest of each group's magnitudes; NaN where one is NaN.

    Args:
        x: [R, C] in float32 or bfloat16, row-major.

    Returns:
        float32 [ceil(R / r), ceil(C / c)].
    """
    (num_rows, num_columns), numbers = x.shape, _numpy(x)
    if groups.columns == 1:
        r = groups.rows if groups.rows < num_rows else min(num_rows, _CHUNK)
        found = torch.empty(-(-num_rows // r), num_columns, dtype=torch.int32)
        _by_rows(_largest_in_columns, numbers, len(found), r * num_columns, r, _numpy(found))
        return (found if groups.rows == r else found.amax(0, keepdim=True)).view(torch.float32)
    found = torch.empty(num_rows, -(-num_columns // groups.columns), dtype=torch.int32)
    _by_rows(_largest_in_rows, numbers, num_rows, num_columns, groups.columns, _numpy(found))
    if groups.rows > 1:
        padded = F.pad(found, (0, 0, 0, -num_rows % groups.rows))
        found = padded.unflatten(0, (-1, groups.rows)).amax(1)
    return found.view(torch.float32)


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
    with_rest: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Numbers over their scales, rounded to the element's values, times the scales.

    Args:
        x: [R, C] in float32 or bfloat16, row-major.
        encode: what each group is divided by, or multiplied by after `lift`; float32 [R / r, C / c].
        decode: what each group's values are multiplied by; None: by nothing.
        carrier: float32 or bfloat16.
        hashes: of rows and of columns, for stochastic rounding; None: to nearest.
        with_rest: also what bfloat16 leaves of each value, in bfloat16.
    """
    out = torch.empty(x.shape, dtype=carrier)
    rest = torch.empty_like(out) if with_rest else None
    _by_rows(
        _to_values,
        _numpy(x),
        len(x),
        x.shape[1],
        (groups.rows, groups.columns),
        _numpy(encode),
        None if decode is None else _numpy(decode),
        _rule(element, is_divided, lift, hashes is not None),
        (None, None) if hashes is None else (_numpy(hashes[0]), _numpy(hashes[1])),
        _numpy(out),
        None if rest is None else _numpy(rest),
    )
    return out, rest


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
    code = (
        np.int32((127 + element.min_exponent - 1) << m),
        np.float32(2.0 ** (m - element.min_exponent)),
        np.int32(23 - m),
        np.int32(32 - element.bits),
        np.int32(1 << (element.bits - 1)),
        # E2M1 has no NaN.
        np.int32(0x7F if element.bits == 8 else 0),
    )
    _by_rows(
        _to_codes,
        _numpy(x),
        len(x),
        x.shape[1],
        (groups.rows, groups.columns),
        _numpy(encode),
        _rule(element, is_divided, lift, hashes is not None),
        (None, None) if hashes is None else (_numpy(hashes[0]), _numpy(hashes[1])),
        code,
        _numpy(out),
    )
    return out


def values_of(
    payload: Tensor, element: Element, length: int, groups: Groups, scales: Tensor | None
) -> Tensor:
    """What codes stand for, float32 [R, length].

    Args:
        payload: codes along the last axis, two in a byte where they have four bits.
        scales: float32, of each group; None: of none.
    """
    out = torch.empty(len(payload), length)
    kernel = _from_pairs if element.bits == 4 else _from_codes
    table = _numpy(_values_of_codes(element))
    codes, of_groups = _numpy(payload.view(torch.uint8)), None if scales is None else _numpy(scales)
    numbers = (groups.rows, groups.columns), table, of_groups, _numpy(out)
    _by_rows(kernel, codes, len(out), length, *numbers)
    return out


@functools.cache
def _values_of_codes(element: Element) -> Tensor:
    """The value of each code."""
    if element.bits == 4:
        return decode_codes(torch.arange(16, dtype=torch.uint8)[:, None], element, 1)[:, 0].contiguous()
    return torch.arange(256, dtype=torch.uint8).view(FLOAT8[element.name]).to(torch.float32)


def _rule(element: Element, is_divided: bool, lift: float, is_stochastic: bool) -> tuple[Any, ...]:
    """How numbers are scaled and rounded, as the kernels take it."""
    unit = 2.0**-element.mantissa_bits if is_stochastic else 1.5 * 2.0 ** (23 - element.mantissa_bits)
    numbers = (lift, element.max_value, 2.0**element.min_exponent, unit)
    return (is_divided, *(np.float32(one) for one in numbers))


def _numpy(x: Tensor) -> np.ndarray[Any, Any]:
    """The same memory, while the tensor lives; bfloat16, which numpy has not, as int16.

    `Tensor.numpy` would tell the storage for good that it may not be resized, as FSDP does with weights that it frees.
    """
    assert x.is_contiguous()
    memory: Any = (ctypes.c_byte * x.nbytes).from_address(x.data_ptr()) if x.numel() else b""
    return np.frombuffer(memory, _TYPES[x.dtype]).reshape(x.shape)


def _by_rows(kernel: Callable[..., None], x: Any, rows: int, numbers: int, *arguments: Any) -> None:
    """A kernel over all rows, in as many threads as torch has.

    Args:
        numbers: of one row, or of what stands for one.
    """
    _compile(kernel, x, arguments)
    threads = max(1, min(torch.get_num_threads(), rows, rows * numbers // FEW))
    if threads == 1:
        kernel(x, 0, rows, *arguments)
        return
    bounds = [rows * part // threads for part in range(threads + 1)]
    parts = [
        _pool().submit(kernel, x, begin, end, *arguments) for begin, end in itertools.pairwise(bounds[1:])
    ]
    kernel(x, 0, bounds[1], *arguments)
    for part in parts:
        part.result()


def _compile(kernel: Callable[..., None], x: Any, arguments: tuple[Any, ...]) -> None:
    """Compile a kernel for these types, or read it from the cache, while no other process does."""
    key = (kernel, _types_of(x), _types_of(arguments))
    if key in _COMPILED:
        return
    with contextlib.nullcontext() if _CACHE is None else folder_lock(_CACHE, lambda: None):
        kernel(x, 0, 0, *arguments)
    _COMPILED.add(key)


_COMPILED: set[Any] = set()


def _types_of(value: Any) -> Any:
    """What Numba compiles for: the types of a value's parts."""
    if isinstance(value, tuple):
        return tuple(_types_of(one) for one in value)
    return (value.dtype.str, value.ndim) if isinstance(value, np.ndarray) else type(value)


@functools.cache
def _pool() -> ThreadPoolExecutor:
    """Its threads begin when they are first needed."""
    return ThreadPoolExecutor(os.cpu_count() or 1, thread_name_prefix="scrimp-quantize")

"""What oneDNN takes for a product of bf16 matrices on a CPU: an upper bound.

Problem  torch gives products of bf16 matrices to oneDNN. It copies operands into tiles and sums in fp32 beside the
         result, in memory of torch's allocator. How it cuts a product follows from a cost model, the caches and the
         number of threads, and changes with its version: an exact rule would be a copy of its source.
Method   What the source allows at most. With M x K times K x N, t threads, L the second-level cache of a core, and
         sizes rounded up to tiles::

             AVX512 without bf16             4 M N + 13 kB t
             AMX, left operand as stored     t (13 kB + min(2 K N + R, 0.8 L)), and 4 M N where K > 1,024
             transposed (a weight's
             gradient)                       t (13 kB + min(128 K + 2 K min(M, 256) + S, 0.8 L))
             K shared out to threads         and 4 M N t
             AVX512 with bf16                as AMX with 8 kB, at most K = 1,024 for each MiB of L, N = 64 of an
                                             operand as stored, and 1.1 L

         Each thread has one block of each operand, all of them no larger than the cache. R is the left operand's rows
         where they are copied, S the sums of a block where K is cut. Above K = 1,024 AMX's threads sum all of their
         part of the result. Where there is too little work for all threads, each may take a part of K and sum all of
         the result. Without AVX512 oneDNN multiplies nothing.
Limits   Upper bounds for sides of 16 or more; below, 9 of 3,366 products took up to 45 kB more. On two threads of a
         processor with AMX and L = 2 MiB they are 0.06 to 0.08 MB too high (median) up to K = 1,024, and 1.3 to 1.6 MB
         above, at most 13 MB; with AVX512's bf16 and L = 1 MiB 0.05 MB, at most 2.5 MB. AMX with another
         cache may pass them. ARM was not measured.
Source   oneDNN 3.12: brgemm_matmul_utils.cpp (init_scratchpad), amx_blocking_heuristics.cpp
         torch: ATen/native/mkldnn/Matmul.cpp
Checked  tests/profiler/memory_trace/test_products.py; docs/lab-log.md: 22,000 products
"""

from __future__ import annotations

import os
from functools import cache
from typing import Literal

import torch

from scrimp.gemm.cpu_products import has_bf16_units

Unit = Literal["amx", "avx512_bf16", "avx512", "none"]
"""What a processor multiplies bf16 with, as far as oneDNN tells it apart."""

_UNITS: tuple[Unit, ...] = ("none", "avx512", "avx512_bf16", "amx")
_ALLOWED: dict[str, Unit] = {
    **dict.fromkeys(("SSE41", "AVX", "AVX2", "AVX2_VNNI", "AVX2_VNNI_2"), "none"),
    **dict.fromkeys(("AVX512_CORE", "AVX512_CORE_VNNI"), "avx512"),
    **dict.fromkeys(("AVX512_CORE_BF16", "AVX512_CORE_FP16"), "avx512_bf16"),
}
_LEAST = 16**3
"""Multiplications up to which torch multiplies itself."""
_EACH = 13_440
_EACH_WITHOUT_TILES = 8_192
"""Tiles and addresses of a thread, and what it needs where only AVX512 multiplies bf16."""
_CACHE = 13 * 2**17
"""Most of the blocks of a thread with AMX: three quarters of a second-level cache of 2 MiB, and 8 % for tails."""
_TILE_DEPTH, _TILE_COLUMNS, _TILE_ROWS = 32, 64, 64
_BLOCK_ROWS = 256
_WIDEST = {"amx": 6 * 64, "avx512_bf16": 16 * 64}
"""Columns of a block of sums."""


def unit_here() -> Unit:
    """What this processor has, up to what ONEDNN_MAX_CPU_ISA allows oneDNN."""
    allowed = _ALLOWED.get(os.environ.get("ONEDNN_MAX_CPU_ISA", "").upper(), "amx")
    return min(_unit_of_processor(), allowed, key=_UNITS.index)


def _unit_of_processor() -> Unit:
    if not has_bf16_units():
        return "none"
    if torch.cpu._is_amx_tile_supported():
        return "amx"
    return "avx512_bf16" if torch.cpu._is_avx512_bf16_supported() else "avx512"


def product_bytes(m: int, n: int, k: int, unit: Unit, threads: int, *, transposed: bool) -> int:
    """Bytes beside operands and result.

    Args:
        m, n, k: M x K times K x N.
        transposed: the left operand is stored by columns.
    """
    if unit == "none" or m * n * k <= _LEAST:
        return 0
    sums = 4 * m * n
    if unit == "avx512":
        return sums + threads * _EACH
    blocks = _of_transposed(m, n, k, unit) if transposed else _of_plain(m, n, k, unit)
    each = _EACH if unit == "amx" else _EACH_WITHOUT_TILES
    most = _CACHE if unit == "amx" else second_level_cache() * 11 // 10
    shared = sums if unit == "amx" and k > 1024 and not transposed else 0
    if _shares_depth(m, n, k, unit, threads, transposed=transposed):
        shared = sums * threads
    return threads * (each + min(blocks, most)) + shared


def _of_plain(m: int, n: int, k: int, unit: Unit) -> int:
    """Blocks of a thread where the left operand is read as it is."""
    depth, columns = _up(k, _TILE_DEPTH), _up(n, _TILE_COLUMNS)
    rows = sums = 0
    if unit == "avx512_bf16":
        depth, columns = min(depth, _deepest()), _TILE_COLUMNS
        sums = 4 * min(m, _BLOCK_ROWS) * min(n, _TILE_COLUMNS)
        if m >= 1024 and k >= 2048:  # strides of large powers of two are copied away
            rows = _BLOCK_ROWS
    elif k % _TILE_DEPTH:
        rows = min(_up(m, 16), _TILE_ROWS)
    return 2 * depth * columns + 2 * rows * (depth + _TILE_DEPTH) + sums


def _of_transposed(m: int, n: int, k: int, unit: Unit) -> int:
    """Blocks of a thread where the left operand is turned."""
    depth = _up(k, _TILE_DEPTH)
    if unit == "avx512_bf16":
        depth = min(depth, _deepest())
    elif k % _TILE_DEPTH:  # a tail makes a block of its own, as large as the others
        depth = min(2 * depth, _up(k, 1024) + 4 * _TILE_DEPTH)
    rows, columns = _up(m, _TILE_ROWS), n
    if unit == "amx":
        rows += _TILE_ROWS if m > _TILE_ROWS else 0
        widest = _WIDEST[unit] if k > 512 or k % _TILE_DEPTH else 0
    else:
        columns = n if n <= _TILE_COLUMNS else _up(n, _TILE_COLUMNS)
        widest = _WIDEST[unit] if k > 512 else _TILE_COLUMNS
    rows = min(rows, _BLOCK_ROWS)
    sums = 4 * min(m, _BLOCK_ROWS) * min(columns, widest)
    return 2 * depth * _TILE_COLUMNS + 2 * rows * (depth + _TILE_DEPTH) + sums


def _deepest() -> int:
    """Most of K in a block, without AMX."""
    return second_level_cache() >> 10


@cache
def second_level_cache() -> int:
    """Bytes of a core's; 2 MiB where the system does not tell."""
    try:
        found = os.sysconf("SC_LEVEL2_CACHE_SIZE")
    except (AttributeError, OSError, ValueError):  # neither Linux nor glibc
        found = 0
    return found if found > 0 else 2**21


def _shares_depth(m: int, n: int, k: int, unit: Unit, threads: int, *, transposed: bool) -> bool:
    """Whether threads may take parts of K, and each sum all of the result."""
    if k <= 1024:
        return False
    if not transposed:
        return unit == "amx" and threads > 1 and 16 * m * n < threads * _CACHE
    is_narrow = threads * _TILE_COLUMNS > n and k >= 2048 and k & (k - 1) == 0
    return threads >= 16 if unit == "amx" else is_narrow


def _up(number: int, unit: int) -> int:
    return -(-number // unit) * unit

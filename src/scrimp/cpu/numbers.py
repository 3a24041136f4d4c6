"""What kernels for a CPU are written with: decorators that compile them, numbers as bits, and an exponential.

bfloat16     is read and written as int16, the upper half of a float32's bits.
Exponential  e^x = 2^n e^r, with n = round(x / ln 2) and |r| <= ln 2 / 2, e^r by Cephes' polynomial: within 2 units in
             the last place, and without a branch, so that LLVM makes vectors of it. Below e^-87.3, where float32 has
             no normal numbers, it is 0; above e^88.37 infinity.
Threads      `over_rows` and `over_exact_rows` compile loops over `numba.prange` for OpenMP, whose threads are torch's
             own on Linux: threads of another pool would wait for torch's, which spin for some time after each operator.
             Where Numba finds no OpenMP (on Linux the system's libgomp), loops are plain, and `rows` cuts them into
             pieces.
Stubs        Functions that raise NotImplementedError are names: Numba puts in their place what `overload` gives for
             a type.
Cache        Compiled at first use, half a second to two for each kernel and type, and kept in the user's cache folder.
Checked      tests/cpu/test_numbers.py
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import os
import warnings
from pathlib import Path
from typing import Any

import numba
import numpy as np
from numba import types
from numba.extending import overload

from scrimp.errors import StorageError
from scrimp.files import make_folder, user_cache

_ROUND, _BF16_NAN = np.int32(0x7FFF), np.int32(0x7FC0)
ONE = np.float32(1.0)
_ZERO, _INFINITY = np.float32(0.0), np.float32(np.inf)
_LOWEST, _HIGHEST, _PER_LN2 = np.float32(-87.33654), np.float32(88.37), np.float32(1.44269504)
_LN2, _LN2_REST = np.float32(0.693359375), np.float32(-2.12194440e-4)
_INTEGERS = np.float32(1.5 * 2.0**23)  # added, it leaves an integer in a float32's last bits
_BIAS = np.int32(0x4B400000 - 127)
_TERMS = (
    1.9875691500e-4,
    1.3981999507e-3,
    8.3334519073e-3,
    4.1665795894e-2,
    1.6666665459e-1,
    5.0000001201e-1,
)
_C7, _C6, _C5, _C4, _C3, _C2 = (np.float32(term) for term in _TERMS)


def _takes_openmp() -> bool:
    """Whether Numba's loops run on OpenMP; a layer that the user chose is left alone."""
    settings: Any = numba.config
    if settings.THREADING_LAYER != "default":
        return bool(settings.THREADING_LAYER == "omp")
    try:
        importlib.import_module("numba.np.ufunc.omppool")
    except ImportError:
        return False
    settings.THREADING_LAYER = "omp"
    return True


OPENMP = _takes_openmp()


def say_not_kept(folder: Path) -> None:
    """Warns that kernels compiled here are not there for the next process."""
    warnings.warn(
        f"compiled kernels cannot be kept in {folder}: each process compiles its own, which takes most of a minute; "
        "NUMBA_CACHE_DIR names another folder",
        stacklevel=3,
    )


def _cache_folder() -> Path | None:
    """Where compiled kernels are kept; None: nothing can be written there, and each process compiles its own.

    Numba looks at a kernel's own file alone: it would take one that was compiled with another version of this module,
    or without OpenMP.
    """
    settings: Any = numba.config
    parent = Path(settings.CACHE_DIR or user_cache() / "numba")
    try:
        version = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:8]
        folder = parent / f"{version}-{'openmp' if OPENMP else 'plain'}"
        make_folder(folder)
        is_writable = os.access(folder, os.W_OK)
    except (OSError, StorageError):
        is_writable = False
    if not is_writable:
        say_not_kept(parent)
        return None
    settings.CACHE_DIR = str(folder)
    return folder


CACHE = _cache_folder()

compiled = functools.partial(numba.njit, nogil=True, error_model="numpy", boundscheck=False)
"""Compiles a function that kernels call, which rounds as it is written."""
over_exact_rows = functools.partial(compiled, parallel=OPENMP, cache=CACHE is not None)
"""Compiles a kernel over rows, which rounds as it is written."""
over_rows = functools.partial(over_exact_rows, fastmath={"contract", "reassoc"})
"""The same where sums of a row may be in any order, and multiplications fused with additions."""


@compiled()
def bits(v: Any) -> Any:
    """A float32 as int32."""
    return np.float32(v).view(np.int32)


@compiled()
def of_bits(number: Any) -> Any:
    """The float32 of some bits."""
    return np.int32(number).view(np.float32)


def wide(number: Any) -> Any:
    """A number as float32: bfloat16 comes as int16."""
    raise NotImplementedError


@overload(wide)
def _wide_of(number: Any) -> Any:
    def same(number: Any) -> Any:
        return number

    def of_bf16(number: Any) -> Any:
        return of_bits(np.int32(number) << 16)

    return same if isinstance(number, types.Float) else of_bf16


def narrow(value: Any, out: Any) -> Any:
    """A float32 in the type of `out`: float32, or bfloat16 as int16, to nearest even."""
    raise NotImplementedError


@overload(narrow)
def _narrow_for(value: Any, out: Any) -> Any:
    def same(value: Any, out: Any) -> Any:
        return value

    def to_bf16(value: Any, out: Any) -> Any:
        number = bits(value)
        up = _ROUND + ((number >> 16) & np.int32(1))
        return np.int16(_BF16_NAN) if value != value else np.int16(np.int32(number + up) >> 16)

    return same if isinstance(out.dtype, types.Float) else to_bf16


@compiled(fastmath={"contract"})
def exponential(x: Any) -> Any:
    """e^x in float32."""
    shifted = x * _PER_LN2 + _INTEGERS
    n = shifted - _INTEGERS
    r = (x - n * _LN2) - n * _LN2_REST
    sum_ = ((((_C7 * r + _C6) * r + _C5) * r + _C4) * r + _C3) * r + _C2
    found = (sum_ * r * r + r + ONE) * of_bits((bits(shifted) - _BIAS) << 23)
    found = _ZERO if x < _LOWEST else found
    return _INFINITY if x > _HIGHEST else found

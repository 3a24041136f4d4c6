"""Kernels over the rows of tensors, in as many threads as torch has.

Threads  Kernels share their rows out themselves where Numba has OpenMP (`numbers`). Elsewhere `by_rows` gives threads
         of a pool a range of rows each; kernels let go of Python's lock.
Forks    Numba ends a process whose parent has used GNU's OpenMP. In one the kernels are compiled without it.
Cache    Numba writes what it has compiled without a lock: processes that compile at once would spoil each other's
         files, so one waits for the other.
Limits   Tensors without memory get results of the right sizes, and no kernel runs: a trace counts the same bytes.
Checked  tests/cpu/test_kernel_rows.py
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import itertools
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numba
import numpy as np
import torch
from torch import Tensor

from scrimp.cpu import numbers
from scrimp.files import folder_lock
from scrimp.tracing import has_memory

FEW = 2**15
"""Numbers that one thread is through with before another has begun."""
_TYPES: dict[torch.dtype, Any] = {
    torch.float32: np.float32,
    torch.bfloat16: np.int16,
    torch.int32: np.int32,
    torch.int64: np.int64,
    torch.uint8: np.uint8,
}


def as_numpy(x: Tensor) -> Any:
    """The same memory, which holds the tensor; bfloat16, which numpy has not, as int16. A tensor without memory itself.

    `Tensor.numpy` would tell the storage for good that it may not be resized, as FSDP does with weights that it frees.
    """
    if not has_memory(x):
        return x
    assert x.is_contiguous()
    return _memory(x, x.numel()).reshape(x.shape)


def span_of(x: Tensor) -> Any:
    """All memory from the first number of x to its last, one-dimensional, for kernels that are told its strides."""
    if not has_memory(x):
        return x
    steps = ((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return _memory(x, 1 + sum(steps) if x.numel() else 0)


def _memory(x: Tensor, count: int) -> Any:
    size = count * x.element_size()
    memory: Any = (ctypes.c_byte * size).from_address(x.data_ptr()) if size else bytearray()
    if size:
        memory.tensor = x  # lives as long as the array
    return np.frombuffer(memory, _TYPES[x.dtype])


def by_rows(kernel: Any, x: Any, rows: int, size: int, *arguments: Any) -> None:
    """A kernel over all rows, in as many threads as torch has.

    Args:
        kernel: a function of x, the first and the last row that it is to do, and the arguments.
        size: numbers of one row, or of what stands for one.
    """
    if isinstance(x, Tensor) or not x.size:  # without memory: `as_numpy` left it as it was
        return
    if _state.must_not_use_openmp:
        kernel = _without_openmp(kernel)
    _compile(kernel, x, arguments)
    threads = max(1, min(torch.get_num_threads(), rows, rows * size // FEW))
    if kernel.targetoptions.get("parallel"):
        numba.set_num_threads(min(threads, numba.config.NUMBA_NUM_THREADS))  # type: ignore[attr-defined]
        threads = 1  # the kernel's own affair
    if threads == 1:
        kernel(x, 0, rows, *arguments)
        return
    bounds = [rows * part // threads for part in range(threads + 1)]
    parts = [
        _pool().submit(kernel, x, begin, end, *arguments) for begin, end in itertools.pairwise(bounds[1:])
    ]
    try:
        kernel(x, 0, bounds[1], *arguments)
    finally:
        for part in parts:  # whatever ends this call: they write into memory that its caller would let go of
            part.exception()
    for part in parts:
        part.result()


def _compile(kernel: Callable[..., None], x: Any, arguments: tuple[Any, ...]) -> None:
    """Compile a kernel for these types, or read it from the cache, while no other process does."""
    key = (kernel, _types_of(x), _types_of(arguments))
    if key in _COMPILED:
        return
    with contextlib.nullcontext() if numbers.CACHE is None else folder_lock(numbers.CACHE, lambda: None):
        threads = torch.get_num_threads()
        kernel(x, 0, 0, *arguments)
        if torch.get_num_threads() != threads:  # Numba begins with OpenMP by setting its own number
            torch.set_num_threads(threads)
    _COMPILED.add(key)


_COMPILED: set[Any] = set()


@dataclass
class _State:
    must_not_use_openmp: bool = False


_state = _State()


def _in_forked_process() -> None:
    _state.must_not_use_openmp = numbers.OPENMP and bool(_COMPILED)
    _pool.cache_clear()  # its threads stay in the parent


os.register_at_fork(after_in_child=_in_forked_process)


@functools.cache
def _without_openmp(kernel: Any) -> Any:
    """Not kept in Numba's cache, which would take it for the kernel itself."""
    options = {name: value for name, value in kernel.targetoptions.items() if name != "nopython"}
    return numba.njit(**options | {"parallel": False})(kernel.py_func)


def _types_of(value: Any) -> Any:
    """What Numba compiles for: the types of a value's parts."""
    if isinstance(value, tuple):
        return tuple(_types_of(one) for one in value)
    return (value.dtype.str, value.ndim) if isinstance(value, np.ndarray) else type(value)


@functools.cache
def _pool() -> ThreadPoolExecutor:
    """Its threads begin when they are first needed."""
    return ThreadPoolExecutor(os.cpu_count() or 1, thread_name_prefix="scrimp-rows")

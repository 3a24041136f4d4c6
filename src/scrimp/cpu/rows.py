"""Kernels over the rows of tensors, in as many threads as torch has.

Threads  Kernels share their rows out themselves where Numba has OpenMP (`numbers`). Elsewhere `by_rows` gives threads
         of a pool a range of rows each; kernels let go of Python's lock.
Forks    Numba ends a process that was forked from one in which it had used OpenMP. There kernels are compiled
         without it.
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
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numba
import numpy as np
import torch
from torch import Tensor

from scrimp.cpu import numbers
from scrimp.errors import StorageError
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
    """A numpy view of x's memory that keeps x alive; bfloat16 as int16, since numpy has none. Tensors without memory
    are returned unchanged.

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
    kernel = _ready(kernel, x, arguments)
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


def _ready(kernel: Any, x: Any, arguments: tuple[Any, ...]) -> Any:
    """A kernel compiled for these types, or read from the cache while no other process writes there."""
    key = (kernel, _types_of(x), _types_of(arguments))
    if key not in _READY:
        if _must_not_use_openmp:
            kernel = _alone(kernel, parallel=False)
        threads = torch.get_num_threads()
        try:
            with (
                contextlib.nullcontext()
                if numbers.CACHE is None
                else folder_lock(numbers.CACHE, lambda: None)
            ):
                kernel(x, 0, 0, *arguments)
        except (OSError, StorageError):  # no room there, or no locks
            if numbers.CACHE is not None:
                numbers.say_not_kept(numbers.CACHE)
            kernel = _alone(kernel, parallel=kernel.targetoptions.get("parallel", False))
            kernel(x, 0, 0, *arguments)
        if torch.get_num_threads() != threads:  # Numba begins with OpenMP by setting its own number
            torch.set_num_threads(threads)
        _READY[key] = kernel
    return _READY[key]


_READY: dict[Any, Any] = {}
_must_not_use_openmp = False


def _in_forked_process() -> None:
    global _must_not_use_openmp
    with contextlib.suppress(ValueError):  # nothing has run in parallel yet
        _must_not_use_openmp = numba.threading_layer() == "omp"  # type: ignore[attr-defined]
    _READY.clear()
    _pool.cache_clear()  # its threads stay in the parent


os.register_at_fork(after_in_child=_in_forked_process)


@functools.cache
def _alone(kernel: Any, *, parallel: bool) -> Any:
    """The kernel outside Numba's cache."""
    options = {name: value for name, value in kernel.targetoptions.items() if name != "nopython"}
    return numba.njit(**options | {"parallel": parallel})(kernel.py_func)


def _types_of(value: Any) -> Any:
    """What Numba compiles for: the types of a value's parts."""
    if isinstance(value, tuple):
        return tuple(_types_of(one) for one in value)
    return (value.dtype.str, value.ndim) if isinstance(value, np.ndarray) else type(value)


@functools.cache
def _pool() -> ThreadPoolExecutor:
    """Its threads begin when they are first needed."""
    return ThreadPoolExecutor(os.cpu_count() or 1, thread_name_prefix="scrimp-rows")

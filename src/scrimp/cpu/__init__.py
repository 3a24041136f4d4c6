"""Kernels that Numba compiles for a CPU: what they are written with (`numbers`), how they run over tensors (`rows`).

The kernels themselves lie where they are used: `scrimp.gemm.cpu_kernels` (formats), `scrimp.models.cpu_kernels`
(norms, gates, rotations), `scrimp.objectives.cpu_loss`. All these import numba, which takes half a second, and are
imported at first use. Numba's threading layer and cache folder are then set for the whole process (`numbers`).
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import warnings
from collections.abc import Iterator
from contextvars import ContextVar

import torch

TYPES = (torch.float32, torch.bfloat16)
"""What the kernels read and write."""


@functools.cache
def has_numba() -> bool:
    """Whether numba is installed, can be imported beside this numpy, and compiles (NUMBA_DISABLE_JIT is not set)."""
    if importlib.util.find_spec("numba") is None:
        return False
    try:
        numba = importlib.import_module("numba")
    except (ImportError, OSError) as error:
        warnings.warn(
            f"numba is installed but cannot be imported, so steps run slower, without its kernels ({error}): "
            "pip install 'scrimp[numba]' takes one that fits",
            stacklevel=2,
        )
        return False
    return not numba.config.DISABLE_JIT


_are_wanted: ContextVar[bool] = ContextVar("are_wanted", default=True)


def has_kernels() -> bool:
    """Whether kernels stand for torch's operators here."""
    return _are_wanted.get() and has_numba()


@contextlib.contextmanager
def operators_alone() -> Iterator[None]:
    """Inside, torch's operators do what kernels would: for code that traces them, and to compare."""
    token = _are_wanted.set(False)
    try:
        yield
    finally:
        _are_wanted.reset(token)

"""Watch planned GEMMs as they run: what proofs, counts and statistics are made of.

An observer sees every execution with its operands before quantization and its result. While
nobody watches this costs one test of a list per GEMM.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from torch import Tensor

from scrimp.formats import QuantizedTensor


@dataclass(frozen=True)
class Execution:
    """One GEMM that ran."""

    layer: str
    gemm: str
    recipe: str
    backend: str
    a: Tensor
    """First operand as it arrived, a matrix."""
    b: Tensor | QuantizedTensor
    """Second operand as it arrived; codes where wgrad read a saved input."""
    result: Tensor


Observer = Callable[[Execution], None]
_observers: list[Observer] = []


@contextlib.contextmanager
def observing(observer: Observer) -> Iterator[None]:
    """Call `observer` for every planned GEMM inside."""
    _observers.append(observer)
    try:
        yield
    finally:
        _observers.remove(observer)


def is_observed() -> bool:
    """Whether anyone watches."""
    return bool(_observers)


def report(execution: Execution) -> None:
    """Tell all observers."""
    for observer in _observers:
        observer(execution)

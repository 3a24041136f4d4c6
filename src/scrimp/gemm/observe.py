"""Watch planned GEMMs as they run: what proofs, counts and statistics are made of.

An observer sees every execution with its operands before quantization and its result. While
nobody watches this costs one test of a list per GEMM. Layers that run wholly in the compute format take
torch's own path, which tells nobody: an observer that must see them too asks for it, and they
then run as planned GEMMs do.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import ParamSpec, TypeVar

from torch import Tensor

from scrimp.formats import QuantizedTensor
from scrimp.gemm.problem import Use


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
    uses: tuple[Use, Use]
    """How both were quantized, with the streams of their noise."""
    result: Tensor


Observer = Callable[[Execution], None]
_observers: list[Observer] = []
_of_plain: list[Observer] = []
_depth = 0
P = ParamSpec("P")
R = TypeVar("R")


def running(function: Callable[P, R]) -> Callable[P, R]:
    """Mark a function that runs planned GEMMs, so that the products inside are not taken for others."""

    @functools.wraps(function)
    def marked(*args: P.args, **kwargs: P.kwargs) -> R:
        global _depth
        _depth += 1
        try:
            return function(*args, **kwargs)
        finally:
            _depth -= 1

    return marked


def is_running() -> bool:
    """Whether a planned GEMM is being run right now."""
    return _depth > 0


@contextlib.contextmanager
def observing(observer: Observer, *, plain: bool = False) -> Iterator[None]:
    """Call `observer` for every planned GEMM inside; with `plain` for those in the compute format too."""
    _observers.append(observer)
    if plain:
        _of_plain.append(observer)
    try:
        yield
    finally:
        _observers.remove(observer)
        if plain:
            _of_plain.remove(observer)


def is_observed() -> bool:
    """Whether anyone watches."""
    return bool(_observers)


def is_plain_observed() -> bool:
    """Whether anyone watches layers in the compute format too."""
    return bool(_of_plain)


def report(execution: Execution) -> None:
    """Tell all observers."""
    for observer in _observers:
        observer(execution)

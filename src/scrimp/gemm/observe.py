"""Watch planned GEMMs as they run: what proofs, counts and statistics are made of.

An observer sees every execution with its operands before quantization and its result. While
nobody watches this costs one test of a list per GEMM. Layers that run wholly in the compute format take
torch's own path, which tells nobody: an observer that must see them too asks for it, and they
then run as planned GEMMs do.

Of a grouped layer (`scrimp.gemm.planned_grouped`) only the first run of a pass is told of, unless an observer asks for
every run.

An observer is called for every layer of every model. A witness is set for one layer, and told of its executions until
it is taken away; `without_witnesses` keeps it out for a while.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
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
    weight: Tensor
    """W [O, I] of the layer, or of the expert, as it arrived."""
    a: Tensor
    """First operand as it arrived, a matrix."""
    b: Tensor | QuantizedTensor
    """Second operand as it arrived; codes where wgrad read a saved input."""
    uses: tuple[Use, Use]
    """How both were quantized, with the streams of their noise."""
    result: Tensor
    expert: int = 0
    """Which expert's matrix it was, in a grouped layer."""
    kept: tuple[Use, Use] | None = None
    """Where fprop made codes of X for wgrad: how they were made, and how wgrad will quantize what they stand for."""


Observer = Callable[[Execution], None]
_observers: list[Observer] = []
_of_plain: list[Observer] = []
_of_every_run: list[Observer] = []
_witnesses: weakref.WeakKeyDictionary[object, Observer] = weakref.WeakKeyDictionary()
"""By planned layer; beside the layers, so that compiled graphs see no change of them."""
_are_witnesses_out = False
_depth = 0
P = ParamSpec("P")
R = TypeVar("R")


def running(function: Callable[P, R]) -> Callable[P, R]:
    """Mark a function that runs planned GEMMs, or products of another model than the trained one, so that those inside
    are not taken for plain products of the plan."""

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
    """Whether what is being run right now is marked as `running`."""
    return _depth > 0


@contextlib.contextmanager
def observing(observer: Observer, *, plain: bool = False, every_run: bool = False) -> Iterator[None]:
    """Call `observer` for every planned GEMM inside.

    Args:
        plain: for those in the compute format too.
        every_run: for all runs of grouped layers.
    """
    lists = [_observers] + [_of_plain] * plain + [_of_every_run] * every_run
    for one in lists:
        one.append(observer)
    try:
        yield
    finally:
        for one in lists:
            one.remove(observer)


def set_witness(layer: object, witness: Observer | None) -> None:
    """Tell `witness` of one planned layer's executions from now on, in place of the one before; None: nobody."""
    if witness is None:
        _witnesses.pop(layer, None)
    else:
        _witnesses[layer] = witness


@contextlib.contextmanager
def without_witnesses() -> Iterator[None]:
    """What runs inside is no part of training: other formats are tried, or nothing that is trained is run."""
    global _are_witnesses_out
    before, _are_witnesses_out = _are_witnesses_out, True
    try:
        yield
    finally:
        _are_witnesses_out = before


def is_observed(layer: object) -> bool:
    """Whether anyone watches a layer."""
    return bool(_observers) or (layer in _witnesses and not _are_witnesses_out)


def is_plain_observed() -> bool:
    """Whether anyone watches layers in the compute format too."""
    return bool(_of_plain)


def is_every_run_observed() -> bool:
    """Whether anyone watches all runs of grouped layers."""
    return bool(_of_every_run)


def report(layer: object, execution: Execution) -> None:
    """Tell all observers, and the layer's witness."""
    for observer in _observers:
        observer(execution)
    if layer in _witnesses and not _are_witnesses_out:
        _witnesses[layer](execution)

"""Run a part of a model again in the backward pass, instead of keeping what it saves.

torch's checkpoint does the work: in forward the tensors that autograd would save are dropped, in backward the part
runs once more to make them. (A memory trace has a stand-in for it, which loads no compiler: `running_again_by`.) Three
things are added:

* The product of the part's last linear layer is read by nobody the second time: torch's own linear stops before
  it, a planned layer is told to leave it out.
* Results of some operators may be kept, so that they alone do not run again (attention, between cheap neighbours).
* `is_running_again` says when, so that proofs count every product once.

The rounding noise of planned layers has the clock's reading as its address, so the second time it is the same:
nothing that is trained changes by a bit.

Compiled torch's partitioner runs a region again to its last operation, and takes a result that is made again anyway
         for whatever reads it afterwards. `linear.run_again_before` therefore ends a compiled region before the
         product, whose result is then kept.
Limits   The clock must not move between forward and backward of a micro-batch.
Checked  tests/runtime/test_recompute.py
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Collection, Iterator
from contextvars import ContextVar
from functools import partial
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from scrimp.gemm.factored import FactoredLinear
from scrimp.tracing import DispatchMode

T = TypeVar("T")
Operators = Collection[Any]
"""Overloads of operators, such as torch.ops.aten.mm.default."""


class _Local(threading.local):
    """State of one thread: autograd runs backward passes in threads of its own."""

    is_again = False
    handled: object = None
    """Its input is made again by a region that it ends: a planned layer, or the module of one that is not."""
    only_saves: object = None
    """Its product is left out now."""


_local = _Local()
_stand_in: ContextVar[Callable[..., Any] | None] = ContextVar("_stand_in", default=None)


def run_again(
    function: Callable[..., T], *inputs: Tensor, last: nn.Module | None, keeps: Operators = ()
) -> T:
    """function(*inputs), of which backward finds the inputs kept and runs the rest again.

    Args:
        last: linear layer whose product is the last that happens inside, and that nothing after it saves; None: all is
            run again.
        keeps: operators whose results are kept all the same.
    """
    if not torch.is_grad_enabled():
        return function(*inputs)
    last = last.B if isinstance(last, FactoredLinear) else last
    contexts = partial(_contexts, getattr(last, "planned", last), keeps)
    if torch.compiler.is_compiling():
        selective: dict[str, Any] = {"context_fn": partial(_selective, keeps)} if keeps else {}
        return cast(
            T, checkpoint(function, *inputs, use_reentrant=False, preserve_rng_state=False, **selective)
        )
    stand_in = _stand_in.get()
    if stand_in is not None:
        return cast(T, stand_in(function, *inputs, contexts=contexts))
    return cast(
        T, checkpoint(function, *inputs, use_reentrant=False, preserve_rng_state=False, context_fn=contexts)
    )


@contextlib.contextmanager
def running_again_by(stand_in: Callable[..., Any]) -> Iterator[None]:
    """Inside, another function stands for torch's checkpoint: the memory trace's, of tensors without memory.

    Args:
        stand_in: called with the function, its inputs, and by name what makes the contexts of both runs.
    """
    before = _stand_in.set(stand_in)
    try:
        yield
    finally:
        _stand_in.reset(before)


def is_running_again() -> bool:
    """Whether a part of the model is being run for the second time, by this thread."""
    return _local.is_again


def is_handled(layer: object) -> bool:
    """Whether a layer's input will be, or is being, made again."""
    return layer is _local.handled or layer is _local.only_saves


def only_saves(layer: object) -> bool:
    """Whether a layer is run for what it saves alone."""
    return layer is _local.only_saves


Context = contextlib.AbstractContextManager[object]


def _contexts(last: object, keeps: Operators) -> tuple[Context, Context]:
    """Around the first run and around the second."""
    kept: list[Any] = []
    first: list[Any] = [_set(handled=last)]
    second: list[Any] = [_set(is_again=True, only_saves=last)]
    if keeps:
        first.append(_Keeping(keeps, kept))
        second.append(_Replaying(keeps, kept))
    return _all(first), _all(second)


class _Keeping(DispatchMode):
    """Remembers what some operators return, in order. torch's own contexts for this follow every operator, and
    would miss those of a product that is left out."""

    def __init__(self, keeps: Operators, kept: list[Any]) -> None:
        super().__init__()
        self._keeps, self._kept = keeps, kept

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in self._keeps:
            self._kept.append(tree_map_only(Tensor, Tensor.detach, result))
        return result


class _Replaying(DispatchMode):
    """Returns what was remembered instead of running the operators again."""

    def __init__(self, keeps: Operators, kept: list[Any]) -> None:
        super().__init__()
        self._keeps, self._kept, self._next = keeps, kept, 0

    def __enter__(self) -> Any:
        self._next = 0
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in self._keeps:
            return func(*args, **(kwargs or {}))
        self._next += 1
        # An alias: autograd gives what is returned here a history.
        return tree_map_only(Tensor, Tensor.detach, self._kept[self._next - 1])


def _selective(keeps: Operators) -> tuple[Context, Context]:
    """The same in words that torch.compile understands."""

    def policy(context: object, operator: Any, *args: object, **kwargs: object) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if operator in keeps else CheckpointPolicy.PREFER_RECOMPUTE

    return cast(tuple[Context, Context], create_selective_checkpoint_contexts(policy))


@contextlib.contextmanager
def _all(contexts: list[Any]) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        yield


@contextlib.contextmanager
def _set(**values: object) -> Iterator[None]:
    before = {name: getattr(_local, name) for name in values}
    for name, value in values.items():
        setattr(_local, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(_local, name, value)

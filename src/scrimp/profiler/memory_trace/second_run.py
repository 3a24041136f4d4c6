"""torch's checkpoint as the memory trace runs it: a part of a model runs again in backward, with the same bytes.

Problem  `torch.utils.checkpoint` loads torch's compiler at its first call: a second, in which a trace is over.
Method   The rules by which torch's (without reentry) holds and frees memory. In forward each tensor that autograd would
         save is dropped, and the inputs are kept. The first of them that backward asks for runs the part again, up to
         the last that is missing; each is let go as soon as it is taken, or as what would have asked for it goes.
Limits   One backward pass, in one thread, and no random numbers.
Checked  tests/profiler/memory_trace/test_meta_mode.py: as many bytes as with torch's
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

T = TypeVar("T")
Context = contextlib.AbstractContextManager[object]


def second_run(
    function: Callable[..., T], *inputs: Tensor, contexts: Callable[[], tuple[Context, Context]]
) -> T:
    """function(*inputs), which backward runs again.

    Args:
        contexts: makes what is around the first run and the second.
    """
    first, second = contexts()
    # The result is kept, not its node alone: torch 2.11 lets go of what a node saved once nothing leads to it.
    keeper = _Inputs.apply(torch.empty(0, requires_grad=True), *inputs)  # type: ignore[no-untyped-call]
    part = _Part(function, lambda: keeper.grad_fn.saved_tensors, second)
    with saved_tensors_hooks(part.drop, part.take), first:
        return function(*inputs)


class _Inputs(torch.autograd.Function):
    """Keeps inputs where autograd keeps them, so that an offload around the part sees them."""

    @staticmethod
    def forward(ctx: Any, empty: Tensor, *inputs: Tensor) -> Tensor:
        ctx.save_for_backward(*inputs)
        return torch.empty_like(empty)


class _Dropped:
    """In the place of a saved tensor; holds it from the second run until it is taken."""

    tensor: Tensor | None = None


class _AllMadeError(Exception):
    """Ends the second run: nothing is missing any more."""


class _Part:
    """One call of a part of a model."""

    def __init__(
        self, function: Callable[..., Any], inputs: Callable[[], tuple[Tensor, ...]], second: Context
    ) -> None:
        self._function, self._inputs, self._second = function, inputs, second
        self._autocast = torch.autocast(
            "cpu",
            dtype=torch.get_autocast_dtype("cpu"),
            enabled=torch.is_autocast_enabled("cpu"),
            cache_enabled=torch.is_autocast_cache_enabled(),
        )
        self._dropped: list[weakref.ref[_Dropped]] = []
        self._made: int | None = None
        """Tensors that the second run has made; None before it."""

    def drop(self, tensor: Tensor) -> _Dropped:
        """What is saved instead of a tensor in the first run."""
        dropped = _Dropped()
        self._dropped.append(weakref.ref(dropped))
        return dropped

    def take(self, dropped: _Dropped) -> Tensor:
        """A tensor of the second run, which is made first."""
        if self._made is None:
            self._run_again()
        tensor, dropped.tensor = dropped.tensor, None
        assert tensor is not None
        return tensor

    def _run_again(self) -> None:
        self._made = 0
        hooks = saved_tensors_hooks(self._make, lambda tensor: tensor)
        with contextlib.suppress(_AllMadeError), hooks, torch.enable_grad(), self._autocast, self._second:
            self._function(*self._inputs())

    def _make(self, tensor: Tensor) -> Tensor:
        assert self._made is not None
        made = tensor.detach() if tensor.requires_grad else tensor
        dropped = self._dropped[self._made]()
        self._made += 1
        if dropped is not None:  # what was to read it may be gone
            dropped.tensor = made
        if self._made == len(self._dropped):
            raise _AllMadeError
        return made

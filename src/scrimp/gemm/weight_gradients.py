"""Gradients of weights that are made later than those of inputs.

Problem  A schedule of a pipeline may want the gradient of a stage's input at once, for another rank waits for it, and
         those of its weights when there is nothing else to do (zero bubble). One backward pass of autograd makes both;
         asking it twice, for inputs and then for weights, runs a function of our own twice, with all that it does.
Method   Inside `waiting` the backward pass of a linear layer makes dX, and leaves dW for later with what it takes to
         make it. So there is one backward pass, in which every product but wgrad runs, and each of them once; `make`
         then runs each wgrad once, and hands it to autograd as the gradient of its weight: sums and hooks are
         autograd's own.
Limits   Gradients of vectors, of the embedding and of the head (which its loss makes in the forward pass) do not wait.
         What waits keeps the input of each layer and the gradient of its output.
Source   zero bubble, arXiv 2401.10241
Checked  tests/gemm/test_weight_gradients.py
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor

_waiting: list[WeightGradients] = []
"""Whose turn it is; one list for all threads, since autograd runs a GPU's backward pass in one of its own."""


class WeightGradients:
    """Those of one backward pass, to be made later."""

    def __init__(self) -> None:
        self._later: list[tuple[Tensor, Callable[[], Tensor]]] = []

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Inside, backward passes leave the gradients of weights for later."""
        _waiting.append(self)
        try:
            yield
        finally:
            _waiting.remove(self)

    def add(self, weight: Tensor, make: Callable[[], Tensor]) -> None:
        """One more.

        Args:
            weight: a parameter.
            make: its gradient.
        """
        self._later.append((weight, make))

    def make(self, of: Iterable[Tensor] | None = None) -> None:
        """Make them, in the order in which they came; what each is made of goes as it is made.

        Args:
            of: parameters; None: all.
        """
        these = None if of is None else {id(weight) for weight in of}
        own = [one for one in self._later if these is None or id(one[0]) in these]
        self._later = [] if these is None else [one for one in self._later if id(one[0]) not in these]
        while own:
            weight, make = own.pop(0)
            with torch.no_grad():
                gradient = make()
            del make
            with torch.enable_grad():  # a backward pass may be going on
                place = weight.view_as(weight)
            torch.autograd.backward(place, gradient)
            del gradient


def make_later(weight: Tensor, make: Callable[[], Tensor]) -> None:
    """Make the gradient of a weight when it is its turn: later where a backward pass leaves it, else now."""
    later = waiting_now() or WeightGradients()
    later.add(weight, make)
    if waiting_now() is None:
        later.make()


def waiting_now() -> WeightGradients | None:
    """Where the gradient of a weight goes instead of being made; None: it is made."""
    return _waiting[-1] if _waiting else None

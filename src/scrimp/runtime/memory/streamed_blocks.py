"""Runs the blocks of a model so that what the plan sends to the host leaves and is back in time.

A block's backward pass begins when the gradient of its output is there, and is over when that of its input is: hooks on
the residual stream between blocks say so, compiled or not, recomputed or not.

Checked  tests/runtime/memory/test_blocks.py
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial

from torch import Tensor

from scrimp.models.attention import AttentionLayout
from scrimp.models.blocks import Block
from scrimp.runtime.memory.gradients import HostGradients
from scrimp.runtime.memory.offload import ActivationOffload
from scrimp.runtime.memory.weights import HostWeights


class BlockMemory:
    """What of each block lives where; `Model.run_block` calls it.

    Args:
        num_blocks: of the model.
        offload: of the activations of the blocks in `leaving`.
    """

    def __init__(
        self,
        num_blocks: int,
        *,
        offload: ActivationOffload | None = None,
        leaving: frozenset[int] = frozenset(),
        weights: HostWeights | None = None,
        gradients: HostGradients | None = None,
    ) -> None:
        self._num_blocks, self._offload = num_blocks, offload
        self.leaving = leaving
        """Blocks whose activations leave; may change between two steps."""
        self.weights, self.gradients = weights, gradients
        self._in_backward: int | None = None
        """Block whose backward pass has begun and is not over."""

    def __call__(self, index: int, block: Block, x_BTD: Tensor, layout: AttentionLayout) -> Tensor:
        """The residual stream after a block."""
        if self.weights is not None:
            self.weights.before_forward(index)
        around: contextlib.AbstractContextManager[object] = contextlib.nullcontext()
        if self._offload is not None:
            leaves = index in self.leaving
            around = self._offload.block(index, block, exclude=layout.tensors, leaves=leaves)
        with around:
            y_BTD: Tensor = block(x_BTD, layout)
        if self.weights is not None:
            self.weights.after_forward(index)
        if y_BTD.requires_grad and (self.weights is not None or self.gradients is not None):
            y_BTD.register_hook(partial(self._begin_backward, index))
            if index == 0 and x_BTD.requires_grad:
                x_BTD.register_hook(lambda gradient: self.end_backward())
        return y_BTD

    @contextlib.contextmanager
    def at_hand(self, index: int) -> Iterator[None]:
        """Inside, a block's weights are on the device; without gradients."""
        if self.weights is not None:
            self.weights.before_forward(index)
        try:
            yield
        finally:
            if self.weights is not None:
                self.weights.after_forward(index)

    def _begin_backward(self, index: int, gradient: Tensor) -> None:
        self.end_backward()
        if self.weights is not None:
            self.weights.before_backward(index)
        if self.gradients is not None:
            self.gradients.before_backward(index)
        self._in_backward = index

    def end_backward(self) -> None:
        """The last begun backward pass of a block is over: called by the next, and after the whole pass."""
        block, self._in_backward = self._in_backward, None
        if block is None:
            if self.gradients is not None:
                self.gradients.settle()  # the first block's, which no further block's pass waits for
            return
        if self.weights is not None:
            self.weights.after_backward(block)
        if self.gradients is not None:
            self.gradients.after_backward(block)

    def reset(self) -> None:
        """After a step that was broken off: nothing is on its way, nothing waits."""
        self._in_backward = None
        if self._offload is not None:
            self._offload.reset()
        if self.weights is not None:
            self.weights.leave()
        if self.gradients is not None:
            self.gradients.clear()

"""What one block, the head and the optimizer step cost in bytes and seconds: the planner's input.

All bytes are of one device and one micro-batch. A block's figures are differences: a trace of a chain of two equal
blocks gives them (`scrimp.profiler.memory_trace`), `scrimp.planner.bytes.walk` adds them up.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class BlockCost:
    """One block under one choice for its activations (`scrimp.config.activations`)."""

    kept: int
    """Live on the device after its forward pass that was not before it, its output included."""
    forward_peak: int
    """Most above what was live before its forward pass."""
    backward_peak: int
    """Most during its backward pass above what was live before its forward pass, without the gradient of its
    output (one boundary), gradients of its weights included."""
    host: int = 0
    """Waits in host memory between the passes."""
    forward_seconds: float = 0.0
    backward_seconds: float = 0.0
    """With what is made again."""


@dataclass(frozen=True)
class BlockClass:
    """Blocks that cost the same: equal shapes and number formats."""

    weights: int
    gradients: int
    optimizer: int
    """Bytes of the block's states: moments, master weights."""
    choices: Mapping[str, BlockCost]
    """Name of the activations' choice to cost."""


@dataclass(frozen=True)
class EndsCost:
    """The embedding, final norm, head and loss: what is no block."""

    weights: int
    gradients: int
    optimizer: int
    head_peak: int
    """Most during head, loss and their backward pass above what was live after the last block, gradients of head and
    final norm included."""
    head_gradients: int
    """Of the gradients above, those that exist once the head's backward pass is over."""
    embedding_peak: int
    """Most during the embedding's backward pass above what was live before it, without the boundary's gradient."""
    seconds: float = 0.0
    """Forward and backward of all of it."""


@dataclass(frozen=True)
class StepCosts:
    """A whole step of one model on one device."""

    classes: tuple[BlockClass, ...]
    blocks: tuple[int, ...]
    """Class of each block, first to last."""
    ends: EndsCost
    boundary: int
    """The residual stream between two blocks."""
    optimizer_peak: int = 0
    """Temporary memory of the optimizer step."""
    resident: int = 0
    """Whatever else stays on the device: tokens, RoPE tables, copies of weights in other formats."""

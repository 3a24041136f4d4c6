"""What the memory trace asks of an optimizer: how it sums gradients, its states, what its update takes.

Each optimizer answers for itself (`scrimp.optim`): with a formula, or by running its update on the trace's fake
tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from scrimp.profiler.memory_trace.stand_ins import DeviceFunctions
from scrimp.profiler.memory_trace.tracker import StorageTracker

Tracing = Callable[[], AbstractContextManager[StorageTracker]]
"""Enters a new tracker of the planned device."""


@dataclass(frozen=True)
class GradientSums:
    """How the optimizer sums the gradients of micro-batches."""

    dtype: torch.dtype | None
    """The sums' type, where a hook adds each gradient to them as soon as it is complete (`scrimp.optim.targets`);
    None: autograd sums gradients itself."""
    scratch: Callable[[Tensor], int] = lambda parameter: 0
    """Bytes that adding a parameter's gradient to an existing sum takes."""


class OptimizerMemory(Protocol):
    """Bytes of an optimizer. Equal ones compare and hash as equal: traces are kept by them.

    Parameters come with their names in the whole model, on tensors without memory.
    """

    def __hash__(self) -> int: ...

    def sums(self, device: DeviceFunctions) -> GradientSums:
        """How gradients are summed on that device."""
        ...

    def state_bytes(self, named: Mapping[str, Tensor]) -> int:
        """What is kept of these parameters: averages, master weights."""
        ...

    def update_peak(self, named: Mapping[str, Tensor], device: DeviceFunctions, tracing: Tracing) -> int:
        """Most bytes that the update of these parameters takes beside weights, gradients and states."""
        ...

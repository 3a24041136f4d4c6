"""The phases of a run, between which the allocator's cache is given back where the next one needs it.

Method   Training is one phase from evaluation to evaluation; evaluation, the sample at the end, and measuring precision
         are others. Each begins where its work begins: the allocator is read at these edges, never in a step. The
         planned peak of training is the plan's; those of the others are measured the first time.
         On a CPU the process's heap is given back there instead (`scrimp.training.memory.heap`).
Meter    A phase has its own peak, so the allocator's is reset at its beginning. The run's peak, over all phases, is
         kept by the memory meter.
Checked  tests/training/memory/test_memory_phases.py; the policy itself: `scrimp.runtime.memory.cache`
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from scrimp.profiler import MemoryMeter
from scrimp.runtime.memory import CudaCache
from scrimp.runtime.memory.cache import Cache
from scrimp.training.memory.heap import HostHeap

TRAINING, EVALUATION, GENERATION, MEASURING = "training", "evaluation", "generation", "measuring"


class MeteredCache(CudaCache):
    """torch's allocator of one device, whose peak begins anew without being lost to the run's meter."""

    def __init__(self, device: torch.device, meter: MemoryMeter) -> None:
        super().__init__(device)
        self._meter = meter

    def reset_peak(self) -> None:
        """Begin a new peak."""
        self._meter.keep_device_peak()
        super().reset_peak()


def cache_of(device: torch.device, meter: MemoryMeter) -> Cache | None:
    """The caching allocator of a device; None where it has none, as a CPU."""
    return MeteredCache(device, meter) if device.type == "cuda" else None


def heap_of(device: torch.device, report: Callable[[str], None]) -> HostHeap | None:
    """The process's heap, where the tensors of a run lie in it."""
    return HostHeap(report) if device.type == "cpu" else None

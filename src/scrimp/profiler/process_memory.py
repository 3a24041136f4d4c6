"""What the tensors of a run take at most, and by how much its process grows.

Tensors are what a plan predicts: on CUDA the allocator knows their peak (`max_memory_allocated`), on a CPU they are
counted in chosen steps (`scrimp.profiler.tensor_peak`). The resident set of the process is another figure: it holds
the interpreter, libraries, and heap that was freed but not given back, and no plan predicts it.
What is free: `scrimp.host_memory`.
"""

from __future__ import annotations

import contextlib
import resource
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from scrimp.profiler.tensor_peak import counting_tensors


class MemoryMeter:
    """Peaks of this process from the moment that the meter is made.

    Args:
        is_apart: whether a tensor on a CPU stands for one on the host beside a device.
    """

    def __init__(self, device: torch.device, is_apart: Callable[[Tensor], bool] = lambda _: False) -> None:
        self._device, self._is_apart = device, is_apart
        self._kept_peak: int | None = None
        self.counted_in_step: int | None = None
        """Where a CPU's tensors were counted, and took the most."""
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        with contextlib.suppress(OSError):  # without it the mark includes what came before
            Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # reset the high-water mark
        self._baseline = resident_bytes() or self.process_peak_bytes()

    @property
    def counts_steps(self) -> bool:
        """Whether tensors are known only from steps in which they were counted."""
        return self._device.type != "cuda"

    @contextlib.contextmanager
    def counting(self, step: int) -> Iterator[None]:
        """Count a CPU's tensors while this step runs; nothing on CUDA, whose allocator always counts."""
        if not self.counts_steps:
            yield
            return
        with counting_tensors(self._is_apart) as counted:
            yield
        if counted.num_bytes is not None and counted.num_bytes > (self._kept_peak or 0):
            self._kept_peak, self.counted_in_step = counted.num_bytes, step

    def forget_counts(self) -> None:
        """Steps take something else from now on: what was counted on a CPU is no longer true."""
        if self.counts_steps:
            self._kept_peak = self.counted_in_step = None

    def peak_device_bytes(self) -> int | None:
        """Most bytes of tensors on the device; None on a CPU where no step was counted yet."""
        if self.counts_steps:
            return self._kept_peak
        return max(self._kept_peak or 0, torch.cuda.max_memory_allocated(self._device))

    def keep_device_peak(self) -> None:
        """The allocator's own peak is about to begin anew: what it was stays part of this meter's."""
        self._kept_peak = self.peak_device_bytes()

    def process_peak_bytes(self) -> int:
        """Largest resident set of the process."""
        peak = _status_bytes("VmHWM")
        if peak is not None:
            return peak
        usage = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return usage if sys.platform == "darwin" else usage * 1024

    def process_growth_bytes(self) -> int:
        """By how much the resident set grew at most since the meter was made."""
        return max(0, self.process_peak_bytes() - self._baseline)


def resident_bytes() -> int | None:
    """The resident set of the process now; None where the system does not tell."""
    return _status_bytes("VmRSS")


def _status_bytes(key: str) -> int | None:
    """A size in /proc/self/status, or None where there is no such file."""
    with contextlib.suppress(OSError), open("/proc/self/status", encoding="ascii", errors="replace") as lines:
        for line in lines:
            if line.startswith(f"{key}:"):
                return int(line.split()[1]) * 1024
    return None

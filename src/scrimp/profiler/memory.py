"""Memory that is free and memory that was used, on the host and on the device.

The host's limit is the smaller of the free memory and the control group's (a container that
exceeds its group is killed without a message, so the group counts). Peaks are high-water
marks: on the host of the resident set, on CUDA of the allocator (`max_memory_allocated`).
"""

from __future__ import annotations

import contextlib
import os
import resource
import sys
from pathlib import Path

import torch

_CGROUP_FILES = (
    ("/sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"),
    ("/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)
"""Folder, limit, usage, and the part of the usage (memory.stat) that is cache and given back on demand."""


def host_memory_available() -> int:
    """Bytes of host memory that this process may still take."""
    available = _meminfo_available()
    for folder, limit_name, usage_name, cache_key in _CGROUP_FILES:
        limit, usage = _read_int(Path(folder, limit_name)), _read_int(Path(folder, usage_name))
        if limit is not None and usage is not None:
            cache = _stat_value(Path(folder, "memory.stat"), cache_key)
            available = min(available, max(0, limit - usage + cache))
    return available


class MemoryMeter:
    """Peaks of this process from the moment that the meter is made.

    On a CPU the device's share is what the resident set has grown by since then, so that the
    interpreter and its libraries, which no plan predicts, are not counted as the model's.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._kept_peak = 0
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        with contextlib.suppress(OSError):  # without it the mark includes what came before
            Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # reset the high-water mark
        self._baseline = _status_bytes("VmRSS") or self.peak_host_bytes()

    def peak_host_bytes(self) -> int:
        """Largest resident set."""
        peak = _status_bytes("VmHWM")
        if peak is not None:
            return peak
        usage = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return usage if sys.platform == "darwin" else usage * 1024

    def peak_device_bytes(self) -> int:
        """Largest sum of device allocations; on a CPU the growth of the resident set."""
        if self._device.type == "cuda":
            return max(self._kept_peak, torch.cuda.max_memory_allocated(self._device))
        return max(0, self.peak_host_bytes() - self._baseline)

    def keep_device_peak(self) -> None:
        """The allocator's own peak is about to begin anew: what it was stays part of this meter's."""
        self._kept_peak = self.peak_device_bytes()


def _status_bytes(key: str) -> int | None:
    """A size in /proc/self/status, or None where there is no such file."""
    with contextlib.suppress(OSError), open("/proc/self/status", encoding="ascii", errors="replace") as lines:
        for line in lines:
            if line.startswith(f"{key}:"):
                return int(line.split()[1]) * 1024
    return None


def _meminfo_available() -> int:
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            for line in lines:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass  # not Linux: all physical memory is the best that is known
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _stat_value(path: Path, key: str) -> int:
    with contextlib.suppress(OSError), open(path, encoding="ascii") as lines:
        for line in lines:
            name, _, value = line.partition(" ")
            if name == key:
                return int(value)
    return 0


def _read_int(path: Path) -> int | None:
    try:
        text = path.read_text(encoding="ascii").strip()
    except OSError:
        return None
    return int(text) if text.isdecimal() else None

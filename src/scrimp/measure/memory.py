"""Memory that is free and memory that was used, on the host and on the device.

The host's limit is the smaller of the free memory and the control group's (a container that
exceeds its group is killed without a message, so the group counts). Peaks are high-water
marks of the process: on the host the resident set, on CUDA the allocator's `max_memory_allocated`.
"""

from __future__ import annotations

import os
import resource
import sys
from pathlib import Path

import torch

_CGROUP_LIMITS = (
    (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")),
    (
        Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
        Path("/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ),
)


def host_memory_available() -> int:
    """Bytes of host memory that this process may still take."""
    available = _meminfo_available()
    for limit_file, usage_file in _CGROUP_LIMITS:
        limit, usage = _read_int(limit_file), _read_int(usage_file)
        if limit is not None and usage is not None:
            available = min(available, max(0, limit - usage))
    return available


def peak_host_bytes() -> int:
    """Largest resident set of this process so far."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def peak_device_bytes(device: torch.device) -> int:
    """Largest sum of device allocations so far; on a CPU the process's resident set."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return peak_host_bytes()


def _meminfo_available() -> int:
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            for line in lines:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass  # not Linux: all physical memory is the best that is known
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _read_int(path: Path) -> int | None:
    try:
        text = path.read_text(encoding="ascii").strip()
    except OSError:
        return None
    return int(text) if text.isdecimal() else None

"""Memory that torch's allocator gave, by torch's own profiler."""

from __future__ import annotations

from collections.abc import Callable

import torch


def allocator_peak(run: Callable[[], object]) -> int:
    """Most bytes that the CPU's allocator held at once, above what it held before."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        run()
    live = peak = 0
    for event in profile.profiler.kineto_results.events():
        if event.name() == "[memory]":
            live += event.nbytes()
            peak = max(peak, live)
    return peak

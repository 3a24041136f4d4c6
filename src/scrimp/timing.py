"""Seconds of a call by the wall clock, the work that it leaves to the device counted.

Method   The device is waited for before a call and after it. `best` is the fastest of some rounds after one that does
         not count: compilation, first touches and disturbances only ever add to a time.
Limits   The cache is warm, and launches count: `scrimp.profiler.stopwatch` is for GEMMs against each other.
Checked  tests/test_timing.py
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch


def now(device: torch.device) -> float:
    """Seconds of the wall clock, once this device has nothing left to do; the current one may be another."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def seconds_of(call: Callable[[], object], device: torch.device, *, in_a_row: int = 1) -> float:
    """Seconds of one call.

    Args:
        in_a_row: calls that the device is waited for together, so that it works while the next is launched.
    """
    began = now(device)
    for _ in range(in_a_row):
        call()
    return (now(device) - began) / in_a_row


def best(
    call: Callable[[], object],
    device: torch.device,
    *,
    rounds: int = 3,
    least_s: float = 0.0,
    in_a_row: int = 1,
) -> float:
    """Seconds of one call, the fastest found.

    Args:
        rounds: at least so many.
        least_s: more of them, until so many seconds have passed.
        in_a_row: calls of a round.
    """
    call()
    until = now(device) + least_s
    found: list[float] = []
    while len(found) < rounds or time.perf_counter() < until:
        found.append(seconds_of(call, device, in_a_row=in_a_row))
    return min(found)

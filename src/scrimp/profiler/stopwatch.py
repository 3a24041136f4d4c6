"""Times some calls on a device against each other: from a cold cache, in rounds, no more of them than it takes.

Problem  A call that is repeated finds its operands where it left them, in the cache; in training other layers ran in
         between. On a GPU a call that is waited for is timed with its launch, which training hides. And a machine
         is faster now and slower then, which the difference of two times must not show.
Method   Every round makes every call once, beginning with another one each time. Before each a buffer larger than the
         cache is read (read, not written: lines that wait to be written back would be paid by the next call).
         CUDA: events around the call, which is queued behind a busy device for 1.5 times as long as it
         took to launch in the warm-up; a call that waits for the device in its middle pays for it. CPU: wall
         time. Rounds end early once the standard error of every median, 0.93 iqr / sqrt(n) for normal
         times (iqr: width of their middle half), is below 2 %.
Limits   The head start ends at 20 ms. A CPU's buffer ends at 512 MiB. Calls are timed one by one: a GPU that throttles
         under a sustained load is slower in training.
Checked  tests/profiler/test_stopwatch.py
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch

Work = Callable[[], object]
_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
_UNITS = {"K": 2**10, "M": 2**20, "G": 2**30}
_UNKNOWN_CACHE_BYTES, _MOST_HOST_BYTES = 64 * 2**20, 512 * 2**20
_MOST_HEAD_START_S, _PROBE_CYCLES = 0.02, 10_000_000
_FEWEST, _FEWEST_STEADY, _STEADY = 3, 5, 0.02
_IQR_OF_NORMAL = 1.349
"""In standard deviations."""
_ERROR_OF_MEDIAN = math.sqrt(math.pi / 2) / _IQR_OF_NORMAL


class Stopwatch:
    """Times calls on one device."""

    def __init__(
        self,
        device: torch.device,
        *,
        flush_bytes: int | None = None,
        now: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Allocate the buffer.

        Args:
            flush_bytes: size of the buffer; unset: by the device's last cache.
            now: the host's clock, in seconds.
        """
        self.device, self.now, self._is_cuda = device, now, device.type == "cuda"
        self._flush = torch.ones(max(1, (flush_bytes or _flush_bytes(device)) // 4), device=device)
        with self.at_device():
            self._cycles_per_s = self._clock_rate() if self._is_cuda else 0.0

    def at_device(self) -> AbstractContextManager[object]:
        """Inside, the device is the current one: events and kernels go to its stream."""
        return torch.cuda.device(self.device) if self._is_cuda else nullcontext()

    def rounds(
        self, calls: Mapping[str, Work], repeats: int, limit_s: float = math.inf
    ) -> dict[str, list[float]]:
        """Seconds of each call, one entry a round.

        Args:
            calls: by name.
            repeats: the most rounds.
            limit_s: seconds after which no round begins, warm-up counted; but three are always made, if
                `repeats` allows.
        """
        with self.at_device():
            return self._rounds(calls, repeats, self.now() + limit_s, limit_s / len(calls))

    def _rounds(
        self, calls: Mapping[str, Work], repeats: int, end: float, limit_s: float
    ) -> dict[str, list[float]]:
        host_s = {name: self._warm(call, limit_s) for name, call in calls.items()}
        seconds: dict[str, list[float]] = {name: [] for name in calls}
        names = list(calls)
        for number in range(repeats):
            is_late = number >= _FEWEST and self.now() > end
            if is_late or all(is_steady(values) for values in seconds.values()):
                break
            first = number % len(names)
            for name in names[first:] + names[:first]:
                seconds[name].append(self._once(calls[name], host_s[name]))
        return seconds

    def _warm(self, call: Work, limit_s: float) -> float:
        """Host seconds of the last of one or two calls: the first may compile."""
        for _ in range(2):
            self._wait()
            start = self.now()
            call()
            host_s = self.now() - start
            if host_s > limit_s / 4:
                break
        self._wait()
        return host_s

    def _once(self, call: Work, host_s: float) -> float:
        self._flush.sum()
        if not self._is_cuda:
            start = self.now()
            call()
            return self.now() - start
        start_event, end_event = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(int(min(1.5 * host_s + 5e-5, _MOST_HEAD_START_S) * self._cycles_per_s))
        start_event.record()
        call()
        end_event.record()
        end_event.synchronize()
        return float(start_event.elapsed_time(end_event)) / 1e3

    def _clock_rate(self) -> float:
        """Cycles of `torch.cuda._sleep` a second."""
        start_event, end_event = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(_PROBE_CYCLES)
        start_event.record()
        torch.cuda._sleep(_PROBE_CYCLES)
        end_event.record()
        end_event.synchronize()
        return _PROBE_CYCLES / (float(start_event.elapsed_time(end_event)) / 1e3)

    def _wait(self) -> None:
        if self._is_cuda:
            torch.cuda.synchronize(self.device)


def is_steady(seconds: list[float]) -> bool:
    """Whether the median of some times is known well enough; see the module."""
    if len(seconds) < _FEWEST_STEADY:
        return False
    standard_error = _ERROR_OF_MEDIAN * middle_half(seconds) / math.sqrt(len(seconds))
    return standard_error <= _STEADY * statistics.median(seconds)


def middle_half(seconds: list[float]) -> float:
    """Width of the middle half of some times; 0 of one alone."""
    if len(seconds) < 2:
        return 0.0
    first, _, third = statistics.quantiles(seconds, n=4, method="inclusive")
    return third - first


def _flush_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        cache: int = torch.cuda.get_device_properties(device).L2_cache_size
        return 4 * cache
    return min(2 * _last_cache_bytes(), _MOST_HOST_BYTES)


def _last_cache_bytes() -> int:
    """Bytes of the CPU's largest cache, as Linux reports it."""
    found = []
    for file in _CACHES.glob("index*/size"):
        try:
            text = file.read_text(encoding="ascii").strip()
        except (OSError, UnicodeDecodeError):
            continue
        number, unit = text.rstrip("KMG"), _UNITS.get(text[-1:], 1)
        if number.isdecimal():
            found.append(int(number) * unit)
    return max(found, default=_UNKNOWN_CACHE_BYTES)

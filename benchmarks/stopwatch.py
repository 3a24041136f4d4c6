"""Times contenders in turns, in rounds, each beside a control: for `gemm.py`.

Problem  A GPU changes its clock with heat, caches keep what the last call left, and a kernel that is waited for
         is timed with its launch. Two programs timed one after the other differ by all of that.
Method   Every round runs every contender once, beginning with another one each time; a contender's ratio is the
         median over rounds of (control / contender) within one round. On CUDA a call is timed by events around
         it. Before them a buffer larger than the cache is read (read, not written: lines that wait to
         be written back would be paid by the next call), and the device is kept busy for 1.5 times as long as the
         call took to launch in the warm-up, so that its launches are queued, as in training. A call
         that waits for the device in its middle pays for it. On a CPU: wall time, caches as they come.
Failures A contender that raises in the warm-up leaves the race with its reason; the control may not.
Limits   The head start ends at 20 ms.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

Work = Callable[[], object]
CONTROL = "bf16"
_FLUSH_BYTES, _MOST_HEAD_START_S = 512 * 2**20, 0.02
_PROBE_CYCLES = 10_000_000
_COPY_BYTES = 2 * 2**30


@dataclass(frozen=True)
class Race:
    """What the rounds showed; lists by contender, one entry a round."""

    seconds: dict[str, list[float]]
    host_s: dict[str, float]
    """Time until a call returned in the last warm-up: launching, and waiting if it waits."""
    failures: dict[str, str]

    def ratios(self, name: str, control: str = CONTROL) -> list[float]:
        """Speed over the control's, round by round."""
        pairs = zip(self.seconds[control], self.seconds[name], strict=True)
        return [theirs / ours for theirs, ours in pairs]


class Stopwatch:
    """Times calls on one device."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.is_cuda = device, device.type == "cuda"
        if self.is_cuda:
            cache: int = torch.cuda.get_device_properties(device).L2_cache_size
            size = max(_FLUSH_BYTES, 4 * cache)
            self._flush = torch.ones(size // 4, device=device)
            self._cycles_per_s = self._clock_rate()

    def race(self, contenders: Mapping[str, Work], warm_up: int, repeats: int) -> Race:
        """All contenders in turn, round after round."""
        host_s: dict[str, float] = {}
        failures: dict[str, str] = {}
        for name, work in contenders.items():
            try:
                host_s[name] = self._warm(work, warm_up)
            except Exception as failure:  # whatever a peer or a kernel throws is its result
                if name == CONTROL:
                    raise
                failures[name] = first_line(failure)
        running = list(host_s)
        seconds: dict[str, list[float]] = {name: [] for name in running}
        for number in range(repeats):
            for name in rotated(running, number):
                seconds[name].append(self.once(contenders[name], host_s[name]))
        return Race(seconds, host_s, failures)

    def once(self, work: Work, host_s: float = 0.0) -> float:
        """Seconds of one call."""
        if not self.is_cuda:
            start = time.perf_counter()
            work()
            return time.perf_counter() - start
        start_event, end_event = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._flush.sum()
        torch.cuda._sleep(int(min(1.5 * host_s + 5e-5, _MOST_HEAD_START_S) * self._cycles_per_s))
        start_event.record()
        work()
        end_event.record()
        end_event.synchronize()
        return float(start_event.elapsed_time(end_event)) / 1e3

    def copy_bandwidth(self) -> float:
        """Bytes read and written a second by a large copy: the best of nine."""
        size = _COPY_BYTES if self.is_cuda else _COPY_BYTES // 32
        source = torch.ones(size // 4, device=self.device)
        target = torch.empty_like(source)
        target.copy_(source)
        return 2 * size / min(self.once(lambda: target.copy_(source)) for _ in range(9))

    def _warm(self, work: Work, times: int) -> float:
        """Call it some times; host seconds of the last."""
        for _ in range(max(1, times)):
            self._wait()
            start = time.perf_counter()
            work()
            host_s = time.perf_counter() - start
        self._wait()
        return host_s

    def _wait(self) -> None:
        if self.is_cuda:
            torch.cuda.synchronize(self.device)

    def _clock_rate(self) -> float:
        """Cycles of `torch.cuda._sleep` a second."""
        start_event, end_event = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(_PROBE_CYCLES)
        start_event.record()
        torch.cuda._sleep(_PROBE_CYCLES)
        end_event.record()
        end_event.synchronize()
        return _PROBE_CYCLES / (float(start_event.elapsed_time(end_event)) / 1e3)


def rotated(names: list[str], by: int) -> list[str]:
    """The same in order, beginning elsewhere."""
    first = by % len(names)
    return names[first:] + names[:first]


def first_line(failure: BaseException) -> str:
    """What failed, in a line."""
    lines = str(failure).strip().splitlines()
    return f"{type(failure).__name__}: {lines[0][:200]}" if lines else type(failure).__name__


def summary(values: list[float]) -> tuple[float, float, float]:
    """Median, lowest and highest."""
    return statistics.median(values), min(values), max(values)

"""Between training, evaluation and generation: give the allocator's cache back only where the next phase needs it.

Problem  Each phase asks for blocks of other sizes. What the allocator keeps from the last one it cannot always reuse:
         reserved memory grows far above what is allocated, and a phase that fits by its account runs out of memory.
         Emptying the cache at every edge cures that and costs time: each later allocation asks the driver again.
Method   At the edge into a phase, from the allocator's own figures::

             slack = reserved - allocated                  kept for reuse
             need  = peak of the next phase - allocated    as planned, or as measured the last time
             free  = capacity - reserved - others          never asked for

         Release, if need > free + slack - split (split: slack inside blocks that are partly in use, which cannot be
         given back and serves only what fits into it), or if the last pass of this phase had to retry an
         allocation: then the cache was there, and its blocks did not fit. Three releases in a row that gave back
         less than 2 % of the capacity are fragmentation inside blocks, which no release cures: said once.
         A phase ends where the next one is switched to, so that nothing is to be undone when an exception flies; within
         a phase switching to it again costs a comparison of words.
Limits   A policy for torch's caching allocator, read at edges alone: what a phase needs the first time is known only
         where it was planned. A CPU has no such cache; its heap is told of the edges.
Source   Zhang et al., arXiv 2410.15651 (release at the edges: -25 % memory, +2 % time), as a measured policy:
         others found it both needless and necessary.
Checked  tests/runtime/memory/test_cache.py, against a simulated allocator, and torch's own on a GPU;
         benchmarks/phases.py compares the policy with others
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import torch

USELESS_SHARE = 0.02
"""Share of the capacity: a release that gives back less does not help."""
USELESS_RELEASES = 3
"""In a row, after which fragmentation is reported."""


@dataclass(frozen=True)
class CacheReading:
    """What the allocator says; bytes."""

    allocated: int
    reserved: int
    split: int
    """Free parts of blocks that are partly in use."""
    peak: int
    """Most allocated since the last `reset_peak`."""
    retries: int
    """Allocations that succeeded only after the cache was emptied, since the process began."""
    capacity: int
    others: int
    """In use on the device, but by no tensor of this allocator: contexts, libraries, other processes."""


class Cache(Protocol):
    """A caching allocator."""

    def read(self) -> CacheReading:
        """Its figures now."""

    def reset_peak(self) -> None:
        """Begin a new peak."""

    def release(self) -> None:
        """Give unused blocks back."""


class Heap(Protocol):
    """The memory of the process, which holds the tensors of a CPU."""

    def at_edge(self, phase: str) -> None:
        """A phase is about to begin."""


class CudaCache:
    """torch's allocator of one device."""

    def __init__(self, device: torch.device) -> None:
        # With its number: some of the allocator's functions take no device without one.
        index = torch.cuda.current_device() if device.index is None else device.index
        self._device = torch.device("cuda", index)

    def read(self) -> CacheReading:
        """Its figures now; the driver says what is free, a fraction that the process was given is the capacity."""
        free, total = torch.cuda.mem_get_info(self._device)
        stats = torch.cuda.memory_stats(self._device)
        reserved = stats["reserved_bytes.all.current"]
        others = max(0, total - free - reserved)
        allowed = int(torch.cuda.get_per_process_memory_fraction(self._device) * total)
        return CacheReading(
            allocated=stats["allocated_bytes.all.current"],
            reserved=reserved,
            split=stats["inactive_split_bytes.all.current"],
            peak=stats["allocated_bytes.all.peak"],
            retries=stats["num_alloc_retries"],
            capacity=min(total, allowed + others),
            others=others,
        )

    def reset_peak(self) -> None:
        """Begin a new peak."""
        torch.cuda.reset_peak_memory_stats(self._device)

    def release(self) -> None:
        """Give unused blocks back to the driver."""
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()


@dataclass
class _Phase:
    peak: int = 0
    """Planned, or the highest that was measured."""
    had_retries: bool = False
    """In its last pass."""


@dataclass
class PhaseEdges:
    """Watches the phases of one process, which follow each other.

    Args:
        cache: the allocator; None where there is none.
        report: told of every release and of fragmentation, in a sentence.
        heap: told of each phase before it begins; None where nothing lies in it.
    """

    cache: Cache | None
    report: Callable[[str], None]
    heap: Heap | None = None
    released: list[int] = field(default_factory=list)
    """Bytes that each release gave back."""
    current: str | None = None
    """The phase that is running; None before the first."""
    _phases: dict[str, _Phase] = field(default_factory=dict)
    _retries: int = 0
    """When the running phase began."""
    _useless: int = 0

    def plan(self, phase: str, peak: int) -> None:
        """Tell the planned peak of a phase. What was measured of it was under another plan, and is forgotten.

        Args:
            peak: bytes of this allocator; 0 where it is not known.
        """
        self._phases[phase] = _Phase(peak)
        if self.cache is not None and phase == self.current:
            self._begin(self.cache, self.cache.read())

    def switch(self, phase: str) -> None:
        """The next phase begins, and the one before is over; nothing, where it is the one that is running."""
        if phase == self.current:
            return
        left, self.current = self.current, phase
        if self.heap is not None:
            self.heap.at_edge(phase)
        if self.cache is None:
            return
        reading = self.cache.read()
        if left is not None:
            self._end(left, reading)
        known = self._phases.setdefault(phase, _Phase())
        if must_release(reading, known.peak, known.had_retries):
            self._release(self.cache, reading, phase)
        self._begin(self.cache, reading)

    def _begin(self, cache: Cache, reading: CacheReading) -> None:
        cache.reset_peak()
        self._retries = reading.retries

    def _end(self, phase: str, reading: CacheReading) -> None:
        known = self._phases.setdefault(phase, _Phase())
        known.peak = max(known.peak, reading.peak)
        known.had_retries = reading.retries > self._retries

    def _release(self, cache: Cache, before: CacheReading, phase: str) -> None:
        cache.release()
        given = before.reserved - cache.read().reserved
        self.released.append(given)
        self.report(f"{given:,} bytes of cached memory were given back before {phase}")
        self._useless = self._useless + 1 if given < USELESS_SHARE * before.capacity else 0
        if self._useless == USELESS_RELEASES:
            self.report(
                f"memory is fragmented: {USELESS_RELEASES} releases in a row gave back almost nothing, while "
                f"{before.reserved - before.allocated:,} reserved bytes are in no use; start with "
                "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
            )


def must_release(reading: CacheReading, next_peak: int, had_retries: bool) -> bool:
    """Whether the next phase needs the cache to be given back.

    Args:
        next_peak: most that it will have allocated; 0 where that is not known.
        had_retries: its last pass found no room at once.
    """
    slack = reading.reserved - reading.allocated
    need = next_peak - reading.allocated
    free = reading.capacity - reading.reserved - reading.others
    return slack > 0 and (had_retries or need > free + slack - reading.split)

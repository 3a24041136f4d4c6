"""Memory of a simulated GPU that knows who touched each byte: it finds races, bad addresses and what nobody wrote.

Problem  Threads that run in lockstep never see the harm of a forgotten barrier: every write is in memory before the
         next instruction reads it. On a GPU it may not be.
Method   For each byte the last writer and the readers since the last barrier are kept. It is a race if a thread

             reads a byte that another has written, or
             writes a byte that another has written or read,

         with no barrier between: of the block, or of the warp where both are of one. What comes later in the
         program makes no difference, so the order in which threads really run need not be tried.
Limits   In global memory there is no barrier of a block, for blocks do not wait for each other. Threads that write the
         same number to a byte in the same instruction do not race, for compilers do this where threads hold
         copies, nor do warps that did so and then read it; in different instructions they do. Atomic operations race
         with plain ones, not with each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

Array: TypeAlias = NDArray[Any]
"""One number a thread, or bytes of memory."""

NOBODY, SEVERAL, ATOMICS, COPIES, WARPS = -1, -2, -3, -4, -10
"""Who touched a byte, beside a thread's number; WARPS less a warp's number: one of it, before its last barrier; COPIES:
several, before their last one, each warp of which has its own number there."""
WARP = 32
POISON = 0xA5
"""What memory and registers hold before they are written."""
FIRST_ADDRESS = 1 << 20
GAP = 512


class AccessError(Exception):
    """An address outside all buffers, not aligned, or never written."""


class Memory:
    """Bytes from FIRST_ADDRESS (global) or 0 (shared) on, in one space, or in one of equal size for each block."""

    def __init__(self, size: int, spaces: int = 1, *, first: int = 0) -> None:
        self.size, self.first = size, first
        self.bytes = np.full(size * spaces, POISON, np.uint8)
        self.is_usable = np.ones(size * spaces, bool)
        self.is_known = np.zeros(size * spaces, bool)
        self.is_written = np.zeros(size * spaces, bool)
        self.races: list[str] = []
        self.writer = np.full(size * spaces, NOBODY, np.int32)
        self.reader = np.full(size * spaces, NOBODY, np.int32)
        self.warps = np.zeros(size * spaces, np.uint64)
        """Which warps of a block wrote a byte in the last instruction that did, a bit each."""

    def barrier(self) -> None:
        """All threads of each block have met: what was done before is seen by all."""
        self.writer.fill(NOBODY)
        self.reader.fill(NOBODY)

    def warp_barrier(self) -> None:
        """The threads of each warp have met."""
        for owners in (self.writer, self.reader):
            is_thread = owners >= 0
            owners[is_thread] = WARPS - owners[is_thread] // WARP
        self.writer[self.writer == SEVERAL] = COPIES

    def read(self, addresses: Array, spaces: Array, threads: Array, size: int, why: str) -> Array:
        """uint8 [threads, size]."""
        places = self._places(addresses, spaces, size, why)
        if not self.is_known[places].all():
            raise AccessError(f"{why} reads what nobody wrote")
        who = np.broadcast_to(threads[:, None], places.shape)
        self._race(~self._has_written(places, who), f"{why} reads what another thread wrote")
        self._own(self.reader, places, np.where(self._is_own(self.reader[places], who), who, SEVERAL))
        return self.bytes[places]

    def write(self, addresses: Array, spaces: Array, threads: Array, values: Array, why: str) -> None:
        """Values are uint8 [threads, size]."""
        places = self._places(addresses, spaces, values.shape[1], why)
        who = np.broadcast_to(threads[:, None], places.shape)
        self._race(~self._has_written(places, who), f"{why} writes what another thread wrote")
        self._race(~self._is_own(self.reader[places], who), f"{why} writes what another thread read")
        self.bytes[places] = values
        self._race(self.bytes[places] != values, f"{why} writes different numbers to a byte")
        self._own(self.writer, places, who)
        self.warps[places] = 0
        np.bitwise_or.at(self.warps, places, _bit_of_warp(who))
        self.is_known[places] = True
        self.is_written[places] = True

    def maximum(self, addresses: Array, values: Array, why: str) -> None:
        """Each value is taken into the one at its address, all at once."""
        places = self._places(addresses, np.zeros_like(addresses, dtype=np.int64), values.itemsize, why)
        is_alone = np.isin(self.writer[places], (NOBODY, ATOMICS)) & (self.reader[places] == NOBODY)
        self._race(~is_alone, f"{why} meets plain reads or writes")
        if not self.is_known[places].all():
            raise AccessError(f"{why} adds to what nobody wrote")
        np.maximum.at(self.bytes.view(values.dtype), places[:, 0] // values.itemsize, values)
        self.writer[places] = ATOMICS
        self.is_written[places] = True

    def _places(self, addresses: Array, spaces: Array, size: int, why: str) -> Array:
        """Index of each byte, [threads, size]."""
        offsets = addresses.astype(np.int64) - self.first
        is_inside = (offsets >= 0) & (offsets + size <= self.size)
        if not is_inside.all():
            raise AccessError(f"{why} leaves memory at {addresses[~is_inside][0]:#x}")
        if (offsets % size).any():
            raise AccessError(f"{why} is not aligned to {size} bytes")
        places: Array = (offsets + spaces * self.size)[:, None] + np.arange(size)
        if not self.is_usable[places].all():
            raise AccessError(f"{why} touches memory between the buffers")
        return places

    def _own(self, owners: Array, places: Array, who: Array) -> None:
        """Note who touches each byte now; a place may be there several times."""
        owners[places] = who
        owners[places[owners[places] != who]] = SEVERAL

    def _has_written(self, places: Array, threads: Array) -> Array:
        """Whether nobody else has, or others only what a thread's warp wrote too."""
        is_copy = (self.writer[places] == COPIES) & ((self.warps[places] & _bit_of_warp(threads)) > 0)
        has_written: Array = is_copy | self._is_own(self.writer[places], threads)
        return has_written

    def _is_own(self, owners: Array, threads: Array) -> Array:
        is_own: Array = (owners == NOBODY) | (owners == threads) | (owners == WARPS - threads // WARP)
        return is_own

    def _race(self, is_race: Array, what: str) -> None:
        if is_race.any():
            self.races.append(f"{what} ({int(is_race.sum())} bytes)")


def _bit_of_warp(threads: Array) -> Array:
    """A block has 32 warps at most."""
    return np.left_shift(np.uint64(1), (threads // WARP % 32).astype(np.uint64))


class GlobalMemory(Memory):
    """Buffers at addresses that are multiples of 512, and between them bytes that no one may touch."""

    def __init__(self, buffers: Sequence[Array]) -> None:
        """Each buffer is an array of bytes."""
        starts, end = [], 0
        for buffer in buffers:
            starts.append(end)
            end += -(-len(buffer) // GAP) * GAP + GAP
        super().__init__(end, first=FIRST_ADDRESS)
        self.is_usable.fill(False)
        self.is_known.fill(True)
        self.slices = [
            slice(start, start + len(buffer)) for start, buffer in zip(starts, buffers, strict=True)
        ]
        self.addresses = [FIRST_ADDRESS + start for start in starts]
        for place, buffer in zip(self.slices, buffers, strict=True):
            self.is_usable[place] = True
            self.bytes[place] = buffer

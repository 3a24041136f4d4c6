"""Host memory of a fixed size, taken once at the start, in which tensors of any size get places.

Problem  Host memory that is taken while a run goes on fails in the middle of a step; memory that a GPU copies to at
         full speed must be pinned, which is slow in small pieces, and torch's pinned allocator rounds every
         piece up to a power of two.
Method   A few large slabs of exact size, all pages touched (or pinned by ``cudaHostRegister``) at once: what the
         budget says is taken before step 0, or refused by name. Inside, places of any size by best fit: the
         smallest gap that is large enough, the lowest of equals; neighbouring gaps become one when a place is freed.
         There are no equal slots, which run dry while much memory is left.

Limits   Sizes are rounded up to 512 bytes. A place lies within one slab. Steps that ask for the same sizes in
         the same order get the same places, but another order may leave gaps that are too small.
         Places know nothing of copies: free one only when no copy reads or writes it any more (`link.Ticket`).
Checked  tests/runtime/memory/test_arena.py: against brute force over every byte. Pinning was not run without a GPU.
"""

from __future__ import annotations

import bisect
import contextlib
import math
import mmap
import resource
import threading
import weakref
from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor

from scrimp.errors import DeviceError, PlanError

ALIGNMENT = 512
"""Bytes; the alignment of torch's own CUDA allocations, so that a copy may be viewed as what the original was."""
SLAB_BYTES = 64 * 2**30
_LESS = (
    "keep less on the host: lower budget.host_memory, or memory.weights, memory.gradients and memory.optimizer where "
    "they are set, or choose memory.activations without +offload"
)


class ArenaTooSmallError(PlanError):
    """The arena has no room for what a step wants to keep in it."""


class HostBudgetError(PlanError):
    """An arena larger than what the host and the control group have free."""


class PinningRefusedError(DeviceError):
    """The system does not let this process pin so much memory."""


class Gaps:
    """The free ranges of one slab, by best fit."""

    def __init__(self, size: int) -> None:
        self._starts, self._sizes = [0], [size]

    @property
    def largest(self) -> int:
        """Size of the largest gap."""
        return max(self._sizes, default=0)

    def best(self, size: int) -> int | None:
        """Size of the smallest gap that is large enough."""
        return min((gap for gap in self._sizes if gap >= size), default=None)

    def take(self, size: int) -> int:
        """Start of a range of `size` at the beginning of the best gap, which `best` has found."""
        gap = self.best(size)
        assert gap is not None
        index = self._sizes.index(gap)
        start = self._starts[index]
        if gap == size:
            del self._starts[index], self._sizes[index]
        else:
            self._starts[index], self._sizes[index] = start + size, gap - size
        return start

    def give(self, start: int, size: int) -> None:
        """Free a range and merge it with its neighbours."""
        index = bisect.bisect(self._starts, start)
        self._starts.insert(index, start)
        self._sizes.insert(index, size)
        for left in (index, index - 1):
            right = left + 1
            if left >= 0 and right < len(self._starts):
                assert self._starts[left] + self._sizes[left] <= self._starts[right], "freed twice"
                if self._starts[left] + self._sizes[left] == self._starts[right]:
                    self._sizes[left] += self._sizes[right]
                    del self._starts[right], self._sizes[right]


class Place:
    """A range of an arena's bytes, from `HostArena.take` to `free`."""

    __slots__ = ("_arena", "_slab", "_start", "nbytes")

    def __init__(self, arena: HostArena, slab: int, start: int, nbytes: int) -> None:
        self._arena: HostArena | None = arena
        self._slab, self._start, self.nbytes = slab, start, nbytes

    @property
    def is_free(self) -> bool:
        """Whether it was given back."""
        return self._arena is None

    def view(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Its first bytes as a contiguous tensor, no copy.

        Raises:
            RuntimeError: it was freed, or is smaller.
        """
        nbytes = math.prod(shape) * dtype.itemsize
        if self._arena is None or nbytes > self.nbytes:
            state = "was freed" if self._arena is None else f"holds {self.nbytes} bytes, not {nbytes}"
            raise RuntimeError(f"a place in the arena {state}")
        return self._arena.bytes_of(self._slab, self._start, nbytes).view(dtype).view(*shape)

    def free(self) -> None:
        """Give it back; a second time is a mistake of the caller.

        Raises:
            RuntimeError: it was freed before.
        """
        arena, self._arena = self._arena, None
        if arena is None:
            raise RuntimeError("a place in the arena was freed twice")
        arena.give(self._slab, self._start, self.nbytes)


class HostArena:
    """Host memory of a fixed number of bytes.

    Args:
        nbytes: rounded down to whole 512 bytes.
        device: whose copies go here; of a CUDA device the memory is pinned.
        available: bytes that host and control group have free (`scrimp.host_memory`);
            None: not checked.
        pins: whether to pin; None: where the device is CUDA. Copies to memory that is not pinned are slower
            and make the host wait.
        slab_bytes: at most so many in one piece.
        poisons: fill places with 0xFF when they are freed, a NaN in every float format: to find ordering errors.

    Raises:
        HostBudgetError: more than is available, or than the system gives.
        PinningRefusedError: the system does not pin so much.
    """

    def __init__(
        self,
        nbytes: int,
        device: torch.device,
        *,
        available: int | None = None,
        pins: bool | None = None,
        slab_bytes: int = SLAB_BYTES,
        poisons: bool = False,
    ) -> None:
        if nbytes < ALIGNMENT or slab_bytes < ALIGNMENT:
            raise PlanError(
                "an arena needs memory", got=f"{nbytes:,} bytes", expected=f"at least {ALIGNMENT}"
            )
        if available is not None and nbytes > available:
            raise HostBudgetError(
                "the arena is larger than the memory that host and control group have free",
                got=f"{nbytes:,} bytes",
                expected=f"at most {available:,}",
                do=_LESS,
            )
        self._poisons = poisons
        self.is_pinned = device.type == "cuda" if pins is None else pins
        self._slabs: list[Tensor] = []
        self._pinned: list[Tensor] = []
        self._finalizer = weakref.finalize(self, _release, self._slabs, self._pinned, device)
        self._acquire(_slab_sizes(nbytes, slab_bytes), device)
        self._gaps = [Gaps(len(slab)) for slab in self._slabs]
        self._lock = threading.Lock()
        self._returned: deque[tuple[int, int, int]] = deque()
        self._in_use = 0
        self.capacity = sum(len(slab) for slab in self._slabs)
        """Bytes in all."""
        self.peak = 0
        """Largest `in_use` since the start or `reset_peak`."""

    @property
    def in_use(self) -> int:
        """Bytes of all places, each rounded up to the alignment."""
        with self._lock:
            self._merge_returned()
            return self._in_use

    @property
    def largest_gap(self) -> int:
        """Bytes of the largest place that could be taken now."""
        with self._lock:
            self._merge_returned()
            return max(gaps.largest for gaps in self._gaps)

    def take(self, nbytes: int) -> Place:
        """A place of so many bytes, aligned to 512; its content is left over from before.

        Raises:
            ArenaTooSmallError: no gap is large enough; nothing has changed.
        """
        size = rounded(nbytes)
        with self._lock:
            self._merge_returned()
            fits = [(gap, i) for i, gaps in enumerate(self._gaps) if (gap := gaps.best(size)) is not None]
            if fits:
                slab = min(fits)[1]
                start = self._gaps[slab].take(size)
                self._in_use += size
                self.peak = max(self.peak, self._in_use)
                return Place(self, slab, start, nbytes)
        raise self._too_small(size)

    def _too_small(self, size: int) -> ArenaTooSmallError:
        """With the capacity that would have been enough: for sure, where gaps are the trouble."""
        in_use = self.in_use
        needed = (in_use if size > self.capacity - in_use else self.capacity) + size
        return ArenaTooSmallError(
            "the arena in host memory is too small",
            got=f"{size:,} bytes wanted, largest gap {self.largest_gap:,}, in use {in_use:,} of {self.capacity:,}",
            do=f"plan {needed:,} bytes of host memory or more, or offload less",
        )

    def give(self, slab: int, start: int, nbytes: int) -> None:
        """Take a range back; for `Place.free`."""
        size = rounded(nbytes)
        if self._poisons:
            self._slabs[slab][start : start + size].fill_(0xFF)
        self._returned.append((slab, start, size))
        # The garbage collector may free a place while this very thread is inside `take`: then the next one merges.
        if self._lock.acquire(blocking=False):
            try:
                self._merge_returned()
            finally:
                self._lock.release()

    def _merge_returned(self) -> None:
        while self._returned:
            slab, start, size = self._returned.popleft()
            self._gaps[slab].give(start, size)
            self._in_use -= size

    def bytes_of(self, slab: int, start: int, nbytes: int) -> Tensor:
        """A range as uint8, no copy; for `Place.view`."""
        return self._slabs[slab][start : start + nbytes]

    def owns(self, tensor: Tensor) -> bool:
        """Whether a tensor's memory is the arena's."""
        storage = tensor.untyped_storage().data_ptr()
        return any(slab.untyped_storage().data_ptr() == storage for slab in self._slabs)

    def reset_peak(self) -> None:
        """Measure the peak from now on."""
        self.peak = self.in_use

    def close(self) -> None:
        """Give all memory back to the system; places and views of it must not be used any more."""
        self._finalizer()
        self._gaps, self.capacity, self._in_use = [Gaps(0)], 0, 0

    def _acquire(self, sizes: list[int], device: torch.device) -> None:
        try:
            for size in sizes:
                self._slabs.append(_allocate(size))
                if self.is_pinned:
                    _pin(self._slabs[-1], sum(sizes), device)
                    self._pinned.append(self._slabs[-1])
                else:
                    self._slabs[-1].zero_()  # pages exist only once they are touched
        except BaseException:
            self._finalizer()  # memory is unpinned before it is freed, also when a later slab is refused
            raise


def rounded(nbytes: int) -> int:
    """Bytes that a place of so many takes."""
    return max(1, -(-nbytes // ALIGNMENT)) * ALIGNMENT


def _slab_sizes(nbytes: int, slab_bytes: int) -> list[int]:
    """Sizes of the slabs, as equal as the alignment allows, so that no slab is a remnant."""
    units, most = nbytes // ALIGNMENT, slab_bytes // ALIGNMENT
    pieces = -(-units // most)
    return [(units // pieces + (i < units % pieces)) * ALIGNMENT for i in range(pieces)]


def _allocate(size: int) -> Tensor:
    """Bytes that begin at a page, as pinning wants; so does their storage, by which torch tells what is pinned."""
    try:
        pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as error:
        raise HostBudgetError(
            "the system gives no memory for the arena",
            got=f"{size:,} bytes refused",
            do=_LESS,
        ) from error
    return torch.frombuffer(pages, dtype=torch.uint8)


def _pin(slab: Tensor, total: int, device: torch.device) -> None:
    with torch.cuda.device(device):
        code = int(torch.cuda.cudart().cudaHostRegister(slab.data_ptr(), len(slab), 0))
        if code == 0 and slab.is_pinned():
            return
        with contextlib.suppress(RuntimeError, AssertionError):
            torch.zeros(1, device=device)  # the next launch reports the refusal once more: not to the user's
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    raise PinningRefusedError(
        "the system refused to pin the arena's memory",
        got=f"{len(slab):,} of {total:,} bytes: cudaHostRegister returned {code}"
        + (" (cudaErrorMemoryAllocation)" if code == 2 else ""),
        expected=f"0; RLIMIT_MEMLOCK is {_limit(soft)} (hard {_limit(hard)})",
        do=f"raise `ulimit -l` (docker: --ulimit memlock=-1), or {_LESS}",
    )


def _limit(nbytes: int) -> str:
    return "unlimited" if nbytes == resource.RLIM_INFINITY else f"{nbytes:,} bytes"


def _release(slabs: list[Tensor], pinned: list[Tensor], device: torch.device) -> None:
    with contextlib.suppress(RuntimeError):  # at exit CUDA may be gone, and the pins with it
        if pinned:
            torch.cuda.synchronize(device)  # copies may still run
        for slab in pinned:
            torch.cuda.cudart().cudaHostUnregister(slab.data_ptr())
    pinned.clear()
    slabs.clear()

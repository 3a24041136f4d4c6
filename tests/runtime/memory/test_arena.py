"""The arena gives every byte to at most one place, and says no by name."""

from __future__ import annotations

import contextlib
import gc
import subprocess
import sys
import threading

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from property_tests import examples

from scrimp.errors import PlanError
from scrimp.runtime.memory import ArenaTooSmallError, HostArena, HostBudgetError, PinningRefusedError, Place
from scrimp.runtime.memory import arena as arena_module
from scrimp.runtime.memory.arena import ALIGNMENT

CPU = torch.device("cpu")
UNIT = ALIGNMENT


def fill(place: Place, value: int) -> None:
    place.view((place.nbytes,), torch.uint8).fill_(value)


# ---- places


@examples(60)
@given(
    steps=st.lists(st.tuples(st.booleans(), st.integers(0, 9 * UNIT)), max_size=40),
    num_units=st.integers(4, 24),
    slab_units=st.integers(4, 24),
)
def test_places_are_best_fits_among_the_bytes_that_brute_force_finds_free(
    steps, num_units, slab_units
) -> None:
    arena = HostArena(num_units * UNIT, CPU, slab_bytes=slab_units * UNIT)
    slabs = [[False] * (len(slab) // UNIT) for slab in arena._slabs]
    assert sum(map(len, slabs)) == num_units
    held: list[tuple[Place, int, range]] = []
    peak = 0
    for number, (takes, amount) in enumerate(steps):
        if not takes and held:
            place, value, units = held.pop(amount % len(held))
            assert (place.view((place.nbytes,), torch.uint8) == value).all()
            for unit in units:
                slabs[place._slab][unit] = False
            place.free()
        elif takes:
            units_needed = max(1, -(-amount // UNIT))
            fitting = [gap for gap in gaps_of(slabs) if len(gap[1]) >= units_needed]
            if not fitting:
                with pytest.raises(ArenaTooSmallError):
                    arena.take(amount)
                continue
            place = arena.take(amount)
            start = place._start // UNIT
            gap = next(gap for gap in fitting if gap[0] == place._slab and gap[1].start == start)
            assert len(gap[1]) == min(len(candidate[1]) for candidate in fitting)
            taken = range(start, start + units_needed)
            for unit in taken:
                slabs[place._slab][unit] = True
            fill(place, number % 255)
            held.append((place, number % 255, taken))
        used = UNIT * sum(map(sum, slabs))
        peak = max(peak, used)
        assert (arena.in_use, arena.peak) == (used, peak)
        assert arena.largest_gap == UNIT * max((len(gap[1]) for gap in gaps_of(slabs)), default=0)


def gaps_of(slabs: list[list[bool]]) -> list[tuple[int, range]]:
    """Maximal runs of free units, slab by slab."""
    found = []
    for number, slab in enumerate(slabs):
        start = 0
        for unit, is_used in enumerate([*slab, True]):
            if is_used:
                if unit > start:
                    found.append((number, range(start, unit)))
                start = unit + 1
    return found


def test_a_view_has_the_types_alignment_and_shares_the_bytes() -> None:
    arena = HostArena(64 * UNIT, CPU)
    arena.take(3)
    place = arena.take(24)
    view = place.view((2, 3), torch.float32)
    assert view.data_ptr() % ALIGNMENT == 0
    view.copy_(torch.arange(6.0).view(2, 3))
    assert torch.equal(place.view((6,), torch.float32), torch.arange(6.0))
    assert arena.owns(view)
    assert not arena.owns(torch.empty(6))
    with pytest.raises(RuntimeError, match="holds 24 bytes, not 28"):
        place.view((7,), torch.float32)


GROWTH = """
import resource, torch
from scrimp.runtime.memory import HostArena

def resident():
    with open("/proc/self/statm", encoding="ascii") as statm:
        return int(statm.read().split()[1]) * resource.getpagesize()

HostArena(2**20, torch.device("cpu")).close()  # whatever is loaded when it is first used
before = resident()
arena = HostArena(32 * 2**20, torch.device("cpu"), slab_bytes=11 * 2**20)
print(resident() - before)
arena.close()
print(resident() - before)
"""


@pytest.mark.slow
def test_the_memory_is_there_from_the_start_to_the_byte() -> None:
    arena = HostArena(32 * 2**20, CPU, slab_bytes=11 * 2**20)
    assert [len(slab) for slab in arena._slabs] == [11184640 + 512, 11184640, 11184640]
    assert arena.capacity == 32 * 2**20
    assert all(slab.data_ptr() % 4096 == 0 for slab in arena._slabs)
    # A process of its own: in this one the allocator may have such pieces left from other tests.
    run = subprocess.run([sys.executable, "-c", GROWTH], capture_output=True, text=True, check=True)
    taken, left = map(int, run.stdout.split())
    assert taken == pytest.approx(32 * 2**20, rel=0.02)
    assert left < 2**20


def test_freed_places_are_no_longer_usable() -> None:
    arena = HostArena(4 * UNIT, CPU, poisons=True)
    place = arena.take(16)
    view = place.view((4,), torch.float32).zero_()
    place.free()
    assert place.is_free
    assert view.isnan().all()
    with pytest.raises(RuntimeError, match="was freed"):
        place.view((1,), torch.uint8)
    with pytest.raises(RuntimeError, match="freed twice"):
        place.free()


def test_a_place_may_be_freed_while_the_same_thread_is_inside_the_arena() -> None:
    """As the garbage collector does."""
    arena = HostArena(4 * UNIT, CPU)
    place = arena.take(4 * UNIT)
    with arena._lock:
        place.free()
        assert arena._in_use == 4 * UNIT
    assert arena.take(4 * UNIT).nbytes == 4 * UNIT


def test_threads_never_share_a_byte() -> None:
    arena = HostArena(64 * UNIT, CPU)
    mixed: list[int] = []

    def work(value: int) -> None:
        for turn in range(200):
            place = arena.take((1 + (turn * value) % 12) * UNIT)
            fill(place, value)
            if not (place.view((place.nbytes,), torch.uint8) == value).all():
                mixed.append(value)
            place.free()

    threads = [threading.Thread(target=work, args=(value,)) for value in (3, 5, 7)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not mixed
    assert (arena.in_use, arena.largest_gap) == (0, 64 * UNIT)


# ---- refusals


def test_a_full_arena_says_how_much_would_do_and_that_much_does() -> None:
    arena = HostArena(4 * UNIT, CPU)
    arena.take(3 * UNIT)
    with pytest.raises(ArenaTooSmallError, match=r"largest gap 512, in use 1,536 of 2,048.*plan 2,560 bytes"):
        arena.take(2 * UNIT - 1)
    assert (arena.in_use, arena.peak) == (3 * UNIT, 3 * UNIT)
    larger = HostArena(5 * UNIT, CPU)
    larger.take(3 * UNIT)
    larger.take(2 * UNIT - 1)


def test_where_gaps_are_the_trouble_the_advice_counts_them() -> None:
    arena = HostArena(4 * UNIT, CPU)
    places = [arena.take(UNIT) for _ in range(4)]
    places[0].free()
    places[2].free()
    with pytest.raises(ArenaTooSmallError, match=r"largest gap 512, in use 1,024 of 2,048.*plan 3,072 bytes"):
        arena.take(2 * UNIT)


def test_more_than_is_available_is_refused_before_any_memory_is_taken() -> None:
    with pytest.raises(HostBudgetError, match=r"got 1,000,000,000,000,000 bytes, expected at most 4,096"):
        HostArena(10**15, CPU, available=4096)
    assert HostArena(4096, CPU, available=4096).capacity == 4096


def test_more_than_the_system_gives_is_refused_by_name() -> None:
    with pytest.raises(HostBudgetError, match="the system gives no memory"):
        HostArena(2**60, CPU, slab_bytes=2**60)


@pytest.mark.parametrize("sizes", [(0, 4096), (-1, 4096), (511, 4096), (4096, 100)])
def test_an_arena_of_nothing_is_refused(sizes: tuple[int, int]) -> None:
    with pytest.raises(PlanError, match="needs memory"):
        HostArena(sizes[0], CPU, slab_bytes=sizes[1])


# ---- pinning: the calls and what follows a refusal, with the CUDA runtime replaced where there is none


class Runtime:
    """cudaHostRegister that refuses after so many calls."""

    def __init__(self, grants: int) -> None:
        self.grants, self.pinned = grants, []

    def cudaHostRegister(self, pointer: int, size: int, flags: int) -> int:  # noqa: N802
        if len(self.pinned) == self.grants:
            return 2
        self.pinned.append((pointer, size))
        return 0

    def cudaHostUnregister(self, pointer: int) -> int:  # noqa: N802
        self.pinned = [entry for entry in self.pinned if entry[0] != pointer]
        return 0


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Runtime:
    runtime = Runtime(99)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "device", lambda device: torch.no_grad())
    monkeypatch.setattr(
        torch.Tensor,
        "is_pinned",  # torch asks of the storage's beginning
        lambda self: self.untyped_storage().data_ptr() in {pointer for pointer, _ in runtime.pinned},
    )
    return runtime


def test_every_slab_is_pinned_whole_and_unpinned_with_the_arena(runtime: Runtime) -> None:
    arena = HostArena(3 * 4096, torch.device("cuda"), slab_bytes=4096)
    assert arena.is_pinned
    assert runtime.pinned == [(slab.data_ptr(), 4096) for slab in arena._slabs]
    del arena
    gc.collect()
    assert runtime.pinned == []


def test_a_refusal_names_the_limits_and_leaves_nothing_pinned(runtime: Runtime) -> None:
    runtime.grants = 1
    with pytest.raises(
        PinningRefusedError, match=r"4,096 of 12,288 bytes.*MemoryAllocation.*MEMLOCK.*ulimit -l"
    ):
        HostArena(3 * 4096, torch.device("cuda"), slab_bytes=4096)
    assert runtime.pinned == []
    assert not HostArena(4096, torch.device("cuda"), pins=False).is_pinned


@pytest.mark.gpu
def test_pinned_memory_is_exact_and_known_to_torch() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    arena = HostArena(3 * 2**20 + 512, torch.device("cuda"))
    assert arena.take(2**20).view((2**18,), torch.float32).is_pinned()
    pointer = arena._slabs[0].data_ptr()
    arena.close()
    assert arena_module.torch.cuda.cudart().cudaHostUnregister(pointer) != 0  # already unpinned
    with contextlib.suppress(RuntimeError):
        torch.zeros(1, device="cuda")  # the next launch reports the refusal once more: not to another test

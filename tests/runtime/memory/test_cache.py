"""When the allocator's cache is given back: against an allocator that keeps blocks of fixed sizes, as torch's does."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from scrimp.runtime.memory.cache import CacheReading, CudaCache, PhaseEdges, must_release

CAPACITY = 1000


class BlockCache:
    """Blocks are reused only for requests of their own size; a request that finds no room empties the cache."""

    def __init__(self) -> None:
        self.used: list[int] = []
        self.kept: list[int] = []
        self.peak = self.retries = self.reads = 0

    def take(self, size: int) -> None:
        if size in self.kept:
            self.kept.remove(size)
        elif sum(self.used) + sum(self.kept) + size > CAPACITY:
            self.retries += 1
            self.kept.clear()
        if sum(self.used) + size > CAPACITY:
            raise torch.OutOfMemoryError("no more blocks")
        self.used.append(size)
        self.peak = max(self.peak, sum(self.used))

    def give(self) -> None:
        self.kept += self.used
        self.used = []

    def read(self) -> CacheReading:
        self.reads += 1
        reserved = sum(self.used) + sum(self.kept)
        return CacheReading(sum(self.used), reserved, 0, self.peak, self.retries, CAPACITY, 0)

    def reset_peak(self) -> None:
        self.peak = sum(self.used)

    def release(self) -> None:
        self.kept.clear()


def run(edges: PhaseEdges, cache: BlockCache, phase: str, sizes: list[int]) -> int:
    """One pass; how many requests had to be retried. Blocks are given back even if one was too many."""
    before = cache.retries
    edges.switch(phase)
    try:
        for size in sizes:
            cache.take(size)
    finally:
        cache.give()
    return cache.retries - before


def test_phases_that_fit_side_by_side_are_left_alone() -> None:
    cache = BlockCache()
    edges = PhaseEdges(cache, report=lambda sentence: None)
    for _ in range(5):
        assert run(edges, cache, "train", [300, 100]) == 0
        assert run(edges, cache, "generate", [7] * 40) == 0
    assert edges.released == []


def test_a_phase_that_had_to_retry_finds_the_cache_empty_the_next_time() -> None:
    cache, said = BlockCache(), []
    edges = PhaseEdges(cache, report=said.append)
    retries = [
        (run(edges, cache, "train", [600, 100]), run(edges, cache, "generate", [7] * 80)) for _ in range(4)
    ]
    assert retries[0][1] == 1  # nothing was known yet
    assert sum(second for _, second in retries[1:]) <= 1
    assert edges.released
    assert all("given back before" in sentence for sentence in said)


def test_a_planned_peak_is_enough_to_know() -> None:
    cache = BlockCache()
    edges = PhaseEdges(cache, report=lambda sentence: None)
    edges.plan("generate", 1100)
    run(edges, cache, "train", [600, 300])
    assert run(edges, cache, "generate", [90] * 10) == 0
    assert edges.released == [900]


def test_a_phase_that_goes_on_is_not_read_again() -> None:
    cache = BlockCache()
    edges = PhaseEdges(cache, report=pytest.fail)
    for _ in range(100):
        run(edges, cache, "train", [300, 100])
    assert (cache.reads, edges.current) == (1, "train")


def test_what_ended_in_an_exception_counts_as_a_pass() -> None:
    cache = BlockCache()
    edges = PhaseEdges(cache, report=lambda sentence: None)
    run(edges, cache, "train", [300])
    with pytest.raises(torch.OutOfMemoryError):
        run(edges, cache, "generate", [400, 700])
    run(edges, cache, "train", [300])
    assert edges.released == []
    run(edges, cache, "generate", [400])  # it had to retry the last time
    assert edges.released == [700]


def test_a_new_plan_forgets_what_was_measured_under_the_old_one() -> None:
    cache = BlockCache()
    edges = PhaseEdges(cache, report=lambda sentence: None)
    edges.plan("train", 900)
    with pytest.raises(torch.OutOfMemoryError):
        run(edges, cache, "train", [900, 200])
    cache.release()  # as the training loop does before it plans anew
    edges.plan("train", 400)
    run(edges, cache, "train", [400])
    run(edges, cache, "evaluate", [500])
    run(edges, cache, "train", [400])
    assert edges.released == []  # neither its peak nor its retry were the new plan's


@given(st.lists(st.tuples(st.sampled_from("abc"), st.lists(st.integers(1, 300), max_size=3)), max_size=12))
def test_the_cache_goes_where_a_pass_had_retries_or_is_planned_too_large(
    passes: list[tuple[str, list[int]]],
) -> None:
    cache = BlockCache()
    edges = PhaseEdges(cache, report=lambda sentence: None)
    edges.plan("c", CAPACITY + 1)
    needs_all = {"a": False, "b": False, "c": True}
    expected, last = [], None
    for phase, sizes in passes:
        kept = sum(cache.kept)
        if phase != last and kept and needs_all[phase]:
            expected.append(kept)
        retries = run(edges, cache, phase, sizes)
        needs_all[phase] = phase == "c" or retries > 0 or (phase == last and needs_all[phase])
        last = phase
    assert edges.released == expected


@pytest.mark.parametrize(
    ("allocated", "reserved", "split", "next_peak", "had_retries", "expected"),
    [
        (100, 100, 0, 5000, True, False),  # nothing is cached
        (100, 600, 0, 900, False, False),  # 400 free and 500 cached
        (100, 600, 200, 900, False, True),  # of which 200 serve only what fits into them
        (100, 600, 0, 0, False, False),  # nothing known of the next phase
        (100, 600, 0, 0, True, True),
    ],
)
def test_the_rule(
    allocated: int, reserved: int, split: int, next_peak: int, had_retries: bool, expected: bool
) -> None:
    reading = CacheReading(allocated, reserved, split, allocated, 0, CAPACITY, 0)
    assert must_release(reading, next_peak, had_retries) is expected


def test_fragmentation_is_reported_once() -> None:
    class Fragmented(BlockCache):
        """Keeps a block that release cannot give back."""

        def release(self) -> None:
            self.kept = [500]

    cache, said = Fragmented(), []
    edges = PhaseEdges(cache, report=said.append)
    cache.kept = [500]
    edges.plan("train", 1200)
    for _ in range(6):
        edges.switch("evaluate")
        edges.switch("train")
    assert sum("fragmented" in sentence for sentence in said) == 1


def test_where_there_is_no_cache_nothing_happens() -> None:
    edges = PhaseEdges(None, report=pytest.fail)
    edges.plan("train", CAPACITY + 1)
    for phase in ("train", "evaluate", "train"):
        edges.switch(phase)
    assert edges.released == []


@pytest.mark.gpu
def test_torchs_allocator_gives_back_what_the_next_phase_has_no_room_for() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    device = torch.device("cuda", torch.cuda.current_device())
    cache = CudaCache(device)
    torch.cuda.empty_cache()
    edges = PhaseEdges(cache, report=lambda sentence: None)
    edges.switch("train")
    block = torch.empty(1 << 30, dtype=torch.uint8, device=device)
    before = cache.read()
    del block
    edges.switch("evaluate")  # nothing is known of it
    assert (edges.released, cache.read().reserved) == ([], before.reserved)
    edges.plan("train", before.capacity + 1)
    edges.switch("train")
    assert edges.released[0] >= 1 << 30
    assert cache.read().peak < before.peak  # and the peak began anew


@pytest.mark.gpu
def test_a_fraction_of_the_device_is_the_capacity() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    device = torch.device("cuda", torch.cuda.current_device())
    whole = CudaCache(device).read()
    torch.cuda.set_per_process_memory_fraction(0.25, device)
    try:
        part = CudaCache(device).read()
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, device)
    assert part.capacity - part.others <= 0.25 * whole.capacity < whole.capacity

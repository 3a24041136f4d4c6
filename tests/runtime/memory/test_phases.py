"""When the allocator's cache is given back: against an allocator that keeps blocks of fixed sizes, as torch's does."""

from __future__ import annotations

import pytest

from scrimp.runtime.memory.phases import CacheReading, PhaseEdges, must_release

CAPACITY = 1000


class BlockCache:
    """Blocks are reused only for requests of their own size; a request that finds no room empties the cache."""

    def __init__(self) -> None:
        self.used: list[int] = []
        self.kept: list[int] = []
        self.peak = self.retries = 0

    def take(self, size: int) -> None:
        if size in self.kept:
            self.kept.remove(size)
        elif sum(self.used) + sum(self.kept) + size > CAPACITY:
            self.retries += 1
            self.kept.clear()
        self.used.append(size)
        assert sum(self.used) <= CAPACITY
        self.peak = max(self.peak, sum(self.used))

    def give(self) -> None:
        self.kept += self.used
        self.used = []

    def read(self) -> CacheReading:
        reserved = sum(self.used) + sum(self.kept)
        return CacheReading(sum(self.used), reserved, 0, self.peak, self.retries, CAPACITY, 0)

    def reset_peak(self) -> None:
        self.peak = sum(self.used)

    def release(self) -> None:
        self.kept.clear()


def run(edges: PhaseEdges, cache: BlockCache, phase: str, sizes: list[int]) -> int:
    """One pass; how many requests had to be retried."""
    before = cache.retries
    with edges.enter(phase):
        for size in sizes:
            cache.take(size)
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
        with edges.enter("train"):
            cache.kept = [500]
    assert sum("fragmented" in sentence for sentence in said) == 1


def test_where_there_is_no_cache_nothing_happens() -> None:
    edges = PhaseEdges(None, report=pytest.fail)
    with edges.enter("train"):
        pass
    assert edges.released == []

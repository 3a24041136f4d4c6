"""Rounds in turns, from a cold cache, and as many of them as the spread asks for."""

from __future__ import annotations

import statistics
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from scrimp.profiler import stopwatch
from scrimp.profiler.stopwatch import Stopwatch, is_steady, middle_half

CPU = torch.device("cpu")


class Clock:
    """Time passes only where it is told to."""

    def __init__(self) -> None:
        self.seconds, self.calls = 0.0, []

    def __call__(self) -> float:
        return self.seconds

    def call(self, name: str, *durations: float):
        """Takes these times in turn, the last for ever."""
        left = list(durations)

        def work() -> None:
            self.calls.append(name)
            self.seconds += left.pop(0) if len(left) > 1 else left[0]

        return work


def watch_of(clock: Clock) -> Stopwatch:
    return Stopwatch(CPU, flush_bytes=64, now=clock)


def test_times_that_are_steady_end_the_rounds_early() -> None:
    clock = Clock()
    found = watch_of(clock).rounds({"a": clock.call("a", 3.0), "b": clock.call("b", 0.5)}, 20)
    assert found == {"a": [3.0] * 5, "b": [0.5] * 5}


def test_one_noisy_call_keeps_all_in_the_race() -> None:
    clock = Clock()
    noisy = clock.call("a", 9.0, 9.0, *([1.0, 2.0] * 20))
    found = watch_of(clock).rounds({"a": noisy, "b": clock.call("b", 0.5)}, 20)
    assert found == {"a": [1.0, 2.0] * 10, "b": [0.5] * 20}


def test_every_round_begins_with_another_call_after_two_of_warm_up() -> None:
    clock = Clock()
    watch_of(clock).rounds({name: clock.call(name, 1.0) for name in "abc"}, 4)
    assert "".join(clock.calls) == "aabbcc" + "abc" + "bca" + "cab" + "abc"


@pytest.mark.parametrize(("limit_s", "num_rounds"), [(0.0, 3), (12.5, 9), (1e9, 20)])
def test_a_limit_ends_the_rounds_but_for_three(limit_s: float, num_rounds: int) -> None:
    clock = Clock()
    work = clock.call("a", *([1.0, 1.0] if limit_s else [1.0]), *([1.0, 1.5] * 20))
    assert len(watch_of(clock).rounds({"a": work}, 20, limit_s)["a"]) == num_rounds


def test_a_call_longer_than_its_limit_is_warmed_up_once() -> None:
    clock = Clock()
    watch_of(clock).rounds({"a": clock.call("a", 100.0)}, 1, 10.0)
    assert clock.calls == ["a", "a"]


def test_the_cache_is_flushed_before_every_timed_call() -> None:
    clock, watch = Clock(), None
    watch = watch_of(clock)

    class Buffer:
        def sum(self) -> None:
            clock.calls.append("flush")

    watch._flush = Buffer()  # type: ignore[assignment]
    watch.rounds({"a": clock.call("a", 1.0)}, 3)
    assert clock.calls == ["a", "a", *["flush", "a"] * 3]


@given(st.lists(st.floats(1e-6, 1e3), min_size=1, max_size=30))
def test_the_middle_half_is_that_of_numpy(seconds: list[float]) -> None:
    low, high = np.percentile(seconds, [25, 75])
    assert middle_half(seconds) == pytest.approx(high - low, rel=1e-9, abs=1e-12)


def test_medians_that_count_as_steady_are_within_a_few_percent_of_the_truth() -> None:
    random = np.random.default_rng(0)
    errors = []
    for _ in range(300):
        values: list[float] = []
        while not is_steady(values) and len(values) < 200:
            values.append(float(random.normal(1.0, 0.08)))
        errors.append(statistics.median(values) - 1.0)
    # Stopping at a lucky moment costs something over the 2 % that are aimed at.
    assert 0.01 < float(np.std(errors)) < 0.04


def caches(folder: Path, **sizes: str) -> Path:
    for name, size in sizes.items():
        (folder / name).mkdir(parents=True)
        (folder / name / "size").write_text(size, encoding="ascii")
    return folder


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ({"index0": "48K\n", "index1": "2M\n", "index2": "32768K\n"}, 2 * 32 * 2**20),
        ({"index0": "480M\n"}, 512 * 2**20),
        ({"index0": "nonsense\n"}, 2 * 64 * 2**20),
        ({}, 2 * 64 * 2**20),
    ],
)
def test_the_buffer_is_larger_than_the_last_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sizes: dict[str, str], expected: int
) -> None:
    monkeypatch.setattr(stopwatch, "_CACHES", caches(tmp_path, **sizes))
    assert stopwatch._flush_bytes(CPU) == expected


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_gpu_is_timed_by_what_it_does_and_not_by_its_launches() -> None:
    device = torch.device("cuda", 0)
    a, b = (torch.randn(size, size, device=device) for size in (4096, 8192))
    found = Stopwatch(device).rounds({"small": lambda: a @ a, "large": lambda: b @ b}, 10)
    ratio = statistics.median(found["large"]) / statistics.median(found["small"])
    assert 4 < ratio < 16  # 8 times the work

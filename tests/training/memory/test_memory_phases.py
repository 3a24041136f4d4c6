"""A run goes through its phases in their order, reads the allocator at their edges alone, and says what it gave back.

The allocator is a recorder, since a CPU has none; everything else is a real run.
"""

from __future__ import annotations

from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_run import flags, losses, records, write_corpus

from scrimp.cli import main
from scrimp.planner import Plan
from scrimp.profiler import MemoryMeter
from scrimp.runtime.memory import PhaseEdges
from scrimp.runtime.memory.cache import CacheReading
from scrimp.runtime.pipeline import PassSums
from scrimp.training import step
from scrimp.training.memory.between_phases import (
    EVALUATION,
    GENERATION,
    MEASURING,
    TRAINING,
    MeteredCache,
    cache_of,
)

WORDS = ["--train.steps=4", "--evaluation.every=2", "--checkpoint.every=0"]
SNIP = ["--precision=snip", "--snip.first=2", "--snip.every=9", "--snip.delay=1", "--snip.batches=1"]


class Recorder:
    """An allocator of 1,000 bytes that every phase leaves with 800 of them cached."""

    def __init__(self) -> None:
        self.reads = self.releases = 0
        self.reserved = 900

    def read(self) -> CacheReading:
        self.reads += 1
        return CacheReading(100, self.reserved, 0, 900, 0, capacity=1000, others=0)

    def reset_peak(self) -> None:
        self.reserved = 900

    def release(self) -> None:
        self.releases += 1
        self.reserved = 100


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    recorder = Recorder()
    monkeypatch.setattr("scrimp.training.run.cache_of", lambda device, meter: recorder)
    return recorder


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Every phase that was asked for, one entry a call."""
    found: list[str] = []
    switch = PhaseEdges.switch

    def noted(self: PhaseEdges, phase: str) -> None:
        found.append(phase)
        switch(self, phase)

    monkeypatch.setattr(PhaseEdges, "switch", noted)
    return found


def phases(calls: list[str]) -> list[str]:
    return [phase for phase, _ in groupby(calls)]


@pytest.mark.slow
def test_training_is_one_phase_from_evaluation_to_evaluation(
    corpus: Path, tmp_path: Path, cache: Recorder, calls: list[str]
) -> None:
    assert main(flags(corpus, tmp_path / "run", *WORDS)) == 0
    assert calls.count(TRAINING) == 4
    assert phases(calls) == [TRAINING, EVALUATION, TRAINING, EVALUATION, GENERATION]
    assert cache.reads == 5 + cache.releases  # once an edge, and once after each release


@pytest.mark.slow
def test_a_release_is_an_event_of_its_step_and_a_line(
    corpus: Path, tmp_path: Path, cache: Recorder, capsys: pytest.CaptureFixture[str]
) -> None:
    """Training is planned to take more than the 1,000 bytes; what evaluation takes fits beside the cache."""
    assert main(flags(corpus, tmp_path / "run", *WORDS)) == 0
    found = [event for event in records(tmp_path / "run", "events.jsonl") if event["kind"] == "memory-phase"]
    found = [event for event in found if "heap" not in event["reason"]]  # this process has one of its own
    sentence = "800 bytes of cached memory were given back before training"
    assert [(event["step"], event["reason"]) for event in found] == [(0, sentence), (2, sentence)]
    shown = capsys.readouterr()
    assert sentence in " ".join((shown.out + shown.err).split())


@pytest.mark.slow
def test_measuring_precision_is_a_phase(
    corpus: Path, tmp_path: Path, cache: Recorder, calls: list[str]
) -> None:
    words = [*WORDS, *SNIP, "--evaluation.every=0"]
    assert main(flags(corpus, tmp_path / "run", *words)) == 0
    found = phases(calls)
    assert found[:3] == [TRAINING, MEASURING, TRAINING]
    assert found[-2:] == [EVALUATION, GENERATION]


@pytest.mark.slow
def test_a_step_that_ran_out_of_memory_stays_in_its_phase_with_the_peak_of_the_new_plan(
    corpus: Path, tmp_path: Path, cache: Recorder, calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    planned: list[tuple[str, int]] = []
    plan, passes, failures = PhaseEdges.plan, step.run_passes, [1]

    def noted(self: PhaseEdges, phase: str, peak: int) -> None:
        planned.append((phase, peak))
        plan(self, phase, peak)

    def fails_once(*arguments: Any, step: int, first_row: int) -> PassSums:
        if step in failures:
            failures.remove(step)
            raise torch.OutOfMemoryError("CUDA out of memory")
        return passes(*arguments, step=step, first_row=first_row)

    monkeypatch.setattr(PhaseEdges, "plan", noted)
    monkeypatch.setattr(step, "run_passes", fails_once)
    run_dir = tmp_path / "run"
    assert main(flags(corpus, run_dir, *WORDS)) == 0
    assert len(losses(run_dir)) == 4
    assert phases(calls) == [TRAINING, EVALUATION, TRAINING, EVALUATION, GENERATION]
    (_, before), (_, after) = planned
    assert before > after == Plan.read(run_dir / "plan.json").predicted.peak_device_bytes


def test_an_evaluation_that_fails_ends_the_run_and_its_phases(
    corpus: Path, tmp_path: Path, cache: Recorder, calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr("scrimp.training.callbacks.evaluations.evaluate_held_out", fails)
    assert main(flags(corpus, tmp_path / "run", *WORDS)) == 1
    assert phases(calls) == [TRAINING, EVALUATION]


def test_a_cpu_has_no_cache() -> None:
    device = torch.device("cpu")
    assert cache_of(device, MemoryMeter(device)) is None


@pytest.mark.gpu
def test_the_peak_of_a_run_is_that_of_its_highest_phase() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    device = torch.device("cuda", torch.cuda.current_device())
    meter = MemoryMeter(device)
    edges = PhaseEdges(MeteredCache(device, meter), report=lambda sentence: None)
    edges.switch(TRAINING)
    block = torch.empty(1 << 28, dtype=torch.uint8, device=device)
    peak = meter.peak_device_bytes()
    del block
    edges.switch(EVALUATION)
    assert torch.cuda.max_memory_allocated(device) < peak == meter.peak_device_bytes()

"""Seconds of calls, by a clock that the calls themselves advance."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from scrimp import timing

CPU, GPU = torch.device("cpu"), torch.device("cuda", 1)


class Machine:
    """A clock, and a device that computes only while it is waited for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seconds = self.queued = 0.0
        self.waited: list[torch.device] = []
        monkeypatch.setattr(timing.time, "perf_counter", lambda: self.seconds)
        monkeypatch.setattr(torch.cuda, "synchronize", self._wait)

    def _wait(self, device: torch.device) -> None:
        self.waited.append(device)
        self.seconds += self.queued
        self.queued = 0.0

    def call(self, *lengths: float) -> Callable[[], None]:
        """A call that takes each of these times in turn."""
        left = iter(lengths)

        def act() -> None:
            self.seconds += next(left)

        return act

    def launch(self) -> None:
        self.seconds += 1.0
        self.queued += 10.0


def test_the_fastest_round_counts_and_the_first_call_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch)
    assert timing.best(machine.call(0.5, 3.0, 2.0, 4.0), CPU) == 2.0
    assert not machine.waited


def test_rounds_go_on_until_there_is_no_time_left(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch)
    assert timing.best(machine.call(9.0, 3.0, 3.0, 3.0, 1.0), CPU, rounds=1, least_s=9.5) == 1.0


def test_a_device_is_waited_for_once_for_calls_in_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch)
    machine.launch()  # of earlier work, which does not count
    assert timing.seconds_of(machine.launch, GPU, in_a_row=4) == 11.0
    assert machine.waited == [GPU, GPU]

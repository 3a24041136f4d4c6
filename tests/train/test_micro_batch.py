"""The micro-batch: fixed unless nothing fits, or the fastest if that was asked for."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest

from scrimp.config import BudgetConfig, Config, MemoryConfig, ModelConfig, TrainConfig
from scrimp.errors import ConfigError
from scrimp.planner.bytes.correct import scaled_costs
from scrimp.planner.bytes.costs import StepCosts
from scrimp.planner.bytes.room import NoRoomError
from scrimp.train import memory_plan
from scrimp.train.setup import decide

OPEN = Config(
    device="cpu",
    model=ModelConfig(preset="llama-3m", vocab_size=512, num_layers=4),
    train=TrainConfig(steps=4, sequence=128, batch_tokens=1024),
    memory=MemoryConfig(split="fastest"),
)
Timer = Callable[..., tuple[StepCosts, str]]


def slow_from(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a device that is slow at micro-batches of this size and more."""
    real: Timer = memory_plan.with_seconds

    def timed(costs: StepCosts, config: Config, *more: object, **options: object) -> tuple[StepCosts, str]:
        found, origin = real(costs, config, *more, **(options | {"may_measure": False}))
        is_slow = (config.train.micro_batch or 0) >= size
        return scaled_costs(found, 100.0 if is_slow else 1.0), origin

    monkeypatch.setattr(memory_plan, "with_seconds", timed)


@pytest.mark.parametrize("size", [2, 8])
def test_the_fastest_is_taken_and_kept(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    slow_from(size, monkeypatch)
    found = decide(OPEN)
    assert found.config.train.micro_batch is not None
    assert found.config.train.micro_batch < size
    assert found.config.memory.split == "fixed"
    assert "8: " in found.reasons["train.micro_batch"]
    assert found.memory is not None
    assert found.memory.setup.micro_batches == 8 // found.config.train.micro_batch


def test_what_does_not_fit_is_not_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    slow_from(9, monkeypatch)
    with pytest.raises(NoRoomError):
        decide(dataclasses.replace(OPEN, budget=BudgetConfig(device_memory="1MB")))
    whole = decide(OPEN)
    assert whole.memory is not None
    tight = f"{int(0.6 * whole.memory.account.peak)}B"
    found = decide(dataclasses.replace(OPEN, budget=BudgetConfig(device_memory=tight, host_memory="900MB")))
    assert found.memory is not None
    assert found.memory.fits


def test_a_given_micro_batch_contradicts_the_search_for_one() -> None:
    given = dataclasses.replace(OPEN, train=dataclasses.replace(OPEN.train, micro_batch=4))
    with pytest.raises(ConfigError, match=r"memory\.split fastest"):
        decide(given)

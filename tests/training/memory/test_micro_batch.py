"""The micro-batch: fixed unless nothing fits, or the fastest if that was asked for."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest

from scrimp.config import BudgetConfig, Config, MemoryConfig, ModelConfig, TrainConfig
from scrimp.errors import ConfigError
from scrimp.planner.memory.correct import scaled_costs
from scrimp.planner.memory.costs import StepCosts
from scrimp.planner.memory.room import NoRoomError
from scrimp.training.memory import decide as memory_plan
from scrimp.training.setup import decide

OPEN = Config(
    device="cpu",
    model=ModelConfig(preset="llama-3m", vocab_size=512, num_layers=4),
    train=TrainConfig(steps=4, sequence=128, batch_tokens=1024),
    memory=MemoryConfig(split="fastest"),
)
Timer = Callable[..., StepCosts]


def slow_from(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a device that is slow at micro-batches of this size and more."""
    real: Timer = memory_plan.with_seconds

    def timed(costs: StepCosts, config: Config, *more: object, **options: object) -> StepCosts:
        found = real(costs, config, *more, **(options | {"may_measure": False}))
        is_slow = (config.train.micro_batch or 0) >= size
        return scaled_costs(found, 100.0 if is_slow else 1.0)

    monkeypatch.setattr(memory_plan, "with_seconds", timed)


@pytest.mark.parametrize("size", [2, 8])
@pytest.mark.slow
def test_the_fastest_is_taken_and_kept(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    slow_from(size, monkeypatch)
    found = decide(OPEN)
    assert found.config.train.micro_batch is not None
    assert found.config.train.micro_batch < size
    assert found.config.memory.split == "fixed"
    assert "8: " in found.reasons["train.micro_batch"]
    assert found.memory.setup.micro_batches == 8 // found.config.train.micro_batch


@pytest.mark.slow
def test_what_does_not_fit_is_not_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    slow_from(9, monkeypatch)
    with pytest.raises(NoRoomError):
        decide(dataclasses.replace(OPEN, budget=BudgetConfig(device_memory="1MB")))
    whole = decide(OPEN)
    tight = f"{int(0.6 * whole.memory.account.peak)}B"
    found = decide(dataclasses.replace(OPEN, budget=BudgetConfig(device_memory=tight, host_memory="900MB")))
    assert found.memory.fits


def test_a_given_micro_batch_contradicts_the_search_for_one() -> None:
    given = dataclasses.replace(OPEN, train=dataclasses.replace(OPEN.train, micro_batch=4))
    with pytest.raises(ConfigError, match=r"memory\.split fastest"):
        decide(given)


@pytest.mark.slow
def test_a_setting_of_the_users_own_gets_a_micro_batch_that_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    slow_from(9, monkeypatch)
    keep = MemoryConfig(split="fastest", activations="keep")
    eight = dataclasses.replace(OPEN.train, micro_batch=8)
    fixed = dataclasses.replace(keep, split="fixed", optimizer="device")
    whole = decide(dataclasses.replace(OPEN, train=eight, memory=fixed))
    room = int(0.9 * whole.memory.account.peak)
    budget = BudgetConfig(device_memory=f"{room}B", host_memory="900MB")
    for split in ("fastest", "fixed"):
        memory = dataclasses.replace(keep, split=split)
        found = decide(dataclasses.replace(OPEN, memory=memory, budget=budget))
        assert found.memory.fits
        assert found.config.train.micro_batch != 8


@pytest.mark.slow
def test_all_sizes_are_compared_by_one_yardstick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where some sizes take too long to be timed, none is."""
    origins: dict[int | None, list[str | None]] = {}
    real: Timer = memory_plan.with_seconds

    def timed(costs: StepCosts, config: Config, *more: object, **options: object) -> StepCosts:
        size = config.train.micro_batch
        quick = bool(options.get("may_measure", True)) and size is not None and size < 4
        found = real(costs, config, *more, **(options | {"may_measure": quick}))
        origins.setdefault(size, []).append(found.seconds_origin)
        return found

    monkeypatch.setattr(memory_plan, "with_seconds", timed)
    found = decide(OPEN)
    assert found.memory.costs.seconds_origin == "predicted"
    assert {sizes[-1] for sizes in origins.values()} == {"predicted"}
    assert "measured" in origins[1]


@pytest.mark.slow
def test_the_chunks_of_the_loss_follow_the_micro_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    slow_from(2, monkeypatch)
    wide = dataclasses.replace(OPEN.model, vocab_size=128_000, width=64, num_heads=2, num_kv_heads=1)
    train = dataclasses.replace(OPEN.train, sequence=256, batch_tokens=2048)
    fixed = decide(dataclasses.replace(OPEN, model=wide, train=train, memory=MemoryConfig()))
    found = decide(dataclasses.replace(OPEN, model=wide, train=train))
    assert found.config.train.micro_batch == 1
    again = dataclasses.replace(train, micro_batch=1)
    expected = decide(dataclasses.replace(OPEN, model=wide, train=again, memory=MemoryConfig()))
    assert found.config.train.loss_chunk == expected.config.train.loss_chunk
    assert found.reasons["train.loss_chunk"] == expected.reasons["train.loss_chunk"]
    assert found.reasons["train.loss_chunk"] != fixed.reasons["train.loss_chunk"]

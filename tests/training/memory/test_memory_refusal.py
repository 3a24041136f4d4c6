"""What a refusal names does fit, when it is typed."""

from __future__ import annotations

import dataclasses
import math
import re
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from scrimp.config import BudgetConfig, Config, MemoryConfig, ModelConfig, TrainConfig, parse_bytes
from scrimp.config.fields import replace_values
from scrimp.errors import PlanError
from scrimp.planner.memory.room import NoRoomError
from scrimp.profiler import Device
from scrimp.runtime.memory import arena_bytes, largest_step
from scrimp.runtime.memory.carry import least_host
from scrimp.training.memory import block_seconds as memory_times
from scrimp.training.memory import decide as memory_plan
from scrimp.training.memory import limits, micro_batch
from scrimp.training.memory.limits import budgets_of, device_limit, host_limit
from scrimp.training.setup import Decisions, decide

CONFIG = Config(
    device="cpu",
    model=ModelConfig(preset="llama-3m", vocab_size=512, num_layers=3),
    train=TrainConfig(steps=4, sequence=128, batch_tokens=2048, micro_batch=8),
)
SIZE = r"([\d.]+ [MG]B)"


def with_budget(config: Config = CONFIG, **budget: str) -> Config:
    return dataclasses.replace(config, budget=BudgetConfig(**budget))


@pytest.fixture(autouse=True)
def nothing_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_times, "LIMIT_S", 0.0)


def is_refused(config: Config) -> bool:
    """Without asking what would fit."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(micro_batch, "refusal_of", lambda *_: NoRoomError("nothing fits"))
        try:
            decide(config)
        except NoRoomError:
            return True
    return False


def refusal(config: Config) -> str:
    with pytest.raises(NoRoomError) as caught:
        decide(config)
    return str(caught.value)


def size(pattern: str, text: str) -> str:
    found = re.search(pattern.replace("SIZE", SIZE), text)
    assert found, text
    return found[1]


def both(text: str) -> dict[str, str]:
    """The smallest device of a refusal, and its host."""
    found = re.search(f"{SIZE} of device memory, the smallest possible, with {SIZE} of the host's", text)
    assert found, text
    return {"device_memory": found[1], "host_memory": found[2]}


def less(text: str, share: float) -> str:
    return f"{int(share * parse_bytes(text))}B"


def fits(config: Config) -> Decisions:
    found = decide(config)
    found.refuse_misfit()
    assert found.memory.fits
    return found


@pytest.mark.slow
def test_on_one_memory_the_device_and_both_budgets_that_are_named_fit() -> None:
    text = refusal(with_budget(device_memory="9MB"))
    assert "got 9.00 MB of device memory, of which a checkpoint's copy takes" in text
    assert "pinnable" not in text
    device = size("these would fit: SIZE of device memory;", text)
    fits(with_budget(device_memory=device))
    assert is_refused(with_budget(device_memory=less(device, 0.97)))
    pair = both(text)
    assert fits(with_budget(**pair)).memory.account.host_peak > 0  # type: ignore[union-attr]
    assert parse_bytes(pair["device_memory"]) < parse_bytes(device)
    assert is_refused(with_budget(**pair | {"host_memory": less(pair["host_memory"], 0.97)}))


@pytest.mark.slow
def test_what_is_named_fits_with_updates_on_the_cpu_too() -> None:
    """Its states need gradients and copies of weights on the host, so that other sizes are enough."""
    asked = dataclasses.replace(CONFIG, memory=MemoryConfig(optimizer="host", update="cpu"))
    pair = both(refusal(with_budget(asked, device_memory="3MB", host_memory="3MB")))
    assert "the CPU updates them" in str(fits(with_budget(asked, **pair)).memory.placement.states)  # type: ignore[union-attr]


@pytest.mark.slow
def test_on_one_memory_parts_that_fit_alone_are_refused_as_a_sum() -> None:
    states = MemoryConfig(weights="host", gradients="host", optimizer="host")
    asked = dataclasses.replace(CONFIG, memory=states)
    found = decide(with_budget(asked, host_memory="1GB"))
    assert not any("offload" in name for name in found.memory.placement.activations)  # nobody asked for that
    account = found.memory.account
    arena = arena_bytes(account.host_peak)
    copy = found.memory.costs.checkpoint_copy
    enough = account.peak + arena + copy
    tight = f"{enough - arena // 2}B"
    fits(with_budget(asked, host_memory=tight))  # blocks recompute instead
    keeping = dataclasses.replace(asked, memory=dataclasses.replace(states, activations="keep"))
    with pytest.raises(PlanError, match=r"one memory(?s:.*)raise budget\.host_memory"):
        decide(with_budget(keeping, host_memory=tight))


@pytest.mark.slow
@pytest.mark.parametrize("free", [60, 75])
def test_what_is_free_of_one_memory_is_divided_between_both_budgets(
    monkeypatch: pytest.MonkeyPatch, free: int
) -> None:
    """The plan that is fastest within each budget takes more than their memory has; another does not."""
    found = decide(CONFIG)
    cpu = Device(torch.device("cpu"), "a CPU", int(free * 10**6 / 0.9) + limits.PROCESS_BYTES, "")
    monkeypatch.setattr(limits, "host_memory_available", lambda: cpu.available_bytes)
    config = with_budget(found.config, device_memory="60MB", host_memory="900MB")
    account = memory_plan.decide_memory(config, found.architecture, cpu).account
    assert account.peak + limits.arena_on_cpu(config, account.host_peak) <= free * 10**6
    with monkeypatch.context() as patch:
        patch.setattr(memory_plan, "refuse_beyond_one_memory", lambda *_: None)
        account = memory_plan.decide_memory(config, found.architecture, cpu).account
    assert account.peak + limits.arena_on_cpu(config, account.host_peak) > free * 10**6


@pytest.mark.slow
def test_a_smaller_micro_batch_is_tried_where_only_the_sum_does_not_fit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    own = dataclasses.replace(CONFIG, memory=MemoryConfig(activations="block+offload"))
    found = decide(with_budget(own, device_memory="900MB", host_memory="900MB"))
    account = found.memory.account
    free = account.peak + limits.arena_on_cpu(own, account.host_peak) - 1
    cpu = dataclasses.replace(found.device, available_bytes=int(free / 0.9) + limits.PROCESS_BYTES)
    monkeypatch.setattr(limits, "host_memory_available", lambda: cpu.available_bytes)

    def decided(may_change: bool) -> int | None:
        reasons = {"train.micro_batch": ""} if may_change else {}
        config, _ = micro_batch.decide_micro_batch(cpu, found.config, found.architecture, reasons)
        return config.train.micro_batch

    assert decided(may_change=True) == 4
    with pytest.raises(NoRoomError, match="more than the one memory"):
        decided(may_change=False)


@pytest.mark.slow
def test_the_host_that_is_named_fits_with_its_arena() -> None:
    pair = both(refusal(with_budget(device_memory="5MB")))
    device = f"{int(1.1 * parse_bytes(pair['device_memory']))}B"
    text = refusal(with_budget(device_memory=device, host_memory="12.5MB"))
    assert "got 12.5 MB of the host's and" in text
    host = size("SIZE of the host's with this device", text)
    assert parse_bytes(host) > 12.5e6
    fits(with_budget(device_memory=device, host_memory=host))
    assert is_refused(with_budget(device_memory=device, host_memory=less(host, 0.97)))
    fits(with_budget(device_memory=size("SIZE of device memory with this host", text), host_memory="12.5MB"))


@pytest.mark.slow
def test_settings_that_change_numbers_fit_where_they_are_named() -> None:
    one = dataclasses.replace(CONFIG, train=dataclasses.replace(CONFIG.train, micro_batch=1))
    text = refusal(with_budget(one, device_memory="9MB"))
    assert "shorter sequences" in text
    assert "micro-batch" not in text  # one sequence was tried
    found = re.findall(rf"--(optimizer\.moments) (\w+) \({SIZE}\)", text)
    assert [value for _, value, _ in found] == ["bf16", "8bit"]
    for key, value, device in found:
        changed = replace_values(one, {key.replace("-", "_"): value})
        fits(with_budget(changed, device_memory=device))
        assert is_refused(with_budget(changed, device_memory=less(device, 0.97)))


@pytest.mark.slow
def test_a_smaller_chunk_of_the_loss_fits_where_it_is_named() -> None:
    wide = dataclasses.replace(CONFIG, model=dataclasses.replace(CONFIG.model, vocab_size=32_000))
    wide = dataclasses.replace(wide, train=dataclasses.replace(CONFIG.train, loss_chunk=0))
    text = refusal(with_budget(wide, device_memory="30MB"))
    assert "a smaller --train.micro-batch (now 8)" in text
    device = size(r"--train\.loss-chunk 512 \(SIZE\)", text)
    fits(with_budget(replace_values(wide, {"train.loss_chunk": 512}), device_memory=device))
    assert is_refused(with_budget(wide, device_memory=device))


@pytest.mark.slow
def test_beside_snip_no_host_is_named() -> None:
    snip = replace_values(CONFIG, {"precision": "snip", "snip.formats": "bf16,nvfp4"})
    text = refusal(with_budget(snip, device_memory="9MB"))
    assert "host" not in text
    fits(with_budget(snip, device_memory=size("these would fit: SIZE of device memory", text)))


@pytest.mark.slow
def test_states_that_the_user_placed_stay_where_they_are() -> None:
    placed = dataclasses.replace(CONFIG, memory=MemoryConfig(optimizer="host"))
    text = refusal(with_budget(placed, device_memory="5MB", host_memory="9MB"))
    assert "with optimizer of 3 blocks on the host, as memory.* says" in text
    assert "leave memory.optimizer to the plan" in text
    fits(with_budget(placed, **both(text)))


@pytest.mark.slow
def test_settings_of_the_users_own_are_refused_with_the_host_that_they_need() -> None:
    own = dataclasses.replace(CONFIG, memory=MemoryConfig(activations="keep", optimizer="host"))
    with pytest.raises(PlanError) as caught:
        decide(with_budget(own, device_memory="900MB", host_memory="15MB")).refuse_misfit()
    text = str(caught.value)
    assert "does not fit in host memory with memory.activations keep and memory.optimizer host" in text
    assert "leave memory.activations and memory.optimizer out" in text
    assert "expected at most 15.0 MB of host memory" in text
    assert not re.search("pass|loss|step", text)  # moments of the device
    fits(with_budget(own, device_memory="900MB", host_memory=size("which SIZE are enough", text)))


@pytest.mark.slow
def test_settings_of_the_users_own_are_refused_with_the_device_that_they_need() -> None:
    own = dataclasses.replace(CONFIG, memory=MemoryConfig(activations="swiglu"))
    with pytest.raises(PlanError) as caught:
        decide(with_budget(own, device_memory="60MB")).refuse_misfit()
    fits(with_budget(own, device_memory=size("which SIZE are enough", str(caught.value))))


def test_what_was_edited_is_refused_with_the_host_that_it_needs() -> None:
    own = dataclasses.replace(CONFIG, memory=MemoryConfig(activations="keep", optimizer="host"))
    found = fits(with_budget(own, device_memory="900MB", host_memory="900MB"))
    small = with_budget(own, device_memory="900MB", host_memory="15MB")
    with pytest.raises(PlanError, match=r"expected at most 15\.0 MB") as caught:
        limits.refuse_beyond_memory(found.memory, small, found.device, 0)
    host = size("which SIZE are enough", str(caught.value))
    enough = with_budget(own, device_memory="900MB", host_memory=host)
    limits.refuse_beyond_memory(found.memory, enough, found.device, 0)


@given(step=st.integers(0, 10**13), compiled=st.booleans())
def test_a_budget_is_the_inverse_of_the_limit(step: int, compiled: bool) -> None:
    assert step <= largest_step(least_host(step)) <= step + 2
    config = replace_values(CONFIG, {"train.compile": "on" if compiled else "off"})
    roomy = Device(torch.device("cuda"), "a GPU", 10**15, "")
    budgets = budgets_of(with_budget(config, device_memory="1GB", host_memory="1GB"), roomy, 7)
    device, host = budgets.device_for(step), budgets.host_for(step)
    typed = with_budget(config, device_memory=f"{device}B", host_memory=f"{host}B")
    assert step <= device_limit(typed, roomy, 7) <= step + 3
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(limits, "host_memory_available", lambda: 10**15)
        assert step <= host_limit(typed, roomy) <= step + 5


def test_a_gpus_budget_leaves_gaps_to_its_allocator() -> None:
    gpu = Device(torch.device("cuda"), "a GPU", 24 * 10**9, "")
    config = with_budget(device_memory="16GB")
    assert device_limit(config, gpu, 10**9) == int(limits.CACHE_SHARE * 16 * 10**9)
    assert device_limit(CONFIG, gpu, 10**9) == int(limits.CACHE_SHARE * 24 * 10**9)
    budgets = budgets_of(config, gpu, 10**9)
    assert "16.0 GB of device memory, 4% of it for the allocator's gaps" in budgets.words
    assert math.isclose(budgets.device_for(device_limit(config, gpu, 10**9)), 16 * 10**9, abs_tol=3)


@pytest.mark.parametrize("config", [CONFIG, with_budget(device_memory="2GB")])
def test_free_memory_need_not_hold_a_checkpoints_copy(config: Config) -> None:
    """Training waits while it is written."""
    cpu = Device(torch.device("cpu"), "a CPU", 900 * 10**6, "")
    usable = limits.usable_of_cpu(900 * 10**6)
    assert device_limit(config, cpu, 10**9) == usable == int(0.9 * (900 * 10**6 - limits.PROCESS_BYTES))
    budgets = budgets_of(config, cpu, 10**9)
    assert budgets.words == "628.8 MB of device memory, the part of 900.0 MB free that a step may take"
    assert budgets.device_for(700 * 10**6, alone=True) == 700 * 10**6


def test_a_cpu_too_small_for_the_process_itself_has_nothing_for_a_step() -> None:
    assert device_limit(CONFIG, Device(torch.device("cpu"), "a CPU", 10**8, ""), 0) == 0


@pytest.mark.slow
@pytest.mark.parametrize("memory", [{}, {"activations": "keep"}])
def test_blocks_are_timed_for_the_micro_batch_that_is_taken_alone(
    monkeypatch: pytest.MonkeyPatch, memory: dict[str, Any]
) -> None:
    real, timed = memory_plan.with_seconds, []

    def counted(costs: Any, config: Config, *more: Any, may_measure: bool = True) -> Any:
        timed.extend([config.train.micro_batch] if may_measure else [])
        return real(costs, config, *more, may_measure=False)

    monkeypatch.setattr(memory_plan, "with_seconds", counted)
    open_size = dataclasses.replace(
        CONFIG, train=dataclasses.replace(CONFIG.train, micro_batch=None), memory=MemoryConfig(**memory)
    )
    if memory:
        with pytest.raises(PlanError):
            decide(with_budget(open_size, device_memory="9MB")).refuse_misfit()
    else:
        assert is_refused(with_budget(open_size, device_memory="9MB"))
    assert timed == []
    device = "32MB" if not memory else "45MB"
    found = fits(with_budget(open_size, device_memory=device, host_memory="9MB"))
    assert found.config.train.micro_batch not in (None, 16)
    assert timed == [found.config.train.micro_batch]

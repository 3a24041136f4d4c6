"""Deterministic settings: what they were comes back, and cuBLAS's workspace is there before a product."""

from __future__ import annotations

import os
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from scrimp.config import BudgetConfig, Config, ModelConfig, TrainConfig
from scrimp.errors import DeviceError
from scrimp.profiler.bandwidth import LinkRates
from scrimp.runtime import deterministic
from scrimp.runtime.determinism import WORKSPACE, kernels_for
from scrimp.training.memory import block_seconds as times
from scrimp.training.memory import decide as memory_plan
from scrimp.training.setup import decide

GPU = torch.device("cuda", 0)
CONFIG = Config(
    device="cuda:0",
    precision="bf16",
    model=ModelConfig(num_layers=2, vocab_size=512),
    budget=BudgetConfig(device_memory="4GB"),
    train=TrainConfig(batch_tokens=512, sequence=128, micro_batch=2, compile="off"),
)


def settings() -> tuple[bool, ...]:
    return (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.utils.deterministic.fill_uninitialized_memory,
        torch.backends.cuda.mem_efficient_sdp_enabled(),
        torch.backends.cuda.cudnn_sdp_enabled(),
    )


@pytest.fixture
def kept_settings() -> Any:
    before = settings()
    yield
    torch.use_deterministic_algorithms(before[0], warn_only=before[1])
    torch.utils.deterministic.fill_uninitialized_memory = before[2]
    torch.backends.cuda.enable_mem_efficient_sdp(before[3])


@pytest.mark.parametrize(
    "before",
    [(False, False, True, True), (True, False, False, False), (True, True, True, False)],
    ids=["torch's own", "deterministic before", "warnings only"],
)
@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("wanted", [True, False])
def test_settings_come_back_as_they_were(
    before: tuple[bool, ...], fails: bool, wanted: bool, kept_settings: None
) -> None:
    """Whatever was in force: a run that need not repeat itself does not do so because its process did."""
    torch.use_deterministic_algorithms(before[0], warn_only=before[1])
    torch.utils.deterministic.fill_uninitialized_memory = before[2]
    torch.backends.cuda.enable_mem_efficient_sdp(before[3])
    cudnn = torch.backends.cuda.cudnn_sdp_enabled()
    try:
        with deterministic(GPU, wanted):
            assert settings() == (wanted, False, False, False, cudnn)
            if fails:
                raise KeyError
    except KeyError:
        pass
    assert settings() == (*before, cudnn)


@pytest.mark.parametrize("wanted", [True, False])
def test_a_cpu_is_left_alone(wanted: bool) -> None:
    assert kernels_for("cpu", deterministic=wanted) is None
    before = settings()
    with deterministic(torch.device("cpu"), wanted):
        assert settings() == before


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU as far as a decision sees it; nothing runs there."""
    fakes = {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "mem_get_info": lambda index: (80 * 2**30, 80 * 2**30),
        "get_device_name": lambda index: "NVIDIA H100 80GB HBM3",
        "get_device_properties": lambda device: SimpleNamespace(
            multi_processor_count=132, total_memory=80 * 2**30
        ),
        "get_device_capability": lambda device: (9, 0),
        "set_device": lambda index: None,
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    rates = LinkRates(1e12, *(1e10 for _ in range(len(LinkRates.__dataclass_fields__) - 1)))
    monkeypatch.setattr(memory_plan, "links_of", lambda device: rates)


@pytest.mark.slow
@pytest.mark.parametrize("wanted", [True, False])
def test_a_plan_on_a_gpu_times_its_blocks_by_the_kernels_of_the_run(
    wanted: bool, gpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = replace(CONFIG, train=replace(CONFIG.train, deterministic=wanted))
    monkeypatch.delenv(WORKSPACE, raising=False)
    seen: list[str | None] = []

    def measured(*arguments: Any, **more: Any) -> None:
        assert torch.are_deterministic_algorithms_enabled() is wanted
        seen.append(os.environ.get(WORKSPACE))

    monkeypatch.setattr(times, "measure_blocks", measured)
    resident = decide(config)
    assert not seen, "far below the budget nothing is timed"
    tight = BudgetConfig(device_memory=f"{int(1.3 * resident.memory.account.peak)}B")
    decide(replace(config, budget=tight))  # as `scrimp plan` does, which trains nothing
    assert seen
    assert set(seen) == {":4096:8"}


def test_a_workspace_of_the_users_stays_if_products_repeat_themselves_with_it(
    gpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    resident = replace(CONFIG, budget=BudgetConfig())
    monkeypatch.setenv(WORKSPACE, ":16:8")
    decide(resident)
    assert os.environ[WORKSPACE] == ":16:8"
    monkeypatch.setenv(WORKSPACE, ":0:0")
    with pytest.raises(DeviceError, match="repeating") as refused:
        decide(resident)
    assert refused.value.got == f"{WORKSPACE}=:0:0"
    decide(replace(resident, train=replace(CONFIG.train, deterministic=False)))

"""What is decided about a run's memory: nothing where all fits, what fits where it does not, and no by name."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import pytest
import torch

from scrimp.config import BudgetConfig, Config, MemoryConfig, ModelConfig, TrainConfig
from scrimp.config.activations import LEVELS
from scrimp.data import held_bytes
from scrimp.errors import ConfigError, PlanError
from scrimp.models import spec_of
from scrimp.models.flash import Gpu
from scrimp.planner.memory.decision import MemoryDecision
from scrimp.planner.memory.placement import Placement, States
from scrimp.planner.memory.room import NoRoomError
from scrimp.planner.memory.states import device_peak
from scrimp.runtime.memory.carry import SPARE_BYTES, SPARE_SHARE
from scrimp.training.memory import block_seconds
from scrimp.training.memory import decide as memory_plan
from scrimp.training.setup import Decisions, decide

CONFIG = Config(
    device="cpu",
    model=ModelConfig(preset="llama-3m", vocab_size=512, num_layers=4),
    train=TrainConfig(steps=4, sequence=128, batch_tokens=2048, micro_batch=8),
)


def decided_with(**budget: str) -> Decisions:
    return decide(dataclasses.replace(CONFIG, budget=BudgetConfig(**budget)))


def resident_peak() -> int:
    found = decide(dataclasses.replace(CONFIG, memory=MemoryConfig(optimizer="device")))
    return found.memory.account.peak


@functools.cache
def copy_bytes() -> int:
    found = decide(CONFIG)
    assert found.plan.predicted.peak_device_bytes is not None
    weights = 4 * spec_of(found.architecture).parameters
    return 3 * weights


def smallest_of(error: NoRoomError) -> int:
    assert error.room is not None
    assert error.room.device_with_this_host is not None
    return error.room.device_with_this_host


@pytest.mark.slow
def test_where_everything_fits_easily_everything_stays_and_nothing_is_timed() -> None:
    found = decided_with()
    assert found.memory.placement.is_resident
    assert found.memory.fits
    assert found.memory.costs.seconds_origin is None
    assert found.plan.predicted.step_seconds is None
    assert {block.activations for block in found.plan.blocks.values()} == {"keep"}


@pytest.mark.parametrize(
    ("precision", "capability", "is_counted"),
    [("fp32", (9, 0), True), ("bf16", (9, 0), False), ("bf16", (7, 5), True)],
)
@pytest.mark.slow
def test_on_a_gpu_the_scores_of_unfused_attention_are_counted_where_everything_fits_easily(
    monkeypatch: pytest.MonkeyPatch, precision: str, capability: tuple[int, int], is_counted: bool
) -> None:
    """A GPU as far as the decision can see: what attention depends on and rates are given."""
    monkeypatch.setattr(memory_plan, "gpu_of", lambda device: Gpu(108, capability))
    monkeypatch.setattr(memory_plan, "links_of", lambda device: memory_plan.NO_LINKS)
    train = dataclasses.replace(CONFIG.train, sequence=512, batch_tokens=4096)
    found = decide(dataclasses.replace(CONFIG, precision=precision, train=train))
    gpu = dataclasses.replace(
        found.device, torch_device=torch.device("cuda", 1), name="NVIDIA H100", available_bytes=80 * 2**30
    )
    memory = memory_plan.decide_memory(found.config, found.architecture, gpu)
    assert memory.costs.seconds_origin is None
    scores = 2 * 4 * 8 * found.architecture.num_heads * 512 * 512 * found.architecture.num_layers
    assert (memory.account.peak > scores) is is_counted


def test_sums_that_may_come_in_any_order_are_counted_with_less_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(memory_plan, "gpu_of", lambda device: Gpu(132, (9, 0)))
    monkeypatch.setattr(memory_plan, "links_of", lambda device: memory_plan.NO_LINKS)
    found = decide(dataclasses.replace(CONFIG, precision="bf16"))
    gpu = dataclasses.replace(
        found.device, torch_device=torch.device("cuda", 1), name="NVIDIA H100", available_bytes=80 * 2**30
    )

    def peak(*, deterministic: bool) -> int:
        train = dataclasses.replace(found.config.train, deterministic=deterministic)
        config = dataclasses.replace(found.config, train=train)
        costs = memory_plan.decide_memory(config, found.architecture, gpu).costs
        return costs.classes[0].choices["keep"].backward_peak

    assert peak(deterministic=False) < peak(deterministic=True)


@pytest.mark.slow
def test_a_budget_that_is_too_small_for_everything_makes_blocks_recompute() -> None:
    peak, copy = resident_peak(), copy_bytes()
    found = decided_with(device_memory=f"{int(0.75 * peak) + copy}B")
    assert found.memory.account.peak <= int(0.75 * peak)
    choices = [block.activations for block in found.plan.blocks.values()]
    assert set(choices) - {"keep"}
    assert set(choices) <= set(LEVELS)  # on a CPU nothing moves to the same memory
    assert {state.optimizer for state in found.plan.states.values()} == {"device"}
    found.refuse_misfit()


@pytest.mark.slow
def test_one_account_whether_it_fits_easily_or_was_decided() -> None:
    easily, decided = (
        decided_with(),
        decide(dataclasses.replace(CONFIG, memory=MemoryConfig(optimizer="device"))),
    )
    assert easily.memory.account == decided.memory.account
    assert easily.plan.predicted.peak_device_bytes == decided.plan.predicted.peak_device_bytes
    assert easily.memory.account.peak == easily.plan.predicted.peak_device_bytes
    assert easily.memory.costs.checkpoint_copy == easily.plan.predicted.peak_host_bytes


@pytest.mark.slow
def test_a_budget_covers_the_copy_that_a_checkpoint_is_written_from() -> None:
    keep = dataclasses.replace(CONFIG, memory=MemoryConfig(activations="keep", optimizer="device"))
    figures = decide(keep).plan.predicted
    predicted = (figures.peak_device_bytes or 0) + (figures.peak_host_bytes or 0)
    for budget in (predicted, predicted - 1):
        found = decide(dataclasses.replace(keep, budget=BudgetConfig(device_memory=f"{budget}B")))
        if budget == predicted:
            found.refuse_misfit()
            continue
        with pytest.raises(PlanError, match="copy"):
            found.refuse_misfit()


@pytest.mark.slow
def test_two_budgets_on_a_cpu_are_two_memories() -> None:
    peak = resident_peak()
    found = decided_with(device_memory=f"{int(0.4 * peak)}B", host_memory="1GB")
    assert found.memory.account.peak <= int(0.4 * peak)
    assert found.memory.account.host_peak > 0
    assert found.memory.placement.uses_host


@pytest.mark.slow
def test_all_micro_batches_of_a_step_are_planned_for() -> None:
    more = dataclasses.replace(CONFIG, train=dataclasses.replace(CONFIG.train, batch_tokens=4096))
    once, twice = (
        decide(dataclasses.replace(config, memory=MemoryConfig(activations="block"))).memory
        for config in (CONFIG, more)
    )
    assert once is not None
    assert twice is not None
    assert (once.setup.micro_batches, twice.setup.micro_batches) == (2, 4)
    assert once.account.peak == device_peak(once.costs, Placement(("block",) * 4, States.split(4)), True)
    batches = [held_bytes(tokens, mask_documents=True) for tokens in (2048, 4096)]
    assert twice.account.peak - once.account.peak == batches[1] - batches[0]


@pytest.mark.slow
def test_no_room_at_all_says_what_would_fit() -> None:
    with pytest.raises(NoRoomError, match="would fit") as caught:
        decided_with(device_memory=f"{copy_bytes() + 10_000_000}B")
    smallest = smallest_of(caught.value)
    found = decided_with(device_memory=f"{smallest + copy_bytes()}B")
    assert found.memory.account.peak <= smallest


def test_a_choice_of_the_user_that_does_not_fit_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_seconds, "LIMIT_S", 1e-6)  # seconds decide nothing here: they are left to rates
    peak, copy = resident_peak(), copy_bytes()
    config = dataclasses.replace(
        CONFIG,
        memory=MemoryConfig(activations="swiglu"),
        budget=BudgetConfig(device_memory=f"{peak // 2 + copy}B"),
    )
    with pytest.raises(PlanError, match=r"memory\.activations swiglu"):
        decide(config).refuse_misfit()


@pytest.mark.slow
def test_states_where_the_user_wants_them_leave_activations_to_the_plan() -> None:
    peak = resident_peak()
    config = dataclasses.replace(
        CONFIG,
        memory=MemoryConfig(optimizer="2"),
        budget=BudgetConfig(device_memory=f"{int(0.8 * peak)}B", host_memory="1GB"),
    )
    found = decide(config)
    assert [found.plan.states[str(i)].optimizer for i in range(4)] == ["device", "device", "host", "host"]
    assert found.memory.is_searched


@pytest.mark.parametrize("setting", [{"optimizer": "host"}, {"activations": "keep+offload"}])
def test_nothing_leaves_the_device_beside_snip(setting: dict[str, str]) -> None:
    config = dataclasses.replace(CONFIG, precision="snip", memory=MemoryConfig(**setting))
    with pytest.raises(PlanError, match="precision snip"):
        decide(config)


@pytest.mark.slow
def test_deciding_leaves_random_numbers_alone() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    decide(dataclasses.replace(CONFIG, memory=MemoryConfig(activations="mlp")))
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.slow
def test_unless_asked_no_plan_has_an_optimizer_on_the_cpu_which_rounds_otherwise_than_a_gpu() -> None:
    for share in (0.35, 0.45, 0.6):
        try:
            found = decided_with(device_memory=f"{int(share * resident_peak())}B", host_memory="1GB")
        except NoRoomError as error:
            smallest = smallest_of(error)
            found = decided_with(device_memory=f"{smallest}B", host_memory="1GB")
        assert found.memory.placement.states.update == "device"
        assert found.plan.predicted.step_seconds is not None
        assert found.plan.predicted.step_seconds < 1000


def test_the_arena_of_a_plan_is_within_the_budget_of_the_host() -> None:
    budget = 24 << 20
    found = decided_with(device_memory=f"{int(0.5 * resident_peak())}B", host_memory=f"{budget}B")
    assert 0 < found.memory.account.host_peak * (1 + SPARE_SHARE) + SPARE_BYTES <= budget
    assert found.plan.predicted.peak_device_bytes == found.memory.account.peak


@pytest.mark.slow
def test_a_micro_batch_that_was_left_open_becomes_smaller_where_nothing_else_fits() -> None:
    with pytest.raises(NoRoomError) as caught:
        decided_with(device_memory=f"{copy_bytes() + 10_000_000}B")
    smallest = smallest_of(caught.value)
    budget = BudgetConfig(device_memory=f"{smallest + copy_bytes() - 2_000_000}B")
    open_train = dataclasses.replace(CONFIG.train, micro_batch=None)
    found = decide(dataclasses.replace(CONFIG, budget=budget, train=open_train))
    assert found.config.train.micro_batch is not None
    assert found.config.train.micro_batch < 8
    assert 16 % found.config.train.micro_batch == 0
    assert "fits in memory" in found.reasons["train.micro_batch"]


def hosted(**memory: Any) -> Decisions:
    """All optimizer states on the host."""
    budget = BudgetConfig(device_memory="1GB", host_memory="2GB")
    setting = MemoryConfig(**({"optimizer": "host"} | memory))
    return decide(dataclasses.replace(CONFIG, memory=setting, budget=budget))


def test_the_cpu_updates_what_lives_on_the_host_where_that_is_asked_for() -> None:
    found = hosted(update="cpu", optimizer="2")
    states = [found.plan.states[str(i)] for i in range(4)]
    assert [state.optimizer for state in states] == ["device", "device", "cpu", "cpu"]
    assert [state.gradients for state in states] == ["device", "device", "host", "host"]
    assert "the CPU updates them after the backward pass" in str(found.memory.placement.states)
    assert found.memory.machine.cpu_adam is not None
    assert found.plan.placement == found.memory.placement


@pytest.mark.parametrize("activations", ["auto", "keep"])
@pytest.mark.parametrize(("rate", "expected"), [(1e3, "host"), (1e13, "cpu")])
def test_the_fastest_updater_is_chosen_by_the_rate_of_the_cpu(
    monkeypatch: pytest.MonkeyPatch, rate: float, expected: str, activations: str
) -> None:
    monkeypatch.setattr(memory_plan, "cpu_update_rate", lambda parameters, settings: rate)
    found = hosted(update="fastest", activations=activations)
    assert {found.plan.states[str(i)].optimizer for i in range(4)} == {expected}


@pytest.mark.slow
def test_an_updater_that_fits_is_chosen_before_a_faster_one_that_does_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(memory_plan, "cpu_update_rate", lambda parameters, settings: 1e3)
    peaks = {}
    for update in ("device", "cpu"):
        found = hosted(update=update, activations="norms")
        peaks[update] = found.memory.account.peak
    assert peaks["cpu"] < peaks["device"]
    budget = BudgetConfig(device_memory=f"{sum(peaks.values()) // 2}B", host_memory="2GB")
    setting = MemoryConfig(optimizer="host", update="fastest", activations="norms")
    tight = decide(dataclasses.replace(CONFIG, memory=setting, budget=budget))
    assert tight.memory.fits
    assert {tight.plan.states[str(i)].optimizer for i in range(4)} == {"cpu"}


def test_with_updates_on_the_cpu_alone_the_search_places_states_by_itself() -> None:
    """A device that states do not fit at all."""
    peak = resident_peak()
    budget = BudgetConfig(device_memory=f"{int(0.45 * peak)}B", host_memory="1GB")
    found = decide(dataclasses.replace(CONFIG, memory=MemoryConfig(update="cpu"), budget=budget))
    assert found.memory.placement.states.update == "cpu"
    assert found.memory.account.peak <= 0.45 * peak


@pytest.mark.parametrize(
    ("memory", "says"),
    [
        ({"update": "cpu", "optimizer": "device"}, "nothing to update"),
        ({"update": "cpu", "optimizer": "host", "gradients": "2"}, "needs the gradients"),
        ({"update": "gpu"}, "memory.update"),
    ],
)
def test_settings_that_contradict_each_other_are_refused_by_name(memory: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        decide(dataclasses.replace(CONFIG, memory=MemoryConfig(**memory)))


@pytest.mark.slow
def test_no_optimizer_runs_on_the_cpu_beside_snip() -> None:
    config = dataclasses.replace(
        CONFIG,
        precision="snip",
        memory=MemoryConfig(update="cpu"),
        budget=BudgetConfig(device_memory=f"{int(0.8 * resident_peak()) + copy_bytes()}B"),
    )
    with pytest.raises(PlanError, match="precision snip"):
        decide(config)


@pytest.mark.slow
def test_where_nothing_is_timed_the_search_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the same seconds it would find the same again."""
    asked: list[float] = []
    fastest = memory_plan.Problem.fastest

    def counted(problem: memory_plan.Problem) -> MemoryDecision | None:
        asked.append(problem.costs.ends.seconds)
        return fastest(problem)

    monkeypatch.setattr(memory_plan.Problem, "fastest", counted)
    config = dataclasses.replace(CONFIG, budget=BudgetConfig(device_memory="100MB", host_memory="100MB"))
    decide(config)
    assert (
        len(asked) == len(set(asked)) == 2
    )  # by predicted seconds what fits, by measured ones what is fastest
    asked.clear()
    monkeypatch.setattr(block_seconds, "LIMIT_S", 0.0)
    decide(config)
    assert len(asked) == 1

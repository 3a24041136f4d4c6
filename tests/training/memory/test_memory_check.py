"""Predicted beside measured after the first steps, and another plan only where it is better."""

import dataclasses
from pathlib import Path

import pytest
from tiny_run import flags, records, write_corpus

from scrimp.cli import main
from scrimp.config import BudgetConfig, Config, ModelConfig, TrainConfig
from scrimp.planner import Plan
from scrimp.planner.memory.account import StepAccount, account_step
from scrimp.training.memory.check import STEPS, WARM_UP, Comparison, MemoryCheck
from scrimp.training.memory.kept_operands import with_kept_operands
from scrimp.training.setup import Decisions, decide

GIVEN = Config(
    device="cpu",
    model=ModelConfig(preset="llama-3m", vocab_size=512, num_layers=6),
    train=TrainConfig(steps=4, sequence=128, batch_tokens=1024, micro_batch=8),
    budget=BudgetConfig(device_memory="70MB", host_memory="900MB"),
)
COUNT = WARM_UP + STEPS
ENOUGH = 2**40


@pytest.fixture(scope="module")
def found() -> Decisions:
    return decide(GIVEN)


def check(
    found: Decisions, factor: float, extra: int | None = None, host_bytes: int = ENOUGH
) -> Comparison | None:
    """A step took so many times what was predicted, its peak so many bytes more."""
    predicted = found.plan.predicted
    seconds = [99.0] * WARM_UP + [factor * (predicted.step_seconds or 0)] * STEPS
    peak = None if extra is None else found.memory.account.peak + extra
    return MemoryCheck(found.memory, host_bytes).after_step(found.plan, COUNT, seconds, peak)


@pytest.mark.slow
def test_too_few_steps_say_nothing_and_enough_say_it_once(found: Decisions) -> None:
    one = MemoryCheck(found.memory, ENOUGH)
    assert one.after_step(found.plan, COUNT - 1, [1.0] * (COUNT - 1), None) is None
    assert one.after_step(found.plan, COUNT, [1.0] * COUNT, None) is not None
    assert one.after_step(found.plan, COUNT + 1, [1.0] * (COUNT + 1), None) is None


@pytest.mark.slow
def test_a_good_prediction_changes_nothing(found: Decisions) -> None:
    comparison = check(found, 1.02, 0)
    assert comparison is not None
    assert "2.0% more" in comparison.sentence
    assert comparison.plan is None


@pytest.mark.slow
def test_a_plan_that_turns_out_too_large_is_made_anew_and_smaller(found: Decisions) -> None:
    room = found.memory.machine.device_bytes - found.memory.account.peak
    extra = room + found.memory.account.peak // 12
    comparison = check(found, 1.0, extra)
    assert comparison is not None
    assert comparison.plan is not None
    assert comparison.plan.states == found.plan.states
    predicted = comparison.plan.predicted.peak_device_bytes
    assert predicted is not None
    assert predicted + extra <= found.memory.machine.device_bytes
    assert f"after step {COUNT}" in comparison.plan.blocks["0"].reason
    account = account_of(found, comparison.plan)
    assert_figures_follow(found.plan, found.memory.account, comparison.plan, account)


@pytest.mark.slow
def test_kept_operands_go_before_blocks_do_more(found: Decisions) -> None:
    """A step that took more than there is, by less than they take."""
    nbytes, machine = 2**23, found.memory.machine
    memory = dataclasses.replace(
        found.memory,
        costs=dataclasses.replace(found.memory.costs, operands=nbytes),
        machine=dataclasses.replace(machine, device_bytes=machine.device_bytes + nbytes),
    )
    two = dataclasses.replace(found.config.train, micro_batch=found.config.train.micro_batch // 2)
    memory = with_kept_operands(memory, dataclasses.replace(found.config, train=two), found.device)
    assert memory.operands == nbytes
    predicted = dataclasses.replace(found.plan.predicted, peak_device_bytes=memory.account.peak)
    plan = dataclasses.replace(found.plan, predicted=predicted)
    seconds, peak = [predicted.step_seconds or 0.0] * COUNT, memory.machine.device_bytes + nbytes // 2
    comparison = MemoryCheck(memory, ENOUGH).after_step(plan, COUNT, seconds, peak)
    assert comparison is not None
    assert comparison.plan is not None
    before, after = plan.placement, comparison.plan.placement
    assert after == before
    assert comparison.plan.predicted.peak_device_bytes == found.memory.account.peak


def account_of(found: Decisions, plan: Plan) -> StepAccount:
    return account_step(found.memory.costs, plan.placement, accumulates=found.memory.setup.accumulates)


def assert_figures_follow(before: Plan, old: StepAccount, after: Plan, new: StepAccount) -> None:
    """What is predicted of another plan of the same run is that plan's: of each figure, and a copy that stays."""
    was, now = before.predicted, after.predicted
    assert None not in (was.peak_device_bytes, was.peak_host_bytes, now.peak_device_bytes)
    assert (now.peak_device_bytes or 0) - (was.peak_device_bytes or 0) == new.peak - old.peak
    assert (now.peak_host_bytes or 0) - (was.peak_host_bytes or 0) == new.host_peak - old.host_peak
    assert now.step_seconds not in (None, was.step_seconds)


@pytest.mark.parametrize("factor", [0.2, 1.0, 5.0])
@pytest.mark.every(3)
@pytest.mark.slow
def test_no_new_plan_needs_host_memory_that_the_run_has_not_taken(found: Decisions, factor: float) -> None:
    taken = found.memory.account.host_peak
    extra = found.memory.machine.device_bytes - found.memory.account.peak + found.memory.account.peak // 10
    for host_bytes in (0, taken, taken + 2**20):
        comparison = check(found, factor, extra, host_bytes)
        assert comparison is not None
        if comparison.plan is None:
            continue
        assert account_of(found, comparison.plan).host_peak <= host_bytes


def test_what_the_user_decided_or_edited_stays(found: Decisions) -> None:
    mine = dataclasses.replace(found.memory, is_searched=False)
    seconds, peak = [1.0] * COUNT, 2 * found.memory.machine.device_bytes
    comparison = MemoryCheck(mine, ENOUGH).after_step(found.plan, COUNT, seconds, peak)
    assert comparison is not None
    assert comparison.plan is None
    edited = {**found.plan.blocks, "0": dataclasses.replace(found.plan.blocks["0"], activations="norms")}
    plan = dataclasses.replace(found.plan, blocks=edited)
    comparison = MemoryCheck(found.memory, ENOUGH).after_step(plan, COUNT, seconds, peak)
    assert comparison is not None
    assert comparison.plan is None


def test_a_run_compares_and_goes_on(tmp_path: Path) -> None:
    corpus, run = write_corpus(tmp_path), tmp_path / "run"
    words = flags(corpus, run, "--train.steps=10", "--memory.activations=norms")
    assert main(words) == 0
    [event] = [one for one in records(run, "events.jsonl") if one["kind"] == "memory-check"]
    assert event["step"] == COUNT
    assert "predicted and measured: a step" in event["reason"]
    assert event["step_seconds"] > 0
    assert Plan.read(run / "plan.json").predicted.step_seconds is not None

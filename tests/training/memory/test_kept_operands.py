"""Operands of weights are kept over a step's micro-batches where they fit, in the account, and change no number."""

from __future__ import annotations

import dataclasses
import gc
from pathlib import Path

import pytest
import torch
from tiny_run import flags, losses, records, write_corpus

from scrimp.cli import main
from scrimp.config import Config, ModelConfig, TrainConfig
from scrimp.planner import Plan
from scrimp.planner.memory.decision import MemoryDecision
from scrimp.training import step as training_step
from scrimp.training.memory.kept_operands import with_kept_operands
from scrimp.training.setup import Decisions, decide

CONFIG = Config(
    device="cpu",
    precision="fp8",
    model=ModelConfig(preset="llama-3m", vocab_size=512, num_layers=3),
    train=TrainConfig(steps=4, sequence=64, batch_tokens=512, micro_batch=2),
)
STEPS = ("--train.steps=6", "--precision=fp8", "--train.micro-batch=1", "--evaluation.every=0")
WIDE = ("--model.width=128", "--model.ffn-width=512", "--model.num-layers=3")


@pytest.fixture(scope="module")
def decided() -> Decisions:
    return decide(CONFIG)


def without(memory: MemoryDecision, nbytes: int) -> MemoryDecision:
    costs = dataclasses.replace(memory.costs, resident=memory.costs.resident - nbytes)
    account = dataclasses.replace(
        memory.account,
        moment=dataclasses.replace(memory.account.moment, bytes=memory.account.peak - nbytes),
    )
    return dataclasses.replace(memory, costs=costs, account=account, keeps_operands=False)


def operand_bytes(memory: MemoryDecision) -> int:
    return sum(memory.costs.classes[kind].operands for kind in memory.costs.blocks)


def test_they_are_kept_where_they_fit(decided: Decisions) -> None:
    memory, config = decided.memory, decided.config
    assert memory.keeps_operands
    nbytes = operand_bytes(memory)
    weights = sum(memory.costs.classes[kind].weights for kind in memory.costs.blocks)
    # Two operands of every linear layer, each in values of 2 or 4 bytes; weights have 2.
    assert 1.9 * weights < nbytes < 4.1 * weights
    bare = without(memory, nbytes)
    assert with_kept_operands(bare, config) == memory
    for room, expected in ((0, True), (-1, False)):
        machine = dataclasses.replace(memory.machine, device_bytes=memory.account.peak + room)
        assert (
            with_kept_operands(dataclasses.replace(bare, machine=machine), config).keeps_operands is expected
        )


def test_where_they_are_not_kept(decided: Decisions) -> None:
    bare, config = without(decided.memory, operand_bytes(decided.memory)), decided.config
    whole = dataclasses.replace(config, train=dataclasses.replace(config.train, micro_batch=8))
    assert whole.micro_batches == 1
    layout = dataclasses.replace(config.layout, fsdp=2)
    for other in (whole, dataclasses.replace(config, layout=layout)):
        assert not with_kept_operands(bare, other).keeps_operands
    states = dataclasses.replace(bare.placement.states, weights=(True, False, False))
    placement = dataclasses.replace(bare.placement, states=states)
    assert not with_kept_operands(dataclasses.replace(bare, placement=placement), config).keeps_operands
    assert not decide(dataclasses.replace(CONFIG, precision="bf16")).memory.keeps_operands


def test_a_run_has_the_same_losses_and_the_predicted_peak(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    corpus = write_corpus(tmp_path)
    gc.collect()  # tensors of other tests are counted too
    assert main(flags(corpus, tmp_path / "kept", *STEPS, *WIDE)) == 0
    plan = Plan.read(tmp_path / "kept" / "plan.json")
    assert plan.measured is not None
    # Of a model this small the loss takes some kilobytes that are not foreseen.
    assert plan.measured.peak_device_bytes == pytest.approx(plan.predicted.peak_device_bytes, rel=0.03)
    monkeypatch.setattr("scrimp.training.setup.with_kept_operands", lambda memory, config: memory)
    assert main(flags(corpus, tmp_path / "apart", *STEPS, *WIDE)) == 0
    assert losses(tmp_path / "apart") == losses(tmp_path / "kept")
    apart = Plan.read(tmp_path / "apart" / "plan.json")
    assert apart.predicted.peak_device_bytes < 0.8 * plan.predicted.peak_device_bytes


def test_a_step_that_runs_out_of_memory_is_taken_again_without_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    corpus, passes, failed = write_corpus(tmp_path), training_step.run_passes, []
    assert main(flags(corpus, tmp_path / "free", *STEPS)) == 0

    def short(*arguments: object, step: int, first_row: int) -> object:
        found = passes(*arguments, step=step, first_row=first_row)
        if step == 3 and not failed:
            failed.append(step)
            raise torch.OutOfMemoryError("no room")
        return found

    monkeypatch.setattr(training_step, "run_passes", short)
    assert main(flags(corpus, tmp_path / "short", *STEPS)) == 0
    assert failed == [3]
    assert losses(tmp_path / "short") == losses(tmp_path / "free")
    found = [one for one in records(tmp_path / "short", "events.jsonl") if one["kind"] == "memory-replan"]
    assert [one["reason"] for one in found] == [
        "out of memory in step 4: weights are quantized in each micro-batch from now on"
    ]
    assert Plan.read(tmp_path / "short" / "plan.json").blocks["0"].activations == "keep"

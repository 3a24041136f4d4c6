"""Quantized weights stay for all micro-batches of a step where they fit: accounted for, and with the same losses."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_run import flags, losses, records, write_corpus

from scrimp.cli import main
from scrimp.config import Config, MemoryConfig, ModelConfig, SnipConfig, TrainConfig
from scrimp.gemm import swap_in
from scrimp.gemm.weight_operands import keeping
from scrimp.models.initialise import initialise
from scrimp.models.model import build_model
from scrimp.planner import Plan
from scrimp.training import step as training_step
from scrimp.training.memory import limits
from scrimp.training.memory.kept_operands import with_kept_operands, without_operands
from scrimp.training.memory.limits import arena_on_cpu
from scrimp.training.setup import Decisions, decide

CONFIG = Config(
    device="cpu",
    precision="fp8",
    model=ModelConfig(preset="llama-3m", vocab_size=512, num_layers=3),
    train=TrainConfig(steps=4, sequence=64, batch_tokens=512, micro_batch=2),
)
STEPS = ("--train.steps=5", "--precision=fp8", "--train.micro-batch=1", "--evaluation.every=0")


@pytest.fixture(scope="module")
def decided() -> Decisions:
    return decide(CONFIG)


def test_they_are_kept_where_they_fit(decided: Decisions) -> None:
    memory, config, device = decided.memory, decided.config, decided.device
    weights = sum(memory.costs.classes[kind].weights for kind in memory.costs.blocks)
    # Two operands of every linear layer, each in values of 2 or 4 bytes; weights have 2.
    assert 1.9 * weights < memory.operands < 4.1 * weights
    bare = without_operands(memory)
    assert bare.operands == 0
    assert without_operands(bare) is bare
    assert 0 < memory.account.peak - bare.account.peak <= memory.operands
    assert with_kept_operands(bare, config, device) == memory
    for room, expected in ((0, memory.operands), (-1, 0)):
        machine = dataclasses.replace(memory.machine, device_bytes=memory.account.peak + room)
        narrow = dataclasses.replace(bare, machine=machine)
        assert with_kept_operands(narrow, config, device).operands == expected


def test_those_of_a_quantized_head_count_too(decided: Decisions) -> None:
    head = decide(dataclasses.replace(CONFIG, precision="fp8,head=fp8"))
    more = head.memory.operands - decided.memory.operands
    numbers = head.architecture.vocab_size * head.architecture.width
    assert 4 * numbers <= more <= 8.2 * numbers


def test_where_formats_are_planned_those_of_the_largest_count() -> None:
    most = decide(dataclasses.replace(CONFIG, precision="fp8")).memory.operands
    planned = dataclasses.replace(CONFIG, precision="snip", snip=SnipConfig(formats="fp8,nvfp4"))
    assert decide(planned).memory.operands >= most
    pinned = decide(dataclasses.replace(planned, precision="snip,*.down=fp8"))
    assert pinned.memory.operands >= most


def test_where_they_are_not_kept(decided: Decisions) -> None:
    bare, config, device = without_operands(decided.memory), decided.config, decided.device
    whole = dataclasses.replace(config, train=dataclasses.replace(config.train, micro_batch=8))
    assert whole.micro_batches == 1
    layout = dataclasses.replace(config.layout, fsdp=2)
    for other in (whole, dataclasses.replace(config, layout=layout)):
        assert not with_kept_operands(bare, other, device).operands
    states = dataclasses.replace(bare.placement.states, weights=(True, False, False))
    placement = dataclasses.replace(bare.placement, states=states)
    assert not with_kept_operands(dataclasses.replace(bare, placement=placement), config, device).operands
    assert not decide(dataclasses.replace(CONFIG, precision="bf16")).memory.operands


def test_the_one_memory_of_a_cpu_has_room_for_them_and_for_what_waits_on_the_host(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    memory = MemoryConfig(activations="block+offload")
    found = decide(dataclasses.replace(CONFIG, memory=memory))
    assert found.memory.operands
    arena = arena_on_cpu(found.config, found.memory.account.host_peak)
    bare = without_operands(found.memory)
    for free, kept in ((0, True), (-1, False)):
        room = found.memory.account.peak + arena + free
        monkeypatch.setattr(limits, "_free", lambda device, room=room: room)
        assert bool(with_kept_operands(bare, found.config, found.device).operands) is kept


def bytes_of(value: Any) -> int:
    """Bytes of all tensors in an operand."""
    if isinstance(value, torch.Tensor):
        return value.untyped_storage().nbytes()
    if dataclasses.is_dataclass(value):
        return sum(bytes_of(getattr(value, one.name)) for one in dataclasses.fields(value))
    return 0


@contextlib.contextmanager
def counting(kept: list[int]) -> Iterator[None]:
    """Adds the bytes of what each step kept."""

    @contextlib.contextmanager
    def counted(wanted: bool) -> Iterator[None]:
        with keeping(wanted) as found:
            yield
            kept.append(sum(bytes_of(one.operand) for one in found.values()))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training_step, "keeping", counted)
        yield


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[int]]:
    """A run that keeps operands, and the bytes that it kept in each step; its text lies beside it."""
    folder, kept = tmp_path_factory.mktemp("kept"), list[int]()
    with counting(kept):
        assert main(flags(write_corpus(folder), folder / "kept", *STEPS)) == 0
    return folder / "kept", kept


def test_a_run_has_the_same_losses_and_keeps_what_was_foreseen(
    run: tuple[Path, list[int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, kept = run
    monkeypatch.setattr("scrimp.training.setup.with_kept_operands", lambda memory, *_: memory)
    apart: list[int] = []
    with counting(apart):
        assert main(flags(whole.parent / "corpus.txt", tmp_path / "apart", *STEPS)) == 0
    assert losses(tmp_path / "apart") == losses(whole)
    peaks = [Plan.read(one / "plan.json").predicted.peak_device_bytes for one in (whole, tmp_path / "apart")]
    # Where its largest moment is the update, less than all of them.
    assert 0 < peaks[0] - peaks[1] <= kept[0]
    assert kept == [kept[0]] * 5
    assert apart == [0] * 5


def test_what_is_foreseen_is_what_a_model_keeps(decided: Decisions) -> None:
    """Through numba's kernels or the reference, whichever this machine's runs take."""
    config, model = decided.config, build_model(decided.architecture, dtype=torch.bfloat16)
    initialise(model, 0)
    choose = decided.with_recorded_backends().backends()
    for block in model.each_block():
        swap_in(block, config.precision, choose=choose)
    tokens = torch.randint(0, 512, (2, 64), generator=torch.Generator().manual_seed(0))
    with keeping() as kept:
        model(tokens).float().sum().backward()
        assert sum(bytes_of(one.operand) for one in kept.values()) == decided.memory.operands


def test_a_step_that_runs_out_of_memory_is_taken_again_without_them(
    run: tuple[Path, list[int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (free, _), passes, failed = run, training_step.run_passes, []

    def short(*arguments: object, step: int, first_row: int) -> object:
        found = passes(*arguments, step=step, first_row=first_row)
        if step == 3 and not failed:
            failed.append(step)
            raise torch.OutOfMemoryError("no room")
        return found

    monkeypatch.setattr(training_step, "run_passes", short)
    assert main(flags(free.parent / "corpus.txt", tmp_path / "short", *STEPS)) == 0
    assert failed == [3]
    assert losses(tmp_path / "short") == losses(free)
    found = [one for one in records(tmp_path / "short", "events.jsonl") if one["kind"] == "weight-operands"]
    assert [one["reason"] for one in found] == [
        "out of memory in step 4: weights are quantized in each micro-batch from now on"
    ]
    plans = [Plan.read(one / "plan.json") for one in (tmp_path / "short", free)]
    assert plans[0].predicted.peak_device_bytes < plans[1].predicted.peak_device_bytes
    assert plans[0].blocks == plans[1].blocks

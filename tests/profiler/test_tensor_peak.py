"""What lives on a CPU is counted in bytes of tensors, and counting changes nothing."""

import contextlib
import gc
import json
import threading
from pathlib import Path

import pytest
import torch
from tiny_run import flags, losses, records, scrimp, write_corpus
from torch import nn

from scrimp.cli import main
from scrimp.planner import Plan
from scrimp.profiler import MemoryMeter
from scrimp.profiler.tensor_peak import counting_tensors
from scrimp.training.memory.counted_steps import COUNTED_STEP, CountedSteps

MIB = 2**20


def counted(act, *, is_apart=lambda _: False) -> int:
    with counting_tensors(is_apart) as found:
        act()
    assert found.num_bytes is not None
    return found.num_bytes


def test_the_peak_is_of_what_lived_before_and_what_was_made_and_freed() -> None:
    gc.collect()  # what earlier tests left would go meanwhile
    empty = counted(lambda: None)
    kept = torch.ones(MIB)  # 4 MiB

    def act() -> None:
        first = torch.ones(2 * MIB)
        del first
        second = torch.ones(MIB) + torch.ones(MIB)  # three of 4 MiB at once
        del second

    assert counted(lambda: None) - empty == kept.nbytes
    assert counted(act) - empty == kept.nbytes + 12 * MIB


def test_views_share_and_gradients_without_a_name_count() -> None:
    empty = counted(lambda: None)
    layer = nn.Linear(512, 1024, bias=False)  # 2 MiB
    views = [layer.weight[i:] for i in range(4)]
    layer(torch.ones(1, 512)).sum().backward()
    assert len(views) == 4
    assert counted(lambda: None) - empty == pytest.approx(2 * layer.weight.nbytes, abs=64)


def test_what_is_apart_does_not_count() -> None:
    empty = counted(lambda: None)
    arena = torch.ones(MIB)
    address = arena.untyped_storage().data_ptr()
    assert counted(lambda: None, is_apart=lambda t: t.untyped_storage().data_ptr() == address) == empty


def test_a_tensor_without_memory_is_passed_by() -> None:
    empty = counted(lambda: None)
    plain = torch._to_functional_tensor(torch.empty(0)).new_ones(MIB)  # what tracing a model leaves behind
    assert type(plain) is torch.Tensor
    assert plain.device.type == "cpu"
    with pytest.raises(RuntimeError, match="invalid python storage"):
        plain.untyped_storage().data_ptr()
    assert counted(lambda: None) == empty


def test_memory_from_before_that_is_freed_inside_makes_no_room() -> None:
    empty = counted(lambda: None)
    old = [torch.ones(MIB)]

    def act() -> None:
        old.clear()
        torch.ones(MIB).sum()

    assert counted(act) - empty == pytest.approx(8 * MIB, abs=64)


def test_a_profiler_of_the_caller_is_left_alone() -> None:
    with torch.profiler.profile(profile_memory=True) as outer, counting_tensors() as found:
        torch.ones(MIB)
    assert found.num_bytes is None
    assert any(event.key == "aten::ones" for event in outer.key_averages())
    with counting_tensors() as later:
        torch.ones(MIB)
    assert later.num_bytes is not None


def test_a_meter_keeps_the_largest_count_and_its_step_until_it_is_told_to_forget() -> None:
    meter = MemoryMeter(torch.device("cpu"))
    for step, size in ((3, 2 * MIB), (7, 4 * MIB), (9, MIB)):
        with meter.counting(step):
            torch.ones(size)
    assert meter.counted_in_step == 7
    assert (meter.peak_device_bytes() or 0) >= 16 * MIB
    meter.forget_counts()
    assert meter.peak_device_bytes() is meter.counted_in_step is None


@pytest.mark.slow
@pytest.mark.parametrize("words", [(), ("--precision=fp4",)])
def test_a_run_counts_one_step_and_no_number_of_it_changes(
    words: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    corpus = write_corpus(tmp_path)
    common = (*words, "--train.steps=5", "--evaluation.every=0")
    done = scrimp(*flags(corpus, tmp_path / "counted", *common))
    assert done.returncode == 0, done.stderr
    assert "profil" not in done.stderr  # torch's profiler says nothing of itself
    monkeypatch.setattr(CountedSteps, "around", lambda self: contextlib.nullcontext())
    assert main(flags(corpus, tmp_path / "plain", *common)) == 0
    assert losses(tmp_path / "counted") == losses(tmp_path / "plain")
    found = records(tmp_path / "counted")
    assert [record["tensor_peak_bytes"] is None for record in found] == [True, True, False, False, False]
    assert all(record["process_peak_bytes"] > record["process_growth_bytes"] for record in found)
    measured = Plan.read(tmp_path / "counted" / "plan.json").measured
    assert measured is not None
    assert measured.counted_in_step == COUNTED_STEP
    assert measured.peak_device_bytes == found[-1]["tensor_peak_bytes"]
    assert measured.peak_host_bytes is None
    step = measured.peak_device_bytes or 0
    states = (
        12 * json.loads((tmp_path / "counted" / "events.jsonl").read_text().splitlines()[0])["parameters"]
    )
    assert states < step < measured.process_growth_bytes
    assert f"(counted in step {COUNTED_STEP})" in done.stdout
    assert "profiler_start" not in done.stderr
    assert "process grown by" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(("steps", "counted"), [(4, 2), (2, 2), (1, 1)])
@pytest.mark.every(3)
def test_a_step_that_proves_a_plan_is_not_counted_unless_it_is_the_last(
    steps: int, counted: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first step of a plan holds copies of operands for its proof, which no prediction includes."""
    monkeypatch.setattr("scrimp.training.memory.counted_steps.COUNTED_STEP", 1)
    corpus = write_corpus(tmp_path)
    words = ("--precision=fp8", f"--train.steps={steps}", "--evaluation.every=0")
    assert main(flags(corpus, tmp_path / "run", *words)) == 0
    measured = Plan.read(tmp_path / "run" / "plan.json").measured
    assert measured is not None
    assert measured.counted_in_step == counted


@pytest.mark.slow
def test_a_run_of_two_steps_counts_the_last(tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path)
    assert main(flags(corpus, tmp_path / "run", "--train.steps=2")) == 0
    measured = Plan.read(tmp_path / "run" / "plan.json").measured
    assert measured is not None
    assert measured.counted_in_step == 2
    assert measured.step_seconds is None


def test_other_threads_are_not_counted() -> None:
    """A limit of the profiler: what a helper thread makes is in no event."""
    empty = counted(lambda: None)

    def act() -> None:
        thread = threading.Thread(target=lambda: torch.ones(MIB))
        thread.start()
        thread.join()

    assert counted(act) - empty < MIB

"""Whole runs in a pipeline: the losses of one process, its files, and runs that go on with other stages or none."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
from distributed import spawn
from tiny_run import flags, losses, records, write_corpus

from scrimp.cli import main
from scrimp.training.checkpoint import CheckpointStore

pytestmark = pytest.mark.slow

STEPS, HALF = 4, 2
SETTINGS = [
    f"--train.steps={STEPS}",
    f"--checkpoint.every={HALF}",
    "--checkpoint.keep-last=4",
    "--evaluation.every=2",
    "--train.micro-batch=1",
    "--optimizer.clip=0.5",
    "--model.num-layers=4",
]
QUANTIZED = ["--precision=fp8,*.qkv=nvfp4", "--train.parameters=fp32"]
TIED = ["--model.preset=qwen2.5-0.5b", "--model.vocab-size=260"]


def commands(rank: int, lines: Sequence[Sequence[str]]) -> list[int]:
    """Exit codes of commands, one after another, of one rank."""
    return [main(list(words)) for words in lines]


def on_ranks(ranks: int, folder: Path, *lines: Sequence[str]) -> None:
    folder.mkdir()
    assert spawn(ranks, commands, folder, lines) == [[0] * len(lines)] * ranks


def alone(*lines: Sequence[str]) -> None:
    assert commands(0, lines) == [0] * len(lines)


def goes_on(run: Path, at: Path, *more: str) -> list[str]:
    """The command that goes on with a copy of a run from its half."""
    shutil.copytree(run, at)
    return ["train", f"--run.dir={at}", f"--resume-from={HALF}", *more]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pipelines")
    corpus = write_corpus(folder)
    alone(
        flags(corpus, folder / "alone", *SETTINGS),
        flags(corpus, folder / "tied alone", *SETTINGS, *TIED),
        flags(corpus, folder / "quantized alone", *SETTINGS, *QUANTIZED),
    )
    on_ranks(
        2,
        folder / "two",
        flags(corpus, folder / "1f1b", *SETTINGS, "--layout.pp=2"),
        flags(corpus, folder / "interleaved", *SETTINGS, "--layout.pp=2", "--layout.virtual=2"),
        flags(corpus, folder / "tied", *SETTINGS, *TIED, "--layout.pp=2", "--layout.stages=1,3"),
        flags(corpus, folder / "quantized", *SETTINGS, *QUANTIZED, "--layout.pp=2", "--layout.schedule=zbv"),
        goes_on(folder / "alone", folder / "from one to two", "--layout.pp=2"),
    )
    on_ranks(
        2,
        folder / "again",
        goes_on(folder / "1f1b", folder / "from 1f1b to 1f1b"),
        goes_on(folder / "1f1b", folder / "from 1f1b to fsdp", "--layout.pp=1", "--layout.fsdp=2"),
        goes_on(folder / "1f1b", folder / "from 1f1b to zbv", "--layout.pp=2", "--layout.schedule=zbv"),
    )
    on_ranks(
        4,
        folder / "four",
        goes_on(
            folder / "1f1b",
            folder / "from two to four",
            *("--layout.pp=2", "--layout.schedule=zbv", "--layout.fsdp=2", "--memory.activations=block"),
        ),
    )
    alone(
        goes_on(folder / "1f1b", folder / "from two to one"),
        goes_on(folder / "tied", folder / "tied to one"),
        goes_on(folder / "from 1f1b to zbv", folder / "from zbv to one"),
    )
    return folder


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("1f1b", "alone"),
        ("interleaved", "alone"),
        ("tied", "tied alone"),
        ("tied to one", "tied alone"),
        ("from one to two", "alone"),
        ("from two to one", "alone"),
        ("from 1f1b to fsdp", "alone"),
        ("from 1f1b to zbv", "alone"),
        ("from zbv to one", "alone"),
        ("from two to four", "alone"),
    ],
)
def test_losses_are_those_of_one_process(runs: Path, name: str, expected: str) -> None:
    wanted, found = losses(runs / expected), losses(runs / name)
    assert found.keys() == wanted.keys()
    assert list(found.values()) == pytest.approx(list(wanted.values()), rel=1e-5)
    for one, other in zip(records(runs / name), records(runs / expected), strict=True):
        assert one["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-4)
        if "eval_loss" in other:
            assert one["eval_loss"] == pytest.approx(other["eval_loss"], rel=1e-5)


def test_quantized_layers_are_proven_and_train_as_in_one_process(runs: Path) -> None:
    wanted, found = losses(runs / "quantized alone"), losses(runs / "quantized")
    assert list(found.values()) == pytest.approx(list(wanted.values()), rel=1e-3)
    assert next(iter(found.values())) == pytest.approx(next(iter(wanted.values())), rel=1e-6)
    events = (runs / "quantized" / "events.jsonl").read_text()
    assert "gave the numbers of their formats" in events
    assert "nothing could be told" not in events


def test_the_same_stages_go_on_bit_for_bit(runs: Path) -> None:
    assert losses(runs / "from 1f1b to 1f1b") == losses(runs / "1f1b")


@pytest.mark.parametrize(("name", "expected"), [("1f1b", "alone"), ("tied", "tied alone")])
def test_a_checkpoint_has_the_files_of_one_process(runs: Path, name: str, expected: str) -> None:
    one, other = (
        CheckpointStore(runs / run, keep_last=1, keep_every=0).at(STEPS) for run in (expected, name)
    )
    index = "model.safetensors.index.json"
    assert json.loads(one.read_file(index)) == json.loads(other.read_file(index))
    assert one.read_file(index) == other.read_file(index)
    found = dict(other.tensors())
    for tensor_name, tensor in one.tensors():
        assert (tensor.float() - found[tensor_name].float()).abs().max() < 1e-4, tensor_name


def test_what_a_schedule_decided_is_open_again_without_it(runs: Path) -> None:
    def activations(name: str) -> str:
        lines = (runs / name / "config.toml").read_text().splitlines()
        return next(line for line in lines if line.startswith("activations"))

    assert activations("from 1f1b to zbv").startswith('activations = "keep"  # blocks recompute nothing')
    assert activations("from zbv to one") == activations("alone") == 'activations = "auto"'


def test_the_plan_says_which_blocks_each_stage_has(runs: Path) -> None:
    layout = json.loads((runs / "tied" / "plan.json").read_text())["layout"]
    assert (layout["pp"], layout["schedule"], layout["stages"]) == (2, "1f1b", [[0, 0], [1, 3]])

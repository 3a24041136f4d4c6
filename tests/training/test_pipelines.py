"""Whole runs in a pipeline: the losses of one process, its files, and runs that go on with other stages or none."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from runs_on_ranks import check_same_course, check_same_tensors, checkpoint_of, commands, goes_on, on_ranks
from tiny_run import flags, losses, write_corpus

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


def alone(*lines: Sequence[str]) -> None:
    assert commands(0, lines) == [0] * len(lines)


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
        goes_on(folder / "alone", folder / "from one to two", HALF, "--layout.pp=2"),
    )
    on_ranks(
        2,
        folder / "again",
        goes_on(folder / "1f1b", folder / "from 1f1b to 1f1b", HALF),
        goes_on(folder / "1f1b", folder / "from 1f1b to fsdp", HALF, "--layout.pp=1", "--layout.fsdp=2"),
        goes_on(folder / "1f1b", folder / "from 1f1b to zbv", HALF, "--layout.pp=2", "--layout.schedule=zbv"),
    )
    on_ranks(
        4,
        folder / "four",
        goes_on(
            folder / "1f1b",
            folder / "from two to four",
            HALF,
            *("--layout.pp=2", "--layout.schedule=zbv", "--layout.fsdp=2", "--memory.activations=block"),
        ),
    )
    alone(
        goes_on(folder / "1f1b", folder / "from two to one", HALF),
        goes_on(folder / "tied", folder / "tied to one", HALF),
        goes_on(folder / "from 1f1b to zbv", folder / "from zbv to one", HALF),
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
    check_same_course(runs / name, runs / expected)


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
    index = "model.safetensors.index.json"
    one, other = (checkpoint_of(runs / run, STEPS).read_file(index) for run in (expected, name))
    assert one == other
    check_same_tensors(runs / name, runs / expected, STEPS)


def test_what_a_schedule_decided_is_open_again_without_it(runs: Path) -> None:
    def compiles(name: str) -> str:
        lines = (runs / name / "config.toml").read_text().splitlines()
        return next(line for line in lines if line.startswith("compile"))

    assert compiles("from 1f1b to zbv").endswith("and zbv makes them apart")
    assert compiles("from zbv to one") == compiles("alone") != compiles("from 1f1b to zbv")


def test_the_plan_says_which_blocks_each_stage_has(runs: Path) -> None:
    layout = json.loads((runs / "tied" / "plan.json").read_text())["layout"]
    assert (layout["pp"], layout["schedule"], layout["stages"]) == (2, "1f1b", [[0, 0], [1, 3]])

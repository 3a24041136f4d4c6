"""Whole runs on several ranks: the losses of one process, and runs that go on under another layout."""

from __future__ import annotations

from pathlib import Path

import pytest
from runs_on_ranks import check_same_course, check_same_tensors, goes_on, on_ranks
from tiny_run import flags, losses, records, scrimp, write_corpus

pytestmark = pytest.mark.slow

STEPS, HALF = 12, 6
SETTINGS = [
    f"--train.steps={STEPS}",
    f"--checkpoint.every={HALF}",
    "--checkpoint.keep-last=4",
    "--evaluation.every=4",
    "--train.micro-batch=1",
    "--optimizer.clip=0.5",
]
# Key heads that two ranks can share.
SETTINGS += ["--model.num-kv-heads=2", "--objective.z-loss=1e-4"]
ON_HOST = [
    "--memory.optimizer=host",
    "--memory.activations=keep+offload",
    "--budget.device-memory=1GB",
    "--budget.host-memory=1GB",
]
HYBRID = ["--layout.dp=2", "--layout.zero=1"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("layouts")
    corpus = write_corpus(folder)
    alone = folder / "alone"
    assert scrimp(*flags(corpus, alone, *SETTINGS)).returncode == 0
    on_ranks(
        2,
        folder / "two",
        flags(corpus, folder / "fsdp", *SETTINGS, "--layout.fsdp=2"),
        flags(corpus, folder / "copies", *SETTINGS, "--layout.dp=2"),
        flags(corpus, folder / "on the host", *SETTINGS, *ON_HOST),
        flags(corpus, folder / "shared rows", *SETTINGS, "--layout.cp=2"),
        flags(corpus, folder / "cut layers", *SETTINGS, "--layout.tp=2"),
        goes_on(alone, folder / "from one to two", HALF),
    )
    on_ranks(
        2,
        folder / "again",
        goes_on(folder / "fsdp", folder / "from two to two", HALF),
        goes_on(folder / "fsdp", folder / "from fsdp to copies", HALF, "--layout.dp=2"),
        goes_on(folder / "fsdp", folder / "from fsdp to cut layers", HALF, "--layout.tp=2"),
        goes_on(folder / "cut layers", folder / "from cut layers to cut layers", HALF),
    )
    on_ranks(
        4,
        folder / "four",
        goes_on(folder / "fsdp", folder / "from two to four", HALF, *HYBRID),
        goes_on(folder / "cut layers", folder / "from two to four cut layers", HALF, "--layout.tp=2"),
    )
    assert scrimp(*goes_on(folder / "cut layers", folder / "from cut layers to one", HALF)).returncode == 0
    assert scrimp(*goes_on(folder / "from two to four", folder / "from four to one", HALF)).returncode == 0
    return folder


@pytest.mark.parametrize(
    "name",
    [
        "fsdp",
        "copies",
        "on the host",
        "shared rows",
        "cut layers",
        "from fsdp to cut layers",
        "from two to four cut layers",
        "from cut layers to one",
        "from one to two",
        "from fsdp to copies",
        "from two to four",
        "from four to one",
    ],
)
def test_losses_are_those_of_one_process(runs: Path, name: str) -> None:
    check_same_course(runs / name, runs / "alone")


def test_the_same_layout_goes_on_bit_for_bit(runs: Path) -> None:
    assert losses(runs / "from two to two") == losses(runs / "fsdp")
    assert losses(runs / "from cut layers to cut layers") == losses(runs / "cut layers")


def test_a_checkpoint_has_the_names_shapes_and_sizes_of_one_process(runs: Path) -> None:
    for name in ("fsdp", "copies", "cut layers"):
        check_same_tensors(runs / name, runs / "alone", STEPS)


def test_exports_and_evaluations_need_not_know_the_layout(runs: Path, tmp_path: Path) -> None:
    assert scrimp("export", str(runs / "fsdp"), str(tmp_path / "out")).returncode == 0
    found = scrimp("eval", str(tmp_path / "out"), f"--data={runs / 'corpus.txt'}", "--device=cpu")
    assert found.returncode == 0, found.stderr
    assert scrimp("verify", str(runs / "from two to four")).returncode == 0


def test_a_run_that_goes_on_under_another_layout_says_both(runs: Path) -> None:
    (told,) = (
        one for one in records(runs / "from fsdp to copies", "events.jsonl") if one["kind"] == "layout"
    )
    assert "layout: dp 2; before: fsdp 2, ZeRO stage 3" in told.values()

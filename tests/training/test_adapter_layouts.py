"""Whole runs with adapters on several ranks: the losses of one process, and runs that go on under another layout."""

from __future__ import annotations

from pathlib import Path

import pytest
from runs_on_ranks import check_same_course, check_same_tensors, goes_on, on_ranks
from tiny_run import flags, losses, records, scrimp, write_corpus

pytestmark = pytest.mark.slow

STEPS, HALF = 8, 4
SETTINGS = [
    f"--train.steps={STEPS}",
    f"--checkpoint.every={HALF}",
    "--checkpoint.keep-last=4",
    "--evaluation.every=4",
    "--train.micro-batch=1",
    "--optimizer.clip=0.05",
    "--adapter.rank=4",
]

FP8 = ["--precision=fp8", "--adapter.targets=attention.qkv,mlp.down"]
"""Frozen layers with adapters and without, which ranks gather in other ways."""
STORED = "--adapter.base=nvfp4"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapters")
    corpus, base, alone = write_corpus(folder), folder / "base", folder / "alone"
    assert scrimp(*flags(corpus, base, "--train.steps=4")).returncode == 0
    ours = [*SETTINGS, f"--model.weights={base}"]
    assert scrimp(*flags(corpus, alone, *ours)).returncode == 0
    on_ranks(
        2,
        folder / "two",
        flags(corpus, folder / "fsdp", *ours, "--layout.fsdp=2"),
        flags(corpus, folder / "zero 1", *ours, "--layout.fsdp=2", "--layout.zero=1"),
        flags(corpus, folder / "copies", *ours, "--layout.dp=2"),
        flags(corpus, folder / "fp8 on two", *ours, "--layout.fsdp=2", *FP8),
        flags(corpus, folder / "stored on two", *ours, "--layout.dp=2", STORED),
        goes_on(alone, folder / "from one to two", HALF),
    )
    assert scrimp(*flags(corpus, folder / "fp8", *ours, *FP8)).returncode == 0
    assert scrimp(*flags(corpus, folder / "stored", *ours, STORED)).returncode == 0
    on_ranks(2, folder / "again", goes_on(folder / "fsdp", folder / "from two to two", HALF))
    assert scrimp(*goes_on(folder / "fsdp", folder / "from two to one", HALF)).returncode == 0
    return folder


@pytest.mark.parametrize("name", ["fsdp", "zero 1", "copies", "from one to two", "from two to one"])
def test_losses_are_those_of_one_process(runs: Path, name: str) -> None:
    check_same_course(runs / name, runs / "alone")
    check_same_tensors(runs / name, runs / "alone", STEPS)


def test_copies_of_stored_weights_train_as_one(runs: Path) -> None:
    check_same_course(runs / "stored on two", runs / "stored")
    check_same_tensors(runs / "stored on two", runs / "stored", STEPS)
    assert losses(runs / "stored") != losses(runs / "alone")


def test_frozen_weights_in_fp8_are_those_of_one_process(runs: Path) -> None:
    expected, found = losses(runs / "fp8"), losses(runs / "fp8 on two")
    assert list(found.values()) == pytest.approx(list(expected.values()), rel=1e-3)


def test_the_same_layout_goes_on_bit_for_bit(runs: Path) -> None:
    assert losses(runs / "from two to two") == losses(runs / "fsdp")


@pytest.mark.parametrize("name", ["fsdp", "zero 1"])
def test_ranks_send_what_is_predicted(runs: Path, name: str) -> None:
    """Frozen weights are gathered, and nothing of them is reduced."""
    (proof,) = (one for one in records(runs / name, "events.jsonl") if one["kind"] == "layout-proof")
    exchanges = {key: pair for key, pair in proof["figures"].items() if key.startswith("fsdp")}
    assert len(exchanges) == 2
    for key, (predicted, measured) in exchanges.items():
        assert measured == pytest.approx(predicted, rel=0.01), key

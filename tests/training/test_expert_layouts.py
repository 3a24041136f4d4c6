"""Whole runs with routed experts: the loss that is recorded, and runs that go on under another layout."""

from __future__ import annotations

from pathlib import Path

import pytest
from runs_on_ranks import check_same_course, check_same_tensors, goes_on, on_ranks
from tiny_run import flags, losses, records, scrimp, write_corpus

pytestmark = pytest.mark.slow

STEPS, HALF = 3, 2
SETTINGS = [
    "--model.preset=mixtral-8m",
    "--model.ffn-width=64",
    f"--train.steps={STEPS}",
    f"--checkpoint.every={HALF}",
    "--checkpoint.keep-last=4",
    "--evaluation.every=3",
    "--train.micro-batch=1",
]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("experts")
    corpus = write_corpus(folder)
    assert scrimp(*flags(corpus, folder / "alone", *SETTINGS)).returncode == 0
    on_ranks(2, folder / "first", flags(corpus, folder / "shared", *SETTINGS, "--layout.ep=2"))
    on_ranks(
        2,
        folder / "again",
        goes_on(folder / "shared", folder / "shared to shared", HALF, "--layout.ep=2"),
        goes_on(folder / "shared", folder / "shared to pieces", HALF, "--layout.ep=1", "--layout.etp=2"),
        goes_on(folder / "shared", folder / "shared to shards", HALF, "--layout.ep=1"),
        goes_on(folder / "shared", folder / "shared to stages", HALF, "--layout.ep=1", "--layout.pp=2"),
        goes_on(folder / "alone", folder / "one to shared", HALF, "--layout.ep=2"),
    )
    assert scrimp(*goes_on(folder / "shared to pieces", folder / "pieces to one", HALF)).returncode == 0
    return folder


@pytest.mark.parametrize(
    "name",
    ["shared", "shared to pieces", "shared to shards", "shared to stages", "one to shared", "pieces to one"],
)
def test_losses_are_those_of_one_process(runs: Path, name: str) -> None:
    check_same_course(runs / name, runs / "alone")
    for one in records(runs / name):
        assert 1.9 < one["router_aux_loss"] < 8, "2 at perfect balance of 2 experts a token"


def test_the_same_layout_goes_on_bit_for_bit(runs: Path) -> None:
    assert losses(runs / "shared to shared") == losses(runs / "shared")


def test_a_checkpoint_has_the_tensors_of_one_process(runs: Path) -> None:
    check_same_tensors(runs / "shared", runs / "alone", HALF)

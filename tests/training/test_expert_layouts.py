"""Whole runs with routed experts: the loss that is recorded, and runs that go on under another layout."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
from distributed import spawn
from tiny_run import flags, losses, records, scrimp, write_corpus

from scrimp.cli import main
from scrimp.training.checkpoint import CheckpointStore

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


def commands(rank: int, lines: Sequence[Sequence[str]]) -> list[int]:
    """Exit codes of commands, one after another, of one rank."""
    return [main(list(words)) for words in lines]


def on_ranks(folder: Path, *lines: Sequence[str]) -> None:
    folder.mkdir()
    assert spawn(2, commands, folder, lines) == [[0] * len(lines)] * 2


def goes_on(run: Path, at: Path, *more: str) -> list[str]:
    """The command that goes on with a copy of a run from its half."""
    shutil.copytree(run, at)
    return ["train", f"--run.dir={at}", f"--resume-from={HALF}", *more]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("experts")
    corpus = write_corpus(folder)
    assert scrimp(*flags(corpus, folder / "alone", *SETTINGS)).returncode == 0
    on_ranks(folder / "first", flags(corpus, folder / "shared", *SETTINGS, "--layout.ep=2"))
    on_ranks(
        folder / "again",
        goes_on(folder / "shared", folder / "shared to shared", "--layout.ep=2"),
        goes_on(folder / "shared", folder / "shared to pieces", "--layout.ep=1", "--layout.etp=2"),
        goes_on(folder / "shared", folder / "shared to shards", "--layout.ep=1"),
        goes_on(folder / "shared", folder / "shared to stages", "--layout.ep=1", "--layout.pp=2"),
        goes_on(folder / "alone", folder / "one to shared", "--layout.ep=2"),
    )
    assert scrimp(*goes_on(folder / "shared to pieces", folder / "pieces to one")).returncode == 0
    return folder


@pytest.mark.parametrize(
    "name",
    ["shared", "shared to pieces", "shared to shards", "shared to stages", "one to shared", "pieces to one"],
)
def test_losses_are_those_of_one_process(runs: Path, name: str) -> None:
    expected, found = losses(runs / "alone"), losses(runs / name)
    assert list(found.values()) == pytest.approx(list(expected.values()), rel=1e-5)
    for one, other in zip(records(runs / name), records(runs / "alone"), strict=True):
        assert one["router_aux_loss"] == pytest.approx(other["router_aux_loss"], rel=1e-4)
        assert 1.9 < one["router_aux_loss"] < 8, "2 at perfect balance of 2 experts a token"


def test_the_same_layout_goes_on_bit_for_bit(runs: Path) -> None:
    assert losses(runs / "shared to shared") == losses(runs / "shared")


def test_a_checkpoint_has_the_tensors_of_one_process(runs: Path) -> None:
    stores = [CheckpointStore(runs / name, keep_last=1, keep_every=0) for name in ("alone", "shared")]
    alone, shared = (dict(store.at(HALF).tensors()) for store in stores)
    assert {n: (t.shape, t.dtype) for n, t in shared.items()} == {
        n: (t.shape, t.dtype) for n, t in alone.items()
    }
    for name, tensor in alone.items():
        assert (tensor.float() - shared[name].float()).abs().max() < 1e-4, name

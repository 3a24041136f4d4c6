"""Whole runs on ranks beside those of one process: commands, runs that go on elsewhere, and what both have written."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
from distributed import spawn
from tiny_run import losses, records

from scrimp.cli import main
from scrimp.training.checkpoint import Checkpoint, CheckpointStore


def commands(rank: int, lines: Sequence[Sequence[str]]) -> list[int]:
    """Exit codes of commands, one after another, of one rank."""
    return [main(list(words)) for words in lines]


def on_ranks(ranks: int, folder: Path, *lines: Sequence[str]) -> None:
    """Commands on so many ranks, which are started once."""
    folder.mkdir()
    assert spawn(ranks, commands, folder, lines) == [[0] * len(lines)] * ranks


def goes_on(run: Path, at: Path, step: int, *more: str) -> list[str]:
    """The command that goes on with a copy of a run from a checkpoint."""
    shutil.copytree(run, at)
    return ["train", f"--run.dir={at}", f"--resume-from={step}", *more]


def check_same_course(run: Path, alone: Path) -> None:
    """Losses, norms of gradients and evaluations of every step, up to the order of sums."""
    expected, found = losses(alone), losses(run)
    assert found.keys() == expected.keys()
    assert list(found.values()) == pytest.approx(list(expected.values()), rel=1e-5)
    for one, other in zip(records(run), records(alone), strict=True):
        for key, bound in (("grad_norm", 1e-4), ("eval_loss", 1e-5), ("router_aux_loss", 1e-4)):
            if key in other:
                assert one[key] == pytest.approx(other[key], rel=bound), key


def checkpoint_of(run: Path, step: int) -> Checkpoint:
    return CheckpointStore(run, keep_last=1, keep_every=0).at(step)


def check_same_tensors(run: Path, alone: Path, step: int) -> None:
    """Names, shapes and types of a checkpoint's tensors; and their numbers, up to what a few steps make of rounding."""
    found, expected = dict(checkpoint_of(run, step).tensors()), dict(checkpoint_of(alone, step).tensors())
    assert {n: (t.shape, t.dtype) for n, t in found.items()} == {
        n: (t.shape, t.dtype) for n, t in expected.items()
    }
    for name, tensor in expected.items():
        assert (tensor.float() - found[name].float()).abs().max() < 1e-4, name

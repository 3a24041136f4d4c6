"""The same run gives the same bytes in every file of a checkpoint: in another folder, and after an interruption."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from tiny_run import flags, scrimp, write_corpus

MORE = ("--train.steps=6", "--checkpoint.every=3", "--evaluation.every=0")
KINDS = {
    "plain": (),
    "bf16": ("--precision=bf16", "--train.parameters=bf16", "--optimizer.moments=8bit"),
    "offloaded": (
        *("--memory.activations=block", "--memory.gradients=host"),
        *("--memory.optimizer=host", "--memory.update=cpu"),
    ),
}


def files(run_dir: Path) -> dict[str, bytes]:
    folder = run_dir / "checkpoints"
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def differing(one: Path, other: Path) -> list[str]:
    first, second = files(one), files(other)
    assert first.keys() == second.keys()
    assert len(first) > 10
    return [name for name, content in first.items() if content != second[name]]


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_two_runs_write_the_same_checkpoints(tmp_path: Path, kind: str) -> None:
    """In processes of their own: the order of some metadata changes with each."""
    corpus = write_corpus(tmp_path)
    for name in ("one", "another"):
        done = scrimp(*flags(corpus, tmp_path / name, *MORE, *KINDS[kind]))
        assert done.returncode == 0, done.stderr
    assert differing(tmp_path / "one", tmp_path / "another") == []
    if kind == "plain":
        shutil.rmtree(tmp_path / "one" / "checkpoints" / "step-00000006")
        assert scrimp("train", f"--run.dir={tmp_path / 'one'}", "--resume").returncode == 0
        assert differing(tmp_path / "one", tmp_path / "another") == []

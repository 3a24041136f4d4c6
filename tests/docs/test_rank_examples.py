"""The scripts that start several ranks, run as their users run them, each on two processes of this machine."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from ranks import environment, free_port
from tiny_run import flags, records, write_corpus

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
SRUN = """#!/bin/sh
# What srun does for two tasks on this machine.
[ "$1" = --kill-on-bad-exit=1 ] || exit 9
shift
export SLURM_STEP_NUM_TASKS=2 SLURM_STEP_ID=0 SLURM_STEP_NODELIST=localhost
SLURM_PROCID=1 SLURM_LOCALID=1 "$@" & other=$!
SLURM_PROCID=0 SLURM_LOCALID=0 "$@" || exit
wait $other
"""


def started(name: str, folder: Path, *, corpus: Path, **more: str) -> subprocess.Popen[str]:
    """One of the scripts, in the environment of a user for whom `scrimp` and `torchrun` are installed."""
    path = f"{folder}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    return subprocess.Popen(
        ["sh", str(EXAMPLES / name), *flags(corpus, folder / "run", "--train.steps=3")[1:]],
        env=environment(folder, PATH=path, **more),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def assert_one_run(folder: Path, processes: list[subprocess.Popen[str]]) -> None:
    outputs = [process.communicate(timeout=200)[0] for process in processes]
    assert [process.returncode for process in processes] == [0] * len(processes), outputs
    assert "".join(outputs).count("report: ") == 1
    assert [record["step"] for record in records(folder / "run")] == [1, 2, 3]


@pytest.mark.slow
def test_one_node(tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path)
    assert_one_run(tmp_path, [started("train_one_node.sh", tmp_path, corpus=corpus, RANKS="2")])


@pytest.mark.slow
def test_several_nodes(tmp_path: Path) -> None:
    """Two agents of torchrun, each with one rank, on one machine."""
    corpus, port = write_corpus(tmp_path), str(free_port())
    named = {"NODES": "2", "HEAD": "127.0.0.1", "PORT": port, "RANKS": "1"}
    nodes = [
        started("train_several_nodes.sh", tmp_path, corpus=corpus, NODE=node, **named) for node in ("0", "1")
    ]
    assert_one_run(tmp_path, nodes)


@pytest.mark.slow
def test_slurm(tmp_path: Path) -> None:
    corpus, srun = write_corpus(tmp_path), tmp_path / "srun"
    srun.write_text(SRUN)
    srun.chmod(0o755)
    process = started("train_slurm.sh", tmp_path, corpus=corpus, SLURM_JOB_ID=str(free_port()))
    assert_one_run(tmp_path, [process])


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("train_*.sh")), ids=lambda path: path.name)
def test_a_script_is_sound_and_says_how_it_is_started(path: Path) -> None:
    subprocess.run(["sh", "-n", str(path)], check=True)
    assert f"examples/{path.name} my.toml" in path.read_text(encoding="utf-8")

"""A run in a control group whose limit lies above the process's own group: it plans for what is left, and lives."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from control_group import nested_group
from tiny_run import write_corpus

from scrimp.planner import Plan

SCRIPT = """
import pathlib, sys
pathlib.Path(sys.argv[1], "cgroup.procs").write_text("0")
from scrimp.cli import main
sys.exit(main(sys.argv[2:]))
"""
LIMIT = 600_000_000
"""Everything resident takes 700 MB of the whole process."""


@pytest.mark.slow
def test_a_run_in_a_nested_group_recomputes_instead_of_being_killed(tmp_path: Path) -> None:
    words = [
        "train",
        "--device=cpu",
        f"--data.source={write_corpus(tmp_path)}",
        f"--data.cache={tmp_path / 'cache'}",
        f"--run.dir={tmp_path / 'run'}",
        "--data.tokenizer=bytes",
        "--model.vocab-size=4096",
        "--train.sequence=256",
        "--train.batch-tokens=4096",
        "--train.micro-batch=16",
        "--train.steps=2",
        "--evaluation.every=0",
        "--evaluation.tokens=256",
    ]
    with nested_group(LIMIT) as group:
        found = subprocess.run(
            [sys.executable, "-c", SCRIPT, str(group), *words],
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
    assert found.returncode == 0, found.stderr[-2000:]
    plan = Plan.read(tmp_path / "run" / "plan.json")
    assert {block.activations for block in plan.blocks.values()} != {"keep"}
    assert (plan.predicted.peak_device_bytes or 0) < LIMIT

"""A process that really runs out of memory in a step goes on with a plan that takes less, and with the same losses."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tiny_run import losses, records, write_corpus

from scrimp.planner import Plan
from scrimp.runtime.memory import ArenaTooSmallError
from scrimp.train.memory_trouble import is_out_of_memory

WIDE = [
    "--device=cpu",
    "--data.tokenizer=bytes",
    "--model.num-layers=12",
    "--model.width=64",
    "--model.num-heads=2",
    "--model.num-kv-heads=1",
    "--model.ffn-width=1024",
    "--train.sequence=128",
    "--train.batch-tokens=4096",
    "--train.micro-batch=32",
    "--train.steps=2",
    "--train.eval-tokens=512",
    "--train.eval-every=0",
    "--train.checkpoint-every=0",
]
SCRIPT = """
import resource, sys
from scrimp.cli import main
from scrimp.train.loop import Trainer

spare, passes = int(sys.argv[1]), Trainer._passes_once

def limited(self, *arguments):
    if self.position.step == 1:  # the first step has loaded all that is loaded once
        with open("/proc/self/statm", encoding="ascii") as statm:
            size = int(statm.read().split()[0]) * resource.getpagesize()
        limit = resource.getrlimit(resource.RLIMIT_AS)
        if limit[0] == resource.RLIM_INFINITY:
            resource.setrlimit(resource.RLIMIT_AS, (size + spare, limit[1]))
    return passes(self, *arguments)

Trainer._passes_once = limited
sys.exit(main(sys.argv[2:]))
"""


def run(corpus: Path, run_dir: Path, spare: int, *more: str) -> subprocess.CompletedProcess[str]:
    """Train in a process that may take only `spare` bytes more from its second step on."""
    words = [
        "train",
        *WIDE,
        *more,
        f"--data.source={corpus}",
        f"--data.cache={corpus.parent}/cache",
        f"--run.dir={run_dir}",
    ]
    # Without arenas of its own for every thread malloc gives what is freed back, and takes it again.
    env = {"PATH": "", "OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "65536"}
    return subprocess.run(
        [sys.executable, "-c", SCRIPT, str(spare), *words],
        capture_output=True,
        text=True,
        env=env,
        timeout=240,
    )


@pytest.mark.skipif(sys.platform != "linux", reason="limits of address space are Linux's")
def test_a_step_that_runs_out_of_memory_is_taken_again_with_less(tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path)
    free = run(corpus, tmp_path / "free", 1 << 40)
    assert free.returncode == 0, free.stderr
    short = run(corpus, tmp_path / "short", 280 << 20)
    assert short.returncode == 0, short.stderr
    assert losses(tmp_path / "short") == losses(tmp_path / "free")
    found = [
        event for event in records(tmp_path / "short", "events.jsonl") if event["kind"] == "memory-replan"
    ]
    assert found
    assert "out of memory in step 2" in found[0]["reason"]
    blocks = Plan.read(tmp_path / "short" / "plan.json").blocks
    assert {block.activations for block in blocks.values()} != {"keep"}


@pytest.mark.skipif(sys.platform != "linux", reason="limits of address space are Linux's")
def test_where_nothing_takes_less_the_run_stops_by_name(tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path)
    found = run(corpus, tmp_path / "run", 48 << 20, "--memory.activations=block")
    assert found.returncode == 1
    assert "ran out of memory" in found.stderr
    assert "Traceback" not in found.stderr


def test_what_counts_as_running_out() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 60)
    assert is_out_of_memory(caught.value)
    assert is_out_of_memory(ArenaTooSmallError("small"))
    with pytest.raises(RuntimeError) as other:
        torch.empty(2) @ torch.empty(3)
    assert not is_out_of_memory(other.value)

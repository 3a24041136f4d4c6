"""A model and a corpus small enough to train within a test: about a second for twenty steps."""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from distributed import FORKED

from scrimp.cli import main

TINY = [
    "--device=cpu",
    "--data.tokenizer=bytes",
    "--model.num-layers=2",
    "--model.width=32",
    "--model.num-heads=2",
    "--model.num-kv-heads=1",
    "--model.ffn-width=64",
    "--train.sequence=64",
    "--train.batch-tokens=256",
    "--evaluation.tokens=512",
    # What ranks are measured to do must not choose what a test runs.
    "--layout.no-search",
]


def write_corpus(folder: Path) -> Path:
    """A text file of about 60 kB that every Python has."""
    path = folder / "corpus.txt"
    path.write_text(
        "\n\n".join(inspect.getsource(module) for module in (textwrap, inspect, json)), encoding="utf-8"
    )
    return path


def flags(corpus: Path, run_dir: Path, *more: str) -> list[str]:
    """The command line of a tiny run."""
    cache = corpus.parent / "cache"
    return ["train", *TINY, f"--data.source={corpus}", f"--data.cache={cache}", f"--run.dir={run_dir}", *more]


def scrimp(*words: str, timeout: float = 120.0) -> subprocess.CompletedProcess[str]:
    """Run the command in a process of its own, as a user does."""
    return subprocess.run(
        [sys.executable, "-m", "scrimp", *words],
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
        env=os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
    )


def forked(*words: str) -> int:
    """The command's exit code in a process of its own, forked from one that has imported torch: seconds less than a new
    one, and no tensor of another test lies in it."""
    process = FORKED.Process(target=_command, args=(words, dict(os.environ)))
    process.start()
    process.join()
    assert process.exitcode is not None
    return process.exitcode


def _command(words: tuple[str, ...], environment: Mapping[str, str]) -> None:
    os.environ.clear()
    os.environ.update(environment)
    torch.set_num_threads(1)
    sys.exit(main(words))


def records(run_dir: Path, name: str = "metrics.jsonl") -> list[dict[str, Any]]:
    """The lines of a run's log."""
    return [json.loads(line) for line in (run_dir / name).read_text(encoding="utf-8").splitlines()]


def losses(run_dir: Path) -> dict[int, float]:
    """Step to loss, exactly as logged."""
    return {record["step"]: record["loss"] for record in records(run_dir)}

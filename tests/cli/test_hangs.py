"""Ranks that are stopped, hang or are slow in real runs: found, named with their place, and every process ends."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
from ranks import children_of, ended, environment, lives, start, start_ranks, wait_for
from tiny_run import flags, records, write_corpus

from scrimp.cli.launch import STOPPED_S

pytestmark = pytest.mark.slow

FOUND_WITHIN_S = 25
"""Limit on a machine that others use too; 7 s on one alone (docs/ranks.md)."""

OWN = """
from dataclasses import dataclass
import os, time
import torch
import torch.distributed as dist
from scrimp.health import record
from scrimp.objectives.next_token import NextToken

@dataclass(frozen=True)
class Late(NextToken):
    "Is late on the second rank."
    def loss(self, model, batch, *, chunk=0):
        if os.environ["RANK"] == "1" and (record().step or 0) {when}:
            {late}
        if record().step and {talks}:
            dist.all_reduce(torch.ones(1000))
        return super().loss(model, batch, chunk=chunk)
"""


def late(
    folder: Path, when: str, late: str, *more: str, talks: bool = True
) -> tuple[float, list[tuple[int, str]]]:
    """Seconds, exit codes and outputs of a run on two ranks."""
    code = folder / "own.py"
    code.write_text(OWN.format(when=when, late=late, talks=talks))
    words = flags(write_corpus(folder), folder / "run", "--evaluation.every=0", *more)
    words += [f"--objective.name={code}:Late", "--trust-code"]
    began = time.monotonic()
    found = ended(start_ranks(2, words, environment(folder)))
    return time.monotonic() - began, found


def test_a_rank_that_hangs_in_a_step_is_named_with_its_place(tmp_path: Path) -> None:
    seconds, found = late(tmp_path, "== 20", "time.sleep(1000)", "--train.steps=1000")
    assert [code for code, _ in found] == [1, 1], found
    assert found[0][1].count("error:") == 1
    assert "error: rank 1 hangs outside of communication" in found[0][1]
    assert "in step 20, at " in found[0][1]
    assert "own.py:14 in loss; rank 0 waits for it in all-" in found[0][1]
    assert found[1][1] == ""
    assert seconds < 500  # not the 1,000 for which the rank sleeps
    assert [
        one["step"] for one in records(tmp_path / "run", "events.jsonl") if one["kind"] == "lost-rank"
    ] == [19]


def test_a_rank_for_which_another_one_waits_in_a_ring_is_named(tmp_path: Path) -> None:
    """It hangs behind the gathering of a block's weights, and before its attention."""
    first = "next(model.blocks[0].children()).register_forward_pre_hook(lambda *given: time.sleep(1000))"
    _, found = late(tmp_path, "== 20", first, "--train.steps=1000", "--layout.cp=2", talks=False)
    assert [code for code, _ in found] == [1, 1], found
    assert "error: rank 1 hangs outside of communication" in found[0][1]
    assert "own.py:14 in <lambda>; rank 0 waits for it in transfer" in found[0][1]


def test_a_slow_rank_is_named_once_and_goes_on(tmp_path: Path) -> None:
    _, found = late(tmp_path, "> 5", "time.sleep(0.3)", "--train.steps=60")
    assert [code for code, _ in found] == [0, 0], found
    assert found[0][1].count("rank 1 is slow: the others waited ") == 1
    kinds = [one["kind"] for one in records(tmp_path / "run", "events.jsonl")]
    assert kinds.count("slow-rank") == 1


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_is_stopped_is_named_and_every_process_ends(tmp_path: Path, rank: int) -> None:
    run_dir = tmp_path / "run"
    words = flags(write_corpus(tmp_path), run_dir, "--train.steps=100000", "--evaluation.every=0")
    ranks = start_ranks(2, words, environment(tmp_path))
    try:
        log = run_dir / "metrics.jsonl"
        wait_for(
            lambda: log.exists() and log.read_bytes().count(b"\n") > 100
        )  # so that the others have heard that it is steady
        ranks[rank].send_signal(signal.SIGSTOP)
        other = ranks[1 - rank]
        output, _ = other.communicate(timeout=FOUND_WITHIN_S)
        assert other.returncode == 1
        assert output.count(f"error: rank {rank} is stopped or cut off") == output.count("error:") == 1
    finally:
        for one in ranks:
            one.kill()
            one.communicate()


def test_the_launcher_ends_a_rank_that_is_stopped_before_the_ranks_have_met(tmp_path: Path) -> None:
    words = flags(write_corpus(tmp_path), tmp_path / "run", "--train.steps=3")
    launcher = start(["-m", "scrimp", "launch", "--ranks=2", *words], environment(tmp_path))
    ranks: dict[int, int] = {}
    while len(ranks) < 2:
        ranks = children_of(launcher.pid)
    os.kill(ranks[1], signal.SIGSTOP)
    began = time.monotonic()
    output, _ = launcher.communicate(timeout=60)
    assert launcher.returncode == 137, output
    assert "rank 1 is stopped, and cannot end by itself: it is killed" in output
    assert time.monotonic() - began > STOPPED_S
    assert not any(map(lives, ranks.values()))

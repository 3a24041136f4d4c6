"""kill -9 at random moments and before every single file operation: nothing complete is lost."""

from __future__ import annotations

import contextlib
import random
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

from checkpoint_victim import SAVES_WHEN_COUNTED, expected

from scrimp.training.checkpoint import CheckpointStore

Kill = Callable[[str], str]


@contextlib.contextmanager
def victims(run_dir: Path, ranks: int) -> Iterator[Kill]:
    """Starts one victim after another, of so many ranks, has it killed in the given way, and says how it ended."""
    script = Path(__file__).with_name("checkpoint_victim.py")
    with subprocess.Popen(
        [sys.executable, str(script), str(run_dir), str(ranks)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        stdin, stdout = process.stdin, process.stdout

        def ask(how: str) -> str:
            stdin.write(how + "\n")
            stdin.flush()
            return stdout.readline().strip()

        yield ask
        stdin.close()


@pytest.fixture
def kill(tmp_path: Path) -> Iterator[Kill]:
    """Kill a run of one rank in `tmp_path`."""
    with victims(tmp_path, 1) as ask:
        yield ask


def newest_good_step(run_dir: Path) -> int:
    """Step of the newest checkpoint, after checking that every one is whole and right that may be new."""
    store = CheckpointStore(run_dir, keep_last=2, keep_every=7)
    newest, errors = store.latest()
    assert errors == [], "a folder with its final name must be complete"
    for checkpoint in store.complete()[-2 - SAVES_WHEN_COUNTED :]:
        checkpoint.verify()
        wanted = expected(checkpoint.step)
        into = {name: torch.zeros_like(tensor) for name, tensor in wanted.items()}
        checkpoint.load(into)
        for name, tensor in wanted.items():
            assert torch.equal(into[name], tensor), f"{name} of step {checkpoint.step}"
        assert checkpoint.state == {"step": checkpoint.step}
        assert checkpoint.read_file("config.toml") == f"# {checkpoint.step}\n"
    return newest.step if newest else 0


def kill_at_random(kill: Kill, run_dir: Path, *, kills: int, seed: int, ranks: int = 1) -> None:
    """So many times at least, and until the victims have got somewhere: kills then came at many different moments."""
    generator, before, done = random.Random(seed), 0, 0
    while done < kills or before <= kills:
        seconds, rank = generator.uniform(0, 0.25), generator.randrange(ranks)
        assert kill(f"random {seconds:.4f} {rank}") == "killed"
        after = newest_good_step(run_dir)
        assert after >= before, "a kill lost a complete checkpoint"
        before, done = after, done + 1
        assert done < 20 * kills, f"after {done} kills the newest checkpoint is of step {before}"


def test_a_run_killed_at_random_moments_keeps_its_newest_checkpoint(kill: Kill, tmp_path: Path) -> None:
    kill_at_random(kill, tmp_path, kills=5, seed=0)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_run_killed_very_often_keeps_its_newest_checkpoint(kill: Kill, tmp_path: Path, seed: int) -> None:
    kill_at_random(kill, tmp_path, kills=100, seed=seed)


def count_kills(kill: Kill, run_dir: Path, first: int, stride: int, rank: int = 0) -> int:
    """Kill a rank before operation first, first + stride, ... until a victim comes to its end."""
    before = newest_good_step(run_dir)
    for number in range(first, 10_000, stride):
        answer = kill(f"call {number} {rank}")
        after = newest_good_step(run_dir)
        assert before <= after <= before + SAVES_WHEN_COUNTED
        before = after
        for old in CheckpointStore(run_dir, keep_last=1, keep_every=0).complete()[: -2 - SAVES_WHEN_COUNTED]:
            shutil.rmtree(old.folder)  # every seventh is kept: hundreds of them would be read at each start
        if answer == "ended":
            return number
        assert answer == "killed"
    raise AssertionError("the victim never came to its end")


@pytest.mark.slow
def test_a_kill_before_any_seventh_file_operation_keeps_the_newest_checkpoint(
    kill: Kill, tmp_path: Path
) -> None:
    assert count_kills(kill, tmp_path, first=1, stride=7) > 50
    assert newest_good_step(tmp_path) > 0


@pytest.mark.slow
def test_a_kill_before_any_file_operation_keeps_the_newest_checkpoint(kill: Kill, tmp_path: Path) -> None:
    assert count_kills(kill, tmp_path, first=1, stride=1) > 50


# -- two ranks, of which one is killed -----------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("seed", [4, 5])
def test_two_ranks_of_which_either_is_killed_keep_the_newest_checkpoint(tmp_path: Path, seed: int) -> None:
    with victims(tmp_path, 2) as kill:
        kill_at_random(kill, tmp_path, kills=20, seed=seed, ranks=2)


@pytest.mark.slow
@pytest.mark.parametrize(("rank", "stride"), [(0, 13), (1, 13)])
def test_a_kill_of_one_of_two_ranks_before_its_file_operations_keeps_the_newest_checkpoint(
    tmp_path: Path, rank: int, stride: int
) -> None:
    with victims(tmp_path, 2) as kill:
        assert count_kills(kill, tmp_path, first=1, stride=stride, rank=rank) > 10
    assert newest_good_step(tmp_path) > 0

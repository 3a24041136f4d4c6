"""Ranks that their launcher starts again: the run goes on from its newest checkpoint, with the same losses."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest
from ranks import Run, children_of, environment, lives, start, wait_for
from tiny_run import flags, losses, records, write_corpus
from torch.distributed import TCPStore

from scrimp.cli import main
from scrimp.config import Config
from scrimp.errors import ConfigError
from scrimp.launchers import restarts_in


def test_restarts_are_counted_by_their_launcher() -> None:
    assert restarts_in({}) == restarts_in({"TORCHELASTIC_RESTART_COUNT": "3"}) == 0
    assert restarts_in({"TORCHELASTIC_RUN_ID": "x", "TORCHELASTIC_RESTART_COUNT": "3"}) == 3
    assert restarts_in({"SCRIMP_RESTARTS": "2"}) == 2
    with pytest.raises(ConfigError, match="SCRIMP_RESTARTS is wrong"):
        restarts_in({"SCRIMP_RESTARTS": "-1"})


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--restarts=2", "train"], "--restarts needs a run"),
        (["--min-ranks=1", "train"], "--min-ranks needs --restarts"),
        (["--restarts=1", "--min-ranks=3", "train"], "--min-ranks"),
    ],
)
def test_restarts_that_cannot_be_are_refused(
    words: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert Config().run.dir is None
    assert main(["launch", "--ranks=2", *words]) == 2
    assert says in capsys.readouterr().err


class Disturbed(Run):
    """A run of 40 steps whose ranks a test kills, and a launcher starts again."""

    def __init__(self, folder: Path, *launcher: str) -> None:
        more = ("--train.steps=40", "--checkpoint.every=10", "--evaluation.every=0")
        words = flags(write_corpus(folder), folder / "run", *more)
        super().__init__(start(["-m", *launcher, *words], environment(folder)), folder / "run")

    def kill_and_wait(self, rank: int, after: int) -> None:
        """Kill a rank when the run has taken so many steps, and wait until another process has its place."""
        self.wait_for_steps(after)
        self.kill(rank)
        wait_for(lambda: children_of(self.process.pid).get(rank) not in (None, self.ranks[rank]))


@pytest.mark.slow
def test_a_lost_rank_is_started_again_and_left_out_the_second_time(tmp_path: Path) -> None:
    run = Disturbed(tmp_path, "scrimp", "launch", "--ranks=2", "--restarts=2", "--min-ranks=1")
    run.kill_and_wait(1, after=12)
    log = run.run_dir / "events.jsonl"
    wait_for(lambda: '"restart"' in log.read_text())
    run.process.poll()
    os.kill(children_of(run.process.pid)[1], signal.SIGKILL)
    code, output = run.end()
    assert code == 0, output
    assert "ranks are started again (1 of 2), 2 of them, after exit code 137" in output
    assert (
        "ranks are started again (2 of 2), 1 of them, after exit code 137; without slot 1, lost 2 times"
        in output
    )
    assert sorted(losses(run.run_dir)) == list(range(1, 41))
    assert any("1 of them" in one["reason"] for one in records(run.run_dir, "events.jsonl"))


@pytest.mark.slow
def test_torchrun_starts_ranks_again_and_the_run_goes_on(tmp_path: Path) -> None:
    run = Disturbed(
        tmp_path,
        *("torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=1", "-m", "scrimp"),
    )
    run.kill_and_wait(0, after=12)
    code, output = run.end()
    assert code == 0, output
    assert "continuing from step " in output
    assert sorted(losses(run.run_dir)) == list(range(1, 41))
    assert any(one["kind"] == "restart" for one in records(run.run_dir, "events.jsonl"))


class Agents:
    """Two of torchrun's, with a rank each; the store where they meet is the test's, and outlives both."""

    def __init__(self, folder: Path, steps: int, **environ: str) -> None:
        self.run_dir, self._environ = folder / "run", environment(folder, **environ)
        self._store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        more = (f"--train.steps={steps}", "--checkpoint.every=10", "--evaluation.every=0")
        self._words = flags(write_corpus(folder), self.run_dir, *more)
        self.running = [self._started() for _ in range(2)]
        self._all = list(self.running)

    def _started(self) -> subprocess.Popen[str]:
        torchrun = [
            *("-m", "torch.distributed.run", "--nnodes=1:2", "--nproc-per-node=1", "--max-restarts=2"),
            *("--rdzv-backend=c10d", f"--rdzv-endpoint=localhost:{self._store.port}", "--rdzv-id=two-agents"),
            *("--rdzv-conf=last_call_timeout=5,is_host=0", "--local-addr=localhost", "-m", "scrimp"),
        ]
        return start([*torchrun, *self._words], self._environ)

    def add(self) -> None:
        """Start another one."""
        self.running.append(self._started())
        self._all.append(self.running[-1])

    def steps(self) -> int:
        """Lines of the log."""
        log = self.run_dir / "metrics.jsonl"
        return log.read_bytes().count(b"\n") if log.exists() else 0

    def ranks(self) -> dict[int, int]:
        """Rank to its process."""
        return {rank: one for agent in self.running for rank, one in children_of(agent.pid).items()}

    def kill(self, rank: int) -> None:
        """Kill the agent of a rank with it, and so that agent's rank."""
        lost = next(agent for agent in self.running if rank in children_of(agent.pid))
        process = children_of(lost.pid)[rank]
        for one in (lost.pid, process):
            os.kill(one, signal.SIGKILL)
        self.running.remove(lost)

    def restarts(self) -> int:
        """Events of them."""
        return [one["kind"] for one in records(self.run_dir, "events.jsonl")].count("restart")

    def end(self) -> None:
        """Leave no process."""
        left = self.ranks()
        for agent in self._all:
            agent.kill()
            agent.communicate()
        for process in left.values():
            if lives(process):
                os.kill(process, signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_one_of_two_agents_is_killed_and_the_other_one_goes_on(tmp_path: Path, rank: int) -> None:
    """With one rank instead of two, from the newest checkpoint."""
    agents = Agents(tmp_path, 60)
    try:
        wait_for(lambda: agents.steps() >= 12)
        ranks = agents.ranks()
        assert sorted(ranks) == [0, 1]
        agents.kill(rank)
        output, _ = agents.running[0].communicate(timeout=180)
        assert agents.running[0].returncode == 0, output
        assert "continuing from step " in output
        assert sorted(losses(agents.run_dir)) == list(range(1, 61))
        assert agents.restarts() == 1
        assert not any(map(lives, ranks.values()))
    finally:
        agents.end()


@pytest.mark.slow
def test_an_agent_that_comes_later_joins_one_that_has_started_its_rank_again(tmp_path: Path) -> None:
    """The later one has restarted nothing: what they count differs, and they meet all the same.

    With the store that agents share by default torch 2.13 does not get so far (docs/lab-log.md).
    """
    agents = Agents(tmp_path, 100_000, TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1")
    try:
        wait_for(lambda: agents.steps() >= 12)
        agents.kill(1)
        wait_for(lambda: agents.restarts() == 1)
        agents.add()
        wait_for(lambda: sorted(agents.ranks()) == [0, 1])
        wait_for(lambda: agents.restarts() == 2)
        before = agents.steps()
        wait_for(lambda: agents.steps() > before + 12)
        assert sorted(agents.ranks()) == [0, 1]
    finally:
        agents.end()

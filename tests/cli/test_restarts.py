"""Ranks that their launcher starts again: the run goes on from its newest checkpoint, with the same losses."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from ranks import children_of, environment, start, wait_for
from tiny_run import flags, losses, records, write_corpus

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


class Disturbed:
    """A run of 40 steps whose ranks a test kills."""

    def __init__(self, folder: Path, *launcher: str) -> None:
        self.run_dir = folder / "run"
        words = flags(
            write_corpus(folder),
            self.run_dir,
            "--train.steps=40",
            "--checkpoint.every=10",
            "--evaluation.every=0",
        )
        self.process = start(["-m", *launcher, *words], environment(folder))
        self.folder = folder

    def kill(self, rank: int, after: int) -> None:
        """Kill a rank when the run has taken so many steps."""
        log = self.run_dir / "metrics.jsonl"
        wait_for(lambda: log.exists() and log.read_bytes().count(b"\n") >= after)
        ranks = children_of(self.process.pid)
        os.kill(ranks[rank], signal.SIGKILL)
        wait_for(lambda: children_of(self.process.pid).get(rank) not in (None, ranks[rank]))

    def end(self) -> str:
        """What it printed."""
        output, _ = self.process.communicate(timeout=120)
        assert self.process.returncode == 0, output
        return output


@pytest.mark.slow
def test_a_lost_rank_is_started_again_and_left_out_the_second_time(tmp_path: Path) -> None:
    run = Disturbed(tmp_path, "scrimp", "launch", "--ranks=2", "--restarts=2", "--min-ranks=1")
    run.kill(1, after=12)
    log = run.run_dir / "events.jsonl"
    wait_for(lambda: '"restart"' in log.read_text())
    run.process.poll()
    os.kill(children_of(run.process.pid)[1], signal.SIGKILL)
    output = run.end()
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
    run.kill(0, after=12)
    output = run.end()
    assert "continuing from step " in output
    assert sorted(losses(run.run_dir)) == list(range(1, 41))
    assert any(one["kind"] == "restart" for one in records(run.run_dir, "events.jsonl"))

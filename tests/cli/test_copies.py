"""Copies of a model that are jobs of their own: one is lost and comes back, and the others go on without a restart."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from ranks import Run, ended, environment, start, wait_for
from tiny_run import TINY, flags, records, write_corpus

from scrimp.cli import main

EVERY, EVALUATED = 10, 50


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["doctor", "--ranks"], "--copies is of train alone"),
        (["train", "--outer.every=10"], "--copies needs a folder"),
        (["train", "--run.dir=run"], "--copies needs outer.every"),
    ],
)
def test_copies_that_cannot_be_are_refused(
    words: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["launch", "--ranks=1", "--copies=2", *words]) == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ("--layout.dp=2", "layout.dp"),
        ("--outer.overlap", "outer.overlap"),
        ("--outer.exchange=fp8", "outer.exchange"),
        ("--evaluation.every=15", "evaluation.every is not a multiple of outer.every"),
        ("--outer.every=0", "outer.every 0"),
        (f"--checkpoint.every={EVERY}", "outer.copies is not the number of copies that were started"),
    ],
)
def test_settings_that_copies_do_not_have_are_refused(
    setting: str, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    corpus = write_corpus(tmp_path)
    words = flags(corpus, tmp_path / "run", f"--outer.every={EVERY}", "--outer.copies=2", setting)
    assert main(words) == 2
    assert says in capsys.readouterr().err


class Copies(Run):
    """Two copies of a run that ends when it is asked to.

    Args:
        ranks: of each copy.
    """

    def __init__(self, folder: Path, ranks: int) -> None:
        words = flags(
            write_corpus(folder),
            folder / "run",
            "--train.steps=100000",
            f"--outer.every={EVERY}",
            f"--evaluation.every={EVALUATED}",
            f"--checkpoint.every={EVALUATED}",
        )
        launch = ["-m", "scrimp", "launch", f"--ranks={ranks}", "--copies=2", "--restarts=3"]
        super().__init__(start([*launch, *words], environment(folder)), folder / "run" / "copy-0")

    def process_of(self, copy: int) -> int | None:
        """A rank of a copy, the first that was started."""
        for one in sorted(self._children()):
            if f"copy-{copy}".encode() in Path(f"/proc/{one}/cmdline").read_bytes():
                return one
        return None

    def _children(self) -> list[int]:
        found = Path(f"/proc/{self.process.pid}/task").glob("*/children")
        return [int(one) for path in found for one in path.read_text().split()]

    def lines(self, copy: int) -> list[dict[str, Any]]:
        """What a copy has recorded of its steps."""
        log = self.run_dir.parent / f"copy-{copy}" / "metrics.jsonl"
        whole = log.read_text().rpartition("\n")[0] if log.exists() else ""  # the last line may be half there
        return [json.loads(line) for line in whole.splitlines()]

    def held_out(self, copy: int) -> dict[int, float]:
        """By step, as far as the copy has come."""
        return {one["step"]: one["eval_loss"] for one in self.lines(copy) if one.get("eval_loss") is not None}

    def wait_for_both(self, after: int) -> dict[int, float]:
        """Until both have evaluated a step beyond this one: what the first has found."""

        def common() -> set[int]:
            assert self.process.poll() is None, self.process.communicate()[0]
            return {step for step in self.held_out(0) if step > after} & set(self.held_out(1))

        wait_for(lambda: bool(common()))
        step = min(common())
        # The same weights, and the same text: bit for bit.
        assert self.held_out(0)[step] == self.held_out(1)[step]
        return self.held_out(0)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.slow
def test_a_copy_is_lost_and_comes_back_and_then_all_are_lost(ranks: int, tmp_path: Path) -> None:
    with Copies(tmp_path, ranks) as run:
        run.wait_for_both(after=0)
        lost = run.process_of(1)
        assert lost is not None
        os.kill(lost, signal.SIGKILL)
        survivor, step = run.process_of(0), max(run.held_out(0))
        wait_for(lambda: max(run.held_out(0)) > step and run.process_of(1) not in (None, lost))
        last = max(run.wait_for_both(after=max(run.held_out(0))))
        assert run.process_of(0) == survivor  # it went on
        lines = [one for one in run.lines(0) if one["step"] <= last]
        assert [one["step"] for one in lines] == list(range(1, last + 1))
        taking_part = [one["copies"] for one in lines if one.get("copies") is not None]
        assert taking_part[0] == 2
        assert 1 in taking_part
        assert taking_part[-1] == 2

        both = [run.process_of(copy) for copy in (0, 1)]
        for process in both:
            assert process is not None
            os.kill(process, signal.SIGKILL)
        run.wait_for_both(after=max(run.held_out(0)))
        run.process.send_signal(signal.SIGTERM)
        code, output = run.end()
    assert code == 143, output
    assert "copy 1 is started again (1 of 3), after exit code 137" in output
    assert "copies 0 of 2 exchanged" in output
    assert "copy 0 is started again (1 of 3), after exit code 137" in output
    kinds = [one["kind"] for one in records(run.run_dir.parent / "copy-1", "events.jsonl")]
    assert "joined" in kinds
    assert f"scrimp launch --copies 2 train --run.dir {tmp_path / 'run'} --resume" in output


@pytest.mark.slow
def test_a_run_of_copies_that_was_stopped_goes_on(tmp_path: Path) -> None:
    with Copies(tmp_path, 1) as run:
        run.wait_for_both(after=0)
        run.process.send_signal(signal.SIGTERM)
        assert run.end()[0] == 143
        before = len(run.lines(0))
    words = ["-m", "scrimp", "launch", "--ranks=1", "--copies=2", "train", f"--run.dir={tmp_path / 'run'}"]
    with Run(start([*words, "--resume"], environment(tmp_path)), run.run_dir) as again:
        wait_for(lambda: min(len(run.lines(copy)) for copy in (0, 1)) > before)
        again.process.send_signal(signal.SIGTERM)
        assert again.end()[0] == 143
    assert [one["step"] for one in run.lines(0)] == list(range(1, len(run.lines(0)) + 1))


KILLED_ONCE = """
import os, pathlib, signal
if "SCRIMP_COPY" in os.environ:
    from scrimp.training import finish
    save = finish.save_last
    def killed(trainer):
        told = pathlib.Path(os.environ["KILLED"] + os.environ["SCRIMP_COPY"].partition("/")[0])
        if not told.exists():
            told.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return save(trainer)
    finish.save_last = killed
"""
"""Python runs it as it starts: each copy kills itself once, before its last checkpoint."""


@pytest.mark.slow
def test_copies_that_are_killed_before_their_last_checkpoint_are_started_again(tmp_path: Path) -> None:
    (tmp_path / "fault").mkdir()
    (tmp_path / "fault" / "sitecustomize.py").write_text(KILLED_ONCE)
    environ = environment(tmp_path) | {"KILLED": str(tmp_path / "killed-")}
    environ["PYTHONPATH"] = os.pathsep.join(
        [str(tmp_path / "fault"), *filter(None, [environ.get("PYTHONPATH")])]
    )
    words = flags(write_corpus(tmp_path), tmp_path / "run", "--train.steps=20", "--outer.every=10")
    launch = [
        "-m",
        "scrimp",
        "launch",
        "--ranks=1",
        "--copies=2",
        "--restarts=3",
        *words,
        "--evaluation.every=0",
    ]
    ((code, output),) = ended([start(launch, environ)])
    assert code == 0, output
    assert {path.name for path in tmp_path.glob("killed-*")} == {"killed-0", "killed-1"}
    assert (tmp_path / "run" / "copy-0" / "checkpoints" / "step-00000020").is_dir()


@pytest.mark.slow
def test_copies_whose_launcher_is_gone_say_so_and_end(tmp_path: Path) -> None:
    with Copies(tmp_path, 1) as run:
        run.wait_for_both(after=0)
        processes = [run.process_of(copy) for copy in (0, 1)]
        run.process.kill()
        wait_for(lambda: not any(Path(f"/proc/{one}/cmdline").exists() for one in processes))
    assert "the launcher of the copies is gone" in (run.run_dir.parent / "copy-1.log").read_text()


@pytest.mark.slow
def test_copies_learn_what_copies_of_one_job_learn(tmp_path: Path) -> None:
    corpus, environ = write_corpus(tmp_path), environment(tmp_path)
    more = ["--train.steps=30", "--outer.every=10", "--evaluation.every=10", "--train.micro-batch=2"]
    whole = flags(corpus, tmp_path / "one", *more, "--train.batch-tokens=512", "--layout.dp=2")
    halves = flags(corpus, tmp_path / "two", *more)
    assert "--train.batch-tokens=256" in TINY  # of each copy
    for how, words in (("--ranks=2", whole), ("--copies=2", halves)):
        ranks = [] if how == "--ranks=2" else ["--ranks=1"]
        ((code, output),) = ended([start(["-m", "scrimp", "launch", how, *ranks, *words], environ)])
        assert code == 0, output
    folders = [tmp_path / "one", *(tmp_path / "two" / f"copy-{copy}" for copy in (0, 1))]
    one, *two = ([line.get("eval_loss") for line in records(folder)] for folder in folders)
    assert two[0] == two[1]
    assert [loss for loss in two[0] if loss] == pytest.approx([loss for loss in one if loss], rel=1e-5)
    assert len([loss for loss in one if loss]) == 3

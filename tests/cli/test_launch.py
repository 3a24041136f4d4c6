"""`scrimp launch` with real processes: exit codes, signals, processes that are killed, and nothing left behind."""

from __future__ import annotations

import contextlib
import os
import pty
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from ranks import Run, children_of, environment, lives, start, wait_for
from tiny_run import flags, records, write_corpus

from scrimp.cli import main
from scrimp.cli.launch import Restarts, _is_stopped, can_share, launch
from scrimp.config import Config, replace_values
from scrimp.config.write_toml import to_toml
from scrimp.training.checkpoint import CheckpointStore

ENDLESS = ("--train.steps=100000", "--evaluation.every=0")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--ranks", "0", "train"], "--ranks"),
        (["--ranks", "2"], "COMMAND is missing"),
        (["train"], "--ranks is missing"),
        (["--ranks", "two", "train"], "--ranks"),
        (["--ranks", "2", "--grace", "0", "train"], "--grace"),
        (["--ranks", "2", "trian"], "unknown command 'trian'"),
        (["--ranks", "2", "launch", "--ranks", "2", "train"], "scrimp launch runs as one process"),
        (["--ranks=2", "prepare", "a", "b"], "scrimp prepare runs as one process"),
        (["--ranks=2", "plan"], "layout"),
        (["--ranks=2", "train", "--train.stepz", "3"], "--train.stepz"),
        (["--ranks=2", "--nodes=2", "train"], "--nodes"),
    ],
)
def test_nonsense_is_refused_before_anything_starts(
    words: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["launch", *words]) == 2
    told = capsys.readouterr().err
    assert says in told
    assert told.count("error:") == 1


def test_a_rank_that_has_ended_is_not_stopped() -> None:
    """Also where something else has asked how it ended, after which the system knows it no more."""
    with subprocess.Popen([sys.executable, "-c", ""]) as child:
        child.wait()
        assert not _is_stopped(child.pid)


def test_help_is_shown_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["launch", "--help"]) == 0
    assert "--ranks" in capsys.readouterr().out
    assert main(["launch", "--ranks", "2", "train", "--help"]) == 0
    assert capsys.readouterr().out.count("--train.steps") == 1


def test_the_code_is_that_of_the_ranks() -> None:
    assert launch(["--version"], 2, 5) == 0
    assert launch(["no-such-command"], 2, 5) == 2


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("launch"))


def launched_run(corpus: Path, folder: Path, *more: str, options: tuple[str, ...] = ()) -> Run:
    """A run on two ranks that `scrimp launch` starts."""
    run_dir = folder / "run"
    words = ["-m", "scrimp", "launch", "--ranks=2", *options, *flags(corpus, run_dir, *more)]
    return Run(start(words, environment(folder)), run_dir)


@pytest.fixture
def launched(corpus: Path, tmp_path: Path) -> Iterator[Run]:
    with launched_run(corpus, tmp_path, *ENDLESS) as run:
        run.wait_for_steps()
        assert sorted(run.ranks) == [0, 1]
        yield run


def newest_step(run_dir: Path) -> int:
    newest, errors = CheckpointStore(run_dir, keep_last=1, keep_every=0).latest(finite=True)
    assert newest is not None
    assert not errors
    return newest.step


@pytest.mark.slow
def test_a_run_ends_with_one_voice_and_one_folder(corpus: Path, tmp_path: Path) -> None:
    run = launched_run(corpus, tmp_path, "--train.steps=3")
    code, output = run.end()
    assert code == 0, output
    assert output.count("report: ") == output.count("step 3/3 ") == 1
    assert [record["step"] for record in records(run.run_dir)] == [1, 2, 3]
    assert newest_step(run.run_dir) == 3


@pytest.mark.slow
@pytest.mark.parametrize(
    "number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1], ids=lambda n: n.name
)
def test_a_signal_to_the_launcher_leaves_a_checkpoint(launched: Run, number: signal.Signals) -> None:
    launched.process.send_signal(number)
    code, output = launched.end()
    assert code == 128 + number, output
    assert output.count("go on with") == 1
    assert "Traceback" not in output
    assert newest_step(launched.run_dir) == records(launched.run_dir)[-1]["step"]


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_is_killed_ends_all_and_is_named_once(launched: Run, rank: int) -> None:
    launched.kill(rank)
    code, output = launched.end()
    assert code == 137, output
    assert output.count(f"error: rank {rank} is gone") == output.count("error:") == 1
    assert f"rank {rank} was ended by SIGKILL" in output
    assert "Traceback" not in output
    assert "[W" not in output


@pytest.mark.slow
def test_a_launcher_that_is_killed_leaves_no_rank_but_a_checkpoint(launched: Run) -> None:
    launched.process.kill()
    launched.process.wait()
    wait_for(lambda: not any(map(lives, launched.ranks.values())), 60)
    assert newest_step(launched.run_dir) == records(launched.run_dir)[-1]["step"]


@pytest.mark.slow
def test_a_stopped_rank_is_killed_where_another_one_is_gone(corpus: Path, tmp_path: Path) -> None:
    run = launched_run(corpus, tmp_path, *ENDLESS)
    run.wait_for_steps()
    run.kill(1, signal.SIGSTOP)
    run.kill(0)
    code, output = run.end()
    assert code == 137, output
    assert "rank 1 is stopped, and cannot end by itself: it is killed" in output


@pytest.mark.slow
def test_a_rank_that_does_not_end_is_killed_after_the_grace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """One rank fails, the other one hears nothing."""
    (tmp_path / "scrimp").mkdir()
    (tmp_path / "scrimp" / "__init__.py").touch()
    (tmp_path / "scrimp" / "__main__.py").write_text(
        "import os, signal, sys, time\n"
        "if os.environ['RANK'] == '0': sys.exit(3)\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "time.sleep(600)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert launch(["train"], 2, 9) == 3
    assert "rank 1 has not ended within 9 s (--grace): it is killed" in capfd.readouterr().err


VICTIMS = """
import os, signal, sys, time
from pathlib import Path

rank, ranks, here = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), Path(__file__).parent
number = os.environ["SCRIMP_RESTARTS"]
if ranks < 3:
    sys.exit(0)
if rank == 1:
    (here / f"dies-{number}").write_text(str(os.getpid()))
    CAUSE
while not (here / f"dies-{number}").exists() or not (here / f"dies-{number}").read_text():
    time.sleep(0.01)
time.sleep(0.3)
os.abort()
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("cause", "code", "ranks"),
    [("os.kill(os.getpid(), signal.SIGKILL)", 137, [3, 3, 2]), ("sys.exit(7)", 7, [3, 3])],
)
def test_ranks_that_abort_because_another_one_is_gone_keep_their_slots(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    cause: str,
    code: int,
    ranks: list[int],
) -> None:
    """As NCCL's watchdog lets them."""
    (tmp_path / "scrimp").mkdir()
    (tmp_path / "scrimp" / "__init__.py").touch()
    (tmp_path / "scrimp" / "__main__.py").write_text(VICTIMS.replace("CAUSE", cause))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    found = launch(["train"], 3, 9, Restarts(len(ranks) - 1, least_ranks=1))
    shown = capfd.readouterr().err
    assert found == (0 if ranks[-1] == 2 else code), shown
    for number, count in enumerate(ranks[1:], 1):
        assert f"({number} of {len(ranks) - 1}), {count} of them, after exit code {code}" in shown
    assert ("without slot 1, lost 2 times" in shown) == (ranks[-1] == 2)
    assert shown.count("was ended by SIGABRT") == 2 * ranks.count(3)


@pytest.mark.slow
def test_ranks_that_cannot_start_are_told_once(corpus: Path, tmp_path: Path) -> None:
    run = launched_run(corpus, tmp_path, "--device=cuda")
    code, output = run.end()
    assert (code, output.count("error:")) == (2, 1), output


@pytest.mark.slow
def test_torchrun_does_the_same(corpus: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "scrimp"]
    process = start([*words, *flags(corpus, run_dir, "--train.steps=3")], environment(tmp_path))
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0, output
    assert output.count("report: ") == 1
    assert newest_step(run_dir) == 3


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1, None], ids=["rank 0", "rank 1", "the agent"])
def test_a_process_of_torchrun_that_is_killed_ends_all(
    corpus: Path, tmp_path: Path, rank: int | None
) -> None:
    run_dir = tmp_path / "run"
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "scrimp"]
    process = start([*words, *flags(corpus, run_dir, *ENDLESS)], environment(tmp_path))
    wait_for(lambda: (run_dir / "metrics.jsonl").exists() and (run_dir / "metrics.jsonl").stat().st_size > 0)
    ranks = children_of(process.pid)
    try:
        os.kill(process.pid if rank is None else ranks[rank], signal.SIGKILL)
        wait_for(lambda: not any(map(lives, [process.pid, *ranks.values()])), 60)
        output, _ = process.communicate(timeout=10)
        if rank is None:
            assert newest_step(run_dir) == records(run_dir)[-1]["step"]
        else:
            assert output.count(f"error: rank {rank} is gone") == output.count("\nerror:") == 1
    finally:
        for one in (process.pid, *ranks.values()):
            if lives(one):
                os.kill(one, signal.SIGKILL)


@pytest.mark.slow
def test_ctrl_c_on_a_terminal_reaches_each_rank_once(corpus: Path, tmp_path: Path) -> None:
    """Twice would end the ranks at once, without their checkpoint."""
    run_dir = tmp_path / "run"
    words = [sys.executable, "-m", "scrimp", "launch", "--ranks=2", *flags(corpus, run_dir, *ENDLESS)]
    environ = environment(tmp_path)
    child, terminal = pty.fork()
    if child == 0:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.execve(sys.executable, words, environ)
    log, shown = run_dir / "metrics.jsonl", bytearray()
    os.set_blocking(terminal, False)

    def has_stepped() -> bool:
        with contextlib.suppress(BlockingIOError):
            shown.extend(os.read(terminal, 65536))
        return log.exists() and log.stat().st_size > 0

    wait_for(has_stepped)
    os.write(terminal, b"\x03")

    def has_ended() -> bool:
        with contextlib.suppress(BlockingIOError, OSError):
            shown.extend(os.read(terminal, 65536))
        return not lives(child)

    wait_for(has_ended, 60)
    _, status = os.waitpid(child, 0)
    os.close(terminal)
    assert os.waitstatus_to_exitcode(status) == 130, shown.decode(errors="replace")
    assert newest_step(run_dir) == records(run_dir)[-1]["step"]


def test_ranks_that_are_left_can_share_the_rows_of_the_run(tmp_path: Path) -> None:
    """Else the next start would be refused as bad input, and the run would stay ended."""
    assert can_share(tmp_path, 3, ())  # there is no run yet
    config = replace_values(Config(), {"train.sequence": 64, "train.batch_tokens": 64 * 12, "layout.dp": 4})
    (tmp_path / "config.toml").write_text(to_toml(config), encoding="utf-8")
    assert [ranks for ranks in range(1, 13) if can_share(tmp_path, ranks, ())] == [1, 2, 3, 4, 6, 12]
    assert [ranks for ranks in range(1, 13) if can_share(tmp_path, ranks, {"layout.dp"})] == [4, 12]

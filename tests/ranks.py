"""Starts `scrimp` on several processes as launchers do, and finds what they leave behind."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Self

SOURCE = Path(__file__).parents[1] / "src"


def environment(folder: Path, *, source: Path = SOURCE, **more: str) -> dict[str, str]:
    """What a process finds in its environment: this package, one thread, and none of a launcher's variables.

    Args:
        folder: of the test.
    """
    own = {
        "PYTHONPATH": str(source),
        "OMP_NUM_THREADS": "1",
        "SCRIMP_JOIN_TIMEOUT": "60",
        "HF_HUB_OFFLINE": "1",
    }
    return {**os.environ, **own, **more}


def start(
    words: Sequence[str], environ: Mapping[str, str], handed: Sequence[int] = ()
) -> subprocess.Popen[str]:
    """A process of Python, both of its streams in one pipe; it ignores no signal.

    Args:
        handed: file descriptors that it gets.
    """
    return subprocess.Popen(
        [sys.executable, *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=dict(environ),
        pass_fds=handed,
        # A shell's background job starts with SIGINT ignored, and hands that on.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def by_environment(rank: int, size: int, port: int, **more: str) -> dict[str, str]:
    """The variables that torchrun sets, without torchrun."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": str(rank),
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(port),
        **more,
    }


def start_ranks(
    size: int,
    words: Sequence[str],
    environ: Mapping[str, str],
    more: Callable[[int], Mapping[str, str]] = lambda rank: {},
) -> list[subprocess.Popen[str]]:
    """`scrimp` on so many ranks, which find one another by their environment.

    Args:
        more: variables of one rank alone.
    """
    port = free_port()
    return [
        start(["-m", "scrimp", *words], {**environ, **by_environment(rank, size, port), **more(rank)})
        for rank in range(size)
    ]


def ended(processes: Sequence[subprocess.Popen[str]], seconds: float = 300) -> list[tuple[int, str]]:
    """Exit code and output of each; none is left behind."""
    try:
        return [(one.communicate(timeout=seconds)[0], one.returncode)[::-1] for one in processes]
    finally:
        for one in processes:
            one.kill()


def free_port() -> int:
    """A port that nobody has at the moment."""
    with socket.create_server(("", 0)) as server:
        return int(server.getsockname()[1])


def wait_for(is_so: Callable[[], bool], seconds: float = 240) -> None:
    """Until it is so; AssertionError if it does not come to be."""
    deadline = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < deadline, "it did not come to be"
        time.sleep(0.05)


def children_of(process: int) -> dict[int, int]:
    """Rank to process number of the ranks that a launcher has started."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            environ = dict(
                entry.partition("=")[::2] for entry in (folder / "environ").read_text().split("\0") if entry
            )
        except (OSError, ValueError):
            continue
        if int(fields[1]) == process and "RANK" in environ:
            found[int(environ["RANK"])] = int(folder.name)
    return found


def lives(process: int) -> bool:
    """Whether a process is there and no zombie."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


class Run:
    """A run on ranks that a test disturbs: `with` leaves none of its processes behind.

    Args:
        launcher: that has started the ranks, or will.
        run_dir: of the run.
    """

    def __init__(self, launcher: subprocess.Popen[str], run_dir: Path) -> None:
        self.process, self.run_dir = launcher, run_dir
        self.ranks: dict[int, int] = {}
        """Rank to process, as it was when they were last looked for."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        for process in (self.process.pid, *self.ranks.values(), *children_of(self.process.pid).values()):
            if lives(process):
                os.kill(process, signal.SIGKILL)
        self.process.communicate()

    def wait_for_steps(self, count: int = 1) -> None:
        """Until the run has taken so many."""
        log = self.run_dir / "metrics.jsonl"
        wait_for(
            lambda: (
                self.process.poll() is not None or (log.exists() and log.read_bytes().count(b"\n") >= count)
            )
        )
        assert self.process.poll() is None, self.process.communicate()[0]
        self.ranks = children_of(self.process.pid)

    def kill(self, rank: int, number: signal.Signals = signal.SIGKILL) -> None:
        """Send a rank a signal that it cannot handle."""
        os.kill(self.ranks[rank], number)

    def end(self, seconds: float = 120) -> tuple[int, str]:
        """Exit code and output, when the ranks are gone too."""
        output, _ = self.process.communicate(timeout=seconds)
        wait_for(lambda: not any(map(lives, self.ranks.values())), 30)
        return self.process.returncode, output

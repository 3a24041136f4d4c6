"""`scrimp launch`: a command on several processes of this machine, a rank each.

Problem  torchrun does the same, for several nodes too, but its own exit code is 1 whatever a rank's was; after a signal
         its agent forgets how ranks ended, and kills them after 30 s, within which a large checkpoint is not written;
         it passes SIGUSR1 on only where it is told to; it shows a traceback of its own beside the rank's error; and
         ranks outlive an agent that is killed.
Method   One process for each rank, in a process group of its own, so that Ctrl-C reaches this process alone, which
         passes each signal on once. The port is opened here and handed to rank 0: no other program can take it
         meanwhile.
Ends     The exit code is that of the first rank that failed, 128 + n where signal n ended it. The others notice by
         themselves (`scrimp.joining`); `ASK_S` seconds later they get SIGTERM, and SIGKILL after the grace. Ranks see
         that this process is gone (`scrimp.cli.ranks`), also by kill -9.
Limits   One machine, and no restarts: for both there is torchrun.
Checked  tests/cli/test_launch.py
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Final

from scrimp.cli.show import say
from scrimp.launchers import GRACE, LAUNCH, LISTENER

ASK_S: Final = 10.0
_LOOK_S: Final = 0.05
_PASSED_ON: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)


def launch(words: Sequence[str], ranks: int, grace: float) -> int:
    """Run `scrimp` with some words on each of several processes; returns the exit code of the first that failed.

    Args:
        grace: seconds that ranks have to end after a signal, or after one of them failed.
    """
    signals: list[int] = []
    with _noting(signals), contextlib.closing(socket.create_server(("127.0.0.1", 0), backlog=1024)) as port:
        children: list[subprocess.Popen[bytes]] = []
        try:
            common = _environment(ranks, port, grace)
            children.extend(_started(words, rank, common, port) for rank in range(ranks))
            port.close()  # rank 0 has its own copy
            return _Watch(children, signals, grace).to_the_end()
        finally:
            for child in children:
                if child.poll() is None:
                    child.kill()
            for child in children:
                child.wait()


def _environment(ranks: int, port: socket.socket, grace: float) -> dict[str, str]:
    """What all ranks find in their environment."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    found = {"OMP_NUM_THREADS": str(max(1, cores // ranks))}
    if "lo" in (name for _, name in socket.if_nameindex()):
        # Else gloo takes the interface of the host's name, which need not resolve.
        found["GLOO_SOCKET_IFNAME"] = "lo"
    return {
        **found,
        **os.environ,
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port.getsockname()[1]),
        LAUNCH: f"{os.getpid()}.{secrets.token_hex(8)}",
        GRACE: str(grace),
    }


def _started(
    words: Sequence[str], rank: int, common: dict[str, str], port: socket.socket
) -> subprocess.Popen[bytes]:
    own = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    if rank == 0:
        own[LISTENER] = str(port.fileno())
    return subprocess.Popen(
        [sys.executable, "-m", "scrimp", *words],
        env=common | own,
        stdin=subprocess.DEVNULL,
        pass_fds=[port.fileno()] if rank == 0 else [],
        process_group=0,
    )


class _Watch:
    """Waits for ranks, passes signals on, and ends those that do not end by themselves."""

    def __init__(self, children: list[subprocess.Popen[bytes]], signals: list[int], grace: float) -> None:
        self._running = dict(enumerate(children))
        self._signals, self._grace = signals, grace
        self._code = 0
        self._ask_at = self._kill_at = float("inf")

    def to_the_end(self) -> int:
        """The exit code of the first rank that failed, when all have ended."""
        while self._running:
            self._pass_on()
            self._take_ended()
            now = time.monotonic()
            if now > self._ask_at:
                self._ask_at = float("inf")
                self._send(signal.SIGTERM)
            if now > self._kill_at:
                self._kill_at = float("inf")
                for rank in self._running:
                    say(f"rank {rank} has not ended within {self._grace:g} s (--grace): it is killed")
                self._send(signal.SIGKILL)
            time.sleep(_LOOK_S)
        return self._code

    def _pass_on(self) -> None:
        while self._signals:
            self._send(self._signals.pop(0))
            # A second SIGTERM would end ranks at once that write their checkpoint because of the first.
            self._ask_at = float("inf")
            self._kill_at = min(self._kill_at, time.monotonic() + self._grace)

    def _take_ended(self) -> None:
        ended = {rank: code for rank, child in self._running.items() if (code := child.poll()) is not None}
        for rank, code in sorted(ended.items(), key=lambda one: one[1] >= 0):  # what a signal ended, first
            del self._running[rank]
            if code < 0:
                say(f"rank {rank} was ended by {_signal_name(-code)}")
            if code != 0 and self._code == 0:
                self._code = code if code > 0 else 128 - code
                now = time.monotonic()
                if self._kill_at == float("inf"):
                    self._ask_at, self._kill_at = now + ASK_S, now + self._grace

    def _send(self, number: int) -> None:
        for child in self._running.values():
            child.send_signal(number)


@contextlib.contextmanager
def _noting(signals: list[int]) -> Iterator[None]:
    """Note signals that are to be passed on; those that are ignored (`nohup`) stay ignored, here and by the ranks."""

    def note(number: int, frame: FrameType | None) -> None:
        signals.append(number)

    before: dict[signal.Signals, Callable[..., object] | int | None] = {
        number: signal.signal(number, note)
        for number in _PASSED_ON
        if signal.getsignal(number) is not signal.SIG_IGN
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _signal_name(number: int) -> str:
    """Real-time signals have no name of their own."""
    known = {one.value: one.name for one in signal.Signals}
    return known.get(number, f"signal {number}")

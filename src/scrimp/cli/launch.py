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
         A rank that is stopped (SIGSTOP), beside others that are not, is killed after `STOPPED_S` seconds: it would
         neither notice that others are gone nor take SIGTERM, and nobody else notices before the ranks have met.
Restarts `--restarts N`: after any failure but bad input (exit code 2) or a signal that asks to end, all ranks are
         started again, up to N times, and go on from the newest checkpoint (`scrimp.cli.ranks`). Where `--min-ranks`
         allows it, a slot (a device) whose process was lost twice is left out, and as many more as the rows of the
         run's batch ask for. Of one start only the first that a signal ended is lost: NCCL's watchdog ends healthy
         ranks by SIGABRT where another one is gone.
Limits   One machine; for several there is torchrun with --max-restarts. Only what a signal ended counts as a lost slot:
         of a main thread that hangs its rank is named, and its slot is kept.
Checked  tests/cli/test_launch.py, tests/cli/test_restarts.py, benchmarks/drills.py
"""

from __future__ import annotations

import contextlib
import itertools
import os
import secrets
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from scrimp.cli.build import build, unknown_command
from scrimp.cli.commands import COMMANDS, Launch, Train
from scrimp.cli.handlers import handled
from scrimp.cli.ranks import refuse_ranks
from scrimp.cli.show import say
from scrimp.config import for_ranks, load_config
from scrimp.config.layout import check_layout
from scrimp.config.schema import decided
from scrimp.errors import ConfigError, ScrimpError
from scrimp.launchers import ELSEWHERE, GRACE, LAUNCH, LISTENER, RESTARTS, WHY_AGAIN, num_cores

ASK_S: Final = 4.0
"""After which ranks that did not notice by themselves, such as one that still waits for all to come, are asked."""
STOPPED_S, STOPPED_LAST_S = 8.0, 2.0
"""That a rank may be stopped; the second one after another rank has failed. Judges among the ranks come first."""
LOST_TOO_OFTEN: Final = 2
_LOOK_S: Final = 0.05
PASSED_ON: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)


@dataclass(frozen=True)
class Restarts:
    """What is done where a rank was lost."""

    most: int = 0
    """How often ranks are started again."""
    least_ranks: int = 1
    can_share: Callable[[int], bool] = lambda ranks: True
    """Whether so many ranks can share the run's batch."""


def launch_command(options: Launch) -> int:
    """`scrimp launch` with its options: the exit code of the first rank that failed.

    Raises:
        ConfigError: the command, or how it is started again, is wrong.
    """
    name, *words = shlex.split(options.command)
    if name not in COMMANDS:
        raise unknown_command([name, *words])
    refuse_ranks([name, *words], f"scrimp launch --ranks {options.ranks}")
    command, keys = build(name, words)  # a mistake, or --help, is answered here, once
    folder = command.config.run.dir if isinstance(command, Train) else None
    if options.copies > 1:
        from scrimp.cli.launch_copies import launch_copies

        return launch_copies(options, [name, *words], command)
    if options.min_ranks is not None and not options.restarts:
        raise ConfigError("--min-ranks needs --restarts", expected="how often ranks are started again")
    if options.restarts and isinstance(command, Train) and folder is None:
        raise ConfigError("--restarts needs a run to go on with", do="name its folder with --run.dir")
    restarts = Restarts(
        options.restarts, options.min_ranks or options.ranks, lambda ranks: can_share(folder, ranks, keys)
    )
    return launch([name, *words], options.ranks, options.grace, restarts)


def launch(words: Sequence[str], ranks: int, grace: float, restarts: Restarts = Restarts()) -> int:
    """Run `scrimp` with some words on each of several processes; returns the exit code of the first that failed.

    Args:
        grace: seconds that ranks have to end after a signal, or after one of them failed.
        restarts: how often all are started again.
    """
    signals: list[int] = []
    slots, losses, why = list(range(ranks)), Counter[int](), ""
    with handled(PASSED_ON, lambda number, frame: signals.append(number)):
        for number in itertools.count():
            end = run_once(words, slots, {RESTARTS: str(number), WHY_AGAIN: why}, grace, signals)
            if end.is_final or number == restarts.most:
                return end.code
            losses.update(end.lost)
            twice = [slot for slot in slots if losses[slot] >= LOST_TOO_OFTEN]
            left = [slot for slot in slots if slot not in twice]
            most = range(len(left), restarts.least_ranks - 1, -1) if twice else range(0)
            count = next(filter(restarts.can_share, most), None)
            slots = slots if count is None else left[:count]
            why = _told(restarts, number + 1, end, slots, twice)
    raise AssertionError("the loop returns")


def can_share(run_dir: Path | None, ranks: int, given: Collection[str]) -> bool:
    """Whether so many ranks can go on with the run of a folder: the layout fits them, and they share its rows.

    Args:
        given: dotted keys that the user wrote.
    """
    if run_dir is None or not (run_dir / "config.toml").is_file():
        return True
    config = for_ranks(load_config(run_dir / "config.toml"), ranks, given)
    try:
        check_layout(config.layout, ranks)
    except ConfigError:
        return False
    readers = ranks // (config.layout.pp * config.layout.cp * config.layout.tp)
    return (
        readers > 0 and (decided(config.train.batch_tokens) // decided(config.train.sequence)) % readers == 0
    )


@dataclass(frozen=True)
class End:
    """How the processes of one start have ended."""

    code: int
    is_asked: bool
    """Whether a signal asked for it: the run is to stay ended."""
    lost: list[int]
    """The slot whose process was the first to be ended by a signal from elsewhere, or stopped, if there is one."""

    @property
    def is_final(self) -> bool:
        """Whether another start is no help: all is well, somebody asked, or the user has to change something."""
        is_done = self.code in (0, ELSEWHERE)
        return is_done or self.is_asked or (self.code == ScrimpError.exit_code and not self.lost)


def run_once(
    words: Sequence[str],
    slots: Sequence[int],
    more: dict[str, str],
    grace: float,
    signals: list[int],
    name: str = "",
    output: int | None = None,
) -> End:
    """Start the ranks of one job, and see them to their end.

    Args:
        more: variables of their environment.
        signals: those that came meanwhile, which are passed on.
        name: of the job, before what is said of its ranks.
        output: descriptor that they print to; None: this process's own.
    """
    children: list[subprocess.Popen[bytes]] = []
    with contextlib.closing(socket.create_server(("127.0.0.1", 0), backlog=1024)) as port:
        try:
            common = _environment(slots, port, grace) | more
            children.extend(_started(words, rank, common, port, output) for rank in range(len(slots)))
            port.close()  # rank 0 has its own copy
            watch = _Watch(children, signals, grace, name)
            code = watch.to_the_end()
        finally:
            for child in children:
                if child.poll() is None:
                    child.kill()
            for child in children:
                child.wait()
    return End(code, watch.is_asked, [slots[rank] for rank in watch.lost])


def _told(restarts: Restarts, number: int, end: End, slots: Sequence[int], dropped: Sequence[int]) -> str:
    """Say in one line that ranks are started again."""
    text = f"ranks are started again ({number} of {restarts.most}), {len(slots)} of them, after exit code {end.code}"
    if dropped:
        text += f"; without slot {' and '.join(map(str, dropped))}, lost {LOST_TOO_OFTEN} times"
    say(text)
    return text


def threads_of(processes: int) -> int:
    """Threads of each of so many processes, by the cores that this one may use."""
    return max(1, num_cores() // processes)


def _environment(slots: Sequence[int], port: socket.socket, grace: float) -> dict[str, str]:
    """What all ranks find in their environment."""
    ranks = len(slots)
    found = {"OMP_NUM_THREADS": str(threads_of(ranks))}
    if "lo" in (name for _, name in socket.if_nameindex()):
        # Else gloo takes the interface of the host's name, which need not resolve.
        found["GLOO_SOCKET_IFNAME"] = "lo"
    devices = {}
    if slots != list(range(ranks)):  # those of slots that were lost too often stay unused
        shown = os.environ.get("CUDA_VISIBLE_DEVICES")
        names = list(map(str, range(max(slots) + 1))) if shown is None else shown.split(",")
        devices["CUDA_VISIBLE_DEVICES"] = ",".join(names[slot] for slot in slots if slot < len(names))
    return {
        **found,
        **os.environ,
        **devices,
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port.getsockname()[1]),
        LAUNCH: f"{os.getpid()}.{secrets.token_hex(8)}",
        GRACE: str(grace),
    }


def _started(
    words: Sequence[str], rank: int, common: dict[str, str], port: socket.socket, output: int | None
) -> subprocess.Popen[bytes]:
    own = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    if rank == 0:
        own[LISTENER] = str(port.fileno())
    return subprocess.Popen(
        [sys.executable, "-m", "scrimp", *words],
        env=common | own,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        pass_fds=[port.fileno()] if rank == 0 else [],
        process_group=0,
    )


class _Watch:
    """Waits for ranks, passes signals on, and ends those that do not end by themselves."""

    def __init__(
        self, children: list[subprocess.Popen[bytes]], signals: list[int], grace: float, name: str
    ) -> None:
        self._running = dict(enumerate(children))
        self._signals, self._grace, self._name = signals, grace, name
        self._code = 0
        self._ask_at = self._kill_at = float("inf")
        self._stopped_since: dict[int, float] = {}
        self.is_asked = False
        """Whether a signal has asked the ranks to end: here, or one of them."""
        self.lost: list[int] = []
        """The first rank that a signal ended from elsewhere, or that was stopped, if there is one."""
        self._has_ended_them = False

    def to_the_end(self) -> int:
        """The exit code of the first rank that failed, when all have ended."""
        while self._running:
            self._pass_on()
            self._take_ended()
            self._kill_stopped()
            now = time.monotonic()
            if now > self._ask_at:
                self._ask_at = float("inf")
                self._send(signal.SIGTERM)
            if now > self._kill_at:
                self._kill_at = float("inf")
                for rank in self._running:
                    say(
                        f"{self._name}rank {rank} has not ended within {self._grace:g} s (--grace): it is killed"
                    )
                self._send(signal.SIGKILL)
            time.sleep(_LOOK_S)
        return self._code

    def _kill_stopped(self) -> None:
        now, limit = time.monotonic(), STOPPED_LAST_S if self._code else STOPPED_S
        stopped = [rank for rank, child in self._running.items() if _is_stopped(child.pid)]
        if len(stopped) == len(self._running) and not self._code:
            stopped = []  # somebody holds the whole job
        self._stopped_since = {rank: self._stopped_since.get(rank, now) for rank in stopped}
        for rank, since in self._stopped_since.items():
            if now - since > limit:
                say(f"{self._name}rank {rank} is stopped, and cannot end by itself: it is killed")
                self._running[rank].kill()

    def _pass_on(self) -> None:
        while self._signals:
            self.is_asked = True
            self._send(self._signals.pop(0))
            # A second SIGTERM would end ranks at once that write their checkpoint because of the first.
            self._ask_at = float("inf")
            self._kill_at = min(self._kill_at, time.monotonic() + self._grace)

    def _take_ended(self) -> None:
        ended = {rank: code for rank, child in self._running.items() if (code := child.poll()) is not None}
        for rank, code in sorted(ended.items(), key=_likely_cause):
            del self._running[rank]
            if code < 0:
                is_victim = self._code != 0 and -code == signal.SIGABRT
                if not (self._has_ended_them or self.lost or is_victim):
                    self.lost.append(rank)
                if not (self._has_ended_them and -code == signal.SIGTERM):  # which this process sent
                    say(f"{self._name}rank {rank} was ended by {_signal_name(-code)}")
            if code != 0 and self._code == 0:
                self._code = code if code > 0 else 128 - code
                # A rank that a signal asked to end has unwound: its code is positive, unless it came very early.
                self.is_asked |= code > 128 or -code in PASSED_ON
                now = time.monotonic()
                if self._kill_at == float("inf"):
                    self._ask_at, self._kill_at = now + ASK_S, now + self._grace

    def _send(self, number: int) -> None:
        self._has_ended_them = True
        for child in self._running.values():
            child.send_signal(number)


def _likely_cause(ended: tuple[int, int]) -> int:
    """The order in which ranks that were found ended at once are looked at: a signal is the cause of exit codes, and
    either one of an abort."""
    _, code = ended
    return 2 if -code == signal.SIGABRT else int(code >= 0)


def _is_stopped(process: int) -> bool:
    """Whether a child was stopped by a signal and has not been continued; one that has ended is not."""
    try:
        found = os.waitid(os.P_PID, process, os.WSTOPPED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return found is not None and found.si_code == os.CLD_STOPPED


def _signal_name(number: int) -> str:
    """Real-time signals have no name of their own."""
    known = {one.value: one.name for one in signal.Signals}
    return known.get(number, f"signal {number}")

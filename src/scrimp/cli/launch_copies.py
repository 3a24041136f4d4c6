"""`scrimp launch --copies`: several jobs, a copy of the model each, of which one may be lost while the others go on.

Method   Each copy is what `scrimp launch` starts otherwise: R ranks with a port and a folder of their own, copy K in
         `<run.dir>/copy-K`. A thread for each watches it, passes signals on, and starts it again, up to `--restarts`
         times for each copy. This process hosts the store where copies meet, and writes there which start of a copy
         runs: one that is gone is not waited for (`scrimp.optim.copy_rounds`).
Output   Copy 0's is shown. That of another goes to `<run.dir>/copy-K.log`; where it fails its last lines are shown.
Ends     When all copies have ended. The exit code is 0 where one of them has taken all steps, since its folder has the
         whole run; else that of the first copy that failed. Who comes back after that is not started again.
Limits   One machine. Where this process is gone, the store is: copies end at the next exchange, and the steps since
         their newest checkpoints are lost. A copy that hangs is waited for, and ended by nobody.
Checked  tests/cli/test_copies.py
"""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Final

from scrimp.cli.commands import Command, Launch, Train
from scrimp.cli.handlers import handled
from scrimp.cli.launch import PASSED_ON, End, run_once, threads_of
from scrimp.cli.show import say
from scrimp.errors import ConfigError
from scrimp.launchers import COPIES_STORE, COPY, RESTARTS, WHY_AGAIN

if TYPE_CHECKING:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

_LAST_LINES: Final = 12


def launch_copies(options: Launch, words: Sequence[str], command: Command) -> int:
    """Run copies until all have ended; returns 0 where one has taken all steps.

    Raises:
        ConfigError: the command, or what is beside it, has no copies.
    """
    folder = _checked(options, command)
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    folder.mkdir(parents=True, exist_ok=True)
    copies = [_Copy(number, options, words, folder, store) for number in range(options.copies)]
    # A copy that does not run yet is waited for.
    for copy in copies:
        copy.say_start("coming")

    def pass_on(number: int, frame: FrameType | None) -> None:
        for copy in copies:
            copy.signals.append(number)

    with handled(PASSED_ON, pass_on):
        for copy in copies:
            copy.thread.start()
        for copy in copies:
            while copy.thread.is_alive():
                copy.thread.join(0.1)
    codes = [copy.code for copy in copies]
    if 0 in codes:
        lost = [str(copy.number) for copy in copies if copy.code != 0]
        if lost:
            say(
                f"copy {' and '.join(lost)} did not take all steps; {folder / f'copy-{codes.index(0)}'} has them"
            )
        return 0
    return min(copies, key=lambda copy: copy.ended_as).code


def _checked(options: Launch, command: Command) -> Path:
    if not isinstance(command, Train):
        raise ConfigError("--copies is of train alone", do="leave --copies out")
    if options.min_ranks is not None:
        raise ConfigError("--min-ranks is not carried out beside --copies", do="leave one of the two out")
    if command.config.run.dir is None:
        raise ConfigError("--copies needs a folder", do="name it with --run.dir: copy K runs in copy-K")
    if command.config.outer.every == 0 and not command.resume:  # else the run's own settings say it
        raise ConfigError(
            "--copies needs outer.every",
            expected="local steps between exchanges",
            do="give --outer.every, such as 15",
        )
    shown, needed = os.environ.get("CUDA_VISIBLE_DEVICES"), options.ranks * options.copies
    if shown and len(shown.split(",")) < needed:
        raise ConfigError(
            "there are fewer devices than processes",
            got=f"CUDA_VISIBLE_DEVICES={shown}, {options.copies} copies of {options.ranks} ranks",
            expected=f"{needed} devices",
            do="show more devices, or start fewer copies; to train on the CPU unset CUDA_VISIBLE_DEVICES",
        )
    return command.config.run.dir


class _Copy:
    """One copy, and the thread that sees it to its end."""

    _ended = itertools.count()

    def __init__(
        self, number: int, options: Launch, words: Sequence[str], folder: Path, store: TCPStore
    ) -> None:
        self.number, self._options, self._store = number, options, store
        self._words = _of_copy(words, number, options.copies, folder)
        self._log = folder / f"copy-{number}.log"
        self.signals: list[int] = []
        self.code, self.ended_as = 1, 0
        self.thread = threading.Thread(target=self._run, name=f"scrimp-copy-{number}")

    def say_start(self, start: int | str) -> None:
        """Tell the other copies which start of this one runs."""
        self._store.set(f"start/{self.number}", str(start))

    def _run(self) -> None:
        try:
            why = ""
            for number in itertools.count():
                self.say_start(number)
                end = self._started(number, why)
                self.code = end.code
                is_last = end.is_final or number == self._options.restarts
                if is_last or self._store.check(["finished"]):
                    return
                self.say_start("coming")
                why = f"copy {self.number} is started again ({number + 1} of {self._options.restarts}), after exit "
                why += f"code {end.code}"
                say(why)
        finally:
            self.ended_as = next(self._ended)
            self.say_start("ended")

    def _started(self, number: int, why: str) -> End:
        ranks = self._options.ranks
        slots = list(range(self.number * ranks, (self.number + 1) * ranks))
        environ = {
            COPY: f"{self.number}/{self._options.copies}/{number}",
            COPIES_STORE: f"127.0.0.1:{self._store.port}",
            RESTARTS: str(number),
            WHY_AGAIN: why,
        }
        if "OMP_NUM_THREADS" not in os.environ:
            environ["OMP_NUM_THREADS"] = str(threads_of(ranks * self._options.copies))
        grace, name = self._options.grace, f"copy {self.number}: "
        if self.number == 0:
            return run_once(self._words, slots, environ, grace, self.signals, name)
        with self._log.open("ab") as log:
            end = run_once(self._words, slots, environ, grace, self.signals, name, log.fileno())
        if end.code and not end.is_asked:
            self._show(end.code)
        return end

    def _show(self, code: int) -> None:
        lines = self._log.read_text(encoding="utf-8", errors="replace").splitlines()[-_LAST_LINES:]
        said = "".join(f"\n  copy {self.number} | {line}" for line in lines)
        say(f"copy {self.number} ended with exit code {code}; the end of {self._log}:{said}")


def _of_copy(words: Sequence[str], number: int, copies: int, folder: Path) -> list[str]:
    """The command of one copy: a folder of its own, and how many there are."""
    own, skip = [], False
    for word in words:
        if skip:
            skip = False
        elif word in ("--run.dir", "--outer.copies"):
            skip = True
        elif not word.startswith(("--run.dir=", "--outer.copies=")):
            own.append(word)
    return [*own, f"--run.dir={folder / f'copy-{number}'}", f"--outer.copies={copies}"]

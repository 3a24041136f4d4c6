"""Runs as processes of this machine: each is `scrimp train` in a folder of its own, and resumed where it stopped.

Problem  A run may end by itself, at the end of a round, by an error, or with the study that started it; whatever
         happens, the next study has to go on from there with the same numbers.
Method   The settings stand in a file beside the run's folder, whole before the run begins: a folder that was begun with
         others is refused. A run goes on from its newest checkpoint, which repeats the same losses bit for bit; where
         there is none it begins again. At the end of a round it gets SIGTERM once the log has the round's last step:
         it finishes its step, writes a checkpoint, and keeps what it did beyond.
         Each run has a session of its own, so that a Ctrl-C reaches the study alone, which then ends the runs as it
         would at the end of a round. Of a study that is killed, they are killed (`tethered`).
Limits   Whether a run is at its round's end is read from the last lines of its log, every half second.
Checked  tests/study/test_study_runs.py, tests/study/test_processes.py
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final, Protocol

from scrimp.files import make_folder, storage, write_whole
from scrimp.study.job import Job, has_reached, read_run_of, refuse_other_settings, row_of
from scrimp.study.rows import Row

_GRACE_S: Final = 60.0
"""Time for the last checkpoint of runs that are told to end."""
_LOOK_S: Final = 0.5
_TAIL_BYTES: Final = 2**14
_SAID: Final = 3
"""Lines of an error that a row has."""


class Places(Protocol):
    """Something that runs jobs."""

    @property
    def count(self) -> int:
        """Most jobs at once."""
        ...

    def start(self, job: Job) -> None:
        """Begin a job in a free place."""
        ...

    def ended(self) -> list[tuple[Job, Row]]:
        """Those that ended since this was last asked."""
        ...

    def steps(self) -> dict[str, int]:
        """The last step of each run that goes on, by name."""
        ...

    def close(self) -> None:
        """End what still runs, with a checkpoint each."""
        ...


class LocalPlaces:
    """Places on this machine.

    Args:
        environments: of each place, further variables of its process: which GPU it sees.
        say: is told of runs that had to be killed.
    """

    def __init__(
        self, environments: Sequence[Mapping[str, str]], say: Callable[[str], None] = lambda text: None
    ) -> None:
        self._free, self._say = list(environments), say
        self._running: list[Process] = []
        self.count = len(environments)

    def start(self, job: Job) -> None:
        """Begin a job in a free place."""
        self._running.append(Process(job, self._free.pop(0)))

    def ended(self) -> list[tuple[Job, Row]]:
        """Those that ended since this was last asked."""
        found = [(one, row) for one in self._running if (row := one.row()) is not None]
        for one, _ in found:
            self._running.remove(one)
            self._free.append(one.environment)
        return [(one.job, row) for one, row in found]

    def steps(self) -> dict[str, int]:
        """The last step of each run that goes on, by name."""
        return {one.job.name: last_step(one.job.run_folder) for one in self._running}

    def close(self) -> None:
        """End what still runs, with a checkpoint each; what takes longer than a minute, together, is killed."""
        for one in self._running:
            one.ask_to_end()
        deadline = time.monotonic() + _GRACE_S
        try:
            for one in self._running:
                if not one.end(deadline):
                    self._say(
                        f"{one.job.name} did not end within {_GRACE_S:.0f} s, and was killed; "
                        "it goes on from the checkpoint before"
                    )
        except BaseException:
            for one in self._running:
                one.kill()
            raise
        self._running.clear()


class Process:
    """A job that runs.

    Args:
        environment: further variables, of the place that it runs in.

    Raises:
        ConfigError: the run's folder was begun with other settings.
    """

    def __init__(self, job: Job, environment: Mapping[str, str] | None = None) -> None:
        self.job, self.environment = job, dict(environment or {})
        self._began = self._looked = time.monotonic()
        self._asked = False
        words = _words(job)
        variables = os.environ | self.environment | dict(job.environment)
        variables["OMP_NUM_THREADS"] = str(job.threads)
        with storage(self._log, "write"), self._log.open("ab") as output:
            self._log_before = output.tell()
            self._process = subprocess.Popen(
                [sys.executable, "-m", "scrimp.study.tethered", str(os.getpid()), *words],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                env=variables,
            )

    @property
    def _log(self) -> Path:
        return self.job.folder / f"{self.job.name}.log"

    def row(self) -> Row | None:
        """What the run found, once it has ended; None while it goes on."""
        if self._process.poll() is None:
            self._end_of_round()
            return None
        return self._row_of_ended()

    def ask_to_end(self) -> None:
        """Have it finish its step and write a checkpoint."""
        if not self._asked and self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
        self._asked = True

    def end(self, deadline: float | None = None) -> bool:
        """Wait for its end, and kill it where that does not come; whether it came.

        Args:
            deadline: by the monotonic clock; None: in a minute.
        """
        deadline = time.monotonic() + _GRACE_S if deadline is None else deadline
        try:
            self._process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            self.kill()
            return False
        except BaseException:
            self.kill()
            raise
        return True

    def kill(self) -> None:
        """End it at once."""
        self._process.kill()
        self._process.wait()

    def _end_of_round(self) -> None:
        now = time.monotonic()
        if not self.job.stops_there or self._asked or now < self._looked + _LOOK_S:
            return
        self._looked = now
        if last_step(self.job.run_folder) >= self.job.steps:
            self.ask_to_end()

    def _row_of_ended(self) -> Row:
        seconds, run = time.monotonic() - self._began, read_run_of(self.job)
        code = self._process.returncode
        # A short run may be through with its steps when it is asked, and dies of the signal as it ends: what it lacks
        # of its last checkpoint the next round makes again.
        is_well = code == 0 or (self._asked and code in (128 + signal.SIGTERM, -signal.SIGTERM))
        if is_well and run is not None and has_reached(self.job, run):
            return row_of(self.job, seconds=seconds)
        return row_of(self.job, seconds=seconds, error=self._why(code))

    def _why(self, code: int) -> str:
        if code < 0:
            known = {one.value: one.name for one in signal.Signals}
            return f"killed by {known.get(-code, f'signal {-code}')}"
        with contextlib.suppress(OSError):
            lines = _tail(self._log, self._log_before).splitlines()
            for number in range(len(lines) - 1, -1, -1):
                if "error:" in lines[number] or lines[number].startswith(("Traceback", "RuntimeError")):
                    return " ".join(" ".join(line.split()) for line in lines[number : number + _SAID])
        return f"ended with exit code {code}; see {self._log.name}"


def prepare_folder(job: Job) -> bool:
    """Write the run's settings beside its folder; whether there is a run to go on with.

    Raises:
        ConfigError: the folder was begun with other settings.
    """
    make_folder(job.folder)
    refuse_other_settings(job)
    write_whole(job.settings_file, job.toml)
    checkpoints = job.run_folder / "checkpoints"
    has_begun = checkpoints.is_dir() and any(checkpoints.iterdir())
    if not has_begun and job.run_folder.exists():
        with storage(job.run_folder, "remove"):  # killed before it had anything to go on with
            shutil.rmtree(job.run_folder)
    return has_begun


def last_step(run_folder: Path) -> int:
    """The last step in a run's log; 0 where there is none."""
    with contextlib.suppress(OSError):
        for line in reversed(_tail(run_folder / "metrics.jsonl").splitlines()):
            with contextlib.suppress(ValueError, TypeError, KeyError):
                return int(json.loads(line)["step"])
    return 0


def _words(job: Job) -> list[str]:
    """The command of a run that begins, or goes on."""
    goes_on = prepare_folder(job)
    words = ["train", *([] if goes_on else [str(job.settings_file)])]
    words += [f"--run.dir={job.run_folder}", *(["--resume", "--restart"] if goes_on else [])]
    if goes_on and "objective.teachers" in job.settings:  # they may have moved with the study
        words.append(f"--objective.teachers={job.settings['objective.teachers']}")
    return [*words, *(["--trust-code"] if job.trusts else [])]


def _tail(path: Path, begin: int = 0) -> str:
    """The last bytes of a file, as text, none of them before `begin`."""
    with path.open("rb") as file:
        file.seek(max(begin, os.fstat(file.fileno()).st_size - _TAIL_BYTES))
        return file.read().decode("utf-8", "replace")

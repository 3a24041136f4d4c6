"""A command as one of several ranks: it joins the others, speaks for all or not at all, and ends with them.

Printing   Standard output and standard error of all ranks but the first lead nowhere, whatever prints there. An error
           that another rank has to show (`Joined.explained`, `scrimp.meeting.shown_by`) goes to that rank's own
           standard error, with its rank.
Mistakes   A command line that is wrong on one node alone is told at the meeting: all ranks end, with one message.
Launcher   A rank whose launcher is gone, by kill -9 say, gets SIGTERM from a thread of its own, and so writes its last
           checkpoint as if the launcher had asked for it.
Restarts   Ranks that their launcher has started again (`--restarts`, torchrun's `--max-restarts`) go on with the run
           that is in the folder.
Checked    tests/cli/test_command_on_ranks.py, tests/cli/test_restarts.py
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import os
import platform
import shlex
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TextIO

import scrimp
from scrimp import __version__, user_code
from scrimp.cli.build import build, carry_out
from scrimp.cli.commands import Command, Doctor, Train
from scrimp.cli.show import say, show_error
from scrimp.config import flatten
from scrimp.errors import ConfigError, ScrimpError
from scrimp.files import storage_error
from scrimp.health import record
from scrimp.launchers import GRACE, GRACE_S, LAUNCH, RANK_ORDER, WHY_AGAIN, Place, order_of, seconds_in
from scrimp.recipes import settings_file
from scrimp.world import World

TAKING_PART = ("train", "doctor --ranks")
"""Commands that run on several ranks."""
TRACES = "flight-recorder-rank-"
"""Files in the run's folder where NCCL's collectives are written down if one of them fails."""
_LOOK_S = 0.5


def on_ranks(place: Place, words: Sequence[str], answer: Callable[[BaseException], int]) -> int:
    """Run the command of some words as one of several ranks; returns the exit code.

    Args:
        answer: shows an exception, and gives its exit code.
    """
    with _voice(place.rank == 0) as voice:
        command, given, failure = None, frozenset[str](), None
        try:
            _prepare_process()
            refuse_ranks(words, f"rank {place.rank} of {place.size}, by {place.launcher}")
            command, given = build(words[0], words[1:])
            papers = papers_of(command, words)
            papers["the order of ranks"] = str(_order(command, place))
        except ScrimpError as error:
            failure, papers = error, {}
        except OSError as error:
            failure, papers = storage_error(error, "a file that the command names cannot be read"), {}
        return _together(place, words[0], command, given, papers, failure, answer, voice)


def _together(
    place: Place,
    name: str,
    command: Command | None,
    given: frozenset[str],
    papers: dict[str, str],
    failure: ScrimpError | None,
    answer: Callable[[BaseException], int],
    voice: Voice,
) -> int:
    from scrimp.health.lookout import end_process
    from scrimp.joining import join
    from scrimp.meeting import is_connecting, is_shown_here

    joined, rank = None, place.rank
    try:
        joined = join(
            place,
            papers,
            device=_device(command),
            failure=failure,
            say=say,
            tell=lambda error: show_error(error, voice.own),
            order=None if failure is not None else _order(command, place),
            traces=_traces(command),
        )
        rank = joined.rank
        _say_order(command, place)
        assert command is not None, "a failure would have been raised"
        with joined.world.together(f"scrimp {name}"):
            if joined.world.any(joined.is_again):
                command = going_on(command, joined.world)
            code = carry_out(name, command, given)
        sys.stdout.flush()
    except BaseException as raised:
        if joined is not None:
            error, shows = joined.explained(raised)
        else:
            error, shows = raised, is_shown_here(raised, place)
        voice.speak(shows)
        if isinstance(error, Exception) and not isinstance(error, ScrimpError):
            say(f"rank {rank}:")
        code = answer(error)
    if joined is not None:
        joined.leave(code)
    elif is_connecting():
        end_process(code)
    return code


def _device(command: Command | None) -> str:
    """Whose links or memory the ranks use."""
    if isinstance(command, Train):
        return command.config.device
    return command.device if isinstance(command, Doctor) else "cpu"


def _order(command: Command | None, place: Place) -> tuple[int, ...] | None:
    """The launcher's ranks by the numbers that they get; of a command that measures them they keep their own.

    Raises:
        ConfigError: the environment names no order.
    """
    return order_of(os.environ, place.size) if isinstance(command, Train) else None


def _traces(command: Command | None) -> str | None:
    folder = command.config.run.dir if isinstance(command, Train) else None
    return None if folder is None else str(folder.absolute() / TRACES)


def _say_order(command: Command | None, place: Place) -> None:
    """A line for who compares the launcher's messages with those of the run."""
    order = _order(command, place)
    if order is not None:
        own = ", ".join(f"{number} is {rank}" for number, rank in enumerate(order) if number != rank)
        say(
            f"ranks by {RANK_ORDER}: " + (f"{own} of {place.launcher}" if own else "as the launcher has them")
        )
    elif isinstance(command, Train) and os.environ.get(RANK_ORDER):
        say(f"{RANK_ORDER} is of another number of ranks, and not followed")


def going_on(command: Command, world: World) -> Command:
    """The same command when its ranks are started again: a run that is there goes on from its newest checkpoint.

    Without one it begins anew, where it has never had any (`scrimp train --resume`).

    Raises:
        ConfigError: nobody can say which run was begun.
    """
    if not isinstance(command, Train):
        return command
    folder = command.config.run.dir
    if folder is None:
        raise ConfigError(
            "a run whose folder has no name cannot go on when its ranks are started again",
            expected="--run.dir",
            do="find the run in runs/, and go on with --run.dir and --resume",
        )
    why = os.environ.get(WHY_AGAIN) or "ranks were started again by their launcher"
    record().findings.append(("restart", why))
    holds_run = world.once("looking for the run", lambda: (folder / "config.toml").is_file())
    return dataclasses.replace(command, resume=True, resume_from=None) if holds_run else command


def refuse_ranks(words: Sequence[str], got: str) -> None:
    """Refuse several ranks to a command that runs as one process.

    Raises:
        ConfigError: naming it.
    """
    name = words[0]
    if any(all(word in words for word in one.split()) for one in TAKING_PART if one.split()[0] == name):
        return
    raise ConfigError(
        f"scrimp {name} runs as one process",
        got=got,
        expected=f"several ranks for {' and '.join(TAKING_PART)} alone",
        do="start it without a launcher"
        + ("; the number of ranks to plan for is that of the layout" if name == "plan" else "")
        + ("; several nodes are for torchrun or srun" if name == "launch" else ""),
    )


def papers_of(command: Command, words: Sequence[str]) -> dict[str, str]:
    """What has to be the same on all ranks, by its name in a sentence.

    Raises:
        ScrimpError: a file that belongs to it cannot be read.
    """
    import torch

    papers = {
        "the version of Scrimp": __version__,
        "Scrimp's source": source_digest(),
        "the version of torch": torch.__version__,
        "the version of Python": platform.python_version(),
        "the command line": shlex.join(words),
    }
    if isinstance(command, Train):
        if command.file is not None:
            file = settings_file(command.file)
            papers["the settings file"] = hashlib.sha256(file.read_bytes()).hexdigest()[:12]
        if command.plan is not None:
            papers["the plan"] = hashlib.sha256(command.plan.read_bytes()).hexdigest()[:12]
        for key, digest in user_code.digests(flatten(command.config)).items():
            papers[f"the code of {key}"] = digest[:12]
    return papers


def source_digest() -> str:
    """Twelve digits that change with any Python file of the package."""
    root, digest = Path(scrimp.__file__).parent, hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(f"{path.relative_to(root)}\0".encode())
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()[:12]


class Voice:
    """Whether what this process prints is seen."""

    def __init__(self) -> None:
        self._own = sys.stdout, sys.stderr
        self._nowhere = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115

    @property
    def own(self) -> TextIO:
        """The process's standard error."""
        return self._own[1]

    def speak(self, speaks: bool) -> None:
        """Print from now on, or do not."""
        sys.stdout, sys.stderr = self._own if speaks else (self._nowhere, self._nowhere)

    def close(self) -> None:
        """As it was before."""
        self.speak(True)
        self._nowhere.close()


@contextlib.contextmanager
def _voice(speaks: bool) -> Iterator[Voice]:
    voice = Voice()
    voice.speak(speaks)
    try:
        yield voice
    finally:
        voice.close()


def _prepare_process() -> None:
    """Before torch is imported: no stack of C++ from each rank for a connection that another has closed."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    parent, launcher = os.getppid(), os.environ.get(LAUNCH, "").partition(".")[0]
    if launcher.isdecimal():
        parent = int(launcher)
    elif "TORCHELASTIC_RUN_ID" not in os.environ:
        return  # Slurm ends its own
    grace = seconds_in(os.environ, GRACE, GRACE_S)
    threading.Thread(target=_follow, args=(parent, grace), name="scrimp-launcher", daemon=True).start()


def _follow(launcher: int, grace: float) -> None:
    """End this process after its launcher, and in order if that is possible."""
    while os.getppid() == launcher:
        time.sleep(_LOOK_S)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(grace)
    os._exit(128 + signal.SIGTERM)

"""`main`: the words of a command line to a command, and whatever happens to an exit code.

=====  ========================================================================================
0      done
2      the input cannot be used: any `ScrimpError` but TrainingError, or storage that is full
1      anything else; a traceback is shown only for what must be a bug in Scrimp
129    ended by SIGHUP: the terminal is gone
130    interrupted by SIGINT
138    ended by SIGUSR1: Slurm's warning
143    ended by SIGTERM
=====  ========================================================================================

While training, the loop answers these signals itself (it finishes the step and writes a checkpoint)
and passes the exit code back. Everywhere else a signal ends the command at once, but through its
`finally` blocks, so that no half-written file stays behind. A signal that was ignored when the
command started (`nohup`) stays ignored.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import io
import os
import resource
import signal
import sys
import threading
import traceback
from collections.abc import Iterator, Sequence
from types import FrameType

from scrimp import __version__
from scrimp.cli.handlers import handled
from scrimp.cli.show import say, show_error
from scrimp.errors import ConfigError, ScrimpError, StorageError
from scrimp.launchers import place_of, restarts_in
from scrimp.world import World

_OVERVIEW = """\
usage: scrimp COMMAND ...

Scrimp trains language models with the bits, bytes and devices you have.

  train [FILE.toml]             train a model; any setting can follow, as --train.steps 500
  launch --ranks N COMMAND ...  a command on several processes of this machine, as: launch --ranks 4 train
  plan [FILE.toml]              what that run would take; starts nothing
  prepare SRC OUT               text to token shards
  demonstrate SRC OUT           labelled examples with the nearest ones of a bank before each, to train on
  align SOURCE TARGET OUT       pairs of sentences of two documents that are translations of one another
  verify PATH                   check all of a corpus, run, checkpoint or exported model
  eval TARGET --data FILE       loss and bits per byte of a run or model folder; --tasks NAME: small tasks
  generate TARGET --prompt TEXT continue a text
  chat TARGET                   talk to a model that has a chat template
  choose-base BASE --data FILE  formats for the frozen weights beside adapters, under a budget of bytes
  export RUN OUT                a run as a Hugging Face folder
  export-precision SOURCE OUT   a plan of formats for torchao or Transformer Engine
  export-layout SOURCE OUT      a plan of a layout for TorchTitan or Megatron-Bridge
  report RUN                    a run's report.html
  study FILE|NAME               variants of a run over seeds: intervals, paired differences, verdicts
  score FOLDER ...              who reaches a loss first, over finished studies
  doctor                        which number formats work on this device, and how fast

scrimp COMMAND --help explains a command's options; scrimp --version prints the version."""

_STORAGE_ERRNOS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM)
_LEAST_COLUMNS = 40
_LEAST_ADDRESS_SPACE = 640 << 20
"""What torch's CPU build ends the process below, from its libraries' own code; measured."""
_PATH_ERRNOS = (errno.ENAMETOOLONG, errno.ELOOP, errno.ENOTDIR)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code and lets no exception out."""
    words = list(sys.argv[1:] if argv is None else argv)
    _prepare_process()
    code: list[int] = []
    if argv is None:  # the command is all that this process does
        atexit.register(_end_rank, code)  # before all others, so that it runs after them
    code.append(_answered(words))
    return code[0]


def _answered(words: Sequence[str]) -> int:
    try:
        with _signals_unwind():
            code = _dispatch(words)
            # Here, not at interpreter shutdown, where a closed pipe could no longer be handled.
            sys.stdout.flush()
            return code
    except BaseException as error:
        return exit_code_of(error)


def exit_code_of(error: BaseException) -> int:
    """The exit code of an exception that ended a command; shows it."""
    if isinstance(error, ScrimpError):
        show_error(error)
        return error.exit_code
    if isinstance(error, KeyboardInterrupt):
        say("interrupted")
        return 128 + signal.SIGINT
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    if isinstance(error, BrokenPipeError):
        _silence_stdout()
        return 1
    if not isinstance(error, Exception):
        raise error
    if _is_no_memory(error):
        return _no_memory(error)
    if not isinstance(error, OSError) or error.errno not in _STORAGE_ERRNOS + _PATH_ERRNOS:
        return _bug(error)
    path = f": {str(error.filename)[:200]}" if error.filename else ""
    do = "free space or choose another folder" if error.errno in _STORAGE_ERRNOS else "give another path"
    show_error(StorageError(f"{error.strerror}{path}", do=do))
    return StorageError.exit_code


def _end_rank(code: Sequence[int]) -> None:
    """End a process that was one of several ranks, after all that runs at the exit of Python, before Python is taken
    down.

    What still refers to a process group keeps its threads beyond `destroy_process_group`. One that frees a tensor while
    the interpreter is taken down is unwound as it asks for Python's lock, and C++ ends the process by SIGABRT for that
    (pytorch issue 190489, pull request 179291).
    """
    if code and "scrimp.joining" in sys.modules:
        from scrimp.health.lookout import end_process

        end_process(code[0])


def _prepare_process() -> None:
    """Settings of this process that must stand before torch is imported or text is printed."""
    # GNU OpenMP's threads spin for milliseconds at the end of every operation. On cores that other programs
    # use too, they spin away the very time that the slower thread needs: a step took up to seven times as
    # long. After 10,000 turns (some 20 us) they sleep; measured in docs/lab-log.md.
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")
    _hold_closed_streams()
    # Libraries that lay out text fail, or print one letter a line, in fewer columns.
    columns = os.environ.get("COLUMNS", "")
    if columns.isdecimal() and int(columns[:6]) < _LEAST_COLUMNS:
        os.environ["COLUMNS"] = str(_LEAST_COLUMNS)
    for stream in (sys.stdout, sys.stderr):
        # Text of a corpus has any character; a terminal that cannot show one must not end the command.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _hold_closed_streams() -> None:
    """Open the null device for a standard stream that is closed: else the next file that is opened gets its
    number, and everybody's messages."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            null = os.open(os.devnull, os.O_RDWR)
            if null != number:
                os.dup2(null, number)
                os.close(null)
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, "r" if number == 0 else "w", closefd=False))  # noqa: SIM115


def _refuse_deleted_folder() -> None:
    try:
        os.getcwd()
    except FileNotFoundError:
        raise StorageError("the working folder was deleted", do="change to a folder that exists") from None


def _refuse_small_address_space() -> None:
    """Refuse a limit within which torch's libraries end the process while they are loaded."""
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit != resource.RLIM_INFINITY and limit < _LEAST_ADDRESS_SPACE:
        raise StorageError(
            "the system gives no more memory than torch takes to load",
            got=f"an address space of {limit >> 20:,} MiB",
            expected=f"at least {_LEAST_ADDRESS_SPACE >> 20:,} MiB, and more for a model",
            do="raise the limit (ulimit -v)",
        )


def _dispatch(words: Sequence[str]) -> int:
    if not words or words[0] in ("-h", "--help", "help"):
        print(_OVERVIEW, file=sys.stdout if words else sys.stderr)
        return 0 if words else ConfigError.exit_code
    if words[0] == "--version":
        print(f"scrimp {__version__}")
        return 0
    _refuse_deleted_folder()
    _refuse_small_address_space()
    # Not at the top: with tyro it takes a while, which --help and --version need not wait for.
    from scrimp.cli.build import build, carry_out, unknown_command
    from scrimp.cli.commands import COMMANDS

    name = words[0]
    if name not in COMMANDS:
        raise unknown_command(words)
    place = place_of(os.environ)
    if place is not None and World.current().size == 1:
        from scrimp.cli.ranks import on_ranks

        return on_ranks(place, words, exit_code_of)
    command, given = build(name, words[1:])
    if restarts_in(os.environ) > 0:  # of several ranks one is left
        from scrimp.cli.ranks import going_on

        command = going_on(command, World.current())
    return carry_out(name, command, given)


def _is_no_memory(error: Exception) -> bool:
    """Whether the system refused memory; torch, the loader of libraries and threads each say it in their own way."""
    refusals = (
        "can't allocate memory",
        "failed to map segment",
        "Cannot allocate memory",
        "can't start new thread",
    )
    return isinstance(error, MemoryError) or any(refusal in str(error) for refusal in refusals)


def _no_memory(error: Exception) -> int:
    lines = str(error).strip().splitlines()
    do = "free memory, raise the limit of this process (ulimit -v), or ask for a smaller model"
    show_error(StorageError("the system gives no more memory", got=lines[-1] if lines else None, do=do))
    return StorageError.exit_code


def _bug(error: Exception) -> int:
    traceback.print_exception(error)
    say("error: this is a bug in Scrimp; please report it with the lines above")
    return 1


def _silence_stdout() -> None:
    """Point stdout at nothing, so that the interpreter's last flush does not fail as well."""
    with contextlib.suppress(OSError, ValueError):
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stdout.fileno())
        os.close(null)


@contextlib.contextmanager
def _signals_unwind() -> Iterator[None]:
    """Turn SIGTERM, SIGHUP and SIGUSR1 into SystemExit(128 + number) in this process while the command runs."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread can set signal handlers
        return
    process, is_ending = os.getpid(), False

    def unwind(number: int, frame: FrameType | None) -> None:
        nonlocal is_ending
        if os.getpid() != process:
            # A forked worker inherits this handler, but is to end as quietly as without it.
            os._exit(128 + number)
        if is_ending and number != signal.SIGTERM:
            return  # a terminal that goes away sends SIGHUP more than once: `finally` blocks run to their end
        is_ending = True
        raise SystemExit(128 + number)

    with handled((signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1), unwind):
        yield

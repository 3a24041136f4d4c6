"""`main`: the words of a command line to a command, and whatever happens to an exit code.

=====  ========================================================================================
0      done
2      the input cannot be used: any `ScrimpError` but TrainingError, or storage that is full
1      anything else; a traceback is shown only for what must be a bug in Scrimp
130    interrupted by SIGINT
143    ended by SIGTERM
=====  ========================================================================================

While training, the loop answers both signals itself (it finishes the step and writes a checkpoint)
and passes the exit code back. Everywhere else a signal ends the command at once, but through its
`finally` blocks, so that no half-written file stays behind.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import signal
import sys
import threading
import traceback
from collections.abc import Iterator, Sequence
from types import FrameType

from scrimp import __version__
from scrimp.cli.show import say, show_error
from scrimp.config import nearest_key
from scrimp.errors import ConfigError, ScrimpError, StorageError

_OVERVIEW = """\
usage: scrimp COMMAND ...

Scrimp trains language models with the bits, bytes and devices you have.

  train [FILE.toml]             train a model; any setting can follow, as --train.steps 500
  plan [FILE.toml]              what that run would take; starts nothing
  prepare SRC OUT               text to token shards
  data verify FOLDER            check token shards against their checksums
  eval TARGET --data FILE       loss, perplexity, bits per byte of a run or model folder
  generate TARGET --prompt TEXT continue a text
  export RUN OUT                a run as a Hugging Face folder
  export-precision SOURCE OUT   a plan of formats for torchao or Transformer Engine
  report RUN                    a run's report.html
  doctor                        which number formats work on this device, and how fast

scrimp COMMAND --help explains a command's options; scrimp --version prints the version."""

_STORAGE_ERRNOS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM)
_PATH_ERRNOS = (errno.ENAMETOOLONG, errno.ELOOP, errno.ENOTDIR)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code and lets no exception out."""
    words = list(sys.argv[1:] if argv is None else argv)
    _prepare_process()
    try:
        with _sigterm_unwinds():
            code = _dispatch(words)
            # Here, not at interpreter shutdown, where a closed pipe could no longer be handled.
            sys.stdout.flush()
            return code
    except ScrimpError as error:
        show_error(error)
        return error.exit_code
    except KeyboardInterrupt:
        say("interrupted")
        return 128 + signal.SIGINT
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except BrokenPipeError:
        _silence_stdout()
        return 1
    except OSError as error:
        if error.errno not in _STORAGE_ERRNOS + _PATH_ERRNOS:
            return _bug()
        path = f": {str(error.filename)[:200]}" if error.filename else ""
        do = "free space or choose another folder" if error.errno in _STORAGE_ERRNOS else "give another path"
        show_error(StorageError(f"{error.strerror}{path}", do=do))
        return StorageError.exit_code
    except Exception:
        return _bug()


def _prepare_process() -> None:
    """Settings of this process that must stand before torch is imported or text is printed."""
    # GNU OpenMP's threads spin for milliseconds at the end of every operation. On cores that other programs
    # use too, they spin away the very time that the slower thread needs: a step took up to seven times as
    # long. After 10,000 turns (some 20 us) they sleep; measured in docs/lab-log.md.
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")
    for stream in (sys.stdout, sys.stderr):
        # Text of a corpus has any character; a terminal that cannot show one must not end the command.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _dispatch(words: Sequence[str]) -> int:
    if not words or words[0] in ("-h", "--help", "help"):
        print(_OVERVIEW, file=sys.stdout if words else sys.stderr)
        return 0 if words else ConfigError.exit_code
    if words[0] == "--version":
        print(f"scrimp {__version__}")
        return 0
    # Not at the top: with tyro it takes a while, which --help and --version need not wait for.
    from scrimp.cli.commands import COMMANDS, build

    for length in (1, 2):
        name = " ".join(words[:length])
        if name in COMMANDS:
            command, given = build(name, words[length:])
            return command.execute(given)
    raise _unknown_command(words, list(COMMANDS))


def _unknown_command(words: Sequence[str], known: list[str]) -> ConfigError:
    wanted = words[0]
    if wanted == "data":
        second = [name for name in known if name.startswith("data ")]
        return ConfigError(
            f"unknown command {' '.join(words[:2])!r}", expected=f"scrimp {' or '.join(second)}"
        )
    if wanted.startswith("-"):
        return ConfigError(
            f"option {wanted} before a command",
            expected="scrimp COMMAND, then its options",
            do=f"write `scrimp train {wanted} ...` to train",
        )
    near = nearest_key(wanted, known)
    return ConfigError(
        f"unknown command {wanted!r}",
        expected=f"one of {', '.join(known)}",
        do=f"did you mean `scrimp {near}`?" if near else "see scrimp --help",
    )


def _bug() -> int:
    traceback.print_exc()
    say("error: this is a bug in Scrimp; please report it with the lines above")
    return 1


def _silence_stdout() -> None:
    """Point stdout at nothing, so that the interpreter's last flush does not fail as well."""
    with contextlib.suppress(OSError, ValueError):
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stdout.fileno())
        os.close(null)


@contextlib.contextmanager
def _sigterm_unwinds() -> Iterator[None]:
    """Turn SIGTERM into SystemExit(143) in this process while the command runs."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread can set signal handlers
        return
    process = os.getpid()

    def unwind(number: int, frame: FrameType | None) -> None:
        if os.getpid() != process:
            # A forked worker inherits this handler, but is to end as quietly as without it.
            os._exit(128 + number)
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, unwind)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)

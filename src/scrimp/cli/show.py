"""What commands print: tables plainly, and errors as what happened, then got, expected and what to do, a line each."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, TextIO

from scrimp.errors import ScrimpError, shortened

if TYPE_CHECKING:
    from rich.console import Console

_RED_BOLD, _DIM, _RESET = "\x1b[1;31m", "\x1b[2m", "\x1b[0m"


def plain_console() -> Console:
    """A console for tables and sentences, which prints what it is given: no markup, no colours of its own."""
    from rich.console import Console

    return Console(markup=False, highlight=False)


def show_error(error: ScrimpError, stream: TextIO | None = None) -> None:
    """Print an error, on stderr unless told otherwise."""
    say(error_text(error, color=_in_color(stream or sys.stderr)), stream)


def say(text: str, stream: TextIO | None = None) -> None:
    """Print a line for the user, on stderr unless told otherwise. A closed stream is no error."""
    stream = stream or sys.stderr
    try:
        # Names of files may hold bytes that are no text; those must not turn a message into a traceback.
        encoding = getattr(stream, "encoding", None) or "utf-8"
        print(text.encode(encoding, "backslashreplace").decode(encoding), file=stream, flush=True)
    except (OSError, ValueError):
        pass


def error_text(error: ScrimpError, *, color: bool) -> str:
    """The message as a block of short lines."""
    red, dim, reset = (_RED_BOLD, _DIM, _RESET) if color else ("", "", "")
    rows = [f"{red}error:{reset} {_one_line(error.what)}"]
    for name, value in (("got", error.got), ("expected", error.expected), ("do", error.do)):
        if value is not None:
            rows.append(f"  {dim}{name:<9}{reset}{_one_line(value)}")
    return "\n".join(rows)


def _one_line(value: object) -> str:
    # Control characters from a file name or a corpus must not reach the terminal.
    text = shortened(value)
    return "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in text)


def _in_color(stream: TextIO) -> bool:
    plain = bool(os.environ.get("NO_COLOR")) or os.environ.get("TERM") == "dumb"
    return not plain and stream.isatty()

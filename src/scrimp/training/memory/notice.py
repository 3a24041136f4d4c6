"""A word on stderr where something quiet takes longer than a user waits without one."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator

PATIENCE = 2.0
"""Seconds."""


@contextlib.contextmanager
def said_if_slow(text: str) -> Iterator[None]:
    """Print `text` once what runs inside has taken `PATIENCE` seconds."""
    timer = threading.Timer(PATIENCE, _say, [text])
    timer.daemon = True
    try:
        timer.start()
    except RuntimeError:  # no more threads: then without a word
        yield
        return
    try:
        yield
    finally:
        timer.cancel()


def _say(text: str) -> None:
    if sys.stderr is not None:
        with contextlib.suppress(OSError, ValueError):
            print(text, file=sys.stderr, flush=True)

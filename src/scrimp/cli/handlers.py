"""Handlers of signals for a while. Whoever started the process may have them ignored (`nohup`): then they stay so."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Collection, Iterator
from types import FrameType


@contextlib.contextmanager
def handled(
    numbers: Collection[signal.Signals], handler: Callable[[int, FrameType | None], None]
) -> Iterator[None]:
    """Call `handler` for these signals inside, but for those that are ignored; in the main thread alone."""
    before = {
        number: signal.signal(number, handler)
        for number in numbers
        if signal.getsignal(number) is not signal.SIG_IGN
    }
    try:
        yield
    finally:
        for number, former in before.items():
            signal.signal(number, former)

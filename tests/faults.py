"""Ranks that come late, and links that break, for real: for tests of what the others do then."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

from scrimp.collective_calls import wrapped


@contextlib.contextmanager
def late(seconds: float) -> Iterator[None]:
    """Inside, this rank comes to every collective, and to every transfer between two ranks, so much later."""

    def after(operation: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def called(*arguments: Any, **named: Any) -> Any:
            time.sleep(seconds)
            return call(*arguments, **named)

        return called

    with wrapped(after):
        yield


def cut_links() -> int:
    """Shut down the connections of this process that carry collectives, as a network does that fails; how many.

    Those to the store where ranks met (MASTER_PORT) stay, so that the process can still say how it is.
    """
    count = 0
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(name))) as link:
            ports = {link.getsockname()[1], link.getpeername()[1]}
            if int(os.environ["MASTER_PORT"]) not in ports:
                link.shutdown(socket.SHUT_RDWR)
                count += 1
    return count

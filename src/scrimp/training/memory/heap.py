"""Between the phases of a run on a CPU: heap that was freed goes back to the system.

Problem  A CPU has no caching allocator to empty, but C's heap behaves like one: tensors of a phase leave gaps that the
         next phase's do not fill, and glibc gives back only what lies at the heap's end. In emulated formats the
         process grows from phase to phase while its tensors do not.
Method   At an edge between phases, if the resident set has grown by `CREEP_BYTES` since the last time: `malloc_trim`,
         which gives back every whole page that is free. A step never waits for it.
Limits   glibc only; elsewhere nothing is done. Growth within a phase stays until its end.
Checked  tests/training/memory/test_heap.py; figures in docs/lab-log.md
"""

from __future__ import annotations

from collections.abc import Callable

from scrimp.host_memory import trim_heap
from scrimp.profiler.process_memory import resident_bytes

CREEP_BYTES = 32 * 2**20
"""Less growth is not worth a trim, and less given back is not worth a word."""


class HostHeap:
    """The heap of this process.

    Args:
        report: told in a sentence what was given back.
    """

    def __init__(self, report: Callable[[str], None]) -> None:
        self._report = report
        self._last = 0
        """Resident bytes after the last trim."""

    def at_edge(self, phase: str) -> None:
        """The next phase begins."""
        before = resident_bytes()
        if before is None or before < self._last + CREEP_BYTES or not trim_heap():
            return
        self._last = resident_bytes() or before
        given = before - self._last
        if given >= CREEP_BYTES:
            self._report(f"{given:,} bytes of freed heap were given back to the system before {phase}")

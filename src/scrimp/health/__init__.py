"""Whether every rank of a run is well: one that hangs, is stopped, or is slow is found and named.

`record` is what a rank says of itself, `judge` what one rank concludes from what all say. The thread that carries the
first to the second is `scrimp.health.lookout.Lookout`.
"""

from __future__ import annotations

from scrimp.health.judge import HANG_S, HANG_TIMEOUT, Judge, silence
from scrimp.health.record import Record, record

__all__ = ["HANG_S", "HANG_TIMEOUT", "Judge", "Record", "record", "silence"]

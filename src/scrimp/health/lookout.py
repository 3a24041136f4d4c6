"""The thread beside a rank's work: it says how this rank is, hears how the others are, and ends a process that cannot.

Problem  The main thread of a rank that waits inside of gloo or NCCL can be neither interrupted nor asked.
Method   Twice a second `Lookout` looks into the store of `scrimp.meeting`.

         note   A rank that gives up leaves one; who answers it, lives (`scrimp.joining`). This process then has
                `LEAVE_S` seconds to unwind.
         health Each rank leaves its statement; rank 0 reads all of them, and judges (`scrimp.health.judge`).
         loss   What the judge finds ends every process at once, with exit code 1: of ranks that wait for one that
                hangs none can unwind. Rank 0 shows it first, since torchrun ends all as soon as one has ended.

         Rank 0 runs the store, so that a call to it may never return once that rank is stopped. On the others a second
         thread, `Guard`, counts its own looks since the last sign of rank 0; its own stops do not count.
Checked  tests/cli/test_command_on_ranks.py, tests/cli/test_hangs.py
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, Final

from scrimp.errors import ScrimpError, TrainingError
from scrimp.health.judge import Judge, silence, silent_error
from scrimp.health.record import Record
from scrimp.meeting import Meeting, speaks_without_rank_0, wait_until

LOOK_S: Final = 0.5
ANSWER_S: Final = 3.0
"""Within which the lookout of a rank that lives has answered."""
LEAVE_S: Final = 20.0
NOTE: Final = "note"
"""Key of what a rank leaves that gives up."""
LOSS: Final = "loss"
"""Key of what the judge leaves."""


class Lookout(threading.Thread):
    """Says how this rank is, and looks what others say.

    Args:
        limit: seconds of silence, or of lateness within a step.
        elsewhere: seconds that ranks wait for one another outside of steps.
        last_words: says why a process ends whose main thread has not unwound after a note.
        tell: shows an error.
    """

    def __init__(
        self,
        meeting: Meeting,
        record: Record,
        limit: float,
        elsewhere: float,
        last_words: Callable[[], None],
        tell: Callable[[ScrimpError], None],
    ) -> None:
        super().__init__(name="scrimp-lookout", daemon=True)
        self._place, self._record, self.limit = meeting.place, record, limit
        self._last_words, self._tell = last_words, tell
        self._store = meeting.connection()
        self._judge = Judge(limit, elsewhere) if meeting.place.rank == 0 else None
        self._keys = [f"health/{rank}" for rank in range(meeting.place.size)]
        self._stopped, self._settled = threading.Event(), threading.Event()
        self.rank_0: Mapping[str, Any] = {}
        """What rank 0 has last said, on the others."""
        self.has_judged = False
        """Whether it has said why all ranks end: connections that break from now on come of that."""
        self.sees_note = False
        """Whether a rank has given up: the process ends, one way or another."""

    def start(self) -> None:
        """Begin to look; all ranks have said something before one of them goes on."""
        self._say()
        super().start()
        if self._judge is None:
            Guard(self, self._tell if speaks_without_rank_0(self._place) else None).start()

    def run(self) -> None:
        """Until `stop`, or a note and `LEAVE_S` seconds."""
        while not self._stopped.wait(LOOK_S):
            if self._looks():
                self.sees_note = True
                break
        self._settled.set()
        if not self._stopped.wait(LEAVE_S):
            self._last_words()
            end_process(TrainingError.exit_code)

    def stop(self) -> None:
        """All went well."""
        self._stopped.set()

    def is_settled(self) -> bool:
        """Whether it calls the store no more, after `ANSWER_S` seconds at the latest; see `meeting.is_connecting`."""
        return self._settled.wait(ANSWER_S)

    @property
    def is_over(self) -> bool:
        """Whether nobody is listened to any more."""
        return self.sees_note or self._stopped.is_set()

    def _looks(self) -> bool:
        """Whether there is a note, or no store any more."""
        with contextlib.suppress(RuntimeError):
            if self._store.check([NOTE]):
                self._answer()
                return True
            self._say()
            if self._judge is not None:
                self._judges(self._judge)
            elif self._store.check([LOSS]):
                self._answer()
                end_process(TrainingError.exit_code)
            elif self._store.check(self._keys[:1]):
                self.rank_0 = json.loads(self._store.get(self._keys[0]))
            return False
        return True

    def _say(self) -> None:
        self._store.set(self._keys[self._place.rank], json.dumps(self._record.statement()))

    def _answer(self) -> None:
        self._store.set(f"alive/{self._place.rank}", "")

    def _judges(self, judge: Judge) -> None:
        if not self._store.check(self._keys):
            return  # one is about to begin
        said = [json.loads(one) for one in self._store.multi_get(self._keys)]
        loss = judge.look(time.monotonic(), said)
        self._record.findings.extend(("slow-rank", sentence) for sentence in judge.slow())
        if loss is None:
            return
        if self._record.on_loss is not None:
            self._record.on_loss(loss)
        self.has_judged = True
        self._tell(loss)
        self._store.set(LOSS, "")
        others = [f"alive/{rank}" for rank in judge.speaking if rank != 0]
        wait_until(lambda: self._store.check(others), ANSWER_S)
        end_process(TrainingError.exit_code)


class Guard(threading.Thread):
    """Ends this process where there is no sign of rank 0, which judges and runs the store.

    Args:
        tell: shows an error; None where another rank does.
    """

    def __init__(self, lookout: Lookout, tell: Callable[[ScrimpError], None] | None) -> None:
        super().__init__(name="scrimp-guard", daemon=True)
        self._lookout, self._tell = lookout, tell

    def run(self) -> None:
        """Until the lookout ends."""
        looks, seen = 0, self._lookout.rank_0.get("beat")
        while not self._lookout.is_over:
            time.sleep(LOOK_S)
            said = self._lookout.rank_0
            looks, seen = (looks + 1, seen) if said.get("beat") == seen else (0, said.get("beat"))
            if looks * LOOK_S > silence(said, self._lookout.limit) and not self._lookout.is_over:
                if self._tell is not None:
                    self._tell(silent_error([0], [said], self._lookout.limit))
                end_process(TrainingError.exit_code)


def end_process(code: int) -> None:
    """End the process whatever its threads wait for."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)

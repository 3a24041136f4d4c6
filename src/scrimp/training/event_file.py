"""The same figures for TensorBoard: its event file, written without a thread of its own.

Problem  `torch.utils.tensorboard.SummaryWriter` writes from a thread that prints a traceback
         when the disk is full, costs about five times as much per step (it queues one event
         per figure), and imports TensorFlow where that is installed.
Method   One event with all figures of a step, through the protocol classes and the record
         writer of the `tensorboard` package, which are what SummaryWriter uses underneath. A
         resumed run writes a session start: TensorBoard then forgets what earlier files say
         about that step and later ones.
Limits   Scalars only. Flushed every `FLUSH_SECONDS` and when closed. What cannot be written
         is left out (``metrics.jsonl`` is the record; this is a view of it).
Checked  tests/training/test_metrics.py reads it back with TensorBoard's own reader.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

FLUSH_SECONDS: Final = 5.0


class EventFile:
    """Appends scalars to a new event file in `folder`. The constructor raises OSError.

    Args:
        resume_step: TensorBoard forgets the steps after this one in older files; None if new.
    """

    def __init__(self, folder: Path, *, resume_step: int | None) -> None:
        # Imported here: most commands do not need it, and it takes a tenth of a second.
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._event, self._summary = event_pb2.Event, summary_pb2.Summary
        folder.mkdir(parents=True, exist_ok=True)
        # The name is the one by which TensorBoard finds and orders the files of a run.
        name = f"events.out.tfevents.{time.time_ns() // 10**9:010d}.{socket.gethostname()}.{os.getpid()}"
        while (folder / name).exists():
            name += ".next"
        self._file = open(folder / name, "xb")  # noqa: SIM115 - closed by `close`
        self._records = RecordWriter(self._file)
        self._write(self._event(wall_time=time.time(), file_version="brain.Event:2"))
        if resume_step is not None:
            start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
            self._write(self._event(wall_time=time.time(), step=resume_step + 1, session_log=start))
        self._file.flush()
        self._flushed = time.monotonic()

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Write figures of one step by their tags. Raises OSError."""
        points = [self._summary.Value(tag=tag, simple_value=value) for tag, value in values.items()]
        self._write(self._event(wall_time=time.time(), step=step, summary=self._summary(value=points)))
        if time.monotonic() - self._flushed > FLUSH_SECONDS:
            self._file.flush()
            self._flushed = time.monotonic()

    def close(self) -> None:
        """Flush and close. Raises OSError."""
        self._file.close()

    def _write(self, event: Any) -> None:
        self._records.write(event.SerializeToString())

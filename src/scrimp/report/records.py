"""Reading what a run wrote down while it ran: one JSON object per line.

Problem  A run can die at any byte: the last line may be torn. A training step may have had
         a loss that is not finite, which JSON cannot write.
Method   A last line that is not an object is dropped (it is the one that was being written).
         Anywhere else a line that is no object means that the file was altered: `read_jsonl`
         refuses it by number, `scan_jsonl` yields None for it. `null` stays None, so that a
         chart can show a gap; the words NaN and Infinity, which Python's own json writes,
         are read as None too.
Limits   `read_jsonl` holds the whole file as Python objects, about 1 KB a step. The page
         reads with `scan_jsonl`, which holds one line.
Checked  tests/report/test_records.py
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from scrimp.errors import CheckpointError
from scrimp.files import open_regular, storage_error
from scrimp.json_files import decode_loosely

MAX_LINE_BYTES = 2**22


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """The objects of a JSON-lines file, without a torn last line; empty if there is no file.

    Raises:
        CheckpointError: a line before the last one is not a JSON object.
        StorageError: the file exists and cannot be read.
    """
    records = []
    for number, record in scan_jsonl(path):
        if record is None:
            raise CheckpointError(
                f"{path.name} is damaged at line {number}",
                got="text that is not a JSON object",
                expected="one JSON object per line",
                do=f"remove that line from {path}; the other lines are good",
            )
        records.append(record)
    return records


def scan_jsonl(path: Path) -> Iterator[tuple[int, dict[str, Any] | None]]:
    """(line number, object) of every line, None for a damaged one; a torn last line is left out."""
    damaged: list[int] = []  # held back until a good line shows that they were not the last
    try:
        with open_regular(path) as file:
            for number, line in enumerate(_lines(file), start=1):
                if not line.strip(b" \t\r\n\0"):
                    continue  # a power cut can leave a tail of NUL bytes
                record = _parse(line)
                if record is None:
                    damaged.append(number)
                    continue
                yield from ((earlier, None) for earlier in damaged)
                damaged.clear()
                yield number, record
    except FileNotFoundError:
        return
    except OSError as error:
        raise storage_error(error, f"cannot read {path}") from error
    yield from ((earlier, None) for earlier in damaged[:-1])


def _lines(file: BinaryIO) -> Iterator[bytes]:
    """The lines of a file; one beyond `MAX_LINE_BYTES` comes in pieces, which are no objects."""
    while line := file.readline(MAX_LINE_BYTES):
        yield line


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        record = decode_loosely(line.strip(b"\0\r\n "))
    except ValueError:
        return None
    return record if isinstance(record, dict) else None

"""Texts, or conversations, out of one column of a JSONL or Parquet file.

A row whose text is null is left out and counted. A missing column, one that holds something else
than text, and text that UTF-8 cannot hold (a lone surrogate) are refused with file and row.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from scrimp.data.conversations import checked_messages
from scrimp.data.streams import Meter, lines
from scrimp.errors import DataError
from scrimp.files import storage
from scrimp.json_files import decode_json

_ROWS = 256
_CONSTANT = re.compile(rb'"(?:[^"\\]|\\.)*+"?|NaN|-?Infinity', re.DOTALL)
"""A string, which may not be closed, or what Python writes for a float that JSON cannot hold."""
T = TypeVar("T")


@dataclass(frozen=True)
class Column:
    """What is read of a row."""

    name: str
    is_messages: bool = False
    """It holds a conversation, not text."""

    def text(self, value: object, where: str, skipped: dict[str, int]) -> str | None:
        """The text of a row, or the canonical text of its conversation; None, counted, where it has none.

        Raises:
            DataError: naming `where`: the row holds something else.
        """
        text = (checked_messages if self.is_messages else checked_text)(value, self.name, where, skipped)
        if text is not None:
            check_unicode(text, where)
        return text

    def texts(self, values: Iterable[object], name: str, done: int, skipped: dict[str, int]) -> Iterator[str]:
        """The texts of the next rows of a table, of which so many are done."""
        for number, value in enumerate(values, start=done + 1):
            text = self.text(value, f"{name}, row {number:,}", skipped)
            if text is not None:
                yield text


def missing_column(name: str, column: str, columns: Iterable[str]) -> DataError:
    """The error for a column that is not there."""
    return DataError(
        f"{name} has no column {column!r}",
        got=f"the columns {', '.join(map(_shown, sorted(columns))) or '(none)'}",
        do="name the one with the text in data.text_column",
    )


def _shown(column: str) -> str:
    return column if column.isprintable() else ascii(column)


def checked_text(value: object, column: str, where: str, skipped: dict[str, int]) -> str | None:
    """The text of a row; None, counted, where it is null."""
    if value is None:
        skipped["rows without text"] = skipped.get("rows without text", 0) + 1
        return None
    if not isinstance(value, str):
        raise _no_text(where, column, f"a {type(value).__name__}")
    return value


def _no_text(where: object, column: str, got: str) -> DataError:
    return DataError(
        f"{where}: column {column!r} does not hold text",
        got=got,
        expected="strings",
        do="name the column with the text in data.text_column",
    )


def check_unicode(text: str, where: str) -> None:
    """Refuse text that UTF-8 cannot hold: JSON's escapes can spell half of a character."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        around = (
            text[max(error.start - 20, 0) : error.start + 20].encode("ascii", "backslashreplace").decode()
        )
        raise DataError(
            f"{where} is not valid Unicode",
            got=f"a lone surrogate at character {error.start:,}: …{around}…",
            expected="text that UTF-8 can hold",
            do="repair or remove that text",
        ) from None


def jsonl_texts(path: Path, column: Column, meter: Meter, skipped: dict[str, int]) -> Iterator[str]:
    """The texts of a file with one JSON object per line."""
    for number, line in lines(path, meter):
        where = f"{path}, line {number:,}"
        row = _row(line, where)
        if column.name not in row:
            raise missing_column(where, column.name, row)
        value: object = _decode(bytes(row[column.name]), Any, where)
        text = column.text(value, where, skipped)
        if text is not None:
            yield text


def _row(line: bytes, where: str) -> dict[str, msgspec.Raw]:
    """The columns of a line, undecoded: beside the text any number and any name may stand."""
    with contextlib.suppress(msgspec.MsgspecError, UnicodeError, RecursionError):
        return msgspec.json.decode(line, type=dict[str, msgspec.Raw])
    line = _with_numbers(line)
    with contextlib.suppress(msgspec.MsgspecError, UnicodeError, RecursionError):
        return msgspec.json.decode(line, type=dict[str, msgspec.Raw])
    return _decode(line, dict[str, msgspec.Raw], where)  # names what is wrong


def _with_numbers(line: bytes) -> bytes:
    """A line with numbers of the same length in place of NaN and infinities, which Python's json.dumps writes."""
    copy = bytearray(line)
    for found in _CONSTANT.finditer(line):
        if not found[0].startswith(b'"'):
            copy[found.start() : found.end()] = b"0.0".ljust(len(found[0]))
    return bytes(copy)


def _decode(content: bytes, kind: type[T], where: str) -> T:
    """JSON of one line; a lone surrogate in it is named as what it is."""
    try:
        return decode_json(content, kind, origin=where, error=DataError, do="repair or remove that line")
    except DataError:
        with contextlib.suppress(ValueError, RecursionError):
            text = json.dumps(json.loads(content), ensure_ascii=False)
            check_unicode(text, where)
        raise


def parquet_texts(path: Path, column: Column, meter: Meter, skipped: dict[str, int]) -> Iterator[str]:
    """The texts of a Parquet file, read in batches of rows."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    with storage(path, "read"):
        size = path.stat().st_size
        start = meter.bytes
        try:
            with pq.ParquetFile(path) as file:
                _check_column(path, column, file.schema_arrow)
                done, total = 0, max(file.metadata.num_rows, 1)
                for batch in file.iter_batches(batch_size=_ROWS, columns=[column.name], use_threads=False):
                    yield from column.texts(batch.column(0).to_pylist(), str(path), done, skipped)
                    done += batch.num_rows
                    meter.bytes = start + size * done // total
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError, UnicodeDecodeError) as error:
            raise unreadable_parquet(path, error) from error
        except OSError as error:
            if error.errno is None:  # Arrow reports damaged pages as an OSError without a number
                raise unreadable_parquet(path, error) from error
            raise


def unreadable_parquet(path: Path, error: Exception) -> DataError:
    """The error for a file that is not (or no longer) Parquet."""
    return DataError(
        f"{path} cannot be read as Parquet",
        got=str(error).splitlines()[0],
        do="fetch or write the file again",
    )


def _check_column(path: Path, column: Column, schema: Any) -> None:
    import pyarrow as pa

    if column.name not in schema.names:
        raise missing_column(str(path), column.name, schema.names)
    if column.is_messages:
        return  # checked row by row
    kind = schema.field(column.name).type
    if isinstance(kind, pa.DictionaryType):
        kind = kind.value_type
    if not (pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_null(kind)):
        raise _no_text(path, column.name, f"the type {kind}")

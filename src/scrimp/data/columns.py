"""Texts out of one column of a JSONL or Parquet file.

A row whose text is null is left out and counted; a missing column, or one that holds
something else than text, is refused with the columns that there are.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from scrimp.data.streams import Meter, lines
from scrimp.errors import DataError
from scrimp.files import storage

_ROWS = 256


def missing_column(name: str, column: str, columns: Iterable[str]) -> DataError:
    """The error for a column that is not there."""
    return DataError(
        f"{name} has no column {column!r}",
        got=f"the columns {', '.join(sorted(columns)) or '(none)'}",
        do="name the one with the text in data.text_column",
    )


def checked_text(value: object, column: str, where: str, skipped: dict[str, int]) -> str | None:
    """The text of a row; None, counted, where it is null."""
    if value is None:
        skipped["rows without text"] = skipped.get("rows without text", 0) + 1
        return None
    if not isinstance(value, str):
        raise DataError(
            f"{where}: column {column!r} does not hold text",
            got=f"a {type(value).__name__}",
            expected="a string",
            do="name the column with the text in data.text_column",
        )
    return value


def jsonl_texts(path: Path, column: str, meter: Meter, skipped: dict[str, int]) -> Iterator[str]:
    """The texts of a file with one JSON object per line."""
    for number, line in lines(path, meter):
        where = f"{path}, line {number:,}"
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise DataError(
                f"{where} is not JSON",
                got=str(error),
                expected="one JSON object per line",
                do="repair that line",
            ) from error
        if not isinstance(row, dict):
            raise DataError(
                f"{where} is not a JSON object", got=f"a {type(row).__name__}", expected="one object per line"
            )
        if column not in row:
            raise missing_column(where, column, row)
        text = checked_text(row[column], column, where, skipped)
        if text is not None:
            yield text


def parquet_texts(path: Path, column: str, meter: Meter, skipped: dict[str, int]) -> Iterator[str]:
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
                for batch in file.iter_batches(batch_size=_ROWS, columns=[column], use_threads=False):
                    for value in batch.column(0).to_pylist():
                        text = checked_text(value, column, str(path), skipped)
                        if text is not None:
                            yield text
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


def _check_column(path: Path, column: str, schema: Any) -> None:
    import pyarrow as pa

    if column not in schema.names:
        raise missing_column(str(path), column, schema.names)
    kind = schema.field(column).type
    if isinstance(kind, pa.DictionaryType):
        kind = kind.value_type
    if not (pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_null(kind)):
        raise DataError(
            f"{path}: column {column!r} does not hold text",
            got=f"the type {kind}",
            expected="strings",
            do="name the column with the text in data.text_column",
        )

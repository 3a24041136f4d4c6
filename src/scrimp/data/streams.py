"""Bytes from files, compressed or not, and strict UTF-8 text from bytes.

Nothing here holds more than a block and an archive's window, whatever a small archive expands to.
A binary file is refused by the first byte that no text has (NUL, or an invalid UTF-8 sequence),
with its offset; an archive that ends early or is damaged is refused too, and never read as a
shorter text.
"""

from __future__ import annotations

import codecs
import gzip
import io
import sys
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, cast

from scrimp.errors import DataError
from scrimp.files import storage

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

BLOCK = 1 << 18
"""Larger ones leave the processor's cache, and malloc gives their memory back to the system each time."""
COMPRESSED = (".gz", ".zst")
SMALL_ARCHIVE = 128 << 20
"""Text that a smaller .zst archive can hold is found again within zstd's usual window of 128 MiB."""
LONGEST_LINE = 256 << 20
"""A longer JSONL line is taken for a file that is not JSONL."""


def content_suffix(path: Path) -> str:
    """The suffix that tells the kind of content: `a.jsonl.gz` gives `.jsonl`."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if suffixes and suffixes[-1] in COMPRESSED:
        suffixes.pop()
    return suffixes[-1] if suffixes else ""


class Meter:
    """How many bytes of the source's files have been read; for the progress line only."""

    def __init__(self) -> None:
        self.bytes = 0


class _MeteredFile(io.RawIOBase):
    """A file that tells the meter what was read from it."""

    def __init__(self, file: BinaryIO, meter: Meter) -> None:
        self._file, self._meter = file, meter

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: bytearray | memoryview) -> int:  # type: ignore[override]
        count = cast(io.FileIO, self._file).readinto(buffer)
        self._meter.bytes += count or 0
        return count or 0

    def close(self) -> None:
        self._file.close()
        super().close()


def _zstd(file: BinaryIO, path: Path) -> BinaryIO:
    """The text of a .zst file; the archive's window, which the reader holds, is bounded by the archive's size."""
    options: dict[int, int] = {
        zstd.DecompressionParameter.window_log_max: 31 if path.stat().st_size >= SMALL_ARCHIVE else 27
    }
    return cast(BinaryIO, zstd.ZstdFile(io.BufferedReader(cast(io.RawIOBase, file), BLOCK), options=options))


def _zstd_problem(path: Path, error: Exception) -> DataError:
    if "too much memory" not in str(error):
        return _damaged(path, str(error))
    return DataError(
        f"{path} needs a window of more than 128 MiB to be decompressed",
        expected=f"that only of an archive of at least {SMALL_ARCHIVE >> 20} MiB",
        do="decompress it first, with `zstd --decompress --long=31`",
    )


def _damaged(path: Path, reason: str) -> DataError:
    return DataError(
        f"{path} is damaged",
        got=reason,
        expected=f"a complete {path.suffix} archive",
        do="fetch or compress the file again",
    )


@contextmanager
def open_bytes(path: Path, meter: Meter) -> Iterator[BinaryIO]:
    """The content of a file, decompressed if its name ends in .gz or .zst."""
    with storage(path, "read"):
        file = cast(BinaryIO, _MeteredFile(open(path, "rb", buffering=0), meter))  # noqa: SIM115  closed below
        stream: BinaryIO
        match path.suffix.lower():
            case ".gz":
                stream = cast(
                    BinaryIO, gzip.GzipFile(fileobj=io.BufferedReader(cast(io.RawIOBase, file), BLOCK))
                )
            case ".zst":
                stream = _zstd(file, path)
            case _:
                stream = io.BufferedReader(cast(io.RawIOBase, file), BLOCK)
        try:
            yield stream
        except zstd.ZstdError as error:
            raise _zstd_problem(path, error) from error
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise _damaged(path, str(error)) from error
        finally:
            stream.close()
            file.close()


def text_blocks(path: Path, meter: Meter) -> Iterator[str]:
    """The text of a file in blocks, decoded strictly; a byte-order mark is dropped."""
    decoder = codecs.getincrementaldecoder("utf-8")("strict")
    offset = 0
    with open_bytes(path, meter) as stream:
        while True:
            block = stream.read(BLOCK)
            pending = len(decoder.getstate()[0])
            nul = block.find(b"\0")
            if nul >= 0:
                raise not_text(path, offset + nul, "a NUL byte")
            try:
                text = decoder.decode(block, final=not block)
            except UnicodeDecodeError as error:
                where = offset - pending + error.start
                raise not_text(path, where, f"the byte 0x{error.object[error.start]:02x}") from error
            if text:
                yield text.removeprefix("\ufeff") if offset == 0 else text
            offset += len(block)
            if not block:
                return


def not_text(path: Path, offset: int, found: str) -> DataError:
    """The error for a file that is not UTF-8 text."""
    return DataError(
        f"{path} is not UTF-8 text",
        got=f"{found} at byte offset {offset:,}",
        expected="UTF-8 text (.gz and .zst are decompressed; JSONL and Parquet go by their suffix)",
        do="leave the file out, or convert it to UTF-8",
    )


def lines(path: Path, meter: Meter) -> Iterator[tuple[int, bytes]]:
    """The lines of a file that are not blank, with their numbers from 1."""
    number = 0
    with open_bytes(path, meter) as stream:
        while line := stream.readline(LONGEST_LINE + 1):
            number += 1
            if len(line) > LONGEST_LINE:
                raise DataError(
                    f"{path}, line {number:,} is too long",
                    got=f"more than {LONGEST_LINE >> 20} MiB",
                    expected="one JSON object per line",
                    do="check that this is a JSONL file",
                )
            if not line.isspace():
                yield number, line

"""Text that models wrote, as rows of tokens in files: a run reads it beside its corpus.

Files    ``rows-00000.npy``, ... of `CHUNK_ROWS` rows each, the last one with fewer: ids of T + 1 tokens, T inputs and
         the same shifted by one as targets. ``written.json`` comes last and has a SHA-256 over all of them. A file is
         whole or absent, so that writing goes on where it was killed.
Rows     A row begins a document. Documents end as they do in a corpus (`scrimp.data.tokenizer`).
Checked  tests/data/test_written.py
"""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from scrimp.data.batch import IGNORED, Row
from scrimp.data.tokenizer import Tokenizer
from scrimp.errors import DataError
from scrimp.files import write_whole
from scrimp.json_files import read_json

CHUNK_ROWS: Final = 256
MANIFEST: Final = "written.json"
Ids = npt.NDArray[np.int64]
Writer = Callable[[int, int], Ids]
"""From the number of a chunk and its rows to their ids, (rows, T + 1)."""
_RESTORE: Final = "delete the folder: the run writes it again"


@dataclass(frozen=True)
class Written:
    """written.json."""

    samples: int
    digest: str


class WrittenText:
    """A complete folder of rows, every byte checked.

    Raises:
        DataError: it is damaged.
    """

    def __init__(self, folder: Path, tokenizer: Tokenizer) -> None:
        manifest = read_json(folder / MANIFEST, Written, error=DataError, do=_RESTORE, at_most=1 << 12)
        self._folder, self._tokenizer = folder, tokenizer
        self.num_samples, self.digest = manifest.samples, manifest.digest
        if _digest(folder, manifest.samples) != manifest.digest:
            raise DataError(f"{folder} is damaged", got="other rows than were written", do=_RESTORE)
        self._chunk = cache(lambda number: np.load(_file(folder, number), mmap_mode="r"))

    def row(self, number: int) -> Row:
        """Inputs, targets, and where further documents begin."""
        chunk, place = divmod(number, CHUNK_ROWS)
        ids = self._chunk(chunk)[place].astype(np.int64)
        tokens, targets = ids[:-1], ids[1:].copy()
        if self._tokenizer.closing_id is not None:
            targets[tokens == self._tokenizer.closing_id] = IGNORED
        starts = np.flatnonzero(tokens == self._tokenizer.delimiter_id)
        return tokens, targets, starts[starts > 0]


def write_rows_to(folder: Path, samples: int, write: Writer) -> None:
    """Write what a folder, which this process has locked, lacks of so many rows."""
    for chunk in range(_chunks(samples)):
        rows = min(CHUNK_ROWS, samples - chunk * CHUNK_ROWS)
        if not _file(folder, chunk).exists():
            content = io.BytesIO()
            np.save(content, write(chunk, rows).astype(np.int32))
            write_whole(_file(folder, chunk), content.getvalue())
    found = Written(samples, _digest(folder, samples))
    write_whole(folder / MANIFEST, json.dumps(asdict(found), indent=1) + "\n")


def _chunks(samples: int) -> int:
    return -(-samples // CHUNK_ROWS)


def _file(folder: Path, chunk: int) -> Path:
    return folder / f"rows-{chunk:05}.npy"


def _digest(folder: Path, samples: int) -> str:
    found = hashlib.sha256()
    for chunk in range(_chunks(samples)):
        try:
            with _file(folder, chunk).open("rb") as file:
                found.update(hashlib.file_digest(file, "sha256").digest())
        except OSError as error:
            raise DataError(
                f"{_file(folder, chunk)} cannot be read", got=error.strerror, do=_RESTORE
            ) from None
    return found.hexdigest()

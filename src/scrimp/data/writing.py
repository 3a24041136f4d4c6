"""Writes the shards of a split, and keeps those that an earlier call finished.

A split's documents arrive in order. Those of finished shards are only hashed and compared
with the shard's digest; the others are written. Nothing but the finished files themselves
tells how far an interrupted call came, so there is no journal that could disagree with them.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np

from scrimp.data.corpus_manifest import ShardEntry, shard_name
from scrimp.data.documents import Document
from scrimp.data.encoding import Encoded
from scrimp.data.progress_line import note
from scrimp.data.shards import Shard, ShardHeader, ShardWriter
from scrimp.errors import DataError


class FinishedShard:
    """A shard that is done: takes its documents again, and compares them with its digest."""

    def __init__(self, path: Path, header: ShardHeader) -> None:
        self._path, self._header = path, header
        self._left, self._digest = header.num_documents, hashlib.sha256()

    def take(self, document: Document) -> bool:
        """Take the next document; whether it was the last one."""
        self._digest.update(document.hash.to_bytes(8, "little"))
        self._left -= 1
        if self._left == 0 and self._digest.digest() != self._header.documents_digest:
            self.refuse()
        return self._left == 0

    def refuse(self) -> None:
        """The source no longer gives this shard's documents."""
        raise DataError(
            "the source changed since its shards were begun",
            got=f"other documents than those of {self._path}",
            do="choose another folder, or remove that one to prepare from the beginning",
        )


class SplitWriter:
    """Turns the documents of one split into its shards; finished ones are kept."""

    def __init__(
        self,
        folder: Path,
        split: str,
        dtype: np.dtype[Any],
        shard_tokens: int,
        *,
        has_answers: bool = False,
    ) -> None:
        self._folder, self._split, self._dtype, self._shard_tokens = folder, split, dtype, shard_tokens
        self._has_answers = has_answers
        self.finished = _finished_shards(folder, split, dtype, has_answers)
        self.entries: list[ShardEntry] = []
        self._reused: FinishedShard | None = None
        self._writer: ShardWriter | None = None
        self._next_shard()
        self._leading = self._reused is not None
        self.num_tokens = 0
        """Tokens written by this call."""

    def _path(self, number: int) -> Path:
        return self._folder / shard_name(self._split, number)

    def _next_shard(self) -> None:
        """Get ready for the shard after the entries there are."""
        number = len(self.entries)
        header = self.finished.get(number)
        self._reused = None if header is None else FinishedShard(self._path(number), header)

    def _reuse(self, document: Document) -> None:
        """The document stands in a finished shard."""
        assert self._reused is not None
        if self._reused.take(document):
            number = len(self.entries)
            self.entries.append(ShardEntry.of(shard_name(self._split, number), self.finished[number]))
            self._next_shard()

    def take_finished(self, document: Document) -> bool:
        """Whether the document stands in the finished shards that the split begins with.

        Such documents need no encoding. Behind the first shard that has to be written nobody
        knows a document's shard before it is encoded, so that later ones go through `add`.
        """
        if not self._leading:
            return False
        self._reuse(document)
        self._leading = self._reused is not None
        return True

    def add(self, document: Document, encoded: Encoded) -> None:
        """The next document, encoded."""
        if self._reused is not None:
            self._reuse(document)
            return
        if self._writer is None:
            self._writer = ShardWriter(
                self._path(len(self.entries)), self._dtype, has_answers=self._has_answers
            )
        self._writer.add(
            encoded.tokens,
            text_bytes=encoded.num_bytes,
            document_hash=document.hash,
            answers=encoded.answers,
        )
        self.num_tokens += len(encoded.tokens)
        if self._writer.num_tokens >= self._shard_tokens:
            self._finish()

    def _finish(self) -> None:
        assert self._writer is not None
        header = self._writer.finish()
        self.entries.append(ShardEntry.of(self._writer.path.name, header))
        self._writer = None
        self._next_shard()

    def close(self) -> None:
        """Finish the last shard."""
        if self._writer is not None:
            self._finish()
        elif self._reused is not None:
            self._reused.refuse()

    def abandon(self) -> None:
        """Drop the unfinished shard."""
        if self._writer is not None:
            self._writer.abandon()


def _finished_shards(
    folder: Path, split: str, dtype: np.dtype[Any], has_answers: bool
) -> dict[int, ShardHeader]:
    """Number -> header of the shards that are there and intact."""
    finished = {}
    for path in sorted(folder.glob(f"{split}-*.tokens")):
        number = path.name.removeprefix(f"{split}-").removesuffix(".tokens")
        try:
            shard = Shard(path)
            shard.check_all()
        except DataError as error:
            note(f"writing {path.name} again: {error.got or error.what}")
            continue
        header = shard.header
        is_of_kind = header.token_bytes == dtype.itemsize and header.has_answers == has_answers
        if number.isdigit() and is_of_kind and header.num_documents:
            finished[int(number)] = header
    return finished

"""The documents of a source, read several times.

`prepare` goes through a source up to four times: what to hold out, what is like it, what to train a
BPE on, and the shards. Reading a source means to decode, cut and hash it, so that the documents of
one that fits into an eighth of the host memory that is free, or into 64 MiB, are held after the first
whole pass; a larger one is read again.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator

from scrimp.data.documents import Document, documents
from scrimp.data.progress_line import Progress
from scrimp.data.sources import Source
from scrimp.data.streams import Meter
from scrimp.host_memory import host_memory_available, trim_heap

HELD_BYTES = 64 << 20
"""Documents of this size together are held however little memory is free."""
_SHARE = 8
"""One in this many bytes of free host memory may be taken for documents."""
_PER_DOCUMENT = 192
"""Bytes of memory that a document takes beside its text."""


class Passes:
    """Reads a source's documents from the first to the last, as often as they are asked for.

    Args:
        source: where the documents come from.
        progress: show a progress line.
    """

    beside = 1
    """Sources whose documents are held at the same time, this one counted."""

    def __init__(self, source: Source, progress: bool) -> None:
        self.source, self.progress = source, progress
        self._held: list[Document] | None = None

    def read(self, label: str) -> Iterator[Document]:
        """One pass; the label says what for."""
        name = f"{label} {self.source.name}"
        if self._held is None:
            yield from self._read(name)
            return
        done, total = 0, sum(document.num_bytes for document in self._held)
        with Progress(name, total, enabled=self.progress) as bar:
            for document in self._held:
                done += document.num_bytes
                bar.update(done)
                yield document

    def forget(self) -> None:
        """Hold nothing any more, and give the memory back: what follows plans with what is free."""
        size = sum(document.num_bytes for document in self._held or ())
        self._held = None
        if size > HELD_BYTES:
            gc.collect()  # threads that encoded them still hold some, in cycles
            trim_heap()

    def _read(self, name: str) -> Iterator[Document]:
        meter = Meter()
        held: list[Document] = []
        size, most = 0, max(HELD_BYTES // self.beside, host_memory_available() // (_SHARE * self.beside))
        with Progress(name, self.source.num_bytes, enabled=self.progress) as bar:
            for document in documents(self.source.texts(meter)):
                bar.update(meter.bytes)
                if size <= most:
                    size += document.num_bytes + _PER_DOCUMENT
                    held.append(document)
                    if size > most:
                        held.clear()
                yield document
        if size <= most:
            self._held = held

"""What a document is.

Cutting  A long text has no document marks, so it is cut at blank lines, else at line ends,
         into pieces of about `target` characters: a piece ends at the first blank line
         between one and two targets from its start; without one at the first line end
         between one and four targets; without one at four targets. The rule looks at the
         text only, so the pieces do not depend on how the text arrived in blocks, and
         joined they are the text again.
Hash     blake2b of the UTF-8 text in 64 bits: which document it is, whatever file it stands in.
Checked  tests/data/test_documents.py.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

KIB, MIB = 1 << 10, 1 << 20
LONGEST_DOCUMENT = MIB
"""Documents longer than this (in characters) are cut."""

_BLANK_LINE = re.compile(r"\n[ \t\r]*\n")


@dataclass(frozen=True, slots=True)
class Document:
    """One document, and the numbers that follow from its text alone."""

    raw: bytes
    """The text in UTF-8: one emoji makes a string of ASCII four times as large."""
    hash: int
    """64-bit hash of the text: decides on which side of the split it falls, and the sample for training a BPE."""
    held_out: bool = False
    """Whether it is kept for evaluation; set by the split."""

    @property
    def text(self) -> str:
        """The text, decoded each time."""
        return self.raw.decode()

    @property
    def num_bytes(self) -> int:
        """Length in UTF-8."""
        return len(self.raw)


def text_target(num_bytes: int) -> int:
    """Target size of the pieces of a single text file: 1/256 of it, between 1 KiB and 64 KiB."""
    return min(max(num_bytes // 256, KIB), 64 * KIB)


def cut(blocks: Iterable[str], target: int) -> Iterator[str]:
    """Cut a text that arrives in blocks into pieces; joined they are the text."""
    reach = 4 * target
    buffer, start = "", 0
    for block in blocks:
        buffer = buffer[start:] + block
        start = 0
        while len(buffer) - start > reach:
            end = _piece_end(buffer, start, target)
            yield buffer[start:end]
            start = end
    while len(buffer) - start > target:
        end = _piece_end(buffer, start, target)
        yield buffer[start:end]
        start = end
    if start < len(buffer):
        yield buffer[start:]


def _piece_end(text: str, start: int, target: int) -> int:
    """End of the piece that begins at `start`."""
    blank = _BLANK_LINE.search(text, start + target, min(start + 2 * target, len(text)))
    if blank is not None:
        return blank.end()
    limit = min(start + 4 * target, len(text))
    line = text.find("\n", start + target, limit)
    return line + 1 if line >= 0 else limit


def documents(texts: Iterable[str]) -> Iterator[Document]:
    """The documents of a source: long texts cut, blank ones left out, each with its hash."""
    for text in texts:
        if len(text) <= LONGEST_DOCUMENT:
            if text and not text.isspace():
                yield document_of(text)
            continue
        for piece in cut([text], LONGEST_DOCUMENT):
            if not piece.isspace():
                yield document_of(piece)


def document_of(text: str) -> Document:
    """The document with this text, which its source has found to be Unicode."""
    encoded = text.encode()
    digest = hashlib.blake2b(encoded, digest_size=8, person=b"scrimp-document").digest()
    return Document(encoded, int.from_bytes(digest, "little"))

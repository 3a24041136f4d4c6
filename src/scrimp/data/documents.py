"""What a document is, and on which side of the held-out split it falls.

Cutting  A long text has no document marks, so it is cut at blank lines, else at line ends,
         into pieces of about `target` characters: a piece ends at the first blank line
         between one and two targets from its start; without one at the first line end
         between one and four targets; without one at four targets. The rule looks at the
         text only, so the pieces do not depend on how the text arrived in blocks, and
         joined they are the text again.
Split    h(text) = blake2b of the UTF-8 text, read as a number in [0, 1). A document is held
         out when h < held_out. The same text always falls on the same side, so that a
         duplicate cannot leak from training into evaluation.
Limits   In a small corpus the hash may hold out none or all. `choose_threshold` then moves
         the threshold to the lowest (highest) hash there is, by one look through the corpus.
Checked  tests/data/test_documents.py.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from scrimp.errors import DataError

KIB, MIB = 1 << 10, 1 << 20
LONGEST_DOCUMENT = MIB
"""Documents longer than this (in characters) are cut."""

_BLANK_LINE = re.compile(r"\n[ \t\r]*\n")
_HASH_SPAN = 1 << 64


@dataclass(frozen=True, slots=True)
class Document:
    """One document, and the numbers that follow from its text alone."""

    text: str
    num_bytes: int
    """Length in UTF-8."""
    hash: int
    """64-bit hash of the text: the side of the split, and the sample for training a BPE."""


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
                yield _document(text)
            continue
        for piece in cut([text], LONGEST_DOCUMENT):
            if not piece.isspace():
                yield _document(piece)


def _document(text: str) -> Document:
    try:
        encoded = text.encode()
    except UnicodeEncodeError as error:
        raise DataError(
            "a document is not valid Unicode",
            got=f"a lone surrogate at character {error.start} of {text[:40]!r}…",
            expected="text that UTF-8 can hold",
            do="repair or remove that document",
        ) from error
    digest = hashlib.blake2b(encoded, digest_size=8, person=b"scrimp-document").digest()
    return Document(text, len(encoded), int.from_bytes(digest, "little"))


@dataclass(frozen=True, slots=True)
class Split:
    """Decides the side of every document by its hash."""

    threshold: int
    """Documents with a hash below this are held out."""

    def is_held_out(self, document: Document) -> bool:
        """Whether the document belongs to the held-out split."""
        return document.hash < self.threshold


def choose_threshold(corpus: Iterable[Document], held_out: float) -> Split:
    """The split of a corpus by its held-out share; both sides get at least one document.

    Reads until both sides have been seen: about 1 / held_out documents, and the whole corpus
    only if one side is empty.
    """
    if not 0.0 <= held_out < 1.0:
        raise DataError(
            "the held-out share is not possible", got=held_out, expected="0 or more and less than 1"
        )
    threshold = int(held_out * _HASH_SPAN)
    if threshold == 0:
        return Split(0)
    lowest, highest, seen = _HASH_SPAN, -1, 0
    for document in corpus:
        seen += 1
        lowest, highest = min(lowest, document.hash), max(highest, document.hash)
        if lowest < threshold <= highest:
            return Split(threshold)
    if seen == 0:
        return Split(threshold)  # the caller reports the empty corpus with its name
    if lowest == highest:
        raise DataError(
            "the corpus is too small to hold documents out",
            got=f"{'1 document' if seen == 1 else f'{seen} documents, all the same'}",
            expected="at least 2 different documents",
            do="give more text, or set data.held_out to 0 to train without evaluation",
        )
    return Split(lowest + 1 if lowest >= threshold else highest)

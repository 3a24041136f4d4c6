"""Two documents that tell the same in two languages become a file of pairs of sentences to train on.

Problem  Translations lie about as whole documents. What trains a model is which sentence says what, without headings
         that stand in one of them alone, and quotations that nobody translated.
Method   Text is cut where a line ends, or a sentence within it, and normalised (NFKC, white space as one space).
         Sentences are aligned (`scrimp.data.lexicon`, `scrimp.data.alignment`). A pair is left out where

             its lengths in words are further apart than `MOST_RATIO` times as those of the documents are, or
             one side reads like the other side's language.

         A language is what its document is written in: a profile of three characters each, how often they stand there.
         A sentence reads like the other one where the mean logarithm of their frequencies is greater by `_SURE` with
         the other document's profile than with that of its own, of which its own characters are taken away.
Rows     JSONL: source, target, score (likeness, 0 to 1), and text, both sentences in two lines, which is what
         `data.source` reads.
Limits   Two documents at a time, both in memory. A profile tells languages apart by their letters: a cipher of the same
         letters, or two dialects, it does not.
Checked  tests/data/test_parallel_text.py
"""

from __future__ import annotations

import json
import math
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from scrimp.data.lexicon import aligned, words_in
from scrimp.errors import DataError, StorageError
from scrimp.files import read_bounded, refuse_taken, write_whole

MOST_BYTES: Final = 2**27
MOST_RATIO: Final = 3.0
MOST_WORDS: Final = 1000
"""Most words of a sentence: learning from a pair takes memory by the product of both sides' words."""
_MOST_DIFFERENT: Final = 5.0
"""Documents of which one has more than this many times the other's sentences are no translations."""
_SURE: Final = 0.5
_ENDS: Final = re.compile(r"(?<=[.!?…])\s+|(?<=[。！？])\s*")


@dataclass(frozen=True)
class Mined:
    """What came out of two documents."""

    source: list[str]
    target: list[str]
    """Their sentences."""
    kept: list[tuple[str, str, float]]
    """Pairs with their likeness."""
    found: int
    """Pairs that were aligned, of which some were left out."""


class Profile:
    """How often three characters stand in a row in a language, by sentences of it."""

    def __init__(self, sentences: Iterable[str]) -> None:
        self._counts = Counter(gram for one in sentences for gram in _grams(one))
        self._total = self._counts.total()

    def likeness(self, *sentences: str, within: bool = False) -> float:
        """Mean logarithm of the frequencies of what stands in sentences, each one more than counted.

        Args:
            within: the sentences are the profile's own, whose counts do not count.
        """
        grams = [gram for one in sentences for gram in _grams(one)]
        own = Counter(grams) if within else Counter[str]()
        total = self._total - own.total() + len(self._counts) + 1
        return sum(math.log((self._counts[one] - own[one] + 1) / total) for one in grams) / max(1, len(grams))


def mine(source: Path, target: Path) -> Mined:
    """Align two documents, and clean what comes out.

    Raises:
        DataError, StorageError: a document that cannot be read or holds no words, or two that are of too different
            lengths, or have nothing in common.
    """
    one, other = read_sentences(source), read_sentences(target)
    _refuse_other_lengths(source, one, target, other)
    pairs = aligned(one, other)
    languages = Profile(one), Profile(other)
    ratio = _length(other) / _length(one)
    kept = []
    for pair, score in pairs:
        own = one[pair.source : pair.source + pair.sources]
        theirs = other[pair.target : pair.target + pair.targets]
        sides = " ".join(own), " ".join(theirs)
        if _go_together(sides, ratio) and _are_in((own, theirs), languages):
            kept.append((*sides, score))
    if not kept:
        raise DataError(
            f"{source} and {target} have no sentences that go together",
            got=f"{len(one):,} and {len(other):,} sentences, {len(pairs):,} pairs before cleaning",
            do="check that one is a translation of the other",
        )
    return Mined(one, other, kept, len(pairs))


def write_pairs(mined: Mined, out: Path) -> None:
    """Write a new JSONL file of the pairs.

    Raises:
        StorageError: it is there already, or cannot be written.
    """
    refuse_out(out)
    rows = [
        {"source": one, "target": other, "score": round(score, 4), "text": f"{one}\n{other}"}
        for one, other, score in mined.kept
    ]
    write_whole(out, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))


def refuse_out(out: Path) -> None:
    """Raise StorageError where the new file cannot be: its name is taken, of another kind, or in no folder."""
    if out.suffix != ".jsonl":
        raise StorageError(
            "pairs are written as JSON lines", got=out.name, expected="NAME.jsonl, which data.source reads so"
        )
    refuse_taken(out)


def read_sentences(path: Path) -> list[str]:
    """The sentences of a document that hold words, normalised.

    Raises:
        DataError, StorageError: it cannot be read, is not UTF-8, or holds no words.
    """
    content = read_bounded(path, error=DataError, do="name a text file", at_most=MOST_BYTES)
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path} is not UTF-8 text",
            got=f"byte 0x{error.object[error.start]:02x} at offset {error.start:,}",
            do="save it as UTF-8",
        ) from None
    found = sentences_in(text)
    longest = max(found, key=lambda one: len(words_in(one)), default="")
    if len(words_in(longest)) > MOST_WORDS:
        raise DataError(
            f"{path} has an implausibly long sentence",
            got=f"{len(words_in(longest)):,} words, from {longest[:40]!r} on",
            expected=f"at most {MOST_WORDS:,}",
            do="end sentences with a mark and a space, or put each on a line",
        )
    if not found:
        raise DataError(f"{path} holds no words", got=f"{len(content):,} bytes", expected="text")
    return found


def sentences_in(text: str) -> list[str]:
    """What ends with a line, or within one with a mark and a space, where it holds words."""
    cut = (part for line in text.splitlines() for part in _ENDS.split(line.strip()))
    parts = (" ".join(unicodedata.normalize("NFKC", part).split()) for part in cut)
    return [part for part in parts if words_in(part)]


def _refuse_other_lengths(source: Path, one: list[str], target: Path, other: list[str]) -> None:
    least, most = sorted((len(one), len(other)))
    if most > _MOST_DIFFERENT * least:
        raise DataError(
            f"{source} and {target} are of too different lengths to be translations",
            got=f"{len(one):,} and {len(other):,} sentences",
            expected=f"at most {_MOST_DIFFERENT:g} times as many",
            do="give the parts that belong together",
        )


def _go_together(sides: tuple[str, str], ratio: float) -> bool:
    """Whether the lengths of a pair are about as those of the documents."""
    one, other = (len(words_in(side)) for side in sides)
    return 1 / MOST_RATIO <= other / (ratio * one) <= MOST_RATIO


def _are_in(sides: tuple[list[str], list[str]], languages: tuple[Profile, Profile]) -> bool:
    """Whether both sides read like their own language."""
    return all(
        another.likeness(*side) < own.likeness(*side, within=True) + _SURE
        for side, own, another in zip(sides, languages, languages[::-1], strict=True)
    )


def _length(sentences: list[str]) -> int:
    return sum(len(words_in(one)) for one in sentences)


def _grams(sentence: str) -> list[str]:
    text = f" {sentence.casefold()} "
    return [text[at : at + 3] for at in range(len(text) - 2)]

"""Tasks made from a text that the user has: nothing is downloaded, and the same text gives the same items.

Problem  Benchmarks have to be downloaded, ask for knowledge that a small model never gets, and stay at chance for most
         of its training. What models learn first is the text itself: its words, their order, its brackets.
Method   Four tasks of up to 200 items. Wrong choices come from where the right one does, so that no count of words
         finds it:

             continuation  the next 6 words after 32 of a document, against 6 others from elsewhere in that document:
                           whether context is used, beyond what the document is about                  (chance 1/4)
             word-order    the next 8 words after 16, against the same words in three other orders: syntax, and which
                           word follows which                                                          (chance 1/4)
             copying       16 random syllables, the first few again, and the next 4, against 4 others of the same
                           string: induction, which no text has taught by heart; needs no text         (chance 1/4)
             closing       which of ) ] } closes what is open; each is right equally often             (chance 1/3)

         A word keeps the white space before it. Items are spread evenly over the text. What is drawn is a hash of task,
         number of the item and number of the draw, so that an item depends on no other, nor on a library's generator.
Limits   The first 4 MiB of a text are read. Brackets are matched letter by letter: those in strings and comments count.
         One token may hold a closing bracket and what follows it; its probability is not the bracket's.
         On a text that the model was trained on, what is measured is partly memory.
Source   Olsson et al. 2022, arXiv 2209.11895, for copying of random strings as the test of induction
Checked  tests/tasks/test_built_in.py
"""

from __future__ import annotations

import bisect
import hashlib
import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from scrimp.data import CorpusSpec
from scrimp.data.documents import documents
from scrimp.data.prepare import open_text_source
from scrimp.data.streams import Meter
from scrimp.errors import DataError
from scrimp.tasks.items import Item, Task

ITEMS: Final = 200
FEWEST: Final = 20
"""Items, below which a text is too short: a score of fewer says nothing."""
MOST_TEXT: Final = 4 << 20
CHOICES: Final = 4
_TRIES: Final = 32
"""Draws for a choice that differs from the others, before the item is left out."""
_CONTEXT, _NEXT = 32, 6
_BEFORE, _ORDERED = 16, 8
_STRING, _COPIED, _LEAST_SEEN, _MOST_SEEN = 16, 4, 2, 6
_REACH = 200
"""Characters before a closing bracket, within which its partner stands."""
_PAIRS: Final = {"(": ")", "[": "]", "{": "}"}
_SYLLABLES: Final = tuple(a + b for a in "bdfghklmnprstz" for b in "aeiou")


@dataclass(frozen=True)
class BuiltIn:
    """A task that is made here."""

    items: Callable[[Sequence[str]], Iterator[Item]]
    """Made from the documents of a text."""
    reads_text: bool = True

    def task(self, name: str, texts: Sequence[str]) -> Task:
        """The task of a text, under its name.

        Raises:
            DataError: the text gives too few items.
        """
        items = tuple(self.items(texts))
        if len(items) < FEWEST:
            raise DataError(
                f"the text is too short for the task {name}, or has nothing of the kind",
                got=f"{len(items)} items",
                expected=f"at least {FEWEST}",
                do="give a longer text with --data, or leave the task out",
            )
        return Task(name, items)


def read_texts(source: str, column: str) -> list[str]:
    """The documents of a source, up to `MOST_TEXT`.

    Raises:
        DataError: it cannot be read, or holds tokens instead of text.
    """
    texts, size = [], 0
    text, _ = open_text_source(CorpusSpec(source=source, text_column=column))
    for document in documents(text.texts(Meter())):
        texts.append(document.text)
        size += document.num_bytes
        if size >= MOST_TEXT:
            break
    return texts


def _draw(below: int, *address: object) -> int:
    """A number from 0 to `below` - 1 that its address alone decides."""
    text = "/".join(map(str, address)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=16, person=b"scrimp-tasks").digest()) % below


def _spread(count: int, places: int, name: str) -> Iterator[tuple[int, int]]:
    """Numbers of items and a place for each, one drawn from each of `count` equal stretches of all places."""
    for number in range(count):
        first, end = number * places // count, (number + 1) * places // count
        yield number, first + _draw(end - first, name, number, "place")


def _shown(right: str, wrong: Sequence[str], context: str, *address: object) -> Item:
    """An item with the right choice at a drawn place."""
    answer = _draw(len(wrong) + 1, *address, "answer")
    return Item(context, (*wrong[:answer], right, *wrong[answer:]), answer)


def _distinct(right: str, draw: Callable[[int], str | None]) -> list[str]:
    """Wrong choices that differ from the right one and each other: those that a draw of a number gives; fewer where
    too many draws give none."""
    wrong: list[str] = []
    for number in range(_TRIES):
        found = draw(number)
        if found is not None and found != right and found not in wrong:
            wrong.append(found)
        if len(wrong) == CHOICES - 1:
            break
    return wrong


class _Words:
    """The documents with enough words, and places in them where something of so many words can stand."""

    def __init__(self, texts: Sequence[str], before: int, taken: int, least: int) -> None:
        split = (re.findall(r"\s*\S+", text) for text in texts)
        self._documents = [words for words in split if len(words) >= least]
        self._before, self._taken = before, taken
        sizes = (len(words) - before - taken + 1 for words in self._documents)
        self._ends = list(itertools.accumulate(sizes))

    def items(self, name: str) -> Iterator[tuple[int, list[str], int]]:
        """Number of an item, words of its document, and where in them what is asked begins."""
        places = self._ends[-1] if self._ends else 0
        for number, place in _spread(min(ITEMS, places // self._taken), places, name):
            at = bisect.bisect(self._ends, place)
            yield number, self._documents[at], place - (self._ends[at - 1] if at else 0) + self._before


def _continuation(texts: Sequence[str]) -> Iterator[Item]:
    name, least = "continuation", _CONTEXT + CHOICES * _NEXT
    for number, words, start in _Words(texts, _CONTEXT, _NEXT, least).items(name):

        def elsewhere(
            draw: int, words: list[str] = words, start: int = start, number: int = number
        ) -> str | None:
            at = _draw(len(words) - _NEXT + 1, name, number, draw)
            is_seen = start - _CONTEXT - _NEXT < at < start + _NEXT
            return None if is_seen else "".join(words[at : at + _NEXT])

        right = "".join(words[start : start + _NEXT])
        wrong = _distinct(right, elsewhere)
        if len(wrong) == CHOICES - 1:
            yield _shown(right, wrong, "".join(words[start - _CONTEXT : start]), name, number)


def _word_order(texts: Sequence[str]) -> Iterator[Item]:
    name = "word-order"
    for number, words, start in _Words(texts, _BEFORE, _ORDERED, _BEFORE + _ORDERED).items(name):
        taken = words[start : start + _ORDERED]

        def shuffled(draw: int, taken: list[str] = taken, number: int = number) -> str:
            bare = [word.lstrip() for word in taken]
            for last in range(len(bare) - 1, 0, -1):
                other = _draw(last + 1, name, number, draw, last)
                bare[last], bare[other] = bare[other], bare[last]
            spaces = (word[: len(word) - len(word.lstrip())] for word in taken)
            return "".join(space + word for space, word in zip(spaces, bare, strict=True))

        wrong = _distinct("".join(taken), shuffled)
        if len(wrong) == CHOICES - 1:
            yield _shown("".join(taken), wrong, "".join(words[start - _BEFORE : start]), name, number)


def _copying(texts: Sequence[str]) -> Iterator[Item]:
    name = "copying"
    for number in range(ITEMS):
        order = sorted(_SYLLABLES, key=lambda one: _draw(1 << 64, name, number, one))
        string = [f" {one}" for one in order[:_STRING]]
        seen = _LEAST_SEEN + _draw(_MOST_SEEN - _LEAST_SEEN + 1, name, number, "seen")
        # Wrong ones stand behind the right one in the string: no syllable of a choice has been seen twice.
        starts = range(seen + 1, _STRING - _COPIED + 1)
        chosen = sorted(starts, key=lambda start: _draw(1 << 64, name, number, "wrong", start))[: CHOICES - 1]
        wrong = ["".join(string[at : at + _COPIED]) for at in chosen]
        context = "".join([*string, "\n", *string[:seen]]).lstrip()
        yield _shown("".join(string[seen : seen + _COPIED]), wrong, context, name, number)


def _closing(texts: Sequence[str]) -> Iterator[Item]:
    kinds = tuple(_PAIRS.values())
    places: dict[str, list[tuple[str, int]]] = {kind: [] for kind in kinds}
    for text in texts:
        for kind, at in _closed(text):
            places[kind].append((text, at))
    each = min(ITEMS // len(kinds), *(len(found) for found in places.values()))
    for answer, kind in enumerate(kinds):
        for _, place in _spread(each, len(places[kind]), f"closing{kind}"):
            text, at = places[kind][place]
            yield Item(text[max(0, at - _REACH) : at], kinds, answer)


def _closed(text: str) -> Iterator[tuple[str, int]]:
    """Brackets behind a letter or digit that close one within reach, and where they stand."""
    opened: list[tuple[str, int]] = []
    for found in re.finditer(r"[()\[\]{}]", text):
        letter, at = found[0], found.start()
        if letter in _PAIRS:
            opened.append((_PAIRS[letter], at))
        elif opened and opened[-1][0] == letter:
            _, begun = opened.pop()
            if at - begun <= _REACH and text[at - 1].isalnum():
                yield letter, at
        else:
            opened.clear()


BUILT_IN: Final[Mapping[str, BuiltIn]] = {
    "continuation": BuiltIn(_continuation),
    "word-order": BuiltIn(_word_order),
    "copying": BuiltIn(_copying, reads_text=False),
    "closing": BuiltIn(_closing),
}
"""By name."""

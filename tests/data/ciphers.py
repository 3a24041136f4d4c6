"""A text and its translation into a language that nobody knows, with the pairs that are right."""

from __future__ import annotations

import random
import re
from dataclasses import dataclass
from pydoc_data.topics import topics

from scrimp.data.alignment import Pair


@dataclass(frozen=True)
class Bitext:
    """Two texts, and which sentences belong together."""

    source: list[str]
    target: list[str]
    pairs: list[Pair]


def english(count: int) -> list[str]:
    """Sentences of Python's own reference, of four words and more."""
    text = " ".join(" ".join(topics[name].split()) for name in sorted(topics))
    found = [one for one in re.split(r"(?<=[.!?])\s+", text) if 4 <= len(re.findall(r"\w+", one)) <= 60]
    return found[:count]


class Cipher:
    """A language in which every word is another one, always the same.

    Args:
        noise: share of the words that it leaves out, and of those to which it adds any other one.
    """

    def __init__(self, chance: random.Random, noise: float) -> None:
        self._chance, self._noise, self._words = chance, noise, dict[str, str]()

    def told(self, sentence: str) -> str:
        """The sentence in it."""
        found = []
        for word in re.findall(r"\w+", sentence.casefold()):
            if self._chance.random() >= self._noise:
                found.append(self._another(word))
            if self._chance.random() < self._noise and self._words:
                found.append(self._chance.choice(list(self._words.values())))
        return " ".join(found) + "."

    def _another(self, word: str) -> str:
        while word not in self._words:
            made = "".join(self._chance.choices("bdfgklmnprstvaeiouy", k=self._chance.randint(2, 11)))
            if made not in self._words.values():
                self._words[word] = made
        return self._words[word]


def ciphered(sentences: list[str], seed: int, *, changed: float = 0.1, noise: float = 0.0) -> Bitext:
    """The text and a cipher of it.

    Args:
        changed: share of places where two sentences are one in the other text, and of those where one is missing there.
        noise: as the cipher has it.
    """
    chance, text, at = random.Random(seed), Bitext([], [], []), 0
    cipher = Cipher(chance, noise)
    shares = {(1, 0): changed / 2, (0, 1): changed / 2, (1, 2): changed / 2, (2, 1): changed / 2}
    moves, weights = [*shares, (1, 1)], [*shares.values(), 1 - 2 * changed]
    while at < len(sentences):
        sources, targets = chance.choices(moves, weights)[0]
        count = max(sources, targets)
        parts = sentences[at : at + count]
        if len(parts) < count:
            break
        if sources and targets:
            text.pairs.append(Pair(len(text.source), sources, len(text.target), targets))
        told = [cipher.told(one) for one in parts]
        text.source.extend([" ".join(parts)] if sources == 1 else parts[:sources])
        text.target.extend([" ".join(told)] if targets == 1 else told[:targets])
        at += count
    return text


def measured(found: list[Pair], right: list[Pair]) -> tuple[float, float, float]:
    """Precision, recall and F1 of whole pairs."""
    both = len(set(found) & set(right))
    precision, recall = both / max(1, len(found)), both / max(1, len(right))
    return precision, recall, 2 * precision * recall / max(1e-9, precision + recall)

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


def ciphered(sentences: list[str], seed: int, *, changed: float = 0.1, noise: float = 0.0) -> Bitext:
    """The text, and a cipher of it: every word is another one, always the same.

    Args:
        changed: share of places where two sentences are one in the other text, and of those where one is missing there.
        noise: share of the words that the cipher leaves out, and of those to which it adds any other one.
    """
    chance, words = random.Random(seed), dict[str, str]()

    def another(word: str) -> str:
        while word not in words:
            made = "".join(chance.choices("bdfgklmnprstvaeiouy", k=chance.randint(2, 11)))
            if made not in words.values():
                words[word] = made
        return words[word]

    def told(sentence: str) -> str:
        found = []
        for word in re.findall(r"\w+", sentence.casefold()):
            if chance.random() >= noise:
                found.append(another(word))
            if chance.random() < noise and words:
                found.append(chance.choice(list(words.values())))
        return " ".join(found) + "."

    source, target, pairs, at = list[str](), list[str](), list[Pair](), 0
    while at < len(sentences):
        which, here, there = chance.random(), len(source), len(target)
        two = sentences[at : at + 2]
        if which < changed / 2:
            source.append(sentences[at])
        elif which < changed:
            target.append(told(sentences[at]))
        elif which < changed * 1.5 and len(two) == 2:
            source.append(" ".join(two))
            target += [told(one) for one in two]
            pairs.append(Pair(here, 1, there, 2))
            at += 1
        elif which < changed * 2 and len(two) == 2:
            source += two
            target.append(" ".join(told(one) for one in two))
            pairs.append(Pair(here, 2, there, 1))
            at += 1
        else:
            source.append(sentences[at])
            target.append(told(sentences[at]))
            pairs.append(Pair(here, 1, there, 1))
        at += 1
    return Bitext(source, target, pairs)


def measured(found: list[Pair], right: list[Pair]) -> tuple[float, float, float]:
    """Precision, recall and F1 of whole pairs."""
    both = len(set(found) & set(right))
    precision, recall = both / max(1, len(found)), both / max(1, len(right))
    return precision, recall, 2 * precision * recall / max(1e-9, precision + recall)

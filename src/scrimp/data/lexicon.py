"""How alike sentences of two languages are, learnt from the two texts themselves: no dictionary, no model.

Problem  A path through two texts needs to know what is a translation of what, and nothing is there but the two texts.
Method   In rounds. First sentences are paired by their lengths alone (Gale & Church): with c words of the target for
         one of the source, and a pair of k and l words,

             s = log P(move) - sentences log P(skip) - d^2 / 2,      d = (l - c k) / sqrt(c k + l)

         where P are their shares of moves, and `sentences` are those that the move goes past. Then words are counted in
         the pairs that were found: IBM model 1 gives P(t | s), that t stands where s stood, by expectation and
         maximisation, and P(s | t) alike. They say what a sentence is in the other language, a mean of word vectors:

             u(S) = w . sum over s in S of P(. | s),      v(T) = w . counts of T,      w(t) = log(n / sentences with t)

         The likeness of S and T is the mean of cos(u(S), v(T)) and of the same from T to S. Pairs score by it, less
         what unrelated sentences reach, and are sought again, until they are the same. Vectors of two sentences are
         sums, so that all moves need the products of single sentences only.
         Words that were expected to meet less than once in all pairs are left out: they would confirm the pair in which
         they met.
Limits   It takes some hundred sentences before words repeat. Words are runs of letters and digits; of Chinese and
         Japanese every character is one.
Source   Brown et al., "The Mathematics of Statistical Machine Translation" (1993), model 1; Gale & Church (1993);
         arXiv 2311.03696, which takes the mean of two cosines of mean word vectors, by machine translations
Checked  tests/data/test_alignment.py: model 1 by a plain loop, likenesses by dense matrices, a cipher that nobody told
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from scrimp.data.alignment import Floats, Pair, align

Integers = NDArray[np.int64]
_WORD: Final = re.compile(r"[぀-ヿ㐀-䶿一-鿿豈-﫿]|[^\W぀-ヿ㐀-䶿一-鿿豈-﫿]+")
_SHARES: Final = {"one": 0.89, "two": 0.089 / 2, "skip": 0.0099 / 2}
"""Gale & Church's (table 5), of moves between English, French and German. Theirs are of both sides together: half of
it is of each."""
_ITERATIONS: Final = 5
_ROUNDS: Final = 8
_LEAST_COUNT: Final = 1.0
_LEAST_WEIGHT: Final = 1e-3
"""Weight of a word that stands in every sentence: at 0, a sentence of such words alone would have no vector."""
_SAMPLED_ROWS: Final = 200
_DEVIATIONS: Final = 2.0


class Words:
    """The sentences of a text as numbers of words.

    Args:
        sentences: in their order.
    """

    def __init__(self, sentences: Sequence[str]) -> None:
        vocabulary: dict[str, int] = {}
        numbers = [
            [vocabulary.setdefault(word, len(vocabulary)) for word in words_in(one)] for one in sentences
        ]
        lengths = np.array([len(one) for one in numbers], dtype=np.int64)
        self.vocabulary = tuple(vocabulary)
        self.words: Integers = np.array([word for one in numbers for word in one], dtype=np.int64)
        self.starts: Integers = np.concatenate([[0], np.cumsum(lengths)])
        met = [word for one in numbers for word in set(one)]
        sentences_with = _sums(np.array(met, dtype=np.int64), np.ones(len(met)), len(vocabulary))
        self.weights: Floats = np.log(len(sentences) / np.maximum(sentences_with, 1)) + _LEAST_WEIGHT

    def __len__(self) -> int:
        return len(self.starts) - 1

    def of(self, first: int, count: int = 1) -> Integers:
        """The words of so many sentences."""
        return self.words[self.starts[first] : self.starts[first + count]]


def words_in(sentence: str) -> list[str]:
    """Its words, in small letters."""
    return _WORD.findall(sentence.casefold())


@dataclass(frozen=True)
class Table:
    """Numbers for pairs of words, by the word of one side: a sparse matrix."""

    starts: Integers
    others: Integers
    values: Floats
    width: int
    """Words of the other side."""

    def summed(self, words: Integers) -> Floats:
        """The sum of the rows of these words."""
        counts = self.starts[words + 1] - self.starts[words]
        within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        places = np.repeat(self.starts[words], counts) + within
        return _sums(self.others[places], self.values[places], self.width)


def model_one(source: Words, target: Words, pairs: Sequence[Pair]) -> Table:
    """P(t | s) of IBM model 1 for words that met in pairs, by the word of the source; rare meetings are left out.

    One more word of the source, which stands in every pair, takes what no word explains.
    """
    nothing = len(source.vocabulary)
    own, other, positions, offset = list[Integers](), list[Integers](), list[Integers](), 0
    for pair in pairs:
        words = np.append(source.of(pair.source, pair.sources), nothing)
        theirs = target.of(pair.target, pair.targets)
        own.append(np.tile(words, len(theirs)))
        other.append(np.repeat(theirs, len(words)))
        positions.append(np.repeat(np.arange(offset, offset + len(theirs)), len(words)))
        offset += len(theirs)
    width = len(target.vocabulary)
    keys = np.concatenate([np.zeros(0, np.int64), *own]) * width + np.concatenate(
        [np.zeros(0, np.int64), *other]
    )
    places = np.concatenate([np.zeros(0, np.int64), *positions])
    unique, which = np.unique(keys, return_inverse=True)
    rows, columns = unique // max(1, width), unique % max(1, width)
    chances, counts = np.ones(len(unique)), np.zeros(len(unique))
    for _ in range(_ITERATIONS):
        here = chances[which]
        shares = here / _sums(places, here, offset)[places]
        counts = _sums(which, shares, len(unique))
        chances = counts / _sums(rows, counts, nothing + 1)[rows]
    kept = (counts >= _LEAST_COUNT) & (rows < nothing)
    starts = np.searchsorted(rows[kept], np.arange(nothing + 1)).astype(np.int64)
    return Table(starts, columns[kept], chances[kept], width)


class ByLength:
    """Scores of pairs by how well their lengths go together, the first that there are."""

    def __init__(self, source: Words, target: Words) -> None:
        self._source, self._target = np.diff(source.starts), np.diff(target.starts)
        self._before = np.concatenate([[0], self._target[:-1]])
        self._ratio = len(target.words) / max(1, len(source.words))

    def row(self, i: int, low: int, high: int) -> tuple[Floats, Floats, Floats]:
        own, theirs = int(self._source[i]), self._target[low:high]
        two = theirs + self._before[low:high]
        before = int(self._source[i - 1]) if i else 0
        return (
            self._score(own, theirs, "one", 2),
            self._score(own, two, "two", 3),
            self._score(own + before, theirs, "two", 3),
        )

    def _score(self, own: int, theirs: Integers, move: str, sentences: int) -> Floats:
        expected = self._ratio * own
        squares = (theirs - expected) ** 2 / np.maximum(expected + theirs, 1)
        found: Floats = np.log(_SHARES[move]) - sentences * np.log(_SHARES["skip"]) - squares / 2
        return found


class ByWords:
    """Scores of pairs by their likeness, less that of unrelated sentences."""

    def __init__(self, source: Words, target: Words, pairs: Sequence[Pair]) -> None:
        self._source, self._target = source, target
        onward, back = model_one(source, target, pairs), model_one(target, source, _turned(pairs))
        own = _norms(_counted(source)), _norms(_counted(target))
        told = (
            _norms(onward.summed(source.of(i)) * target.weights for i in range(len(source))),
            _norms(back.summed(target.of(j)) * source.weights for j in range(len(target))),
        )
        self._lengths = (told[0], own[1]), (own[0], told[1])
        values = onward.values * target.weights[onward.others] ** 2
        self._onward = Table(onward.starts, onward.others, values, onward.width)
        self._back = _transposed(back, source.weights)
        self._least = 0.0
        self._least = self._unrelated()

    def row(self, i: int, low: int, high: int) -> tuple[Floats, Floats, Floats]:
        ones, two_targets, two_sources = self.likeness(i, low, high)
        return ones - self._least, two_targets - self._least, two_sources - self._least

    def likeness(self, i: int, low: int, high: int) -> tuple[Floats, Floats, Floats]:
        """Means of the two cosines, as `row` has scores: 0 to 1."""
        parts = []
        for table, (mine, theirs) in zip((self._onward, self._back), self._lengths, strict=True):
            products = self._products(table, i, low, high)
            before = self._products(table, i - 1, low, high)[1:] if i else np.zeros(high - low)
            single, double = theirs[0][low:high], theirs[1][low:high]
            parts.append(
                (
                    _ratio(products[1:], mine[0][i] * single),
                    _ratio(products[1:] + products[:-1], mine[0][i] * double),
                    _ratio(products[1:] + before, mine[1][i] * single),
                )
            )
        one, two, three = ((there + here) / 2 for there, here in zip(*parts, strict=True))
        return one, two, three

    def of(self, pair: Pair) -> float:
        """The likeness of a pair."""
        i, j = pair.source + pair.sources - 1, pair.target + pair.targets - 1
        kinds = {(1, 1): 0, (1, 2): 1, (2, 1): 2}
        return float(self.likeness(i, j, j + 1)[kinds[pair.sources, pair.targets]][0])

    def _products(self, table: Table, i: int, low: int, high: int) -> Floats:
        """Those of a sentence of the source with sentences low - 1 to high - 1 of the target; 0 before the first."""
        row, starts = table.summed(self._source.of(i)), self._target.starts
        begin = max(0, low - 1)
        sums = np.concatenate([[0.0], np.cumsum(row[self._target.words[starts[begin] : starts[high]]])])
        found = np.diff(sums[starts[begin : high + 1] - starts[begin]])
        return found if low else np.concatenate([[0.0], found])

    def _unrelated(self) -> float:
        """What unrelated sentences reach: of rows here and there the mean, but for the best of each, and two standard
        deviations."""
        found = []
        for i in np.unique(np.linspace(0, len(self._source) - 1, _SAMPLED_ROWS).astype(int)):
            ones = self.likeness(int(i), 0, len(self._target))[0]
            found.append(np.sort(ones)[: max(1, len(ones) - 3)])
        values = np.concatenate(found)
        return float(values.mean() + _DEVIATIONS * values.std())


def aligned(source: Sequence[str], target: Sequence[str]) -> list[tuple[Pair, float]]:
    """Pairs of sentences of two texts, each with its likeness, 0 to 1."""
    one, other = Words(source), Words(target)
    pairs = align(ByLength(one, other), len(one), len(other))
    scorer = ByWords(one, other, pairs)
    for _ in range(_ROUNDS):
        found = align(scorer, len(one), len(other))
        if found == pairs:
            break
        pairs, scorer = found, ByWords(one, other, found)
    return [(pair, scorer.of(pair)) for pair in pairs]


def _turned(pairs: Sequence[Pair]) -> list[Pair]:
    return [Pair(one.target, one.targets, one.source, one.sources) for one in pairs]


def _transposed(table: Table, weights: Floats) -> Table:
    """A table by the words of the other side, its values times the squares of the weights of these."""
    words = np.repeat(np.arange(len(table.starts) - 1), np.diff(table.starts))
    order = np.argsort(table.others, kind="stable")
    starts = np.searchsorted(table.others[order], np.arange(table.width + 1)).astype(np.int64)
    values = (table.values * weights[table.others] ** 2)[order]
    return Table(starts, words[order], values, len(table.starts) - 1)


def _counted(text: Words) -> Iterator[Floats]:
    """Its sentences as weighted counts of words."""
    size = len(text.vocabulary)
    return (_sums(words, text.weights[words], size) for words in map(text.of, range(len(text))))


def _norms(vectors: Iterator[Floats]) -> tuple[Floats, Floats]:
    """Norms of each sentence by itself, and of each with the one before it."""
    single, double, before = list[float](), list[float](), None
    for vector in vectors:
        single.append(float(np.sqrt(vector @ vector)))
        both = vector if before is None else vector + before
        double.append(float(np.sqrt(both @ both)))
        before = vector
    return np.array(single), np.array(double)


def _ratio(products: Floats, lengths: Floats) -> Floats:
    found: Floats = np.divide(products, lengths, out=np.zeros(len(products)), where=lengths > 0)
    return found


def _sums(places: Integers, values: Floats, size: int) -> Floats:
    """The sum of the values of each place."""
    return np.asarray(np.bincount(places, values, minlength=size), dtype=np.float64)

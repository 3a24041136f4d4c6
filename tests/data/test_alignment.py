"""Paths by brute force, likenesses by dense matrices, and a language that nobody told."""

from __future__ import annotations

import functools
import itertools

import numpy as np
import pytest
from ciphers import ciphered, english, measured
from hypothesis import given
from hypothesis import strategies as st
from property_tests import examples

from scrimp.data.alignment import Floats, Pair, align
from scrimp.data.lexicon import ByLength, ByWords, Words, aligned, model_one


class Given:
    """Scores that stand in a table, by pair."""

    def __init__(self, sources: int, targets: int, seed: int) -> None:
        draw = np.random.default_rng(seed)
        self.ones, self.two_targets, self.two_sources = draw.normal(0, 1, (3, sources, targets))

    def row(self, i: int, low: int, high: int) -> tuple[Floats, Floats, Floats]:
        return self.ones[i, low:high], self.two_targets[i, low:high], self.two_sources[i, low:high]

    def of(self, pair: Pair) -> float:
        table = {(1, 1): self.ones, (1, 2): self.two_targets, (2, 1): self.two_sources}
        place = pair.source + pair.sources - 1, pair.target + pair.targets - 1
        return float(table[pair.sources, pair.targets][place])


def best_of_all(scorer: Given, sources: int, targets: int) -> float:
    """The best total of all paths, without a table of numpy, a band or a trick."""

    @functools.cache
    def best(i: int, j: int) -> float:
        if i == j == 0:
            return 0.0
        found = [best(i - own, j - theirs) for own, theirs in ((1, 0), (0, 1)) if i >= own and j >= theirs]
        for own, theirs in ((1, 1), (1, 2), (2, 1)):
            if i >= own and j >= theirs:
                found.append(best(i - own, j - theirs) + scorer.of(Pair(i - own, own, j - theirs, theirs)))
        return max(found)

    return best(sources, targets)


def assert_is_path(pairs: list[Pair], sources: int, targets: int) -> None:
    """In order on both sides, and every sentence at most once."""
    ends = (0, 0)
    for pair in pairs:
        assert pair.source >= ends[0]
        assert pair.target >= ends[1]
        ends = pair.source + pair.sources, pair.target + pair.targets
    assert ends <= (sources, targets)
    assert ends[1] <= targets


@examples(150)
@given(sources=st.integers(0, 9), targets=st.integers(0, 9), seed=st.integers(0, 2**32 - 1))
def test_the_path_is_the_best_of_all(sources: int, targets: int, seed: int) -> None:
    scorer = Given(sources, targets, seed)
    pairs = align(scorer, sources, targets, width=10)
    assert_is_path(pairs, sources, targets)
    total = sum(scorer.of(pair) for pair in pairs)
    assert total == pytest.approx(best_of_all(scorer, sources, targets), abs=1e-9)


@examples(60)
@given(
    sources=st.integers(0, 40),
    targets=st.integers(0, 40),
    width=st.none() | st.integers(1, 40),
    seed=st.integers(0, 2**32 - 1),
)
def test_in_any_band_no_sentence_is_used_twice(
    sources: int, targets: int, width: int | None, seed: int
) -> None:
    width = None if width is None else max(width, -(-targets // max(1, sources)))
    assert_is_path(align(Given(sources, targets, seed), sources, targets, width=width), sources, targets)


def test_a_path_that_leaves_its_band_is_found_in_a_wider_one() -> None:
    """150 sentences are missing at the beginning of one text, and 150 at the end of the other."""
    scorer = Given(400, 400, 0)
    for table in (scorer.ones, scorer.two_targets, scorer.two_sources):
        table[:] = -1.0
    scorer.ones[np.arange(150, 400), np.arange(250)] = 1.0
    assert align(scorer, 400, 400) == [Pair(150 + j, 1, j, 1) for j in range(250)]
    assert align(scorer, 400, 400, width=32) == []


def plain_model_one(pairs: list[tuple[list[int], list[int]]]) -> dict[tuple[int, int], tuple[float, float]]:
    """Brown et al., model 1, word by word: P(t | s) and how often they were expected to meet; -1 is no word."""
    chances = {(s, t): 1.0 for own, theirs in pairs for s in [*own, -1] for t in theirs}
    counts: dict[tuple[int, int], float] = {}
    for _ in range(5):
        counts = dict.fromkeys(chances, 0.0)
        for own, theirs in pairs:
            for t in theirs:
                total = sum(chances[s, t] for s in [*own, -1])
                for s in [*own, -1]:
                    counts[s, t] += chances[s, t] / total
        totals: dict[int, float] = {}
        for (s, _), count in counts.items():
            totals[s] = totals.get(s, 0.0) + count
        chances = {(s, t): count / totals[s] for (s, t), count in counts.items()}
    return {pair: (chances[pair], counts[pair]) for pair in chances}


def small() -> tuple[Words, Words, list[Pair]]:
    text = ciphered(english(60), 3)
    return Words(text.source), Words(text.target), text.pairs


def test_model_one_is_that_of_a_plain_loop() -> None:
    source, target, pairs = small()
    table = model_one(source, target, pairs)
    plain = plain_model_one(
        [
            (
                source.of(one.source, one.sources).tolist(),
                target.of(one.target, one.targets).tolist(),
            )
            for one in pairs
        ]
    )
    expected = {pair: chance for pair, (chance, count) in plain.items() if count >= 1 and pair[0] >= 0}
    rows = np.repeat(np.arange(len(source.vocabulary)), np.diff(table.starts))
    found = dict(zip(zip(rows.tolist(), table.others.tolist(), strict=True), table.values, strict=True))
    assert found == pytest.approx(expected, rel=1e-9)
    assert len(found) > 50


def test_likenesses_are_cosines_of_mean_word_vectors() -> None:
    """Dense: matrices of translations, vectors of each sentence, a cosine for each pair and each way."""
    source, target, pairs = small()
    scorer = ByWords(source, target, pairs)
    turned = [Pair(one.target, one.targets, one.source, one.sources) for one in pairs]
    matrices = []
    for own, other, met in ((source, target, pairs), (target, source, turned)):
        table, dense = model_one(own, other, met), np.zeros((len(own.vocabulary), len(other.vocabulary)))
        dense[np.repeat(np.arange(len(dense)), np.diff(table.starts)), table.others] = table.values
        matrices.append(dense)

    def cosine(one: Floats, other: Floats) -> float:
        length = np.linalg.norm(one) * np.linalg.norm(other)
        return float(one @ other / length) if length else 0.0

    def expected(i: int, own: int, j: int, theirs: int) -> float:
        here, there = source.of(i - own + 1, own), target.of(j - theirs + 1, theirs)
        counts = [
            np.bincount(here, minlength=len(source.vocabulary)).astype(float),
            np.bincount(there, minlength=len(target.vocabulary)).astype(float),
        ]
        onward = cosine(counts[0] @ matrices[0] * target.weights, counts[1] * target.weights)
        back = cosine(counts[1] @ matrices[1] * source.weights, counts[0] * source.weights)
        return (onward + back) / 2

    for i, (low, high) in itertools.product((0, 1, 17), ((0, 9), (5, 12), (1, 2))):
        kinds = scorer.likeness(i, low, high)
        for j in range(low, high):
            assert kinds[0][j - low] == pytest.approx(expected(i, 1, j, 1), abs=1e-12)
            if j:
                assert kinds[1][j - low] == pytest.approx(expected(i, 1, j, 2), abs=1e-12)
            if i:
                assert kinds[2][j - low] == pytest.approx(expected(i, 2, j, 1), abs=1e-12)


@pytest.mark.parametrize(
    ("sentences", "noise", "seed"),
    [
        pytest.param(*case, marks=() if case == (300, 0.0, 0) else pytest.mark.slow)
        for case in itertools.product((300, 1000), (0.0, 0.15), (0, 1))
    ],
)
def test_a_cipher_that_nobody_told_is_aligned(sentences: int, noise: float, seed: int) -> None:
    """A tenth of the places merged, a tenth missing on one side; then also words that are left out and added."""
    text = ciphered(english(sentences), seed, noise=noise)
    one, other = Words(text.source), Words(text.target)
    by_length = measured(align(ByLength(one, other), len(one), len(other)), text.pairs)
    found = aligned(text.source, text.target)
    precision, recall, f1 = measured([pair for pair, _ in found], text.pairs)
    print(f"by lengths F1 {by_length[2]:.3f}; F1 {f1:.3f}, precision {precision:.3f}, recall {recall:.3f}")
    assert f1 >= 0.95
    assert f1 > by_length[2] + 0.05
    scores = dict(found)
    right = [scores[pair] for pair in text.pairs if pair in scores]
    wrong = [score for pair, score in found if pair not in set(text.pairs)]
    assert all(0 <= score <= 1 + 1e-9 for score in scores.values())
    assert not wrong or np.mean(right) > np.mean(wrong)

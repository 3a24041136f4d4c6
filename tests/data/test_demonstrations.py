"""Retrieved demonstrations: against bm25s and full sorts, and what may never stand before a question."""

from __future__ import annotations

import json
import math
from pathlib import Path

import bm25s
import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from property_tests import examples

from scrimp.data.demonstrations import (
    Bm25,
    Example,
    at_random,
    by_bm25,
    conversation,
    highest,
    normalised,
    read_examples,
    retrieved,
)
from scrimp.errors import DataError

QUESTIONS = st.lists(st.lists(st.sampled_from("abcdef"), max_size=6).map(" ".join), min_size=1, max_size=12)
TASKED = st.lists(
    st.builds(
        Example, st.sampled_from(["a b", "A  b", "b", "a", "c a", "d"]), st.just("1"), st.sampled_from("xy")
    ),
    min_size=1,
    max_size=10,
)


@examples(100)
@given(bank=QUESTIONS, question=st.lists(st.sampled_from("abcdefg"), max_size=6).map(" ".join))
def test_bm25_is_that_of_bm25s(bank: list[str], question: str) -> None:
    assume(any(bank))  # bm25s takes no bank without words
    other = bm25s.BM25(method="lucene", k1=1.2, b=0.75, dtype="float64")
    other.index([one.split() for one in bank], show_progress=False)
    # Lucene's form leaves out the constant k1 + 1.
    expected = 2.2 * other.get_scores(question.split()) if question else np.zeros(len(bank))
    np.testing.assert_allclose(
        Bm25(bank).scores(question), np.where(expected == 0, -np.inf, expected), rtol=1e-12
    )


def test_words_are_known_without_case_and_punctuation() -> None:
    found = Bm25(["What is the CAPITAL of France?", "Who wrote it?"]).scores("the capital, please")
    assert found[0] > 0
    assert found[1] == -math.inf
    assert (Bm25(["?", "!"]).scores("?") == -math.inf).all()


@examples(300)
@given(
    scores=st.lists(st.sampled_from([-math.inf, -2.0, 0.0, 0.5, 1.0]), max_size=12), count=st.integers(0, 14)
)
def test_the_highest_are_those_of_a_full_sort(scores: list[float], count: int) -> None:
    order = sorted(range(len(scores)), key=lambda number: (-scores[number], number))
    expected = [number for number in order if scores[number] > -math.inf][:count]
    assert highest(np.array(scores), count) == expected


@examples(200)
@given(
    rows=TASKED,
    count=st.integers(0, 5),
    tasks=st.sampled_from(["any", "same", "other"]),
    seed=st.integers(0, 9),
)
def test_what_may_not_be_chosen_never_is_and_all_else_is(
    rows: list[Example], count: int, tasks: str, seed: int
) -> None:
    """In a bank that is the file itself: no question stands before itself, however it is spelt."""
    scorer = at_random(rows, seed)
    for number, found in enumerate(retrieved(rows, rows, scorer, count, tasks)):  # type: ignore[arg-type]
        asked = rows[number]
        fit = [
            one
            for one in rows
            if " ".join(one.question.lower().split()) != " ".join(asked.question.lower().split())
            and (tasks == "any" or (one.task == asked.task) == (tasks == "same"))
        ]
        assert len(found) == min(count, len(fit))
        assert all(any(one is other for other in fit) for one in found)
        scores = scorer(number)
        assert found == sorted(found, key=lambda one: scores[[one is other for other in rows].index(True)])


def test_the_nearest_stands_last_and_of_equal_ones_the_first_in_the_bank_is_taken() -> None:
    bank = [
        Example("red fox", "0"),
        Example("red dog", "1"),
        Example("red owl", "2"),
        Example("blue cat", "3"),
    ]
    asked = [Example("a red owl?", "")]
    (found,) = retrieved(asked, bank, by_bm25(asked, bank), 2)
    assert [one.answer for one in found] == ["0", "2"]
    (found,) = retrieved(asked, bank, by_bm25(asked, bank), 9)
    assert [one.answer for one in found] == ["1", "0", "2"]  # the cat shares no word


def test_draws_are_the_seed_s_and_differ_between_questions() -> None:
    bank = [Example(str(number), "") for number in range(50)]
    asked = [Example("?", ""), Example("!", "")]
    first, again, other = (list(retrieved(asked, bank, at_random(bank, seed), 5)) for seed in (3, 3, 4))
    assert first == again
    assert first[0] != first[1]
    assert first != other


def test_equal_questions_are_equal_in_any_spelling() -> None:
    assert normalised(" What\tIS  it? ") == normalised("what is it?") == normalised("ｗｈａｔ is it?")
    assert normalised("2+2") != normalised("2-2")


def test_only_the_last_answer_is_learnt() -> None:
    assert conversation([Example("a", "1")], Example("b", "2")) == [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "1", "weight": 0},
        {"role": "user", "content": "b"},
        {"role": "assistant", "content": "2"},
    ]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ('{"question": "a"}', "no answer that is text - got nothing"),
        ('{"question": " ", "answer": "b"}', "no question that is text - got blank text"),
        ('{"question": "a", "answer": 4}', "no answer that is text - got 4"),
        ('{"question": "a", "answer": "b"}', "no task that is text - got nothing"),
        ('{"question": "a", "answer": "b", "task": 3}', "no task that is text - got 3"),
        ('{"question": "a", "answer": "\\ud800"}', "not JSON|not valid Unicode"),
        ('["a", "b"]', "line 3"),
        ("a,b", "is not JSON"),
    ],
)
def test_a_row_that_is_no_example_is_refused_by_its_line(row: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "tasks.jsonl"
    file.write_text('{"question": "a\\r\\n", "answer": "b", "task": "t", "more": [1]}\n\n' + row + "\n")
    with pytest.raises(DataError, match=message) as caught:
        read_examples(file, need_tasks=True)
    assert f"{file}, line 3" in str(caught.value)


def test_rows_are_read_as_they_are(tmp_path: Path) -> None:
    file = tmp_path / "tasks.jsonl"
    rows = [{"question": "a\r\n", "answer": " b", "id": 3}, {"question": "c", "answer": "d", "task": "t"}]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert read_examples(file) == [Example("a\r\n", " b"), Example("c", "d", "t")]
    file.write_text("\n")
    with pytest.raises(DataError, match="holds no examples"):
        read_examples(file)

"""Labelled examples that are like a question, to stand before it: retrieved demonstrations.

Problem  A model that is to answer questions of a new task from a few labelled examples learns to do so only where such
         examples stood before the questions that it was trained on, and only examples that bear on the question help.
Method   Of a bank of labelled examples the `count` with the highest score for a question are chosen, the nearest last,
         right before the question. With the words of question q and a bank of N examples by BM25 (Robertson and
         Zaragoza, 2009),

             score(q, d) = sum over the words w of q of  idf(w) f (k1 + 1) / (f + k1 (1 - b + b |d| / mean |d|))
             idf(w)      = ln(1 + (N - n(w) + 1/2) / (n(w) + 1/2)),    k1 = 1.2, b = 0.75

         f how often w stands in d, n(w) how many examples hold it. A word is a run of letters, digits and underscores,
         without regard to case. An example without a word of the question is not chosen, so that there may be fewer.
         Or by the cosine of two embeddings (scrimp.tasks.embedding), or at random.
Guard    Never the example itself, nor any with the same question but for case, white space and compatible forms of
         Unicode (NFKC): its answer would stand before it. Where that is asked for, only examples of the same task, or
         only of other tasks.
Order    Of equal scores the first in the bank. All of it follows from files and a seed, so that all ranks that read the
         file which is written have the same demonstrations.
Cost     BM25: the examples that share a word with the question, and a pass over N scores; 12 bytes for each word of
         each example. The index is 20 lines, so that the core does without the package bm25s.
Limits   A rephrased question is no duplicate to the guard. Text without spaces between words (as Chinese) is one word
         up to the next punctuation mark: take embeddings.
Source   Mueller et al., "Meta-training with Demonstration Retrieval for Efficient Few-shot Learning" (2023, arXiv
         2307.00119)
Checked  tests/data/test_demonstrations.py, against bm25s and full sorts
"""

from __future__ import annotations

import math
import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt

from scrimp.data.columns import check_unicode
from scrimp.data.conversations import WEIGHT
from scrimp.data.streams import Meter, lines
from scrimp.errors import DataError
from scrimp.json_files import decode_json

Scores = npt.NDArray[np.float64]
Scorer = Callable[[int], Scores]
"""The number of a question -> the score of each example of the bank; -inf: it is not to be chosen."""
Tasks = Literal["any", "same", "other"]
"""Whose examples may stand before a question: those of all tasks, of its own, or of all but its own."""
_FORM: Final = '{"question": "2 + 2?", "answer": "4", "task": "sums"}'
_WORD = re.compile(r"\w+")
_K1: Final = 1.2
_B: Final = 0.75


@dataclass(frozen=True, slots=True)
class Example:
    """A question with its answer, and the task that it is from, where that is known."""

    question: str
    answer: str
    task: str | None = None


def read_examples(file: Path, *, need_tasks: bool = False) -> list[Example]:
    """The rows of a JSONL file: question, answer and, where it has one, task; other keys are ignored.

    Raises:
        DataError: by file and line, for a row of anything else, and one without a task where tasks are needed.
    """
    found = []
    for number, line in lines(file, Meter()):
        where = f"{file}, line {number:,}"
        row = decode_json(line, dict[str, Any], origin=where, error=DataError, do=f"write rows as {_FORM}")
        found.append(_example(row, where, need_tasks=need_tasks))
    if not found:
        raise DataError(f"{file} holds no examples", expected=f"rows of {_FORM}")
    return found


def _example(row: dict[str, Any], where: str, *, need_tasks: bool) -> Example:
    needed = {"question": True, "answer": True, "task": need_tasks}
    for key, is_needed in needed.items():
        value = row.get(key)
        if value is None and not is_needed:
            continue
        if not isinstance(value, str) or not value.strip():
            raise DataError(
                f"{where} has no {key} that is text",
                got="blank text"
                if isinstance(value, str)
                else "nothing"
                if value is None
                else f"{value!r:.60}",
                expected=f"a row of {_FORM}" + (", since tasks are compared" if key == "task" else ""),
                do="repair or remove the row",
            )
        check_unicode(value, where)
    return Example(row["question"], row["answer"], row.get("task"))


def conversation(demonstrations: Sequence[Example], asked: Example) -> list[dict[str, Any]]:
    """The messages of a question behind its demonstrations, of which its own answer alone is learnt."""
    messages: list[dict[str, Any]] = []
    for one in demonstrations:
        messages.append({"role": "user", "content": one.question})
        messages.append({"role": "assistant", "content": one.answer, WEIGHT: 0})
    messages.append({"role": "user", "content": asked.question})
    messages.append({"role": "assistant", "content": asked.answer})
    return messages


def retrieved(
    asked: Sequence[Example], bank: Sequence[Example], scorer: Scorer, count: int, tasks: Tasks = "any"
) -> Iterator[list[Example]]:
    """For each question its demonstrations out of the bank, the nearest last.

    Args:
        count: at most so many.
        tasks: whose examples may be chosen; all have a task then.
    """
    questions = _numbers([normalised(one.question) for one in (*asked, *bank)])
    names = _numbers([one.task for one in (*asked, *bank)])
    for number in range(len(asked)):
        scores = scorer(number).copy()
        scores[questions[len(asked) :] == questions[number]] = -np.inf
        if tasks != "any":
            is_same = names[len(asked) :] == names[number]
            scores[is_same if tasks == "other" else ~is_same] = -np.inf
        yield [bank[one] for one in highest(scores, count)[::-1]]


def normalised(question: str) -> str:
    """A question without regard to case, white space and compatible forms of characters."""
    return " ".join(unicodedata.normalize("NFKC", question).casefold().split())


def highest(scores: Scores, count: int) -> list[int]:
    """Where the highest scores are, the highest first, of equal ones the first first; never one of -inf."""
    count = min(count, int(np.count_nonzero(scores > -np.inf)))
    if count == 0:
        return []
    least = np.partition(scores, len(scores) - count)[len(scores) - count]
    found = np.flatnonzero(scores >= least)
    best: list[int] = found[np.argsort(-scores[found], kind="stable")][:count].tolist()
    return best


class Bm25:
    """BM25 of a bank of questions.

    Args:
        bank: the questions of its examples.
    """

    def __init__(self, bank: Sequence[str]) -> None:
        self._size = len(bank)
        words = [Counter(_words(question)) for question in bank]
        lengths = np.array([one.total() for one in words], dtype=np.float64)
        norms = _K1 * (1 - _B + _B * lengths / max(lengths.mean(), 1e-9))
        holders: dict[str, list[tuple[int, int]]] = defaultdict(list)
        for number, counts in enumerate(words):
            for word, times in counts.items():
                holders[word].append((number, times))
        self._weights: dict[str, tuple[npt.NDArray[np.int32], Scores]] = {}
        for word, found in holders.items():
            examples, times = np.array(found, dtype=np.int32).T
            idf = math.log1p((self._size - len(found) + 0.5) / (len(found) + 0.5))
            self._weights[word] = (examples, idf * times * (_K1 + 1) / (times + norms[examples]))

    def scores(self, question: str) -> Scores:
        """The score of each example; -inf for one without a word of the question."""
        scores = np.zeros(self._size)
        for word, times in Counter(_words(question)).items():
            if word in self._weights:
                examples, weights = self._weights[word]
                scores[examples] += times * weights
        scores[scores == 0] = -np.inf
        return scores


def by_bm25(asked: Sequence[Example], bank: Sequence[Example]) -> Scorer:
    """Scores by the words of questions."""
    index = Bm25([one.question for one in bank])
    return lambda number: index.scores(asked[number].question)


def at_random(bank: Sequence[Example], seed: int) -> Scorer:
    """Scores by a draw of its own for each question."""
    return lambda number: np.random.default_rng([seed, number]).random(len(bank))


def _words(text: str) -> list[str]:
    return _WORD.findall(normalised(text))


def _numbers(values: Sequence[Hashable]) -> npt.NDArray[np.int64]:
    """A number for each value, the same for equal ones."""
    known: dict[Hashable, int] = {}
    return np.array([known.setdefault(value, len(known)) for value in values], dtype=np.int64)

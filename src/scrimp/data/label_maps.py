"""Tasks that nobody can answer without examples: label maps, as conversations with demonstrations before the question.

Problem  Does training with retrieved demonstrations help on tasks that were never trained on? To see it there have to
         be many tasks, whose answers cannot be known from the question.
Method   Each of 420 tasks gives a label, one of four, to each of 6 letters that it has drawn from the alphabet; another
         task gives the same letter another one. A question is a digit, which means nothing, and a letter: `7 k`. Of
         the tasks 400 are trained on and 20 held out. An example's demonstrations are four others of its task, out of a
         bank that has each letter twice, with digits that are not asked:

             label-maps:bm25       chosen by BM25 (see demonstrations): the two with the letter, and up to two that
                                   share the digit
             label-maps:random     drawn at random
             label-maps:none       none: nobody can do better than ln 4 for a label
             label-maps:few-shot   the held-out tasks' banks, by BM25: what there is of a new task to tune a model on

         All hold out the same questions of the 20 tasks, `few-shot` with the demonstrations of `bm25`.
Numbers  All draws are those of a hash of what is drawn for, so that all machines have the same texts.
Loss     An answer is a label and an end, which anybody can predict: a loss per token is half of that of a label.
Checked  tests/data/test_label_maps.py
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator

from scrimp.data.demonstrations import Example, at_random, by_bm25, conversation, retrieved
from scrimp.data.sources import Source
from scrimp.data.streams import Meter

_TASKS, _HELD_OUT, _LETTERS, _LABELS, _COUNT = 420, 20, 6, "ABCD", 4
_OF_BANK, _ASKED = 2, 4
"""Examples of each letter of a task that its bank has, and that are asked."""


class LabelMaps(Source):
    """Conversations about label maps.

    Args:
        name: one of `LABEL_MAPS`.
        held_out: those of the tasks that are not trained on.
    """

    chat_template = (
        "{% for message in messages %}{{ message.content }}"
        "{% if message.role == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
    )

    def __init__(self, name: str, *, held_out: bool = False) -> None:
        super().__init__(name)
        self._kind, self._is_held_out = name.partition(":")[2], held_out

    def texts(self, meter: Meter) -> Iterator[str]:
        is_tuning = self._kind == "few-shot" and not self._is_held_out
        first = _TASKS - _HELD_OUT
        for task in range(first, _TASKS) if self._is_held_out or is_tuning else range(first):
            bank, asked = _examples(task)
            asked = bank if is_tuning else asked
            count = 0 if self._kind == "none" else _COUNT
            scorer = at_random(bank, task) if self._kind == "random" else by_bm25(asked, bank)
            for example, found in zip(asked, retrieved(asked, bank, scorer, count), strict=True):
                yield json.dumps(conversation(found, example), sort_keys=True)

    def fingerprint(self) -> str:
        return f"{self.name}-1{'-held-out' * self._is_held_out}"

    def validation(self) -> Source:
        return LabelMaps(self.name, held_out=True)


def _examples(task: int) -> tuple[list[Example], list[Example]]:
    """The bank of a task, and the questions that are asked about it."""
    letters = sorted("abcdefghijklmnopqrstuvwxyz", key=lambda one: _drawn(task, "letter", one))[:_LETTERS]
    bank, asked = [], []
    for letter in letters:
        label = _LABELS[_drawn(task, "label", letter) % len(_LABELS)]
        digits = sorted("0123456789", key=lambda one: _drawn(task, letter, one))
        examples = [Example(f"{digit} {letter}", label, str(task)) for digit in digits]
        bank += examples[:_OF_BANK]
        asked += examples[_OF_BANK : _OF_BANK + _ASKED]
    bank, asked = (
        sorted(part, key=lambda one: _drawn(task, "order", one.question)) for part in (bank, asked)
    )
    return bank, asked


def _drawn(*what: object) -> int:
    return int.from_bytes(hashlib.sha256(repr(what).encode()).digest()[:8])

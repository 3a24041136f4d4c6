"""A task: items, each a context, the choices that may follow it, and which of them is right.

Form     A file of a user's own holds one item a line, in JSON::

             {"context": "The capital of France is", "choices": [" Paris", " Rome"], "answer": 0}

         A choice is what stands right behind the context: the space between them belongs to the choice. Other keys of
         a row are passed over.
Chance   The mean over items of 1 / choices: what a model gets right that prefers choices at random.
Limits   Choices are continuations, never letters that name them: early in training models cannot read such a list,
         and their scores stay at chance (arXiv 2506.07731).
Checked  tests/tasks/test_items.py
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from scrimp.data.streams import Meter, lines
from scrimp.errors import DataError
from scrimp.json_files import decode_json

_FORM = '{"context": "...", "choices": ["...", "..."], "answer": 0}'


@dataclass(frozen=True)
class Item:
    """One question of a task."""

    context: str
    choices: tuple[str, ...]
    answer: int
    """Which choice is right, from 0."""


@dataclass(frozen=True)
class Task:
    """Items under a name."""

    name: str
    items: tuple[Item, ...]

    @property
    def chance(self) -> float:
        """Accuracy of guesses."""
        return fmean(1 / len(item.choices) for item in self.items)


def read_task(path: Path) -> Task:
    """The task that a JSONL file holds, by the file's name.

    Raises:
        DataError: it cannot be read or holds no item; a row is no item, which is named by its line.
    """
    items = []
    for number, line in lines(path, Meter()):
        where = f"{path}, line {number:,}"
        item = decode_json(
            line, Item, origin=where, error=DataError, do=f"write items as {_FORM}", closed=False
        )
        _refuse_bad(item, where)
        items.append(item)
    if not items:
        raise DataError(f"{path} holds no items", expected=f"lines of {_FORM}")
    return Task(path.name, tuple(items))


def _refuse_bad(item: Item, where: str) -> None:
    """Refuse an item that no model can be asked."""
    got, expected = None, None
    if len(item.choices) < 2:
        got, expected = f"{len(item.choices)} choices", "two choices or more"
    elif not all(item.choices):
        got, expected = f"choice {item.choices.index('')} is empty", "text in each choice"
    elif len(set(item.choices)) < len(item.choices):
        got, expected = "the same choice twice", "choices that differ"
    elif not 0 <= item.answer < len(item.choices):
        got, expected = f"answer {item.answer}", f"0 to {len(item.choices) - 1}"
    if got is not None:
        raise DataError(f"{where}: the item cannot be asked", got=got, expected=expected, do=f"write {_FORM}")

"""Files of items: what is read, and what is refused by file and line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from scrimp.errors import DataError
from scrimp.tasks import Item, read_task

GOOD = {"context": "The sky is", "choices": [" blue", " a fish", " loud"], "answer": 0}


def write(folder: Path, *rows: object) -> Path:
    path = folder / "mine.jsonl"
    path.write_text("".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows))
    return path


def test_rows_become_items_and_chance_is_the_mean_of_guesses(tmp_path: Path) -> None:
    other = {"context": "", "choices": ["a", "b\n"], "answer": 1, "subject": "letters"}
    task = read_task(write(tmp_path, GOOD, "", other))
    assert task.name == "mine.jsonl"
    assert task.items == (Item("The sky is", (" blue", " a fish", " loud"), 0), Item("", ("a", "b\n"), 1))
    assert task.chance == pytest.approx((1 / 3 + 1 / 2) / 2)


@pytest.mark.parametrize(
    ("row", "part"),
    [
        ("{", "not JSON"),
        ("[1]", "object"),
        ({**GOOD, "answer": 3}, "0 to 2"),
        ({**GOOD, "answer": -1}, "0 to 2"),
        ({**GOOD, "answer": "A"}, "answer"),
        ({**GOOD, "choices": [" blue"]}, "two choices or more"),
        ({**GOOD, "choices": [" blue", ""]}, "choice 1 is empty"),
        ({**GOOD, "choices": [" blue", " blue"]}, "the same choice twice"),
        ({"context": "a", "choices": ["b", "c"]}, "missing answer"),
        ('{"context": "a\\ud800", "choices": ["b", "c"], "answer": 0}', "line 2"),
    ],
)
def test_a_bad_row_is_refused_with_its_line(tmp_path: Path, row: object, part: str) -> None:
    path = write(tmp_path, GOOD, row)
    with pytest.raises(DataError) as refusal:
        read_task(path)
    assert f"{path}, line 2" in str(refusal.value)
    assert part in str(refusal.value)


def test_a_file_without_items_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="holds no items"):
        read_task(write(tmp_path, ""))

"""Tasks made from a text: what they ask is true of the text, and nothing but understanding it answers."""

from __future__ import annotations

import argparse
import ast
import inspect
import textwrap
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest

from scrimp.errors import DataError
from scrimp.tasks import BUILT_IN, Item, Task, read_texts

TEXTS = [inspect.getsource(module) for module in (argparse, ast, inspect, textwrap)]


def made(name: str, texts: Sequence[str] = TEXTS) -> Task:
    return BUILT_IN[name].task(name, texts)


@pytest.mark.parametrize("name", BUILT_IN)
def test_items_are_distinct_with_one_right_choice_and_the_chance_that_is_stated(name: str) -> None:
    task = made(name)
    assert len(set(task.items)) == len(task.items) > 150
    for item in task.items:
        assert len(set(item.choices)) == len(item.choices)
    assert task.chance == pytest.approx(1 / 3 if name == "closing" else 1 / 4)
    # No place is right much more often than the others.
    often = Counter(item.answer for item in task.items)
    assert max(often.values()) <= 1.4 * len(task.items) * task.chance


@pytest.mark.parametrize("name", BUILT_IN)
def test_the_same_text_gives_the_same_items(name: str) -> None:
    assert made(name) == made(name)
    if BUILT_IN[name].reads_text:
        assert made(name) != made(name, TEXTS[1:])


def test_what_is_drawn_stays_the_same_in_later_versions() -> None:
    first = made("copying").items[0]
    assert first.context == "de la tu te do no ku ta ro ba nu ki le ze fo ha\n de la"
    assert (first.choices, first.answer) == (
        (" ki le ze fo", " tu te do no", " le ze fo ha", " ta ro ba nu"),
        1,
    )


def right(item: Item) -> str:
    return item.choices[item.answer]


def test_a_continuation_is_the_text_s_own_and_the_others_stand_elsewhere_in_the_document() -> None:
    for item in made("continuation").items:
        (home,) = [text for text in TEXTS if item.context + right(item) in text]
        for choice in item.choices:
            assert choice in home
            assert len(choice.split()) == 6
            assert choice == right(item) or item.context + choice not in home


def test_orders_have_the_same_words_and_white_space() -> None:
    for item in made("word-order").items:
        assert any(item.context + right(item) in text for text in TEXTS)
        assert len({tuple(sorted(choice.split())) for choice in item.choices}) == 1
        assert len({"".join(c for c in choice if c.isspace()) for choice in item.choices}) == 1


def test_a_copy_continues_the_string_and_no_choice_has_been_seen_twice() -> None:
    for item in made("copying", []).items:
        string, again = item.context.split("\n")
        assert string.startswith(again.strip() + right(item))
        for choice in item.choices:
            assert string.count(choice) == 1
            assert not set(choice.split()) & set(again.split())


def test_each_bracket_closes_equally_often_what_is_open() -> None:
    task = made("closing")
    assert len(set(Counter(item.answer for item in task.items).values())) == 1
    partner = dict(zip(")]}", "([{", strict=True))
    for item in task.items:
        opened: list[str] = []
        for letter in reversed(item.context):
            if letter in partner:
                opened.append(partner[letter])
            elif letter in partner.values():
                if not opened:
                    assert letter == partner[right(item)]
                    break
                assert opened.pop() == letter
        else:
            pytest.fail(f"nothing is open in {item.context!r}")


@pytest.mark.parametrize("name", ["continuation", "word-order", "closing"])
def test_a_text_that_is_too_short_is_refused(name: str) -> None:
    with pytest.raises(DataError, match=f"too short for the task {name}"):
        made(name, ["Once upon a time there was a text with (a) bracket. " * 3])


def test_texts_are_read_like_any_source_and_token_shards_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("Some words.\n\nMore words.", encoding="utf-8")
    assert "".join(read_texts(str(tmp_path / "a.txt"), "text")) == "Some words.\n\nMore words."
    (tmp_path / "corpus.json").write_text("{}")
    with pytest.raises(DataError, match="holds token shards"):
        read_texts(str(tmp_path), "text")

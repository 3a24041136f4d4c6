"""Globs for layers: as few patterns as say exactly who has which choice.

Problem  A plan names hundreds of layers; a file for people names `blocks.*.mlp.down`.
Method   Layers that differ only in numbers between dots are a family. A family whose members share a choice
         becomes one glob; else it is split by its first number, and so on down to exact names. A glob
         is taken only where every layer that it matches has the choice, so that the order of the
         patterns is of no account to any reader (first match, last match, any).
Gaps     A glob may catch layers that were not named. Where the numbers are not 0, 1, 2, ... the family is not
         whole and is written by exact names; a family whose end is missing cannot be told from a whole one.
Checked  tests/export/test_globs.py: an independent fnmatch reading of the patterns gives the choices back.
"""

from __future__ import annotations

import glob
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from typing import TypeVar

Choice = TypeVar("Choice")


def collapse(choices: Mapping[str, Choice]) -> list[tuple[str, Choice]]:
    """Patterns for `fnmatch` and their choice, in the order of the layers.

    Args:
        choices: layer name to choice; choices are compared by ==.
    """
    patterns: dict[str, Choice] = {}

    def settle(names: list[str], kept: int) -> None:
        families: dict[str, list[str]] = {}
        for name in names:
            families.setdefault(_pattern(name, kept), []).append(name)
        for pattern, members in families.items():
            choice = choices[members[0]]
            caught = [name for name in choices if fnmatchcase(name, pattern)]
            is_exact = not _numbers(members[0])[kept:]
            if is_exact or (_is_whole(members, kept) and all(choices[name] == choice for name in caught)):
                patterns[pattern] = choice
            else:
                settle(members, kept + 1)

    settle(list(choices), 0)
    return list(patterns.items())


def _pattern(name: str, kept: int) -> str:
    """The name with its numbers after the first `kept` ones replaced by stars."""
    parts = name.split(".")
    starred = [index for index, part in enumerate(parts) if _is_number(part)][kept:]
    return ".".join("*" if index in starred else glob.escape(part) for index, part in enumerate(parts))


def _is_whole(members: Iterable[str], kept: int) -> bool:
    """Whether more than one member, and at every starred place the numbers 0, 1, 2, ..."""
    columns = [set(column) for column in zip(*(_numbers(name)[kept:] for name in members), strict=True)]
    return all(column == set(range(len(column))) for column in columns) and any(
        len(column) > 1 for column in columns
    )


def _numbers(name: str) -> list[int]:
    return [int(part) for part in name.split(".") if _is_number(part)]


def _is_number(part: str) -> bool:
    """Digits as Python counts modules: no leading zeros."""
    return part.isascii() and part.isdigit() and str(int(part)) == part

"""The configuration as a flat list of dotted keys.

Everything that treats all settings alike (loading, saving, comparing, the command line) walks the
dataclasses once here, so that a new field in `scrimp.config.schema` needs no second entry anywhere.
A *leaf* is a field that is no dataclass itself; its key joins the field names with dots:
`train.batch_tokens`. Top-level leaves (`device`) have keys without a dot.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import types
import typing
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar, Union

T = TypeVar("T")

CLOSE = 0.75
"""Likeness of two names, from 0 to 1, from which one may be a typo of the other."""
_LONGEST = 100
"""Characters of a word that are compared: to compare 100,000 with every setting took six seconds."""
_OWN_WORDS = ("memory", "snip")
"""Sections whose names mean something there only."""

NUMBER_OR_PATH = float | Path
"""The type of a setting that takes either."""
_NAMES: dict[object, str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
    Path: "a path",
    NUMBER_OR_PATH: "a number or a path",
}


@dataclasses.dataclass(frozen=True)
class Leaf:
    """One setting: its dotted key, its type without None, and whether it may be unset."""

    key: str
    kind: Any
    """bool, int, float, str, Path, NUMBER_OR_PATH, or a Literal."""
    optional: bool
    default: Any

    @property
    def choices(self) -> tuple[str, ...]:
        """The allowed values of a Literal; empty for every other type."""
        return typing.get_args(self.kind) if typing.get_origin(self.kind) is Literal else ()

    @property
    def expected(self) -> str:
        """The type in words, for messages."""
        return ", ".join(self.choices) if self.choices else _NAMES[self.kind]


@functools.cache
def _hints(section: type[Any]) -> dict[str, Any]:
    """Types of the fields, compiled once: each command asks for all of them several times."""
    return typing.get_type_hints(section)


def leaves(section: type[Any], prefix: str = "") -> dict[str, Leaf]:
    """All leaves below a dataclass, by dotted key, in the order of their definition."""
    found: dict[str, Leaf] = {}
    hints = _hints(section)  # type: ignore[arg-type]  # mypy takes no class for hashable
    for field in dataclasses.fields(section):
        key, hint = prefix + field.name, hints[field.name]
        if dataclasses.is_dataclass(hint):
            found |= leaves(typing.cast(type[Any], hint), key + ".")
            continue
        optional = type(None) in typing.get_args(hint)
        is_union = typing.get_origin(hint) in (Union, types.UnionType) and hint != NUMBER_OR_PATH
        kinds = [kind for kind in typing.get_args(hint) if kind is not type(None)] if is_union else [hint]
        assert len(kinds) == 1, f"{key}: a setting has one type, or one type and None"
        found[key] = Leaf(key=key, kind=kinds[0], optional=optional, default=field.default)
    return found


def sections(section: type[Any]) -> dict[str, type[Any]]:
    """The dataclass-valued fields of a dataclass: the tables of the file."""
    hints = _hints(section)  # type: ignore[arg-type]  # mypy takes no class for hashable
    names = [field.name for field in dataclasses.fields(section)]
    return {name: hints[name] for name in names if dataclasses.is_dataclass(hints[name])}


def flatten(value: Any, prefix: str = "") -> dict[str, Any]:
    """Values of all leaves of a dataclass instance, by dotted key."""
    found: dict[str, Any] = {}
    for field in dataclasses.fields(value):
        item, key = getattr(value, field.name), prefix + field.name
        if dataclasses.is_dataclass(item):
            found |= flatten(item, key + ".")
        else:
            found[key] = item
    return found


def replace_values(config: T, values: Mapping[str, Any]) -> T:
    """A copy of a dataclass instance with some leaves changed, given by dotted key."""
    here: dict[str, Any] = {}
    below: dict[str, dict[str, Any]] = {}
    for key, value in values.items():
        head, _, rest = key.partition(".")
        if rest:
            below.setdefault(head, {})[rest] = value
        else:
            here[head] = value
    for head, inner in below.items():
        here[head] = replace_values(getattr(config, head), inner)
    return dataclasses.replace(config, **here)  # type: ignore[type-var]


def nearest_key(key: str, known: Iterable[str]) -> str | None:
    """The known dotted key that a mistyped one most likely meant; None if nothing is near.

    The name must be close, the section need not be (`steps`, `run.steps` and `train.stpes` for `train.steps`). Only
    `memory` and `snip` use words that mean something else elsewhere: `train.optimizer` is not `memory.optimizer`.
    """
    section, _, name = key[:_LONGEST].lower().replace("-", "_").rpartition(".")
    found: list[tuple[float, float, str]] = []
    for candidate in known:
        its_section, _, its_name = candidate.rpartition(".")
        by_name, by_section = _likeness(name, its_name), _likeness(section, its_section)
        if name == candidate:
            by_section = CLOSE  # a name of no section: nearer than that of a section unlike the given one
        is_elsewhere = bool(section) and its_section in _OWN_WORDS and by_section < CLOSE
        if by_name >= CLOSE and not is_elsewhere:
            found.append((by_name, by_section, candidate))
    # Of equals the one that stands first among the settings.
    return max(found, key=lambda one: one[:2])[2] if found else None


def nearest_word(word: str, known: Iterable[str]) -> str | None:
    """The known word that a mistyped one most likely meant; None if nothing is near."""
    close = difflib.get_close_matches(word[:_LONGEST].lower().replace("-", "_"), list(known), n=1, cutoff=0.6)
    return close[0] if close else None


def _likeness(word: str, other: str) -> float:
    return difflib.SequenceMatcher(None, word, other).ratio()

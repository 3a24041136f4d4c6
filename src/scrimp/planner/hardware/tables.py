"""One TOML table as one dataclass, strictly: unknown, missing and impossible keys are refused by file and key.

Problem  A hardware file is written by hand. A number in GB/s where B/s belong, or a key with a typo, would
         become a confident wrong plan.
Method   The fields of the dataclass are the keys (a field typed by a dataclass is a table below), those
         without a default are required, and every number has a `Range`. Types are converted as in a
         configuration (`scrimp.config.read_toml.convert`). `sources` maps keys to texts, `estimates` lists
         keys; both may name only keys that the file has.
Checked  tests/planner/hardware/test_read.py
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

from scrimp.config import Range, check_range, leaves, nearest_key, nearest_word
from scrimp.config.fields import sections
from scrimp.config.read_toml import MAX_FILE_BYTES, convert
from scrimp.errors import ConfigError
from scrimp.files import read_bounded

T = TypeVar("T")
_ABOUT = ("sources", "estimates", "default_for")
"""Fields that hold texts about the numbers."""


@dataclass(frozen=True)
class Reader:
    """How the values of one file are checked."""

    where: str
    """The file, in messages."""
    ranges: Mapping[str, Range]
    special: Mapping[str, Callable[[Any], Any]]
    """Keys of another form than a number, a text or a table, and how they are read."""


def read_table(file: Path) -> dict[str, Any]:
    """The tables of a TOML file."""
    content = read_bounded(
        file, error=ConfigError, do="check the path of the hardware file", at_most=MAX_FILE_BYTES
    )
    try:
        return tomllib.loads(content.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise ConfigError(
            f"hardware file {file} is not valid TOML in UTF-8",
            got=str(error) or type(error).__name__,
            expected="lines such as `power_watts = 700`, and sections such as [peak]",
            do="correct that line",
        ) from None


def build(kind: type[T], table: object, reader: Reader, prefix: str = "") -> T:
    """The dataclass that a table fills.

    Args:
        prefix: the dotted key of the table in its file, with a dot at its end.
    """
    if not isinstance(table, dict):
        raise ConfigError(
            f"{prefix.rstrip('.') or 'the file'} in {reader.where} is no table", got=repr(table)[:80]
        )
    known = {field.name: field for field in fields(kind)}  # type: ignore[arg-type]  # T is a dataclass
    for name in table:
        if name not in known:
            raise unknown(prefix + name, [prefix + one for one in known], reader.where)
    values: dict[str, Any] = {}
    for name, field in known.items():
        if name in table:
            values[name] = _value(kind, name, table[name], reader, prefix)
        elif field.default is MISSING and field.default_factory is MISSING:
            raise missing(prefix + name, reader.where, "a table" if name in sections(kind) else "a value")
    return kind(**values)


def _value(kind: type[Any], name: str, value: object, reader: Reader, prefix: str) -> Any:
    key = prefix + name
    if key in reader.special:
        return reader.special[key](value)
    if name in _ABOUT:
        return _about(key, value, reader.where)
    below = sections(kind)
    if name in below:
        return build(below[name], value, reader, key + ".")
    found = convert(leaves(kind, prefix)[key], value, reader.where)
    if key in reader.ranges:
        check_range(f"{key} in {reader.where}", found, reader.ranges[key])
    elif not found.strip():
        raise ConfigError(f"{key} in {reader.where} is empty", expected="a name")
    return found


def keys_of(table: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Dotted keys of everything in a table, sections included, but for texts about numbers."""
    found: list[str] = []
    for name, value in table.items():
        if name in _ABOUT:
            continue
        found.append(prefix + name)
        if isinstance(value, dict):
            found += keys_of(value, f"{prefix}{name}.")
    return found


def check_about(table: Mapping[str, Any], where: str) -> None:
    """Refuse sources and estimates of keys that the file does not have."""
    there = keys_of(table)
    for name in ("sources", "estimates"):
        for key in table.get(name, ()):
            if key not in there:
                near = nearest_word(key, there)
                raise ConfigError(
                    f"{name} in {where} names a key that the file does not have",
                    got=repr(key),
                    expected="a key such as power_watts, or a section such as peak",
                    do=f"did you mean {near!r}?" if near else f"remove it from {name}",
                )


def unknown(key: str, known: list[str], where: str) -> ConfigError:
    """The error for a key that nothing reads."""
    near = nearest_key(key, known)
    return ConfigError(
        f"unknown key {key} in {where}",
        expected=f"one of {', '.join(known)}",
        do=f"did you mean {near}?" if near else f"remove {key}",
    )


def missing(key: str, where: str, expected: str) -> ConfigError:
    """The error for a key that must be there."""
    name = key.rpartition(".")[2]
    do = f"add [{key}]" if expected == "a table" else f"add `{name} = ...`"
    return ConfigError(f"{key} is missing in {where}", expected=expected, do=do)


def _about(key: str, value: object, where: str) -> Any:
    """Texts about keys: sources as a table of texts, the others as a list of names."""
    if key.endswith("sources"):
        if isinstance(value, dict) and all(isinstance(text, str) and text.strip() for text in value.values()):
            return value
        raise ConfigError(
            f"{key} in {where} is no table of texts",
            got=repr(value)[:80],
            expected='lines such as power_watts = "data sheet", and sections as "peak"; quote dotted keys',
        )
    if isinstance(value, list) and all(isinstance(text, str) for text in value):
        return tuple(value)
    raise ConfigError(
        f"{key} in {where} is no list of names",
        got=repr(value)[:80],
        expected='a list such as ["power_watts"]',
    )

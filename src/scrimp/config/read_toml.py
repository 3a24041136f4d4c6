"""TOML file to `Config`, strictly.

A key that no field has, a value of another type, or a word outside a Literal is refused, with the
file, the key, what was given, what is allowed and the nearest known key. Nothing is converted
silently but two things: a whole number where a number with a fraction is allowed (`lr = 1`), and `~`
at the start of a path, which no shell expands inside a file.

TOML has no null. A setting that may be unset is unset by leaving its key out, which is the same as
its default: every field that allows None has None as its default (checked in
tests/config/test_load_config.py).
"""

from __future__ import annotations

import dataclasses
import os
import tomllib
import typing
from pathlib import Path
from typing import Any

from scrimp.config.elsewhere import Answer, answer_for, answer_for_section
from scrimp.config.fields import (
    NUMBER_OR_PATH,
    Leaf,
    leaves,
    nearest_key,
    nearest_word,
    replace_values,
    sections,
)
from scrimp.config.renamed import REMOVED, RENAMED
from scrimp.config.schema import Config
from scrimp.errors import ConfigError, typed
from scrimp.files import open_regular

MAX_FILE_BYTES = 2**20
"""A configuration is a few KiB. Beyond this the file is something else, a corpus for example."""

_TOML_NAMES = {dict: "a table", list: "a list", str: "text", bool: "true or false", int: "a whole number"}


def load_config(file: Path | None) -> Config:
    """The configuration in a TOML file of one run; the defaults for None."""
    if file is None:
        return Config()
    return replace_values(Config(), parse_config(_read_text(file), where=str(file)))


def read_table(file: Path) -> dict[str, Any]:
    """The content of a TOML file, as it stands there."""
    return _parsed(_read_text(file), str(file))


def parse_config(text: str, *, where: str = "configuration") -> dict[str, Any]:
    """Checked and converted values by dotted key, from TOML text.

    Args:
        where: name of the text in messages, usually the file.
    """
    return settings_in(_parsed(text, where), where)


def _parsed(text: str, where: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        # tomllib raises plain ValueErrors too (an integer of 5,000 digits), and recurses into nested lists.
        raise ConfigError(
            f"{where} is not valid TOML",
            got=str(error) or type(error).__name__,
            expected='lines such as `steps = 500` under [train], with text in quotes: source = "corpus.txt"',
            do="correct that line; to train on a text file write `scrimp train --data.source FILE`",
        ) from None


def settings_in(table: dict[str, Any], where: str) -> dict[str, Any]:
    """Checked and converted settings by dotted key, of a table of TOML that was read."""
    return _with_new_names(_read_table(table, Config, "", where), where)


def _with_new_names(values: dict[str, Any], where: str) -> dict[str, Any]:
    """The values by the names that settings have today."""
    twice = [old for old in values if RENAMED.get(old) in values]
    if twice:
        old, new = twice[0], RENAMED[twice[0]]
        raise ConfigError(
            f"{old} in {where} is the old name of {new}, which is set too",
            got=f"{old} = {values[old]!r}, {new} = {values[new]!r}",
            expected="one of the two",
            do=f"remove {old}",
        )
    return {RENAMED.get(key, key): value for key, value in values.items()}


def convert(leaf: Leaf, value: object, where: str = "configuration") -> Any:
    """The value as the field's type; ConfigError if it is of another one."""
    if leaf.choices:
        if value in leaf.choices and isinstance(value, str):
            return value
        near = nearest_word(str(value), leaf.choices)
        raise ConfigError(
            f"{leaf.key} in {where} is not one of its choices",
            got=_shown(value),
            expected=f"one of {leaf.expected}",
            do=f"did you mean {near!r}?" if near else None,
        )
    expected = leaf.expected
    if leaf.kind == NUMBER_OR_PATH:
        leaf = dataclasses.replace(leaf, kind=Path if isinstance(value, str) else float)
    # bool is a subclass of int: `steps = true` must not become one step.
    fits = isinstance(value, bool) if leaf.kind is bool else not isinstance(value, bool)
    if leaf.kind is float and fits and isinstance(value, int):
        try:
            return float(value)
        except OverflowError:
            fits = False
    kind = str if leaf.kind is Path else leaf.kind
    if not (fits and isinstance(value, kind)):
        raise ConfigError(
            f"{leaf.key} in {where} has the wrong type",
            got=_shown(value),
            expected=expected,
            do=_type_advice(leaf, value),
        )
    if leaf.kind is not Path:
        return value
    if not value:
        raise ConfigError(
            f"{leaf.key} in {where} is empty", expected="a path", do=f"name one, or leave {leaf.key} out"
        )
    # Asked of the text: a Path forgets the ./ of ./~, by which a folder called ~ is meant.
    path = Path(typing.cast(str, value))
    return expand_home(leaf.key, path) if typing.cast(str, value).startswith("~") else path


def expand_home(key: str, path: Path) -> Path:
    """`~` and `~user` at the start of a path replaced by the home folder."""
    try:
        return path.expanduser()
    except RuntimeError:
        raise ConfigError(
            f"{key} names a home folder that is not known",
            got=path,
            do=f"write the full path, or ./{path} for a folder of that name",
        ) from None


def unknown_key(key: str, where: str) -> ConfigError:
    """The error for a key of the file that no field has."""
    known = leaves(Config)
    settable = {*known, "resume"}
    answer = answer_for(key, dict.fromkeys(settable))
    near = None if answer else nearest_key(key, known)
    if near is None:
        answer = answer or answer_for_section(key, dict.fromkeys(settable))
    what = f"unknown key {key} in {where}"
    if answer is not None:
        return _known_elsewhere(what, key, answer)
    if near is None:
        return ConfigError(what, expected=f"one of {', '.join(known)}", do=f"remove {key}")
    return ConfigError(
        what,
        expected=f"a known key; the nearest is {near}",
        do=f"write {_assignment(near)}, or remove {key}",
    )


def _known_elsewhere(what: str, key: str, answer: Answer) -> ConfigError:
    """The error for a name of another tool."""
    if answer.key is None:
        return ConfigError(what, expected="a known key; Scrimp has none for this", do=answer.note)
    if answer.key == "resume":
        do = f"remove {key}, and go on with a run by `scrimp train --run.dir RUN --resume`"
        return ConfigError(what, expected="an option of the command line", do=do)
    note = f" ({answer.note})" if answer.note else ""
    return ConfigError(
        what,
        expected=f"Scrimp's name for it, {answer.key}",
        do=f"write {_assignment(answer.key)}{note}, or remove {key}",
    )


def _assignment(key: str) -> str:
    """How a file sets a key, and where."""
    section, _, name = key.rpartition(".")
    place = f"under [{section}]" if section else "at the top, before the first [section]"
    return f"`{name} = ...` {place}"


def _read_text(file: Path) -> str:
    try:
        with open_regular(file) as opened:
            size = os.fstat(opened.fileno()).st_size
            content = opened.read(MAX_FILE_BYTES + 1)
        if len(content) > MAX_FILE_BYTES:
            raise ConfigError(
                f"{file} is too large for a configuration",
                got=f"{max(size, len(content)):,} bytes",
                expected=f"at most {MAX_FILE_BYTES:,}",
                do=f"to train on a text file write {typed('train', '--data.source', file)}",
            )
        # utf-8-sig: some editors put a byte order mark first, which TOML 1.0 has no place for.
        return content.decode("utf-8-sig")
    except FileNotFoundError:
        raise ConfigError(
            f"configuration file {file} does not exist",
            expected="a TOML file",
            do="check the path, or leave the file out to train with the defaults",
        ) from None
    except IsADirectoryError:
        raise ConfigError(
            f"configuration file {file} is a folder",
            expected="a TOML file",
            do=f"name the file in it, such as {file / 'config.toml'}",
        ) from None
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"configuration file {file} is not UTF-8 text",
            got=f"byte 0x{error.object[error.start]:02x} at offset {error.start}",
            expected="a TOML file in UTF-8",
            do=f"to train on a file write {typed('train', '--data.source', file)}",
        ) from None
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"configuration file {file} cannot be read", got=reason) from None


def _read_table(table: dict[str, Any], section: type[Any], prefix: str, where: str) -> dict[str, Any]:
    inner = sections(section)
    own = {key: leaf for key, leaf in leaves(section, prefix).items() if "." not in key[len(prefix) :]}
    values: dict[str, Any] = {}
    for name, value in table.items():
        key = prefix + name
        if name in inner:
            if not isinstance(value, dict):
                raise ConfigError(
                    f"{key} in {where} is a section, not a value",
                    got=_shown(value),
                    expected=f"a table: [{key}], with {', '.join(leaves(inner[name]))} below",
                )
            values |= _read_table(value, inner[name], key + ".", where)
        elif key in own:
            values[key] = convert(own[key], value, where)
        elif key in REMOVED:
            continue
        elif key in RENAMED:
            leaf = dataclasses.replace(leaves(Config)[RENAMED[key]], key=key)
            values[key] = convert(leaf, value, where)
        elif isinstance(value, dict):
            raise _unknown_table(key, value, where)
        else:
            raise unknown_key(key, where)
    return values


def _unknown_table(key: str, table: dict[str, Any], where: str) -> ConfigError:
    for name in table:  # `[training] seq_len = 512`: the whole table may be another tool's
        if answer_for(f"{key}.{name}", leaves(Config)):
            return unknown_key(f"{key}.{name}", where)
    near = nearest_word(key, sections(Config))
    if near is None and table:
        # `[optimizer] lr = 1e-3`: no section is near, but the key in it is known elsewhere.
        return unknown_key(f"{key}.{next(iter(table))}", where)
    return ConfigError(
        f"unknown section [{key}] in {where}",
        expected=f"one of {', '.join(f'[{name}]' for name in sections(Config))}",
        do=f"write [{near}] instead" if near else "remove it",
    )


def _shown(value: object) -> str:
    """A value and, where it is not obvious, its type, shortened for a message."""
    text = {True: "true", False: "false"}[value] if isinstance(value, bool) else repr(value)
    text = text if len(text) <= 80 else text[:77] + "..."
    return f"{text} ({_TOML_NAMES[type(value)]})" if isinstance(value, (str, dict, list)) else text


def _type_advice(leaf: Leaf, value: object) -> str | None:
    if leaf.optional and isinstance(value, str) and value.lower() in ("auto", "none", "null", "unset", ""):
        return f"leave {leaf.key} out: unset, Scrimp decides"
    if leaf.kind is int and isinstance(value, float) and value.is_integer():
        return f"write {int(value)}"
    if leaf.kind in (int, float, bool) and isinstance(value, str):
        return "write it without quotes"
    if leaf.kind in (str, Path) and not isinstance(value, (dict, list)):
        return "put it in quotes"
    return None

"""Errors in the words of the command that was called.

Problem  `scrimp prepare` and `scrimp eval` run code that training runs too, whose errors name settings of a run:
         `data.text_column`. These commands have other names for them, `--text-column`, or arguments without a name.
Method   A setting that the command has under the same last name, or in the table, is renamed in every part of the
         error. What stands in backticks is a command line of its own and stays.
Checked  tests/cli/test_advice.py
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from scrimp.cli.parse import flags_of, option, positionals_of
from scrimp.config import Config, leaves
from scrimp.errors import ScrimpError

_OTHER_NAMES: Mapping[tuple[str, str], str] = {
    ("prepare", "data.source"): "SRC",
    ("prepare", "data.vocab_size"): "--bpe-vocab-size",
    ("eval", "data.source"): "--data",
}
"""By command and setting, where the last names differ."""


def in_words_of(name: str, command: type[Any], error: ScrimpError) -> ScrimpError:
    """The same error with the names that a command has for settings; itself where the command takes all settings.

    Args:
        name: of the command.
    """
    flags = flags_of(command)
    renamed = {
        key: written
        for key in leaves(Config)
        if key not in flags and (written := _written(name, command, key))
    }
    if not renamed:
        return error
    pattern = re.compile(rf"`[^`]*`|(?<![\w.-])(?:--)?({'|'.join(map(_either_way, renamed))})(?![\w-])")

    def rename(found: re.Match[str]) -> str:
        return renamed[found[1].replace("-", "_")] if found[1] else found[0]

    def said(part: object | None) -> str | None:
        return None if part is None else pattern.sub(rename, str(part))

    # In place: its class, which decides the exit code, and its traceback stay.
    error.what, error.got, error.expected, error.do = (
        said(error.what) or "",
        said(error.got),
        said(error.expected),
        said(error.do),
    )
    return error


def _written(name: str, command: type[Any], key: str) -> str | None:
    """How a command writes a setting; None: it does not have it."""
    last = key.rpartition(".")[2]
    if (name, key) in _OTHER_NAMES:
        return _OTHER_NAMES[name, key]
    if "." not in key or last not in flags_of(command):
        return None
    return last.upper() if last in positionals_of(command) else option(last)


def _either_way(key: str) -> str:
    """A pattern for a key as files and as the command line write it."""
    return re.escape(key).replace("_", "[_-]")

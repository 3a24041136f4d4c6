"""`Config` to TOML that reads back as an equal `Config`.

Unset values (None) are left out, since TOML has no null and their default is None. A value that
Scrimp decided carries its reason as a comment. Checked in tests/config/test_config_toml.py, for any config.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from scrimp.config.fields import flatten
from scrimp.config.renamed import RENAMED
from scrimp.config.schema import Config


def to_toml(config: Config, reasons: Mapping[str, str] | None = None) -> str:
    """The configuration as TOML text.

    Args:
        reasons: why Scrimp chose a value, by dotted key; written behind the value.
    """
    lines: list[str] = []
    section = ""
    # Keys of no section first: behind a table's header they would belong to the table.
    values = sorted(flatten(config).items(), key=lambda item: "." in item[0])
    for key, value in values:
        if value is None:
            continue
        head, _, name = key.rpartition(".")
        if head != section:
            section = head
            lines += ["", f"[{section}]"] if lines else [f"[{section}]"]
        # One line of printable characters: TOML forbids control characters in comments.
        words = " ".join((reasons or {}).get(key, "").split())
        reason = "".join(letter for letter in words if letter.isprintable())
        lines.append(f"{name} = {toml_value(value)}" + (f"  # {reason}" if reason else ""))
    return "\n".join(lines) + "\n"


def reasons_in(text: str, config: Config) -> dict[str, str]:
    """The reasons that `to_toml` wrote into `text`, for the values that `config` still has."""
    reasons: dict[str, str] = {}
    section = ""
    values = flatten(config)
    for line in text.splitlines():
        if line.startswith("["):
            section = line.strip("[]") + "."
            continue
        name = line.partition(" = ")[0]
        key = RENAMED.get(section + name, section + name)
        before = f"{name} = {toml_value(values.get(key))}  # "
        if line.startswith(before):
            reasons[key] = line.removeprefix(before)
    return reasons


def toml_value(value: Any) -> str:
    """A setting's value as TOML writes it."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (int, float)):
        return repr(value)
    text = str(value)
    if isinstance(value, Path) and text.startswith("~"):
        text = f"./{text}"  # a folder really called ~: reading would expand it to the home folder
    # A JSON string is a TOML basic string, but for DEL, which JSON leaves as it is and TOML forbids.
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")

"""The ways of `scrimp plan`, and which of its options go with which.

::

    --batch      lines of settings, which say all themselves
    --hardware   a search on other hardware
    --tune       short runs here
    none         a plan for this machine

Problem  An option that another way would read is passed over without a word, and its file is never written.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from scrimp.cli.parse import option, renamed_options
from scrimp.errors import ConfigError

if TYPE_CHECKING:
    from scrimp.cli.commands import Plan

HERE: Final = ""
"""The way that no option asks for."""
OPTIONS: Final[Mapping[str, tuple[str, ...]]] = {
    "batch": (),
    "hardware": (
        *("shape", "objective", "tokens", "days", "explain", "what_if", "json", "report"),
        *("save", "statistics", "simulate", "trust_code"),
    ),
    "tune": ("ranks", "trust_code"),
    HERE: ("out", "target", "trust_code"),
}
"""Fields of the command, by the way that reads them."""
_WORDS: Final[Mapping[str, str]] = {
    "hardware": "a search on other hardware",
    "tune": "--tune",
    HERE: "a plan for this machine",
}
_VALUES: Final[Mapping[str, str]] = {"hardware": ", as 8xh100", "tune": ", as 8"}


def refuse_options_of_others(command: Plan) -> None:
    """Refuse two ways at once, and options that another way than the one that is asked for reads.

    Raises:
        ConfigError: by the option.
    """
    given = [
        field.name
        for field in dataclasses.fields(command)
        if field.name not in ("file", "config") and getattr(command, field.name) != field.default
    ]
    ways = [name for name in OPTIONS if name in given]
    if len(ways) > 1:
        raise ConfigError(
            f"{option(ways[1])} does not go with {option(ways[0])}",
            expected="lines of settings, a search on other hardware, or short runs on this machine",
            do="leave one of the two out",
        )
    way = ways[0] if ways else HERE
    for name in given:
        if name != way and name not in OPTIONS[way]:
            raise _misplaced(option(renamed_options(type(command)).get(name, name)), name, way)


def _misplaced(spelt: str, name: str, way: str) -> ConfigError:
    (owner, *_) = (one for one, names in OPTIONS.items() if name in names)
    what = f"{spelt} is an option of {_WORDS[owner]}"
    if way:
        return ConfigError(what, got=f"{spelt} beside {option(way)}", do="leave one of the two out")
    return ConfigError(
        what, got=f"no {option(owner)}", do=f"give {option(owner)}{_VALUES[owner]}, or leave {spelt} out"
    )

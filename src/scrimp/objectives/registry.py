"""Objectives by name; an objective's module, and torch with it, is imported when it is built."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from scrimp.config import ObjectiveConfig, nearest_word
from scrimp.errors import ConfigError

if TYPE_CHECKING:
    from scrimp.objectives.base import Objective

OBJECTIVES = {
    "next-token": "scrimp.objectives.next_token:NextToken",
}
"""Name of an objective to the module and class that is it; the class has `build(settings)`."""


def check(settings: ObjectiveConfig) -> None:
    """Refuse a name that no objective has.

    Raises:
        ConfigError: naming those there are.
    """
    if settings.name in OBJECTIVES:
        return
    near = nearest_word(settings.name.replace("_", "-"), OBJECTIVES)
    raise ConfigError(
        "objective.name names no objective",
        got=repr(settings.name),
        expected=f"one of {', '.join(OBJECTIVES)}",
        do=f"did you mean {near}?" if near else None,
    )


def build(settings: ObjectiveConfig) -> Objective:
    """The objective that the settings name; ConfigError as by `check`."""
    check(settings)
    module, _, name = OBJECTIVES[settings.name].partition(":")
    objective: Objective = getattr(importlib.import_module(module), name).build(settings)
    return objective

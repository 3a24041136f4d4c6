"""Objectives by name; an objective's module, and torch with it, is imported when it is built."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from scrimp import user_code
from scrimp.config import ObjectiveConfig, nearest_word
from scrimp.errors import ConfigError

if TYPE_CHECKING:
    from scrimp.objectives.base import Objective

OBJECTIVES = {
    "next-token": "scrimp.objectives.next_token:NextToken",
    "sft": "scrimp.objectives.sft:SupervisedFineTuning",
    "distill": "scrimp.training.distillation:Distillation",
}
"""Name of an objective to the module and class that is it; the class has `build(settings)`."""
KEY = "objective.name"
_METHODS = ("loss", "head_loss", "count", "head_passes", "reads", "resident_bytes")


def check(settings: ObjectiveConfig) -> None:
    """Refuse a name that no objective has, and code that may not run or is not an objective.

    Raises:
        ConfigError: saying which names there are, or what is wrong with the code.
    """
    if user_code.is_code(settings.name):
        build(settings)
        return
    if settings.name in OBJECTIVES:
        return
    near = nearest_word(settings.name.replace("_", "-"), OBJECTIVES)
    raise ConfigError(
        "objective.name names no objective",
        got=repr(settings.name),
        expected=f"one of {', '.join(OBJECTIVES)}, or FILE.py:NAME",
        do=f"did you mean {near}?" if near else None,
    )


def build(settings: ObjectiveConfig) -> Objective:
    """The objective that the settings name; ConfigError as by `check`."""
    if user_code.is_code(settings.name):
        return _own(settings)
    check(settings)
    module, _, name = OBJECTIVES[settings.name].partition(":")
    objective: Objective = getattr(importlib.import_module(module), name).build(settings)
    return objective


def _own(settings: ObjectiveConfig) -> Objective:
    kind: Any = user_code.load(KEY, settings.name, needs=("build",))
    try:
        objective: Objective = kind.build(settings)
    except Exception as error:
        raise ConfigError(
            f"{KEY}: {settings.name} cannot be built",
            got=f"{type(error).__name__}: {error}",
            expected="a classmethod build(settings) that returns the objective",
        ) from error
    missing = [name for name in _METHODS if not hasattr(objective, name)]
    if missing:
        raise ConfigError(
            f"{KEY}: {settings.name} does not build an objective",
            got=f"a {type(objective).__name__} without {', '.join(missing)}",
            expected="the methods of scrimp.objectives.Objective",
            do="inherit from scrimp.objectives.next_token.NextToken, and write what differs",
        )
    return objective

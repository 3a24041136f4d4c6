"""Recipes: methods of papers on the core's seams. The core never imports one.

A recipe is a folder here:

    __init__.py   what the method is, what it needs besides settings, and what its study's results mean
    train.toml    settings of a run: `scrimp train recipe:NAME`, and any option after it
    study.toml    the study that shows what the method does: `scrimp study recipe:NAME`

Underscores of the folder are hyphens of the name. A study that names its recipe (`recipe = "NAME"`) ends with the lines
that the folder's `findings(results)` makes of its results.

Checked  tests/recipes/test_recipe_files.py
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

from scrimp.config import nearest_word
from scrimp.errors import ConfigError

if TYPE_CHECKING:
    from scrimp.study.results import Results

PREFIX: Final = "recipe:"
_HERE: Final = Path(__file__).parent


def recipes() -> tuple[str, ...]:
    """The names of all recipes."""
    return tuple(sorted(file.parent.name.replace("_", "-") for file in _HERE.glob("*/study.toml")))


def is_recipe(word: str) -> bool:
    """Whether a word where a file may stand names a recipe."""
    return word.startswith(PREFIX)


def settings_file(file: Path) -> Path:
    """The file that FILE of a command is: itself, or that of a recipe. ConfigError: there is no such recipe."""
    return file_of(str(file), "train") if is_recipe(str(file)) else file


def file_of(word: str, kind: Literal["train", "study"]) -> Path:
    """The file of a recipe that a word such as recipe:data-limited names.

    Raises:
        ConfigError: there is no such recipe.
    """
    return _folder(word.removeprefix(PREFIX)) / f"{kind}.toml"


def check(name: str) -> None:
    """Refuse the recipe that a study names where there is none; empty: it names none.

    Raises:
        ConfigError: there is no such recipe.
    """
    if name:
        _folder(name)


def findings(results: Results) -> Sequence[str]:
    """What the recipe of a study says of its results; nothing of a study without one."""
    name = results.study.recipe
    if not name:
        return ()
    module = importlib.import_module(f"{__name__}.{_folder(name).name}")
    found: Sequence[str] = module.findings(results)
    return found


def _folder(name: str) -> Path:
    known = recipes()
    if name not in known:
        near = nearest_word(name, known)
        raise ConfigError(
            f"there is no recipe {name!r}",
            expected=f"one of {', '.join(known)}",
            do=f"did you mean {PREFIX}{near}?" if near else None,
        )
    return _HERE / name.replace("-", "_")

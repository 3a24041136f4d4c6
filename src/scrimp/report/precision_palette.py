"""One letter and one colour for every recipe, the same on the page and in the terminal.

Warm is 4 bit, green is 8 bit, bluish are its integers, cool grey is 16 and 32 bit, and within a width a recipe has its
own shade. The letter says the same without colour. The page's colours stand in `precision.css`, one class per recipe;
those of the terminal stand here. Checked in tests/report/test_precision_palette.py: no letter twice,
every recipe in every palette, contrast of letter and ground.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from scrimp.precision import RECIPES

UNKNOWN: Final = "?"
"""The letter of what is no recipe of this version."""
LETTERS: Final = {
    "fp32": "F",
    "bf16": "b",
    "fp8": "8",
    "fp8_tensor": "T",
    "fp8_row": "R",
    "mxfp8": "X",
    "int8": "I",
    "int8_fallback": "J",
    "int8_hadamard": "H",
    "fp4": "4",
    "nvfp4": "N",
    "mxfp4": "M",
}
TERMINAL: Final = {
    "fp32": ("#14161a", "#8d98a8"),
    "bf16": ("#14161a", "#c6d0dc"),
    "fp8": ("#14161a", "#58b8a4"),
    "fp8_tensor": ("#14161a", "#a9c46c"),
    "fp8_row": ("#14161a", "#3f9c8c"),
    "mxfp8": ("#14161a", "#8ccf9b"),
    "int8": ("#14161a", "#7fc4cf"),
    "int8_fallback": ("#14161a", "#86a8d8"),
    "int8_hadamard": ("#14161a", "#a9a4e0"),
    "fp4": ("#14161a", "#e2604a"),
    "nvfp4": ("#14161a", "#f28a3c"),
    "mxfp4": ("#14161a", "#f6bd4b"),
}
"""Recipe to the colours of letter and ground; a terminal with fewer colours takes the nearest."""


def letter(recipe: str) -> str:
    """One letter."""
    return LETTERS.get(recipe, UNKNOWN)


def css_class(recipe: str) -> str:
    """The class that colours a cell of the page."""
    return f"q-{recipe}" if recipe in LETTERS else "q-other"


def terminal_style(recipe: str) -> str:
    """A style for rich."""
    if recipe not in TERMINAL:
        return "reverse"
    ink, ground = TERMINAL[recipe]
    return f"{ink} on {ground}"


def by_width(recipes: Iterable[str]) -> list[str]:
    """Recipes without repetition, narrow ones first, unknown ones last; within a width as in `RECIPES`."""
    known = list(RECIPES)
    found = set(recipes) - {""}
    return sorted(
        found,
        key=lambda name: (RECIPES[name].bits, known.index(name), "") if name in RECIPES else (999, 0, name),
    )

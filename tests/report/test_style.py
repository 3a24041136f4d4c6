"""Contrast of every colour of the style sheet, in light and in dark, by the WCAG 2 formula."""

import re
from importlib import resources

import pytest

CSS = resources.files("scrimp.report").joinpath("page.css").read_text()
PALETTES = [
    dict(re.findall(r"--([\w-]+): (#\w{6})", block))
    for block in re.findall(r":root \{(.*?)\}", CSS, re.DOTALL)
]
LIGHT, DARK = PALETTES[0], {**PALETTES[0], **PALETTES[1]}


def luminance(colour):
    parts = [int(colour[start : start + 2], 16) / 255 for start in (1, 3, 5)]
    red, green, blue = (p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one, other):
    light, dark = sorted([luminance(one), luminance(other)], reverse=True)
    return (light + 0.05) / (dark + 0.05)


def test_the_formula_knows_black_on_white():
    assert contrast("#000000", "#ffffff") == pytest.approx(21)


@pytest.mark.parametrize("palette", [LIGHT, DARK], ids=["light", "dark"])
@pytest.mark.parametrize("name", ["text", "soft", "good", "warn", "bad", "c1", "c2", "c3", "c4"])
@pytest.mark.parametrize("ground", ["page", "card", "tint", "prompt"])
def test_text_and_lines_can_be_read(palette, name, ground):
    assert contrast(palette[name], palette[ground]) >= 4.5


def test_dark_changes_every_colour():
    assert set(PALETTES[0]) == set(PALETTES[1])

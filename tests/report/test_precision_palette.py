"""Letters and colours of formats: all there, all different, all readable."""

import re
from importlib import resources

import pytest
from rich.style import Style
from test_style import contrast

from scrimp.precision import RECIPES
from scrimp.report.precision_palette import LETTERS, TERMINAL, by_width, css_class, letter, terminal_style

CSS = resources.files("scrimp.report").joinpath("precision.css").read_text()
PALETTES = [
    dict(re.findall(r"--([\w-]+): (#\w{6})\b", block))
    for block in re.findall(r":root \{(.*?)\}", CSS, re.DOTALL)
]


def variable(name):
    return "q-" + name.replace("_", "-")


def test_every_recipe_has_a_letter_of_its_own():
    assert set(LETTERS) == set(TERMINAL) == set(RECIPES)
    assert len(set(LETTERS.values())) == len(LETTERS)
    assert letter("int4") not in LETTERS.values()


def test_every_recipe_has_a_colour_of_its_own_in_light_and_dark():
    for palette in PALETTES:
        colours = [palette[variable(name)] for name in RECIPES]
        assert len(set(colours)) == len(colours)
    for name in [*RECIPES, "int4"]:
        rule = re.search(rf"\.{css_class(name)} \{{ (.*?) \}}", CSS)
        assert rule, name
        shown = variable(name) if name in RECIPES else "q-other"
        assert rule[1] == f"background-color: var(--{shown}); fill: var(--{shown});"


@pytest.mark.parametrize("palette", PALETTES, ids=["light", "dark"])
@pytest.mark.parametrize("name", [*RECIPES, "other"])
def test_letters_can_be_read_on_their_cells(palette, name):
    wide = name == "other" or RECIPES[name].bits > 8
    assert contrast(palette["ink-wide" if wide else "ink"], palette[variable(name)]) >= 4.5


@pytest.mark.parametrize("palette", PALETTES, ids=["light", "dark"])
def test_the_selected_cell_can_be_found(palette):
    rings = palette["ring"], palette["ring-inner"]
    for name in RECIPES:
        assert max(contrast(ring, palette[variable(name)]) for ring in rings) >= 4.5


def hue_is_warm(colour):
    red, _, blue = (int(colour[start : start + 2], 16) for start in (1, 3, 5))
    return red > 1.4 * blue


@pytest.mark.parametrize("palette", PALETTES, ids=["light", "dark"])
def test_only_four_bits_are_warm(palette):
    for name, entry in RECIPES.items():
        red, green, _ = (int(palette[variable(name)][start : start + 2], 16) for start in (1, 3, 5))
        assert (hue_is_warm(palette[variable(name)]) and red > green) == (entry.bits == 4)


def test_terminal_styles_are_known_to_rich_and_readable():
    for name in RECIPES:
        assert Style.parse(terminal_style(name)).bgcolor is not None
        assert contrast(*TERMINAL[name]) >= 4.5
    assert Style.parse(terminal_style("int4")).reverse


def test_narrow_formats_come_first_and_strangers_last():
    assert by_width(["int4", "bf16", "fp8", "mxfp8", "nvfp4", "fp8", ""]) == [
        "nvfp4", "fp8", "mxfp8", "bf16", "int4",
    ]  # fmt: skip

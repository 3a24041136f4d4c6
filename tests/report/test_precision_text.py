"""The map in the terminal: what is printed can be read back, with and without colour."""

import io
import re
from types import SimpleNamespace

import pytest
from fake_run import SPLIT, analysis, plan_of
from hypothesis import given
from hypothesis import strategies as st
from property_tests import examples
from rich.console import Console

from scrimp.errors import PlanError
from scrimp.precision import RECIPES, LinearPrecision
from scrimp.report.precision_palette import LETTERS
from scrimp.report.precision_text import ROWS, precision_map_text

NAMES = {letter: name for name, letter in LETTERS.items()}


def shown(layers, shares=None, width=80, color=None):
    console = Console(file=io.StringIO(), width=width, color_system=color, force_terminal=color is not None)
    console.print(precision_map_text(layers, shares))
    return console.file.getvalue()


def read_back(text):
    """Block to a list of recipes, of the rows of a printed map."""
    found = {}
    for line in text.splitlines():
        row = re.fullmatch(r"(\d+)(?:-(\d+))?((?: +\w)+) *", line)
        if row:
            recipes = [NAMES[letter] for letter in row[3].split()]
            found |= dict.fromkeys(range(int(row[1]), int(row[2] or row[1]) + 1), recipes)
    return found


@examples(40)
@given(
    st.lists(
        st.tuples(*[st.tuples(*[st.sampled_from(["bf16", "fp8", "nvfp4"])] * 3)] * 2), min_size=1, max_size=9
    )
)
def test_every_letter_is_the_format_of_its_gemm(blocks):
    layers = {
        f"blocks.{number}.{name}": choice
        for number, block in enumerate(blocks)
        for name, choice in zip(("attention.qkv", "mlp.down"), block, strict=True)
    }
    assert read_back(shown(layers)) == {
        number: [name for choice in block for name in choice] for number, block in enumerate(blocks)
    }


def test_every_recipe_is_in_the_legend_with_its_letter():
    text = shown({f"l.{n}.x": (name,) * 3 for n, name in enumerate(RECIPES)}, width=240)
    for name, letter in LETTERS.items():
        assert f"{letter}  {name} {100 / len(RECIPES):.1f}%" in text


def test_equal_blocks_share_a_line():
    layers = {f"blocks.{n}.{k}": LinearPrecision.of("bf16") for n in range(80) for k in ("a", "b")}
    lines = shown(layers | {"head": LinearPrecision.of("fp32")}).splitlines()
    assert len(lines) == 8
    assert lines[3].split() == ["0-79", *"bbbbbb"]
    assert lines[5].split() == ["head", *"FFF"]
    del layers["blocks.50.a"], layers["blocks.50.b"]
    assert [line.split()[0] for line in shown(layers).splitlines()[3:5]] == ["0-49", "51-79"]
    layers["blocks.40.a"] = ("nvfp4", "bf16", "bf16")
    assert [line.split()[0] for line in shown(layers).splitlines()[3:6]] == ["0-39", "40", "41-49"]


def test_shares_are_of_flops_where_they_are_given():
    layers = {"b.0.x": ("nvfp4",) * 3, "b.0.y": ("fp8", "fp8", "nvfp4")}
    assert "N  nvfp4 66.7%   8  fp8 33.3%" in shown(layers)
    text = shown(layers, {"b.0.x": 9e9, "b.0.y": 1e9})
    assert "N  nvfp4 93.3%   8  fp8 6.7%" in text
    assert "shares of the linear FLOPs (counted)" in text


def test_it_takes_what_names_three_formats():
    three = {"fprop": "fp8", "dgrad": "nvfp4", "wgrad": "bf16"}
    ways = (LinearPrecision(**three, saved="bf16"), SimpleNamespace(**three), three, ["fp8", "nvfp4", "bf16"])
    assert len({shown({"x": way}) for way in ways}) == 1
    for wrong in ("fp8", ("fp8", "fp8"), {"fprop": "fp8"}, None, (1, 2, 3)):
        with pytest.raises(PlanError, match=r"net\.x has no format"):
            precision_map_text({"net.x": wrong})


def test_any_module_has_a_map():
    layers = {
        "0": ("fp8",) * 3,
        "net.2": ("mxfp4", "mxfp8", "int4"),
        "[red]x[/]": ("fp8",) * 3,
        "": ("bf16",) * 3,
    }
    lines = shown(layers).splitlines()
    assert [line.split()[-3:] for line in lines[2:5]] == [["8"] * 3, ["M", "X", "?"], ["8"] * 3]
    assert "[red]x[/]" in lines[4]
    assert "(the module itself)" in lines[5]
    assert "no linear layers" in shown({})


def test_colour_adds_nothing_but_colour():
    found = analysis(400, blocks=12, linears=SPLIT, prefix="model.layers")
    coloured = shown(plan_of(found)["gemms"], color="truecolor")
    assert "\x1b[" in coloured
    assert re.sub(r"\x1b\[[\d;]*m", "", coloured) == shown(plan_of(found)["gemms"])
    assert "\x1b" not in shown(plan_of(found)["gemms"])


def test_a_block_of_seven_layers_fits_into_eighty_characters():
    found = analysis(400, blocks=32, linears=SPLIT, prefix="model.layers")
    text = shown(plan_of(found)["gemms"], width=80)
    assert max(map(len, text.splitlines())) <= 80
    back = read_back(text)
    assert len(back) == 32
    for number, recipes in back.items():
        rows = [found["layers"][f"model.layers.{number}.{name}"]["gemms"] for name in SPLIT]
        assert recipes == [choice["choice"] for row in rows for choice in row.values()]


def test_a_very_deep_mixed_model_is_cut_and_says_so():
    layers = {f"b.{n}.x": ("fp8" if n % 2 else "bf16",) * 3 for n in range(ROWS + 50)}
    assert "… 50 more rows" in shown(layers)


def test_text_from_outside_stays_text():
    text = shown({"a\x1b[31m\u202e\nb": ("fp8", "\x1b]0;x\x07", "fp8")}, width=200)
    assert not re.search("[\x00-\x09\x0b-\x1f\u202e]", text)

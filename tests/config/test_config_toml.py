"""Any configuration, written as TOML and read again, is the same configuration."""

from __future__ import annotations

import string
import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from property_tests import examples

from scrimp.config import Config, flatten, leaves, parse_config, reasons_in, replace_values, to_toml
from scrimp.config.fields import NUMBER_OR_PATH, Leaf

# Every character that a file name or a name can hold; lone surrogates are refused by check_values.
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
PATHS = (TEXT.filter(lambda text: "\0" not in text) | st.sampled_from(["~", "~/a", "~user/x", "."])).map(Path)
VALUES = {
    bool: st.booleans(),
    int: st.integers(),
    float: st.floats(allow_nan=False),
    str: TEXT,
    Path: PATHS,
    NUMBER_OR_PATH: st.floats(allow_nan=False) | PATHS,
}


def values_of(leaf: Leaf) -> st.SearchStrategy[object]:
    values = st.sampled_from(leaf.choices) if leaf.choices else VALUES[leaf.kind]
    return st.none() | values if leaf.optional else values


CONFIGS = st.fixed_dictionaries({key: values_of(leaf) for key, leaf in leaves(Config).items()}).map(
    lambda values: replace_values(Config(), values)
)
REASONS = st.dictionaries(st.sampled_from(list(leaves(Config))), st.text(max_size=20))


@examples(150)
@given(CONFIGS, REASONS)
def test_reading_what_was_written_gives_the_same_configuration(
    config: Config, reasons: dict[str, str]
) -> None:
    text = to_toml(config, reasons)
    again = replace_values(Config(), parse_config(text))
    assert again == config
    assert {key: type(value) for key, value in flatten(again).items()} == {
        key: type(value) for key, value in flatten(config).items()
    }


def test_reasons_stand_behind_their_values_on_one_line() -> None:
    text = to_toml(Config(), {"train.steps": "two\nlines", "precision": "because"})
    assert "steps = 200  # two lines\n" in text
    assert 'precision = "auto"  # because\n' in text


@pytest.mark.parametrize(
    "text", ["fp8,*.wgrad=bf16,blocks.0.*=bf16", "fp8/fp4/bf16, head=fp8", "bf16,*[0-3]*=fp8"]
)
def test_rules_are_one_string(text: str) -> None:
    config = replace_values(Config(), {"precision": text})
    written = to_toml(config, {"precision": "because"})
    assert f'precision = "{text}"  # because\n' in written
    assert replace_values(Config(), parse_config(written)) == config
    assert reasons_in(written, config) == {"precision": "because"}


def test_unset_values_are_left_out_and_sections_come_in_order() -> None:
    table = tomllib.loads(to_toml(Config()))
    assert "dir" not in table["run"]
    assert list(table) == [
        "device",
        "precision",
        "backend",
        "run",
        "data",
        "model",
        "adapter",
        "train",
        "objective",
        "optimizer",
        "schedule",
        "evaluation",
        "checkpoint",
        "layout",
        "outer",
        "memory",
        "snip",
    ]


def test_text_is_escaped() -> None:
    nasty = '"""' + string.printable + "\x7f\x00é\u2028\U0001f600\\"
    config = replace_values(Config(), {"data.source": nasty})
    assert tomllib.loads(to_toml(config))["data"]["source"] == nasty

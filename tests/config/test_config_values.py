"""Impossible values are refused, each with its key, its value and what is allowed."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scrimp.config import RANGES, Config, Range, check_values, leaves, parse_bytes, replace_values
from scrimp.config.fields import NUMBER_OR_PATH
from scrimp.errors import ConfigError
from scrimp.precision import parse_rules

NUMERIC = {key: leaf for key, leaf in leaves(Config).items() if leaf.kind in (int, float, NUMBER_OR_PATH)}


def refusal(key: str, value: object) -> str:
    with pytest.raises(ConfigError) as caught:
        check_values(replace_values(Config(), {key: value}))
    return str(caught.value)


def test_defaults_are_possible() -> None:
    check_values(Config())


def test_every_numeric_setting_has_a_range_and_no_other() -> None:
    assert set(RANGES) == set(NUMERIC)


@pytest.mark.parametrize("key", RANGES)
def test_ends_of_each_range(key: str) -> None:
    allowed = RANGES[key]
    step = 1 if NUMERIC[key].kind is int else 1e-9
    low = allowed.low + step if allowed.above else allowed.low
    high = allowed.high - step if allowed.below else allowed.high
    for value in (low, high):
        assert value in allowed
    for value in (allowed.low - 1, allowed.high + 1, math.nan, math.inf, -math.inf):
        message = refusal(key, value)
        assert message.startswith(f"{key} is out of range - got ")
        assert str(allowed) in message
    if allowed.above:
        refusal(key, allowed.low)
    if allowed.below:
        refusal(key, allowed.high)


def test_a_range_says_what_it_allows() -> None:
    assert str(Range(1, 2**31 - 1)) == "1 or more"
    assert str(Range(0, 1)) == "0 to 1"
    assert str(Range(0, 1, above=True)) == "above 0, at most 1"
    assert str(Range(0, 1, below=True)) == "0 or more, below 1"


@pytest.mark.parametrize(
    ("key", "value", "part"),
    [
        ("data.source", "", "data.source is empty"),
        ("data.source", " \n", "data.source is empty"),
        ("data.source", "a\0b", "NUL"),
        ("data.text_column", "", "data.text_column is empty"),
        ("run.dir", Path("a\0b"), "NUL"),
        ("run.dir", Path("caf\udce9"), "not valid text"),
        ("device", "gpu", "auto, cpu, cuda or cuda:N"),
        ("device", "cuda:-1", "cuda:N"),
        ("device", "cuda:0\n", "cuda:N"),
        ("precision", "bf61", "did you mean bf16?"),
        ("precision", "", "precision is empty"),
        ("precision", "fp8,bf16", "not the first rule"),
        ("precision", "fp8,*.wgrad=fp88", "did you mean fp8?"),
        ("schedule.name", "cosin", "schedule.name"),
        ("model.preset", "llama-60", "llama-60m"),
        ("budget.device_memory", "16", "budget.device_memory"),
        ("budget.host_memory", "0GB", "budget.host_memory"),
    ],
)
def test_impossible_texts(key: str, value: object, part: str) -> None:
    assert part in refusal(key, value)


@pytest.mark.parametrize("text", ["auto", "fp8", "fp8/fp8/bf16", "*.wgrad=bf16", "fp8,*.wgrad=bf16,head=fp8"])
def test_possible_precisions(text: str) -> None:
    config = replace_values(Config(), {"precision": text})
    check_values(config)
    assert config.precision_rules == parse_rules(text)


def test_an_unknown_preset_is_refused_even_where_weights_replace_it() -> None:
    config = replace_values(Config(), {"model.preset": "mine", "model.weights": Path("folder")})
    with pytest.raises(ConfigError, match=r"model\.preset"):
        check_values(config)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("16GB", 16 * 10**9),
        ("16GiB", 16 * 2**30),
        ("15.5GiB", 15.5 * 2**30),
        ("16 gb", 16 * 10**9),
        ("0.5tib", 2**39),
        ("512MB", 512 * 10**6),
        ("1KiB", 1024),
        ("7B", 7),
        (" 2 PiB ", 2 * 2**50),
    ],
)
def test_sizes_in_bytes(text: str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize(
    "text",
    ["", "16", "GB", "16G", "16 G B", "-1GB", "1e9B", "1,5GB", "16GBit", "٣GB", "inf GB", "9" * 400 + "GB"],
)
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"budget\.x .* 16GB .* 16GiB"):
        parse_bytes(text, key="budget.x")


@given(st.integers(1, 10**6), st.sampled_from(["B", "KB", "KiB", "MB", "MiB", "GB", "GiB", "TB", "TiB"]))
def test_whole_sizes_are_exact(number: int, unit: str) -> None:
    base = 1024 if "i" in unit else 1000
    assert parse_bytes(f"{number}{unit}") == number * base ** " KMGT".index(unit[0].replace("B", " "))

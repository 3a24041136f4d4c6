"""Weights become whole shares without a rounding; what is no mixture is refused by what is wrong with it."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scrimp.config import Config, check_values
from scrimp.config.mixture import MOST_PARTS, labels_of, mix_text, mixed_sources
from scrimp.errors import ConfigError


def shares(text: str) -> dict[str, int]:
    return {source.name: source.share for source in mixed_sources(text)}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a.txt=0.7,stdlib=0.3", {"a.txt": 7, "stdlib": 3}),
        ("a=70, b = 30", {"a": 7, "b": 3}),
        ("a=1,b=1,c=1", {"a": 1, "b": 1, "c": 1}),
        ("a=2.5e-1,b=.75", {"a": 1, "b": 3}),
        ("x=y=0.1,hf:o/n:c=0.2", {"x=y": 1, "hf:o/n:c": 2}),
        ("a=0.5,b=0,c=0.00,d=1", {"a": 1, "b": 0, "c": 0, "d": 2}),
        (f"a={MOST_PARTS - 1},b=1", {"a": MOST_PARTS - 1, "b": 1}),
    ],
)
def test_weights_are_read_as_they_are_written(text: str, expected: dict[str, int]) -> None:
    assert shares(text) == expected


@given(
    st.lists(st.integers(0, 999), min_size=2, max_size=8).filter(any), st.integers(0, 3), st.integers(1, 50)
)
def test_only_the_ratios_count_and_they_are_exact(weights: list[int], digits: int, factor: int) -> None:
    text = ",".join(f"s{n}={weight * factor / 10**digits!r}" for n, weight in enumerate(weights))
    found = list(shares(text).values())
    assert [Fraction(one, sum(found)) for one in found] == [Fraction(one, sum(weights)) for one in weights]
    again = mix_text(mixed_sources(text))
    assert mix_text(mixed_sources(again)) == again


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("a.txt=1", "has one source"),
        ("a.txt", "no source and weight"),
        ("a=1,", "no source and weight"),
        ("=1,b=1", "no source and weight"),
        ("a=1,b=2,a=3", "a source twice"),
        ("a=0,b=0.0", "trains on nothing"),
        ("a=.,b=1", "weight of a"),
        ("a=0.0.0,b=1", "weight of a"),
        ("a=1,b=", "weight of b"),
        ("a=1,b=-0.5", "weight of b"),
        ("a=nan,b=1", "weight of a"),
        ("a=1,b=inf", "weight of b"),
        ("a=1,b=1e999", "weight of b"),
        ("a=1,b=1e-999999999", "weight of b"),
        ("a=1,b=much", "weight of b"),
        ("a=1,b=1/3", "weight of b"),
        ("a=0.3333333,b=0.6666667", "too fine"),
        (f"a={MOST_PARTS},b=1", "too fine"),
        ("a=1e-300,b=1", "too fine"),
        (",".join(f"s{n}=1" for n in range(65)), "too many sources"),
    ],
)
def test_what_is_no_mixture_is_refused(text: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        mixed_sources(text)


def test_a_mixture_stands_alone() -> None:
    config = Config()
    mixed = replace(config, data=replace(config.data, mix="a=1,b=1"))
    check_values(mixed)
    with pytest.raises(ConfigError, match=r"data\.mix and data\.source contradict"):
        check_values(replace(mixed, data=replace(mixed.data, source="c.txt")))
    check_values(replace(mixed, data=replace(mixed.data, mix="a=1,b=0")))
    with pytest.raises(ConfigError, match="source of weight 0"):
        check_values(replace(mixed, data=replace(mixed.data, mix="a=1,b=0", held_out=0.0)))
    with pytest.raises(ConfigError, match=r"data\.held_out of a mixture"):
        check_values(replace(mixed, data=replace(mixed.data, held_out=Path("c.txt"))))


def test_labels_are_short_where_that_is_clear() -> None:
    assert labels_of(["/data/web.jsonl", "stdlib", "hf:owner/name"]) == ["web.jsonl", "stdlib", "name"]
    assert labels_of(["/one/train.txt", "/two/train.txt"]) == ["/one/train.txt", "/two/train.txt"]

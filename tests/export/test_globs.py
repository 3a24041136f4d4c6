"""Patterns say exactly who has which choice, to any reader of globs."""

from __future__ import annotations

import fnmatch
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from property_tests import examples

from scrimp.export.globs import collapse

PARTS = st.sampled_from(["blocks", "mlp", "down", "0", "1", "2", "10", "01", "a[0]", "*", "x?", "-1"])
NAMES = st.lists(PARTS, min_size=1, max_size=5).map(".".join)
GRIDS = st.builds(
    lambda depth, experts, tails: [
        f"b.{i}.e.{j}.{t}" for i in range(depth) for j in range(experts) for t in tails
    ],
    st.integers(1, 4),
    st.integers(1, 3),
    st.sets(st.sampled_from(["up", "down"]), min_size=1),
)


@pytest.mark.slow
@examples(300)
@given(names=st.one_of(st.lists(NAMES, min_size=1, max_size=30), GRIDS), data=st.data())
def test_reading_the_patterns_gives_the_choices_back_in_any_order(
    names: list[str], data: st.DataObject
) -> None:
    choices = {name: data.draw(st.sampled_from("ab")) for name in names}
    patterns = collapse(choices)
    random.Random(len(names)).shuffle(patterns)
    for name, choice in choices.items():
        assert {key for pattern, key in patterns if fnmatch.fnmatch(name, pattern)} == {choice}
    assert len(patterns) <= len(choices)
    assert all(any(fnmatch.fnmatch(name, pattern) for name in choices) for pattern, _ in patterns)


def test_a_family_with_one_choice_is_one_glob_and_a_mixed_one_exact_names() -> None:
    choices = {f"blocks.{i}.{layer}": "fp8" for i in range(12) for layer in ("mlp.up", "mlp.down")}
    choices["blocks.7.mlp.up"] = "bf16"
    patterns = dict(collapse(choices))
    assert patterns["blocks.*.mlp.down"] == "fp8"
    assert {name for name in patterns if "up" in name} == {f"blocks.{i}.mlp.up" for i in range(12)}


def test_experts_of_a_block_stay_one_glob_where_blocks_differ() -> None:
    choices = {f"layers.{i}.experts.{j}.w1": "ab"[i] for i in range(2) for j in range(8)}
    assert collapse(choices) == [("layers.0.experts.*.w1", "a"), ("layers.1.experts.*.w1", "b")]


def test_a_family_with_gaps_is_not_taken_for_the_whole_one() -> None:
    odd = {f"blocks.{i}.out": "fp8" for i in (1, 3, 5)}
    assert [pattern for pattern, _ in collapse(odd)] == list(odd)
    assert collapse({"blocks.0.out": "fp8"}) == [("blocks.0.out", "fp8")]


def test_a_glob_that_would_catch_another_family_is_not_taken() -> None:
    choices = {f"blocks.{i}.mlp.down": "fp8" for i in range(3)} | {"blocks.0.moe.mlp.down": "bf16"}
    assert "blocks.*.mlp.down" not in dict(collapse(choices))

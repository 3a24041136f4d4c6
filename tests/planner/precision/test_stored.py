"""Formats of frozen weights under a budget of bytes, against all combinations."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scrimp.errors import PlanError
from scrimp.planner.precision.stored import choose_stored, stored_text, weight_bytes
from scrimp.precision import stored_in

SHAPES = {"blocks.0.a": (64, 32), "blocks.0.b": (32, 128), "blocks.1.a": (64, 32), "blocks.1.b": (32, 128)}
FORMATS = ("nvfp4", "fp8", "bf16")


def test_bytes_are_those_of_codes_and_scales() -> None:
    assert weight_bytes((64, 32), "bf16") == 4096
    assert weight_bytes((64, 32), "nvfp4") == 1024 + 8 + 4
    assert weight_bytes((64, 32), "fp8") == 2048 + 4


@given(st.lists(st.floats(1e-6, 1.0), min_size=8, max_size=8), st.floats(0.27, 1.0))
def test_no_combination_within_the_budget_costs_less(numbers: list[float], share: float) -> None:
    costs = {layer: {"nvfp4": numbers[2 * i], "fp8": numbers[2 * i + 1]} for i, layer in enumerate(SHAPES)}
    chosen = choose_stored(costs, SHAPES, share)

    def cost(formats: tuple[str, ...]) -> float:
        return sum((costs[layer] | {"bf16": 0.0})[name] for layer, name in zip(SHAPES, formats, strict=True))

    def size(formats: tuple[str, ...]) -> int:
        return sum(weight_bytes(shape, name) for shape, name in zip(SHAPES.values(), formats, strict=True))

    most = share * size(("bf16",) * 4)
    best = min(cost(one) for one in itertools.product(FORMATS, repeat=4) if size(one) <= most)
    found = tuple(chosen.values())
    assert size(found) <= most * (1 + 1e-9)
    assert cost(found) <= best * 1.002
    text = stored_text(chosen)
    assert {layer: stored_in(text, layer) or "bf16" for layer in SHAPES} == chosen


def test_a_budget_below_the_smallest_format_is_refused() -> None:
    costs = {layer: {"nvfp4": 1.0, "fp8": 0.1} for layer in SHAPES}
    with pytest.raises(PlanError, match=r"share of bf16's"):
        choose_stored(costs, SHAPES, 0.2)

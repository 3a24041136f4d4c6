"""Bytes that are kept of an input, against the tensors that quantizing makes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from property_tests import examples

from scrimp.formats import quantize
from scrimp.gemm.problem import ROWS, operands_of
from scrimp.precision import HIGH_PRECISION, RECIPES, capacity, saved_bytes

QUANTIZED = [name for name in RECIPES if name not in HIGH_PRECISION]


@examples(60)
@given(st.sampled_from(QUANTIZED), st.integers(1, 300), st.integers(1, 70))
def test_codes_take_the_bytes_that_are_said(name: str, tokens: int, features: int) -> None:
    operand = operands_of("wgrad", name)[1]
    assert operand is not None
    x = torch.randn(tokens, features)
    codes = quantize(x, operand.element, operand.scaling, ROWS, hadamard=operand.hadamard)
    assert saved_bytes(name, tokens, features) == codes.nbytes
    assert saved_bytes(name, tokens, features, compiled=True) == capacity(tokens, features) >= codes.nbytes


@pytest.mark.parametrize(("saved", "each"), [("bf16", 2), ("fp32", 4), ("recompute", 0)])
def test_what_is_no_code_takes_the_bytes_of_its_type(saved: str, each: int) -> None:
    for compiled in (False, True):
        assert saved_bytes(saved, 24, 5, compiled=compiled) == each * 24 * 5


def test_a_grouped_layer_in_a_graph_keeps_the_input_itself() -> None:
    assert saved_bytes("nvfp4", 24, 5, compiled=True, grouped=True) == 2 * 24 * 5

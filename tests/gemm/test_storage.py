"""Codes travel through a compiled graph as bytes: nothing is lost, and the bytes suffice."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from planned_cases import QUANTIZED, random
from property_tests import examples

from scrimp.formats import Noise, QuantizedTensor
from scrimp.gemm.backends import ReferenceBackend
from scrimp.gemm.problem import AXES, Use, operands_of
from scrimp.gemm.storage import CODES, pack, saved_class, unpack
from scrimp.precision import capacity


def codes_of(recipe: str, tokens: int, features: int) -> QuantizedTensor:
    """What a forward pass keeps of an input."""
    operand = operands_of("wgrad", recipe)[1]
    x = random(tokens, features, seed=tokens + 1000 * features)
    return ReferenceBackend().store(x, Use(operand, AXES["wgrad"][1], Noise(2)))


def same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Type, shape and every bit."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return torch.equal(*(one.reshape(-1).view(torch.uint8) for one in (a, b)))


@examples(150)
@given(st.sampled_from(QUANTIZED), st.integers(0, 300), st.integers(1, 70))
@example("nvfp4", 1, 1)
@example("fp8_tensor", 0, 1)
@example("fp8_row", 0, 3)
@example("fp8", 129, 1)
@example("mxfp4", 33, 2)
@example("fp4", 0, 5)
def test_packed_codes_come_back_bit_for_bit(recipe: str, tokens: int, features: int) -> None:
    codes = codes_of(recipe, tokens, features)
    packed = pack(codes)
    assert packed.dtype == torch.uint8
    assert packed.numel() == capacity(tokens, features) >= codes.nbytes
    found = unpack(packed, recipe, (tokens, features))
    assert same_bytes(found.payload, codes.payload)
    assert same_bytes(found.scales, codes.scales)
    assert (found.tensor_scale is None) == (codes.tensor_scale is None)
    if found.tensor_scale is not None and codes.tensor_scale is not None:
        assert same_bytes(found.tensor_scale.reshape(1), codes.tensor_scale.reshape(1))
    assert (found.operand, found.axis, found.shape) == (codes.operand, codes.axis, codes.shape)
    assert torch.equal(found.dequantize(), codes.dequantize())


@pytest.mark.parametrize("recipe", ["fp8", "fp8_tensor", "fp8_row", "mxfp8"])
def test_the_unused_bytes_of_8_bit_codes_are_few(recipe: str) -> None:
    """At a usual size: under 7 percent."""
    used = codes_of(recipe, 1024, 64).nbytes
    assert capacity(1024, 64) < 1.07 * used


def test_codes_that_are_not_finite_come_back_as_nan() -> None:
    operand = operands_of("wgrad", "nvfp4")[1]
    x = random(40, 8)
    x[3, 2] = torch.inf
    codes = ReferenceBackend().store(x, Use(operand, -2, Noise()))
    assert unpack(pack(codes), "nvfp4", (40, 8)).dequantize().isnan().all()


def test_codes_of_all_recipes_are_one_class_to_a_graph() -> None:
    assert {saved_class(name) for name in QUANTIZED} == {CODES}
    assert [saved_class(name) for name in ("bf16", "fp32", "recompute")] == ["bf16", "fp32", "recompute"]


@pytest.mark.parametrize("recipe", QUANTIZED)
def test_every_part_begins_where_kernels_can_read_it(recipe: str) -> None:
    packed = pack(codes_of(recipe, 130, 7))
    codes = unpack(packed, recipe, (130, 7))
    for part in (codes.payload, codes.scales):
        assert (part.data_ptr() - packed.data_ptr()) % 16 == 0

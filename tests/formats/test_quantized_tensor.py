"""Packed tensors: the values of fake quantization, the predicted bytes, nothing done to the input."""

from __future__ import annotations

import math

import pytest
import torch
from slow_oracle import COMBINATIONS
from torch import Tensor

from scrimp.formats import Noise, Operand, QuantizedTensor, fake_quantize, quantize
from scrimp.precision import storage_bytes

EVERY_COMBINATION = pytest.mark.parametrize(("element", "scaling"), COMBINATIONS)
SQUARE = [(e, s) for e, s in COMBINATIONS if s in ("tensor", "block", "nvfp4_2d")]
ROUNDINGS = ("nearest", "stochastic")
OPERANDS = [
    Operand(element, scaling, rounding, hadamard, four_over_six)
    for element, scaling in COMBINATIONS
    for rounding in ROUNDINGS
    for hadamard in (False, True)
    for four_over_six in (
        (False, True) if scaling.startswith("nvfp4") and rounding == "nearest" else (False,)
    )
] + [Operand("int8", "tile", fallback=True)]


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


def packed(x: Tensor, operand: Operand, axis: int, noise: Noise | None = None) -> QuantizedTensor:
    return quantize(
        x,
        operand.element,
        operand.scaling,
        axis,
        operand.rounding,
        hadamard=operand.hadamard,
        four_over_six=operand.four_over_six,
        fallback=operand.fallback,
        noise=noise,
    )


@pytest.mark.parametrize("operand", OPERANDS, ids=str)
@pytest.mark.parametrize("axis", [-1, -2, 0, 1])
@pytest.mark.every(13)
def test_packed_values_are_those_of_fake_quantization_bit_for_bit(operand: Operand, axis: int) -> None:
    for shape in ((37, 150), (64, 96), (1, 33), (129, 1)):
        x, noise = normal(*shape), Noise(3, first_row=5, first_column=9)
        ours = packed(x, operand, axis, noise)
        fake = fake_quantize(x, operand, axis, noise=noise).dequantize()
        assert ours.dequantize().equal(fake)
        rotated = fake_quantize(x, operand, axis, noise=noise, keep_rotation=True)
        matrix = ours.dequantize_matrix()
        assert matrix.values.equal(rotated.values)
        assert (matrix.outer is None) == (rotated.outer is None)
        assert matrix.dequantize().equal(rotated.dequantize())


@EVERY_COMBINATION
@pytest.mark.parametrize("shape", [(1,), (31,), (2, 3), (128, 128), (129, 257), (5, 7, 33), (2, 0, 17)])
@pytest.mark.every(4)
def test_bytes_are_those_that_planning_predicts(element: str, scaling: str, shape: tuple[int, ...]) -> None:
    if scaling in ("block", "nvfp4_2d") and len(shape) < 2:
        return
    for axis in range(-len(shape), 0):
        moved = [size for other, size in enumerate(shape) if other != axis % len(shape)]
        for hadamard in (False, True):
            length = math.ceil(shape[axis] / 16) * 16 if hadamard else shape[axis]
            ours = quantize(torch.zeros(shape), element, scaling, axis, hadamard=hadamard)
            assert ours.nbytes == storage_bytes([*moved, length], element, scaling)


@EVERY_COMBINATION
def test_the_input_is_neither_changed_nor_watched_by_autograd(element: str, scaling: str) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.nn.Parameter(normal(48, 80).to(dtype))
        before = x.detach().clone()
        for hadamard in (False, True):
            operand = Operand(element, scaling, hadamard=hadamard)
            ours = packed(x, operand, -1)
            fake = fake_quantize(x, operand, -1)
            assert x.detach().equal(before)
            assert not ours.payload.requires_grad
            assert not ours.dequantize().requires_grad
            assert not fake.dequantize().requires_grad
            before_fake = fake.values.clone()
            with torch.no_grad():
                x.add_(1)
            assert fake.values.equal(before_fake)
            with torch.no_grad():
                x.copy_(before)


@pytest.mark.parametrize(("element", "scaling"), SQUARE)
def test_square_groups_give_a_transposed_tensor_the_transposed_values(element: str, scaling: str) -> None:
    x = normal(150, 70)
    straight = quantize(x, element, scaling).dequantize()
    assert quantize(x.T, element, scaling).dequantize().equal(straight.T)
    assert quantize(x, element, scaling, -2).dequantize().equal(straight)
    stochastic = [quantize(x, element, scaling, axis, "stochastic").dequantize() for axis in (-1, -2)]
    assert stochastic[0].equal(stochastic[1])
    assert not stochastic[0].equal(straight)


@pytest.mark.parametrize("scaling", ["row", "tile", "mx", "nvfp4"])
def test_the_other_scalings_do_not(scaling: str) -> None:
    x = normal(150, 70)
    assert not quantize(x, "e2m1", scaling, -2).dequantize().equal(quantize(x, "e2m1", scaling).dequantize())


def test_dequantize_gives_the_asked_type_in_the_original_shape() -> None:
    x = normal(3, 20, 40)
    for axis in (0, 1, 2):
        ours = quantize(x, "e4m3", "tile", axis)
        assert ours.dequantize(torch.bfloat16).dtype == torch.bfloat16
        assert ours.dequantize().shape == x.shape
        assert (ours.dequantize() - x).abs().max() < 0.13


def test_the_same_input_gives_the_same_codes_again() -> None:
    x = normal(70, 130)
    for operand in OPERANDS[::3]:
        one, other = packed(x, operand, -1, Noise(4)), packed(x, operand, -1, Noise(4))
        assert one.payload.view(torch.uint8).equal(other.payload.view(torch.uint8))

"""The random Hadamard rotation: orthonormal, invertible, and invisible in a product."""

from __future__ import annotations

import pytest
import torch

from scrimp.formats import Operand, fake_quantize
from scrimp.formats.hadamard import SIZE, rotate

ROTATION = rotate(torch.eye(SIZE), -1).double()


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(2))


def test_the_rotation_is_orthonormal_with_entries_of_one_quarter() -> None:
    assert (ROTATION @ ROTATION.T).equal(torch.eye(SIZE, dtype=torch.float64))
    assert ROTATION.abs().eq(0.25).all()


def test_rows_change_sign_by_a_pattern_that_is_neither_constant_nor_regular() -> None:
    signs = ROTATION[:, 0].sign()
    assert signs.sum().abs() <= 4
    for period in (1, 2, 4, 8):
        assert not signs.equal(signs.roll(period))
        assert not signs.equal(-signs.roll(period))


@pytest.mark.parametrize("axis", [-1, -2])
@pytest.mark.parametrize("shape", [(48, 64), (3, 32, 48)])
def test_each_16_neighbours_are_rotated_on_their_own(axis: int, shape: tuple[int, ...]) -> None:
    x = normal(*shape)
    blocks = torch.block_diag(*[ROTATION] * (shape[axis] // SIZE))
    moved = x.double().movedim(axis, -1)
    torch.testing.assert_close(
        rotate(x, axis).double(), (moved @ blocks).movedim(-1, axis), rtol=0, atol=1e-5
    )


@pytest.mark.parametrize("axis", [-1, -2])
def test_the_inverse_undoes_the_rotation_and_the_input_is_kept(axis: int) -> None:
    x = normal(48, 64)
    before = x.clone()
    torch.testing.assert_close(rotate(rotate(x, axis), axis, inverse=True), x, rtol=0, atol=1e-5)
    assert x.equal(before)
    assert not rotate(x, axis).equal(x)


def test_the_rotation_stays_in_float32_under_autocast() -> None:
    x = normal(48, 64)
    with torch.autocast("cpu", torch.bfloat16):
        ours = [rotate(x, axis) for axis in (-1, -2)]
    assert all(one.equal(rotate(x, axis)) for one, axis in zip(ours, (-1, -2), strict=True))


def test_a_product_of_two_rotated_operands_is_the_product() -> None:
    a, b = normal(24, 64), normal(64, 40)
    blocks = torch.block_diag(*[ROTATION] * 4)
    exact = a.double() @ b.double()
    torch.testing.assert_close((a.double() @ blocks) @ (blocks.T @ b.double()), exact, rtol=0, atol=1e-12)
    ours = rotate(a, -1) @ rotate(b, -2)
    torch.testing.assert_close(ours.double(), exact, rtol=0, atol=1e-4)


def test_rotated_quantized_operands_multiply_to_about_the_product_even_where_padded() -> None:
    a, b = normal(24, 50), normal(50, 40)
    operand = Operand("e4m3", "tile", hadamard=True)
    one = fake_quantize(a, operand, -1, keep_rotation=True).dequantize()
    other = fake_quantize(b, operand, -2, keep_rotation=True).dequantize()
    assert one.shape == (24, 64)
    error = (one @ other - a @ b).norm() / (a @ b).norm()
    assert 0.001 < error < 0.06
    # Rotated back, the same operands give the same product.
    plain = fake_quantize(a, operand, -1).dequantize() @ fake_quantize(b, operand, -2).dequantize()
    assert ((one @ other - plain).norm() / plain.norm()).item() < 0.06


def test_an_outlier_no_longer_drowns_its_block() -> None:
    x = 0.01 * normal(64, 64)
    x[:, ::16] = 10.0
    small = torch.ones(64, dtype=torch.bool)
    small[::16] = False
    plain = fake_quantize(x, Operand("e2m1", "tile"), -1).dequantize()
    assert plain[:, small].eq(0).all()
    rotated = rotate(x, -1)
    assert rotated.abs().max() < 2.6
    assert rotated.abs().min() > 2.4

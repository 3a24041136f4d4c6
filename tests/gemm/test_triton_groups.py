"""fake_quantize_groups and tensor_amax give the values of `scrimp.formats`, bit for bit."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from triton_cases import DEVICE, assert_same_bits, exact_under_rotation, fake_values, matrix, spoilt

from scrimp.errors import PlanError
from scrimp.formats import Noise, Operand
from scrimp.formats.hadamard import rotate
from scrimp.gemm.kernels import fake_quantize_groups, tensor_amax

OPERANDS = (
    ("e2m1", "mx"),
    ("e4m3", "mx"),
    ("e5m2", "mx"),
    ("e2m1", "nvfp4"),
    ("e2m1", "nvfp4_2d"),
)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.parametrize("axis", [-1, -2])
@pytest.mark.parametrize("names", OPERANDS, ids="-".join)
@pytest.mark.every(6)
def test_values_of_groups_with_ragged_edges(
    names: tuple[str, str], axis: int, rounding: str, dtype: torch.dtype
) -> None:
    x = matrix(70, 140, dtype)
    operand = Operand(*names, rounding)  # type: ignore[arg-type]
    noise = Noise(5, first_row=40, first_column=900)
    values, scale = fake_quantize_groups(x.to(DEVICE), operand, axis, noise=noise)
    expected, expected_scale = fake_values(x, operand, axis, noise)
    assert_same_bits(values, expected.bfloat16())
    assert torch.equal(expected.bfloat16().float(), expected)
    assert (scale is None) == (expected_scale is None)
    if scale is not None and expected_scale is not None:
        assert torch.equal(scale.cpu(), expected_scale)


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.parametrize("axis", [-1, -2])
@pytest.mark.parametrize("scaling", ["nvfp4", "nvfp4_2d", "mx"])
@pytest.mark.every(5)
def test_rotated_groups_stay_rotated_and_padded(scaling: str, axis: int, rounding: str) -> None:
    x = exact_under_rotation(70, 90)
    operand = Operand("e2m1", scaling, rounding, hadamard=True)  # type: ignore[arg-type]
    values, scale = fake_quantize_groups(x.to(DEVICE), operand, axis)
    expected, expected_scale = fake_values(x, operand, axis)
    assert values.shape[axis] % 16 == 0
    assert_same_bits(values, expected.bfloat16())
    if scale is not None and expected_scale is not None:
        assert torch.equal(scale.cpu(), expected_scale)


def test_a_rotation_that_rounds_agrees_with_float64_to_float32s_precision() -> None:
    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(1))
    matrix64 = rotate(torch.eye(16), -1).double()
    largest = (x.double().view(64, 4, 16) @ matrix64).abs().max()
    assert float(tensor_amax(x.to(DEVICE), True).double().cpu()) == pytest.approx(float(largest), rel=2**-21)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("names", OPERANDS, ids="-".join)
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.every(3)
def test_one_nonfinite_member_makes_all_under_its_scales_nan(
    names: tuple[str, str], rounding: str, dtype: torch.dtype
) -> None:
    x = spoilt(128, 160, dtype)
    operand = Operand(*names, rounding)  # type: ignore[arg-type]
    values, _ = fake_quantize_groups(x.to(DEVICE), operand, -1)
    expected, _ = fake_values(x, operand, -1)
    assert_same_bits(values, expected.bfloat16())
    assert bool(values.isnan().all()) == (names[1] != "mx")


@pytest.mark.parametrize("axis", [-1, -2])
@pytest.mark.parametrize("hadamard", [False, True])
def test_the_largest_magnitude_of_a_tensor(axis: int, hadamard: bool) -> None:
    x = exact_under_rotation(130, 75)
    pad = -x.shape[axis] % 16
    padded = torch.nn.functional.pad(x, (0, pad) if axis == -1 else (0, 0, 0, pad))
    expected = (rotate(padded, axis) if hadamard else x).abs().max()
    assert torch.equal(tensor_amax(x.to(DEVICE), hadamard, axis).cpu(), expected)
    assert float(tensor_amax(-x.to(DEVICE), hadamard, axis)) == float(expected)
    x[100, 70] = torch.nan
    assert bool(tensor_amax(x.to(DEVICE), hadamard, axis).isnan())


def test_a_given_tensor_scale_is_used() -> None:
    x = matrix(16, 64, torch.bfloat16)
    whole = torch.cat([x, 9 * x])
    operand = Operand("e2m1", "nvfp4")
    expected, scale = fake_values(whole, operand, -1)
    assert scale is not None
    values, _ = fake_quantize_groups(x.to(DEVICE), operand, -1, scale.to(DEVICE))
    assert_same_bits(values, expected[:16].bfloat16())
    alone, _ = fake_quantize_groups(x.to(DEVICE), operand, -1)
    assert not torch.equal(alone, values)


def test_empty_and_zero_matrices() -> None:
    for scaling in ("mx", "nvfp4"):
        values, _ = fake_quantize_groups(torch.zeros(3, 40, device=DEVICE), Operand("e2m1", scaling), -1)
        assert float(values.abs().max()) == 0
        values, _ = fake_quantize_groups(torch.zeros(3, 0, device=DEVICE), Operand("e2m1", scaling), -1)
        assert values.shape == (3, 0)


def test_wrong_tensors_and_operands_are_refused_by_name() -> None:
    x, operand = torch.ones(4, 32, device=DEVICE), Operand("e2m1", "nvfp4")
    for arguments, reason in (
        ((x.half(), operand, -1), "float16"),
        ((x.T, operand, -1), "row-major"),
        ((x, operand, 0), "no such axis"),
        ((x, Operand("e2m1", "tile"), -1), "no kernel for these groups"),
        ((x, Operand("e2m1", "nvfp4", four_over_six=True), -1), "four_over_six"),
        ((x, operand, -1, torch.ones(2, device=DEVICE)), "one number"),
        ((x, Operand("e2m1", "mx"), -1, torch.ones((), device=DEVICE)), "mx has no tensor scale"),
    ):
        with pytest.raises(PlanError, match=reason):
            fake_quantize_groups(*arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.parametrize("magnitude", [1e-28, 1e-36, 1e-38])
@pytest.mark.parametrize("scaling", ["nvfp4", "nvfp4_2d"])
def test_values_of_tiny_tensors(scaling: str, magnitude: float, rounding: str) -> None:
    x = torch.randn(48, 64, generator=torch.Generator().manual_seed(2)) * magnitude
    operand = Operand("e2m1", scaling, rounding)  # type: ignore[arg-type]
    values, scale = fake_quantize_groups(x.to(DEVICE), operand, -1, noise=Noise(3))
    expected, expected_scale = fake_values(x, operand, -1, Noise(3))
    assert_same_bits(values, expected.bfloat16())
    assert scale is not None
    assert expected_scale is not None
    assert torch.equal(scale.cpu(), expected_scale)
    assert expected.any(1).all()

"""Groups: codes, scales and values of `scrimp.formats`, bit for bit, along either axis and along both."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

import triton
import triton.language as tl
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor
from triton_cases import (
    DEVICE,
    assert_same_bits,
    assert_same_groups,
    assert_same_tensor_scale,
    exact_under_rotation,
    fake_values,
    in_groups,
    matrix,
    spoilt,
)

from scrimp.errors import PlanError
from scrimp.formats import Noise, Operand, QuantizedTensor, quantize
from scrimp.formats.codes import decode
from scrimp.formats.hadamard import rotate
from scrimp.formats.scales import e8m0_scales
from scrimp.gemm.backends.native import swizzle
from scrimp.gemm.kernels import GroupsOf, group_maxima, quantize_groups, tensor_amax
from scrimp.gemm.kernels.arithmetic import codes_of, e8m0_scale
from scrimp.gemm.kernels.launch import element_constants
from scrimp.precision import lookup_element

OPERANDS = (
    ("e2m1", "mx"),
    ("e4m3", "mx"),
    ("e5m2", "mx"),
    ("e2m1", "nvfp4"),
    ("e2m1", "nvfp4_2d"),
)


def values_of(
    x: Tensor, operand: Operand, axis: int, amax: Tensor | None = None, noise: Noise | None = None
) -> tuple[Tensor, Tensor | None]:
    found = in_groups(x.to(DEVICE), GroupsOf(operand, "values", noise, amax), axis)
    return found.codes, found.tensor_scale


def codes_by_formats(x: Tensor, operand: Operand, axis: int, noise: Noise | None = None) -> QuantizedTensor:
    o = operand
    return quantize(x, o.element, o.scaling, axis, o.rounding, hadamard=o.hadamard, noise=noise)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.parametrize("axis", [-1, -2])
@pytest.mark.parametrize("names", OPERANDS, ids="-".join)
@pytest.mark.every(11)
def test_values_of_groups_with_ragged_edges(
    names: tuple[str, str], axis: int, rounding: str, dtype: torch.dtype
) -> None:
    x = matrix(70, 140, dtype)
    operand = Operand(*names, rounding)  # type: ignore[arg-type]
    noise = Noise(5, first_row=40, first_column=900)
    values, scale = values_of(x, operand, axis, noise=noise)
    expected, expected_scale = fake_values(x, operand, axis, noise)
    assert_same_bits(values, expected.bfloat16())
    assert torch.equal(expected.bfloat16().float(), expected)
    assert_same_tensor_scale(scale, expected_scale)


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.parametrize("axis", [-1, -2])
@pytest.mark.parametrize("scaling", ["nvfp4", "nvfp4_2d", "mx"])
@pytest.mark.every(5)
def test_rotated_groups_stay_rotated_and_padded(scaling: str, axis: int, rounding: str) -> None:
    x = exact_under_rotation(70, 90)
    operand = Operand("e2m1", scaling, rounding, hadamard=True)  # type: ignore[arg-type]
    values, scale = values_of(x, operand, axis)
    expected, expected_scale = fake_values(x, operand, axis)
    assert values.shape[axis] % 16 == 0
    assert_same_bits(values, expected.bfloat16())
    assert_same_tensor_scale(scale, expected_scale)


def test_a_rotation_that_rounds_agrees_with_float64_to_float32s_precision() -> None:
    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(1))
    matrix64 = rotate(torch.eye(16), -1).double()
    largest = (x.double().view(64, 4, 16) @ matrix64).abs().max()
    assert float(tensor_amax(x.to(DEVICE), True).double().cpu()) == pytest.approx(float(largest), rel=2**-21)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("names", OPERANDS, ids="-".join)
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.every(7)
def test_one_nonfinite_member_makes_all_under_its_scales_nan(
    names: tuple[str, str], rounding: str, dtype: torch.dtype
) -> None:
    x = spoilt(128, 160, dtype)
    operand = Operand(*names, rounding)  # type: ignore[arg-type]
    values, _ = values_of(x, operand, -1)
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


def test_a_given_maximum_makes_the_tensors_scale() -> None:
    x = matrix(16, 64, torch.bfloat16)
    whole = torch.cat([x, 9 * x])
    operand = Operand("e2m1", "nvfp4")
    expected, expected_scale = fake_values(whole, operand, -1)
    values, scale = values_of(x, operand, -1, whole.abs().max().float().to(DEVICE))
    assert_same_bits(values, expected[:16].bfloat16())
    assert_same_tensor_scale(scale, expected_scale)
    alone, _ = values_of(x, operand, -1)
    assert not torch.equal(alone, values)


def test_empty_and_zero_matrices() -> None:
    for scaling in ("mx", "nvfp4"):
        values, _ = values_of(torch.zeros(3, 40), Operand("e2m1", scaling), -1)
        assert float(values.abs().max()) == 0
        values, _ = values_of(torch.zeros(3, 0), Operand("e2m1", scaling), -1)
        assert values.shape == (3, 0)


def test_wrong_tensors_and_operands_are_refused_by_name() -> None:
    x, operand = torch.ones(4, 32, device=DEVICE), Operand("e2m1", "nvfp4")
    one, mx = GroupsOf(operand), Operand("e2m1", "mx")
    noisy = GroupsOf(Operand("e2m1", "nvfp4", "stochastic"), noise=Noise(3))
    for arguments, reason in (
        ((x.half(), one, None), "float16"),
        ((x.T, one, None), "row-major"),
        ((x, None, None), "nothing to quantize"),
        ((x, GroupsOf(Operand("e2m1", "tile")), None), "no kernel for these groups"),
        ((x, GroupsOf(Operand("e2m1", "nvfp4", four_over_six=True)), None), "four_over_six"),
        ((x, GroupsOf(operand, amax=torch.ones(2, device=DEVICE)), None), "one number"),
        ((x, GroupsOf(mx, amax=torch.ones((), device=DEVICE)), None), "mx has no tensor scale"),
        ((x, one, GroupsOf(mx)), "one scaling"),
        ((x, noisy, noisy), "same noise"),
    ):
        with pytest.raises(PlanError, match=reason):
            quantize_groups(*arguments)  # type: ignore[arg-type]
    with pytest.raises(PlanError, match="no such axis"):
        tensor_amax(x, axis=0)


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.parametrize("magnitude", [1e-28, 1e-36, 1e-38])
@pytest.mark.parametrize("scaling", ["nvfp4", "nvfp4_2d"])
@pytest.mark.every(5)
def test_values_of_tiny_tensors(scaling: str, magnitude: float, rounding: str) -> None:
    x = torch.randn(48, 64, generator=torch.Generator().manual_seed(2)) * magnitude
    operand = Operand("e2m1", scaling, rounding)  # type: ignore[arg-type]
    values, scale = values_of(x, operand, -1, noise=Noise(3))
    expected, expected_scale = fake_values(x, operand, -1, Noise(3))
    assert_same_bits(values, expected.bfloat16())
    assert_same_tensor_scale(scale, expected_scale)
    assert expected.any(1).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.parametrize("names", OPERANDS, ids="-".join)
@pytest.mark.every(11)
def test_codes_along_both_axes_with_ragged_edges(
    names: tuple[str, str], rounding: str, dtype: torch.dtype
) -> None:
    operand = Operand(*names, rounding)  # type: ignore[arg-type]
    noises = [Noise(key, 40, columns=(range(7, 20), range(900, 2000))) for key in (5, 6)]
    for x in (matrix(70, 141, dtype), spoilt(101, 141, dtype)):
        found = quantize_groups(x.to(DEVICE), *(GroupsOf(operand, noise=noise) for noise in noises))
        for one, axis, noise in zip(found, (-1, -2), noises, strict=True):
            assert one is not None
            assert_same_groups(one, codes_by_formats(x, operand, axis, noise))


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.parametrize("scaling", ["nvfp4", "nvfp4_2d", "mx"])
@pytest.mark.every(4)
def test_codes_of_a_rotated_half_beside_those_of_the_other(scaling: str, rounding: str) -> None:
    """What backward has: G and X plain along the columns, rotated along the rows."""
    x = exact_under_rotation(70, 90)
    plain, rotated = (Operand("e2m1", scaling, rounding, hadamard=one) for one in (False, True))  # type: ignore[arg-type]
    sides = GroupsOf(plain, noise=Noise(1)), GroupsOf(rotated, noise=Noise(2))
    for one, axis, side in zip(quantize_groups(x.to(DEVICE), *sides), (-1, -2), sides, strict=True):
        assert one is not None
        assert_same_groups(one, codes_by_formats(x, side.operand, axis, side.noise))


@pytest.mark.parametrize("shape", [(70, 141), (128, 256), (300, 30)], ids=str)
@pytest.mark.parametrize("names", [("e4m3", "mx"), ("e2m1", "nvfp4"), ("e2m1", "nvfp4_2d")], ids="-".join)
@pytest.mark.every(8)
def test_swizzled_scales_are_those_of_every_row_in_cublass_order(
    names: tuple[str, str], shape: tuple[int, int]
) -> None:
    x, operand = matrix(*shape, torch.bfloat16), Operand(*names)
    found = quantize_groups(x.to(DEVICE), *[GroupsOf(operand, "swizzled")] * 2)
    for one, axis in zip(found, (-1, -2), strict=True):
        assert one is not None
        expected = codes_by_formats(x, operand, axis)
        by_row = expected.scales.view(torch.uint8)
        if operand.scaling == "nvfp4_2d":
            by_row = by_row.repeat_interleave(16, 0)[: len(expected.payload)]
        assert torch.equal(one.scales.cpu().view(torch.uint8), swizzle(by_row))
        assert torch.equal(one.codes.cpu().view(torch.uint8), expected.payload.view(torch.uint8))


def test_values_and_codes_come_from_one_launch() -> None:
    x = exact_under_rotation(40, 90)
    operand, rotated = Operand("e2m1", "nvfp4"), Operand("e2m1", "nvfp4", hadamard=True)
    row, column = quantize_groups(x.to(DEVICE), GroupsOf(operand, "values"), GroupsOf(rotated))
    assert row is not None
    assert column is not None
    assert_same_bits(row.codes, fake_values(x, operand, -1)[0].bfloat16())
    assert_same_groups(column, codes_by_formats(x, rotated, -2))


def test_maxima_of_both_halves_are_those_of_each() -> None:
    x = exact_under_rotation(130, 75)
    plain, rotated = Operand("e2m1", "nvfp4"), Operand("e2m1", "nvfp4", hadamard=True)
    first, second = group_maxima(x.to(DEVICE), plain, rotated)
    assert first is not None
    assert second is not None
    assert torch.equal(first.cpu(), x.abs().max())
    assert torch.equal(second.cpu(), rotate(torch.nn.functional.pad(x, (0, 0, 0, 14)), -2).abs().max())
    assert group_maxima(x.to(DEVICE), Operand("e2m1", "mx"), None) == [None, None]


SPECIAL = torch.tensor(
    [0.0, -0.0, torch.nan, -torch.nan, torch.inf, -torch.inf, 2.0**-149, -(2.0**-127), 3e38]
)
EMPTY = ((0, 40), (40, 0), (0, 0))


@pytest.mark.slow
@given(
    shape=st.tuples(st.integers(1, 70), st.integers(1, 140)),
    names=st.sampled_from(OPERANDS),
    rounding=st.sampled_from(("nearest", "stochastic")),
    exponents=st.tuples(st.integers(0, 254), st.integers(0, 254)).map(sorted),
    special=st.lists(st.integers(0, len(SPECIAL) - 1), max_size=3),
    seed=st.integers(0, 2**32),
)
@example(EMPTY[0], OPERANDS[3], "nearest", [120, 130], [], 0)
@example(EMPTY[1], OPERANDS[4], "nearest", [120, 130], [], 0)
@example(EMPTY[2], OPERANDS[0], "stochastic", [120, 130], [], 0)
def test_codes_are_the_formats_of_any_numbers(
    shape: tuple[int, int],
    names: tuple[str, str],
    rounding: str,
    exponents: list[int],
    special: list[int],
    seed: int,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    bits = torch.randint(-(2**31), 2**31, shape, generator=generator) & ~(0xFF << 23)
    bits |= torch.randint(exponents[0], exponents[1] + 1, shape, generator=generator) << 23
    x = bits.to(torch.int32).view(torch.float32)
    if x.numel():
        x.view(-1)[torch.randint(0, x.numel(), (len(special),), generator=generator)] = SPECIAL[special]
    operand = Operand(*names, rounding)  # type: ignore[arg-type]
    noises = Noise(seed), Noise(seed + 1)
    found = quantize_groups(x.to(DEVICE), *(GroupsOf(operand, noise=noise) for noise in noises))
    for one, axis, noise in zip(found, (-1, -2), noises, strict=True):
        assert one is not None
        assert_same_groups(one, codes_by_formats(x, operand, axis, noise))


@triton.jit
def scales_kernel(
    amax, decode, encode, MAX_EXPONENT: tl.constexpr, NO_CLIP: tl.constexpr, ELEMENT: tl.constexpr
):
    at = tl.program_id(0) * 4096 + tl.arange(0, 4096)
    scale, inverse = e8m0_scale(tl.load(amax + at), ELEMENT, MAX_EXPONENT, NO_CLIP)
    tl.store(decode + at, scale)
    tl.store(encode + at, inverse)


@pytest.mark.parametrize("no_clip", [False, True])
@pytest.mark.parametrize("name", ["e2m1", "e4m3", "e5m2"])
def test_powers_of_two_need_no_division(name: str, no_clip: bool) -> None:
    """Every exponent, beside every fraction where a rule changes; and every small subnormal number."""
    element = lookup_element(name)
    edges = [2**22, 3 * 2**21, 7 * 2**20]  # of 1.5, 1.75 and 1.875
    fractions = torch.cat([torch.arange(-3, 4) + edge for edge in (3, *edges, 2**23 - 4)])
    whole = torch.cat([((torch.arange(255)[:, None] << 23) + fractions).flatten(), torch.arange(2**15)])
    whole = torch.cat([whole, torch.tensor([0x7F800000, 0x7FC00000])])
    amax = torch.nn.functional.pad(whole, (0, -len(whole) % 4096)).to(torch.int32)
    decoded, inverse = torch.empty(2, len(amax), device=DEVICE)
    scales_kernel[(len(amax) // 4096,)](
        amax.to(DEVICE),
        decoded,
        inverse,
        MAX_EXPONENT=element.max_exponent,
        NO_CLIP=no_clip,
        ELEMENT=element_constants(element),
    )
    expected = e8m0_scales(amax.view(torch.float32), element, no_clip=no_clip)
    assert torch.equal(decoded.cpu().nan_to_num(-1), expected.decode.nan_to_num(-1))
    assert torch.equal(inverse.cpu().nan_to_num(-1), expected.encode.nan_to_num(-1))


@triton.jit
def codes_kernel(values, codes, BITS: tl.constexpr, ELEMENT: tl.constexpr):
    at = tl.arange(0, 256)
    tl.store(codes + at, codes_of(tl.load(values + at), BITS, ELEMENT))


@pytest.mark.parametrize("name", ["e2m1", "e4m3", "e5m2"])
def test_every_value_has_its_code(name: str) -> None:
    """But for infinities and NaN, which E5M2 has several of, and zero, which is positive."""
    element = lookup_element(name)
    every = torch.arange(256, dtype=torch.uint8)
    payload = (
        every if name == "e2m1" else every.view(torch.float8_e4m3fn if name == "e4m3" else torch.float8_e5m2)
    )
    values = decode(payload, element, 512 if name == "e2m1" else 256)[:256]
    kept = values.isfinite() & ~((values == 0) & values.signbit())
    values[~kept] = torch.nan
    codes = torch.empty(256, dtype=torch.uint8, device=DEVICE)
    codes_kernel[(1,)](values.to(DEVICE), codes, BITS=element.bits, ELEMENT=element_constants(element))
    wide = torch.stack([every & 15, every >> 4], -1).flatten()[:256] if name == "e2m1" else every
    assert torch.equal(codes.cpu()[kept], wide[kept])
    assert set(codes.cpu()[~kept].tolist()) <= {0x7F if element.bits == 8 else 0}

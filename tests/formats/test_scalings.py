"""Every scaling against a slow oracle; MX and NVFP4 against torchao, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from property_tests import examples
from slow_oracle import COMBINATIONS, LARGEST, all_values, one_group, power_of_two, slowly, tensor_scale_of
from torch import Tensor
from torchao.prototype.mx_formats.config import ScaleCalculationMode
from torchao.prototype.mx_formats.mx_tensor import to_mx
from torchao.prototype.mx_formats.nvfp4_tensor import nvfp4_quantize, per_tensor_amax_to_scale

from scrimp.errors import PlanError
from scrimp.formats import Noise, Operand, fake_quantize, quantize
from scrimp.formats import scales as scale_rules
from scrimp.formats.codes import encode
from scrimp.formats.rounding import round_
from scrimp.precision import lookup_element

EVERY_COMBINATION = pytest.mark.parametrize(("element", "scaling"), COMBINATIONS)
TORCHAO_TYPES = {
    "e2m1": torch.float4_e2m1fn_x2,
    "e4m3": torch.float8_e4m3fn,
    "e5m2": torch.float8_e5m2,
}


def normal(*shape: int, seed: int = 0, binades: int = 0) -> Tensor:
    """Gaussian; with `binades`, rows and columns of very different sizes."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator)
    if binades:
        for axis, size in enumerate(shape):
            exponents = torch.randint(-binades, binades, (size,), generator=generator)
            x = x * torch.exp2(exponents).view(-1, *[1] * (len(shape) - axis - 1))
    return x


def bits(payload: Tensor, element: str) -> Tensor:
    """Codes of a payload, one a byte, with the code of -0 as 0."""
    codes = payload.view(torch.uint8)
    if element == "e2m1":
        codes = torch.stack([codes & 15, codes >> 4], -1).flatten(-2)
    return torch.where(codes == (8 if element == "e2m1" else 128), 0, codes)


def assert_same(ours: Tensor, theirs: np.ndarray) -> None:
    np.testing.assert_array_equal(ours.numpy(), theirs)


# Against torchao


def difficult_rows() -> Tensor:
    x = normal(64, 256, binades=20).bfloat16()
    x[3] = 0
    x[5, :32] = 0
    x[7, ::3] = 0
    x[9] = 448.0
    x[11] = 5.0
    x[13] = -6.0
    return x


@pytest.mark.parametrize("element", list(TORCHAO_TYPES))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_mx_is_torchao_with_the_floor_rule(element: str, dtype: torch.dtype) -> None:
    x = difficult_rows().to(dtype)
    if dtype == torch.float32:
        x = x * 1.2345
    ours = quantize(x, element, "mx")
    scales, payload = to_mx(x, TORCHAO_TYPES[element], 32, ScaleCalculationMode.FLOOR)
    assert ours.scales.equal(scales.view(torch.uint8))
    assert bits(ours.payload, element).equal(bits(payload, element))


@pytest.mark.parametrize("element", list(TORCHAO_TYPES))
def test_mx_without_clipping_is_torchao_with_the_rceil_rule(element: str) -> None:
    x = difficult_rows()
    scales, payload = to_mx(x, TORCHAO_TYPES[element], 32, ScaleCalculationMode.RCEIL)
    assert quantize(x, element, "mx", rounding="stochastic").scales.equal(scales.view(torch.uint8))
    groups = x.float().unflatten(-1, (-1, 32))
    entry = lookup_element(element)
    ours = scale_rules.e8m0_scales(groups.abs().amax(-1, keepdim=True), entry, no_clip=True)
    codes = encode(round_(groups * ours.encode, entry).flatten(-2), entry)
    assert bits(codes, element).equal(bits(payload, element))


def test_nvfp4_is_torchao_where_torchao_does_not_raise_the_block_scale() -> None:
    # torchao raises block scales below 2^-6 to 2^-6; the format goes down to 2^-9 and 0, and so do we.
    x = normal(96, 256, binades=3)
    x[4, :16] = 0
    g = per_tensor_amax_to_scale(x.abs().amax())
    scales, payload = nvfp4_quantize(x, 16, g)
    ours = quantize(x, "e2m1", "nvfp4")
    assert ours.tensor_scale is not None
    assert ours.tensor_scale.equal(g)
    raised = x.unflatten(-1, (-1, 16)).abs().amax(-1) / 6 / g < 2.0**-6
    assert raised.any()
    assert not raised.all()
    assert ours.scales.float()[~raised].equal(scales.float()[~raised])
    codes, theirs = (bits(p, "e2m1").unflatten(-1, (-1, 16)) for p in (ours.payload, payload))
    assert codes[~raised].equal(theirs[~raised])
    assert (scales.float()[raised] == 2.0**-6).all()
    assert_same(ours.dequantize(), slowly(x.numpy(), "e2m1", "nvfp4").dequantized)


@pytest.mark.parametrize("exponent", [-100, -110, -118])
def test_nvfp4_of_small_tensors_is_torchao(exponent: int) -> None:
    """Small numbers are scaled as torchao scales them, as far as its reciprocal is finite."""
    x = normal(96, 256)
    x = x / x.abs().amax() * 2688 * 2.0**exponent
    g = per_tensor_amax_to_scale(x.abs().amax())
    scales, payload = nvfp4_quantize(x, 16, g)
    ours = quantize(x, "e2m1", "nvfp4")
    assert ours.tensor_scale is not None
    assert ours.tensor_scale.equal(g)
    assert ours.scales.float().equal(scales.float())
    assert bits(ours.payload, "e2m1").equal(bits(payload, "e2m1"))


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.parametrize("four_over_six", [False, True])
@pytest.mark.parametrize("magnitude", [1e-30, 1e-36, 1e-38, 1e-39])
def test_tiny_tensors_keep_the_accuracy_of_the_format(
    magnitude: float, four_over_six: bool, rounding: str
) -> None:
    if four_over_six and rounding == "stochastic":
        return  # refused
    x = normal(64, 128) * magnitude
    found = quantize(x, "e2m1", "nvfp4", -1, rounding, four_over_six=four_over_six)  # type: ignore[arg-type]
    error = float((found.dequantize(torch.float64) - x.double()).norm() / x.double().norm())
    assert error < (0.11 if rounding == "nearest" else 0.17)
    assert torch.equal(quantize(x * 0, "e2m1", "nvfp4").dequantize(), x * 0)


# Against the oracle


SHAPES = [(70,), (150, 70), (33, 290), (3, 37, 150), (2, 2, 18, 40)]
FIT = [
    (element, scaling, shape, axis)
    for element, scaling in COMBINATIONS
    for shape in SHAPES
    for axis in range(-len(shape), 0)
    if not (scaling in ("block", "nvfp4_2d") and len(shape) < 2)
]


@pytest.mark.parametrize(("element", "scaling", "shape", "axis"), FIT)
@pytest.mark.every(13)
def test_every_scaling_on_every_axis_is_the_slow_oracle(
    element: str, scaling: str, shape: tuple[int, ...], axis: int
) -> None:
    x = normal(*shape, binades=6)
    ours, slow = quantize(x, element, scaling, axis), slowly(x.numpy(), element, scaling, axis)
    assert_same(ours.dequantize(), slow.dequantized)
    stored = scale_rules.e8m0_value(ours.scales) if scaling == "mx" else ours.scales.float()
    assert sorted(stored.flatten().tolist()) == sorted(slow.scales)


@EVERY_COMBINATION
@pytest.mark.parametrize("axis", [-1, -2])
@pytest.mark.every(3)
def test_stochastic_rounding_is_the_slow_oracle_with_the_same_noise(
    element: str, scaling: str, axis: int
) -> None:
    x, noise = normal(37, 150, binades=4), Noise(7)
    ours = quantize(x, element, scaling, axis, "stochastic", noise=noise)
    uniform = noise.uniform(37, 150, "cpu").numpy()
    assert_same(ours.dequantize(), slowly(x.numpy(), element, scaling, axis, uniform).dequantized)


@EVERY_COMBINATION
@pytest.mark.every(18)
def test_numbers_between_two_values_are_divided_by_their_scale_as_documented(
    element: str, scaling: str
) -> None:
    # Here the last bit of x / s decides: x times a rounded reciprocal differs.
    grid = torch.from_numpy(all_values(element)).float()
    middles = (grid[1:] + grid[:-1]) / 2
    for seed in range(15):
        x = normal(48, 256, seed=seed)
        slow = slowly(x.numpy(), element, scaling)
        scale = torch.tensor(slow.scales) * float(slow.tensor_scale)
        picked = torch.randint(len(middles), x.shape, generator=torch.Generator().manual_seed(seed))
        largest = x.abs() == x.abs().amax(-1, keepdim=True)
        x = torch.where(largest, x, middles[picked] * scale[seed % len(scale)])
        assert_same(
            quantize(x, element, scaling).dequantize(), slowly(x.numpy(), element, scaling).dequantized
        )


@examples(120)
@given(
    st.sampled_from(COMBINATIONS),
    st.sampled_from([(31,), (127, 131), (131, 37), (3, 7, 17), (3, 17, 131), (2, 131, 7), (1, 13), (13, 1)])
    | st.lists(st.integers(1, 40), min_size=2, max_size=3).map(tuple),
    st.sampled_from([-1, -2]),
    st.integers(0, 2**31),
)
def test_ragged_edges_are_the_slow_oracle(
    combination: tuple[str, str], shape: tuple[int, ...], axis: int, seed: int
) -> None:
    shape = (1, *shape) if len(shape) == 1 else shape
    x = normal(*shape, seed=seed)
    ours = quantize(x, *combination, axis)
    assert_same(ours.dequantize(), slowly(x.numpy(), *combination, axis).dequantized)


def test_square_groups_do_not_cross_the_matrices_of_a_stack() -> None:
    x = normal(3, 20, 40)
    x[1] *= 1000
    for element, scaling in COMBINATIONS:
        if scaling in ("block", "nvfp4_2d"):
            whole = quantize(x, element, scaling)
            assert whole.scales.shape[0] == 3
            if scaling == "block":
                each = torch.stack([quantize(matrix, element, scaling).dequantize() for matrix in x])
                assert whole.dequantize().equal(each)


@pytest.mark.parametrize("scaling", ["nvfp4", "nvfp4_2d"])
@pytest.mark.parametrize("axis", [-1, -2])
def test_four_over_six_takes_the_scale_with_the_smaller_error(scaling: str, axis: int) -> None:
    x = normal(64, 96)
    x[:16, :32] = torch.where(x[:16, :32] > 0, 4.0, 3.0)
    ours = quantize(x, "e2m1", scaling, axis, four_over_six=True)
    g = tensor_scale_of(x.numpy(), 256.0)
    assert ours.tensor_scale is not None
    assert ours.tensor_scale.item() == g
    values = (ours.dequantize_matrix().values if axis == -1 else ours.dequantize_matrix().values.T).numpy()
    moved = x.numpy() if axis == -1 else x.T.numpy()
    fours = 0
    height = 16 if scaling == "nvfp4_2d" else 1
    for row in range(0, moved.shape[0], height):
        for column in range(0, moved.shape[1], 16):
            group = slice(row, row + height), slice(column, column + 16)
            choices = [one_group(moved[group], "e2m1", scaling, g, None, at=at)[0] for at in (6.0, 4.0)]
            errors = [np.square(q.astype(np.float64) - moved[group] / np.float64(g)).sum() for q in choices]
            taken = [bool(np.array_equal(q, values[group])) for q in choices]
            assert any(taken)
            assert errors[taken.index(True)] <= min(errors) * (1 + 1e-5)
            fours += taken == [False, True]
    # Of Gaussian rows nearly half; a Gaussian square hardly ever, so only those made of 3 and 4 here.
    share = fours * 16 * height / x.numel()
    assert 0.3 < share < 0.6 if height == 1 else share == 2 * 256 / x.numel()


# Extremes


@EVERY_COMBINATION
@pytest.mark.parametrize("size", [3e38, 1e30, 1e-30, 2.0**-126, 1e-39, 1e-45, 0.0])
@pytest.mark.every(8)
def test_huge_subnormal_and_zero_groups_have_the_documented_values(
    element: str, scaling: str, size: float
) -> None:
    x = (torch.linspace(-1, 1, 40 * 150) * size).view(40, 150)
    slow = slowly(x.numpy(), element, scaling)
    ours = quantize(x, element, scaling)
    assert ours.dequantize().isfinite().all()
    assert_same(ours.dequantize(), slow.dequantized)
    # Scales are 2^-126 at least, and integers are no smaller than 1.
    smallest = 127 * 2.0**-126 if element == "int8" else 2.0**-126
    if size >= smallest and not scaling.startswith("nvfp4"):
        assert ((ours.dequantize() - x).abs().max() / size).item() < 0.3


@EVERY_COMBINATION
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_zeros_have_scale_1_or_code_0_and_stay_zeros(element: str, scaling: str, rounding: str) -> None:
    ours = quantize(torch.zeros(20, 40), element, scaling, rounding=rounding)  # type: ignore[arg-type]
    assert ours.dequantize().eq(0).all()
    assert ours.payload.view(torch.uint8).eq(0).all()
    stored = scale_rules.e8m0_value(ours.scales) if scaling == "mx" else ours.scales.float()
    wanted = {"mx": 2.0**-127, "nvfp4": 0.0, "nvfp4_2d": 0.0}.get(scaling, 1.0)
    assert stored.eq(wanted).all()
    assert ours.tensor_scale is None or ours.tensor_scale.item() == 1


@EVERY_COMBINATION
@pytest.mark.parametrize("poison", [torch.inf, -torch.inf, torch.nan])
@pytest.mark.parametrize("axis", [-1, -2])
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.every(5)
def test_a_number_that_is_not_finite_poisons_exactly_its_group(
    element: str, scaling: str, poison: float, axis: int, rounding: str
) -> None:
    x = normal(150, 290)
    clean = quantize(x, element, scaling, axis, rounding).dequantize()  # type: ignore[arg-type]
    x[130, 140] = poison
    ours = quantize(x, element, scaling, axis, rounding).dequantize()  # type: ignore[arg-type]
    group = torch.zeros(150, 290, dtype=torch.bool)
    along, across = {
        "tile": ((128, 256), (130, 131)),
        "mx": ((128, 160), (130, 131)),
        "row": ((0, 290), (130, 131)),
        "block": ((128, 256), (128, 150)),
    }.get(scaling, ((0, 290), (0, 150)))
    if axis == -2 and scaling != "block":
        along, across = (
            (140, 141),
            {"tile": (128, 150), "mx": (128, 150), "row": (0, 150)}.get(scaling, (0, 150)),
        )
        along = along if scaling in ("tile", "mx", "row") else (0, 290)
    group[slice(*across), slice(*along)] = True
    assert ours.isnan().equal(group)
    assert ours[~group].equal(clean[~group])
    # The scale itself is NaN, and e2m1 codes, which have no NaN, are 0.
    packed = quantize(x, element, scaling, axis, rounding)  # type: ignore[arg-type]
    scale = packed.scales.float() if packed.tensor_scale is None else packed.tensor_scale
    num_bad = int(packed.scales.eq(255).sum()) if scaling == "mx" else int(scale.isnan().sum())
    assert num_bad == 1
    assert scaling == "mx" or not scale.isinf().any()
    if element == "e2m1" and scaling in ("tensor", "nvfp4", "nvfp4_2d"):
        assert packed.payload.eq(0).all()
    fake = fake_quantize(x, Operand(element, scaling, rounding), axis).dequantize()  # type: ignore[arg-type]
    assert fake.isnan().equal(group)


@EVERY_COMBINATION
@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (0, 0), (2, 0, 5), (0, 3, 5), (2, 3, 0)])
@pytest.mark.parametrize("axis", [-1, -2])
def test_tensors_without_elements_stay_without(
    element: str, scaling: str, shape: tuple[int, ...], axis: int
) -> None:
    for hadamard in (False, True):
        ours = quantize(torch.empty(shape), element, scaling, axis, hadamard=hadamard)
        assert ours.dequantize().shape == shape
        if len(shape) == 2:
            operand = Operand(element, scaling, hadamard=hadamard)
            assert fake_quantize(torch.empty(shape), operand, axis).dequantize().shape == shape


@EVERY_COMBINATION
def test_the_layout_of_the_input_does_not_matter(element: str, scaling: str) -> None:
    x = normal(60, 140, binades=3)
    spread = torch.empty(120, 420)[::2, ::3].copy_(x)
    expanded = x[:1].expand(60, 140)
    for axis in (-1, -2):
        plain = quantize(x, element, scaling, axis).dequantize()
        assert quantize(x.T.contiguous().T, element, scaling, axis).dequantize().equal(plain)
        assert quantize(spread, element, scaling, axis).dequantize().equal(plain)
        assert fake_quantize(spread, Operand(element, scaling), axis).dequantize().equal(plain)
        copied = quantize(expanded.contiguous(), element, scaling, axis).dequantize()
        assert quantize(expanded, element, scaling, axis).dequantize().equal(copied)


# Mistakes


def test_mistakes_are_refused_with_what_is_allowed() -> None:
    x = torch.zeros(4, 6)
    wrong = [
        (lambda: quantize(x, "e3m4"), "e2m1, e4m3, e5m2, int8"),
        (lambda: quantize(x, "e4m3", "tiles"), "tensor, row, tile"),
        (lambda: quantize(x, rounding="up"), "nearest, stochastic"),  # type: ignore[arg-type]
        (lambda: quantize(x, "e4m3", "nvfp4"), "e2m1"),
        (lambda: quantize(x, "e2m1", "tile", four_over_six=True), "nvfp4"),
        (lambda: quantize(x, axis=2), "axis"),
        (lambda: quantize(x, axis=-3), "axis"),
        (lambda: quantize(torch.tensor(1.0)), "axes"),
        (lambda: quantize(x[0], "e4m3", "block"), "at least 2 axes"),
        (lambda: fake_quantize(x[0], Operand("e4m3", "tile"), -1), "2 axes"),
        (lambda: fake_quantize(x[None], Operand("e4m3", "tile"), -1), "2 axes"),
    ]
    for call, allowed in wrong:
        with pytest.raises(PlanError, match=allowed):
            call()
    for dtype in (torch.int32, torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn):
        with pytest.raises(PlanError, match="float32"):
            quantize(x.to(dtype))


def test_an_axis_counts_from_either_end() -> None:
    x = normal(40, 150)
    for positive, negative in ((0, -2), (1, -1)):
        operand = Operand("e4m3", "tile")
        assert (
            fake_quantize(x, operand, positive)
            .dequantize()
            .equal(fake_quantize(x, operand, negative).dequantize())
        )
        one, other = (quantize(x, "e4m3", "tile", axis).dequantize() for axis in (positive, negative))
        assert one.equal(other)


# Accuracy


@pytest.mark.parametrize(
    ("element", "scaling", "error"),
    [
        ("e4m3", "tensor", 0.0264),
        ("e5m2", "tensor", 0.0526),
        ("e2m1", "tensor", 0.136),
        ("e4m3", "row", 0.0265),
        ("e2m1", "row", 0.119),
        ("e4m3", "tile", 0.0257),
        ("e2m1", "tile", 0.109),
        ("e4m3", "block", 0.0264),
        ("e2m1", "block", 0.123),
        ("e4m3", "mx", 0.0293),
        ("e2m1", "mx", 0.115),
        ("e2m1", "nvfp4", 0.0951),
        ("e2m1", "nvfp4 four over six", 0.0869),
    ],
)
def test_the_error_of_a_gaussian_is_the_published_one(element: str, scaling: str, error: float) -> None:
    x = normal(1024, 1024)
    name, *better = scaling.split(maxsplit=1)
    ours = fake_quantize(x, Operand(element, name, four_over_six=bool(better)), -1).dequantize()
    assert ((ours - x).norm() / x.norm()).item() == pytest.approx(error, rel=0.06)


def test_the_oracle_and_the_formats_agree_on_the_largest_values() -> None:
    for element, largest in LARGEST.items():
        assert lookup_element(element).max_value == largest
        assert power_of_two(largest, element, round_up=True) == 1

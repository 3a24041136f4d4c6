"""quantize_rows and quantize_tensor give the codes and scales of `scrimp.formats`, bit for bit."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from property_tests import examples
from torch import Tensor

pytest.importorskip("triton", reason="triton is not installed")

from triton_cases import DEVICE, matrix, spoilt

from scrimp.errors import PlanError
from scrimp.formats import Noise, QuantizedTensor, quantize
from scrimp.gemm.kernels import ScaledRows, quantize_rows, quantize_tensor, rows
from scrimp.precision.formats import lookup_element
from scrimp.precision.recipes import Rounding

TYPES = (torch.bfloat16, torch.float32)
ELEMENTS = ("e4m3", "e5m2")
QUANTIZERS = {"row": quantize_rows, "tensor": quantize_tensor}
SCALINGS = tuple(QUANTIZERS)
WAYS = {"row": (True, False), "column": (False, True), "both": (True, True)}
NOISE = Noise(11, first_row=1000, first_column=70_000)


def assert_same(found: ScaledRows | None, expected: QuantizedTensor) -> None:
    """Scales equal bit for bit, NaN for NaN; codes equal wherever the scale is a number."""
    assert found is not None
    codes, scales = found.codes.cpu(), found.scales.cpu()
    assert scales.shape == expected.scales.shape
    assert (codes.dtype, codes.shape) == (expected.payload.dtype, expected.payload.shape)
    assert found.codes.is_contiguous()
    is_number = ~expected.scales.isnan()
    assert torch.equal(scales.isnan(), ~is_number)
    assert torch.equal(scales[is_number].view(torch.int32), expected.scales[is_number].view(torch.int32))
    compared = is_number.expand(codes.shape)
    assert torch.equal(codes.view(torch.uint8)[compared], expected.payload.view(torch.uint8)[compared])


def assert_quantizes(
    x: Tensor, scaling: str, element: str, way: str, noise: Noise | None = None, other: Noise | None = None
) -> None:
    """Each result that is asked for is the reference's."""
    wanted = WAYS[way]
    streams = [stream if asked else None for stream, asked in zip((noise, other), wanted, strict=True)]
    found = QUANTIZERS[scaling](
        x.to(DEVICE),
        element,
        by_row=wanted[0],
        by_column=wanted[1],
        noise=streams[0],
        noise_column=streams[1],
    )
    for ours, stream, asked, axis in zip(found, streams, wanted, (-1, -2), strict=True):
        rounding: Rounding = "nearest" if stream is None else "stochastic"
        if asked:
            assert_same(ours, quantize(x, element, scaling, axis, rounding, noise=stream))
        else:
            assert ours is None


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("element", ELEMENTS)
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.every(11)
def test_codes_and_scales_with_ragged_edges(dtype: torch.dtype, element: str, way: str, scaling: str) -> None:
    assert_quantizes(matrix(130, 200, dtype), scaling, element, way)


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("element", ELEMENTS)
@pytest.mark.every(5)
def test_stochastic_codes_draw_the_noise_of_the_elements_address_whichever_axis_is_scaled(
    element: str, way: str, scaling: str
) -> None:
    x = matrix(140, 130, torch.bfloat16)
    nearest = quantize(x, element, scaling)
    expected = quantize(x, element, scaling, -1, "stochastic", noise=NOISE)
    assert not torch.equal(expected.payload.view(torch.uint8), nearest.payload.view(torch.uint8))
    assert_quantizes(x, scaling, element, way, NOISE, NOISE.derive(1))


@pytest.mark.parametrize("scaling", SCALINGS)
def test_one_result_may_be_stochastic_and_the_other_not(scaling: str) -> None:
    x = matrix(130, 140, torch.bfloat16)
    assert_quantizes(x, scaling, "e5m2", "both", NOISE, None)
    assert_quantizes(x, scaling, "e5m2", "both", None, NOISE)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.every(4)
def test_nonfinite_numbers_spoil_their_own_scale_and_no_other(dtype: torch.dtype, way: str) -> None:
    x = spoilt(140, 200, dtype)
    assert int(quantize(x, "e4m3", "row").scales.isnan().sum()) == 3
    assert_quantizes(x, "row", "e4m3", way)
    assert quantize(x, "e4m3", "tensor").scales.isnan().all()
    assert_quantizes(x, "tensor", "e4m3", way)


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("largest", [0.0, 2.0**-149, 2.0**-130, 2.0**-126, 2.0**-118, 3e38])
@pytest.mark.every(4)
def test_zeros_subnormals_and_the_largest_numbers(largest: float, scaling: str) -> None:
    x = torch.linspace(-largest, largest, 30 * 20).view(30, 20)
    for way in WAYS:
        assert_quantizes(x, scaling, "e4m3", way)


@pytest.mark.parametrize("columns", [256, 257, 4096, 4097, 9001])
@pytest.mark.parametrize("noise", [None, NOISE], ids=["nearest", "noise"])
@pytest.mark.every(3)
def test_rows_that_fill_one_chunk_or_need_several(columns: int, noise: Noise | None) -> None:
    x = matrix(3, columns, torch.bfloat16)
    x[:, -1] = x.abs().amax(1) * 2  # the largest number is the last one
    assert_quantizes(x, "row", "e4m3", "row", noise)


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize(
    "shape", [(1, 1), (1, 130), (130, 1), (3, 0), (0, 3), pytest.param((128, 128), marks=pytest.mark.slow)]
)
def test_small_whole_and_empty_matrices(shape: tuple[int, int], scaling: str) -> None:
    x = torch.linspace(-3, 9, math.prod(shape)).view(shape)
    for way in WAYS:
        assert_quantizes(x, scaling, "e4m3", way)


@pytest.mark.filterwarnings("ignore:invalid value")  # of numpy, which meets signalling NaNs
@examples(10)
@given(data=st.data())
def test_any_bits_of_any_shape(data: st.DataObject) -> None:
    """Arbitrary bit patterns: NaNs, infinities, subnormals and all binades beside each other."""
    num_rows, num_columns = data.draw(st.integers(1, 140)), data.draw(st.integers(1, 140))
    dtype, bits = data.draw(st.sampled_from([(torch.float32, torch.int32), (torch.bfloat16, torch.int16)]))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**31)))
    info = torch.iinfo(bits)
    x = (
        torch.randint(info.min, info.max + 1, (num_rows, num_columns), generator=generator)
        .to(bits)
        .view(dtype)
    )
    if data.draw(st.booleans()):
        x = torch.where(x.isfinite(), x, 1.0)
    noise = data.draw(st.sampled_from([(None, None), (NOISE, None), (NOISE, NOISE.derive(1))]))
    scaling, element = data.draw(st.sampled_from(SCALINGS)), data.draw(st.sampled_from(ELEMENTS))
    assert_quantizes(x, scaling, element, data.draw(st.sampled_from(list(WAYS))), *noise)


@pytest.mark.parametrize(
    ("scaling", "way", "launches"),
    [
        ("row", "row", ["quantize_rows_kernel"]),
        ("row", "column", ["largest_magnitudes_kernel", "write_codes_kernel"]),
        ("row", "both", ["largest_magnitudes_kernel", "write_codes_kernel"]),
        ("tensor", "both", ["write_codes_kernel"]),  # after tensor_amax, which launches its own
    ],
)
def test_each_result_takes_its_passes_and_no_more(
    monkeypatch: pytest.MonkeyPatch, scaling: str, way: str, launches: list[str]
) -> None:
    seen: list[str] = []
    run: Callable[..., None] = rows.run

    def record(kernel: object, *arguments: object, **options: object) -> None:
        seen.append(kernel.fn.__name__)  # type: ignore[attr-defined]
        run(kernel, *arguments, **options)

    monkeypatch.setattr(rows, "run", record)
    assert_quantizes(matrix(130, 140, torch.bfloat16), scaling, "e4m3", way)
    assert seen == launches


@pytest.mark.parametrize("quantizer", [quantize_rows, quantize_tensor])
def test_wrong_tensors_and_choices_are_refused_by_name(quantizer: Callable[..., object]) -> None:
    x = torch.ones(4, 6, device=DEVICE)
    for wrong, reason in ((x[0], "matrix"), (x.double(), "float64"), (x.T, "row-major")):
        with pytest.raises(PlanError, match=reason):
            quantizer(wrong, "e4m3", by_row=True, by_column=False)
    with pytest.raises(PlanError, match="no such element"):
        quantizer(x, "e3m4", by_row=True, by_column=False)
    with pytest.raises(PlanError, match="nothing to quantize"):
        quantizer(x, "e4m3", by_row=False, by_column=False)
    with pytest.raises(PlanError, match="same noise"):
        quantizer(x, "e4m3", by_row=True, by_column=True, noise=Noise(), noise_column=Noise())


def test_values_are_within_half_a_step_of_the_numbers() -> None:
    """Against the numbers themselves, not the reference: one scale per row keeps each to 2^-4 of itself or of its
    row's smallest step."""
    x = torch.randn(64, 96, generator=torch.Generator().manual_seed(0))
    row, column = quantize_rows(x.to(DEVICE), "e4m3", by_row=True, by_column=True)
    element = lookup_element("e4m3")
    for found, true in ((row, x), (column, x.T)):
        assert found is not None
        values, scales = found.codes.cpu().float() * found.scales.cpu(), found.scales.cpu()
        bound = torch.maximum(true.abs() * 2.0**-4, scales * 2.0 ** (element.min_exponent - 4))
        assert bool(((values - true).abs() <= bound).all())

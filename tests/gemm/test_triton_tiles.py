"""quantize_tiles and quantize_blocks give the codes and scales of `scrimp.formats`, bit for bit."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from triton_cases import (
    DEVICE,
    assert_same_codes,
    assert_same_rest,
    exact_under_rotation,
    matrix,
    outlying,
    spoilt,
)

from scrimp.errors import PlanError
from scrimp.formats import Noise, quantize
from scrimp.formats.codes import decode
from scrimp.gemm.kernels import quantize_blocks, quantize_tiles
from scrimp.precision import lookup_element

TYPES = (torch.bfloat16, torch.float32)
ELEMENTS = ("e2m1", "e4m3", "e5m2", "int8")


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("element", ELEMENTS)
@pytest.mark.every(3)
def test_one_pass_gives_the_tiles_of_both_axes_with_ragged_edges(element: str, dtype: torch.dtype) -> None:
    x = matrix(130, 200, dtype)
    row, column = quantize_tiles(x.to(DEVICE), element, by_row=True, by_column=True)
    assert row is not None
    assert column is not None
    assert_same_codes(row.codes, row.scales, quantize(x, element, "tile", -1))
    assert_same_codes(column.codes, column.scales, quantize(x, element, "tile", -2))


@pytest.mark.parametrize("element", ELEMENTS)
def test_stochastic_tiles_draw_the_noise_of_the_elements_address_whichever_axis_is_scaled(
    element: str,
) -> None:
    x = matrix(200, 130, torch.bfloat16)
    noise = Noise(11, first_row=1000, first_column=70_000)
    other = noise.derive(1)
    row, column = quantize_tiles(
        x.to(DEVICE), element, by_row=True, by_column=True, noise=noise, noise_column=other
    )
    assert row is not None
    assert column is not None
    nearest = quantize(x, element, "tile", -1)
    expected = quantize(x, element, "tile", -1, "stochastic", noise=noise)
    assert not torch.equal(expected.payload.view(torch.uint8), nearest.payload.view(torch.uint8))
    assert_same_codes(row.codes, row.scales, expected)
    assert_same_codes(
        column.codes, column.scales, quantize(x, element, "tile", -2, "stochastic", noise=other)
    )


@pytest.mark.parametrize("noise", [None, Noise(11)], ids=["nearest", "noise"])
@pytest.mark.parametrize("shape", [(256, 256), (201, 141)])
def test_codes_of_four_bits_are_packed_as_they_are_kept(shape: tuple[int, int], noise: Noise | None) -> None:
    x, rounding = spoilt(*shape, torch.bfloat16), "stochastic" if noise else "nearest"
    streams = noise, None if noise is None else noise.derive(1)
    row, column = quantize_tiles(
        x.to(DEVICE),
        "e2m1",
        by_row=True,
        by_column=True,
        noise=streams[0],
        noise_column=streams[1],
        packed=(True, True),
    )
    for found, axis, stream in zip((row, column), (-1, -2), streams, strict=True):
        assert found is not None
        expected = quantize(x, "e2m1", "tile", axis, rounding, noise=stream)
        assert found.codes.shape == expected.payload.shape
        values = decode(found.codes.cpu(), lookup_element("e2m1"), shape[axis])
        is_number = ~expected.scales.isnan().repeat_interleave(128, 1)[:, : shape[axis]]
        assert torch.equal(
            values[is_number], decode(expected.payload, lookup_element("e2m1"), shape[axis])[is_number]
        )
        assert torch.equal(found.scales.cpu().nan_to_num(7.0), expected.scales.nan_to_num(7.0))


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("element", ["e4m3", "int8"])
def test_nonfinite_groups_get_a_nan_scale_and_spoil_no_other_group(element: str, dtype: torch.dtype) -> None:
    x = spoilt(140, 200, dtype)
    row, column = quantize_tiles(x.to(DEVICE), element, by_row=True, by_column=True)
    blocks = quantize_blocks(x.to(DEVICE), element)
    assert row is not None
    assert column is not None
    expected = quantize(x, element, "tile", -1)
    assert int(expected.scales.isnan().sum()) == 3
    assert_same_codes(row.codes, row.scales, expected)
    assert_same_codes(column.codes, column.scales, quantize(x, element, "tile", -2))
    assert_same_codes(blocks.codes, blocks.scales, quantize(x, element, "block", -1))


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("shape", [(300, 200), (130, 384), (5, 17)])
@pytest.mark.parametrize("by_column", [True, False])
@pytest.mark.every(5)
def test_row_tiles_with_outliers_have_a_rest(
    shape: tuple[int, int], dtype: torch.dtype, by_column: bool
) -> None:
    x = outlying(*shape, dtype)
    row, column = quantize_tiles(x.to(DEVICE), "int8", by_row=True, by_column=by_column, fallback=True)
    expected = quantize(x, "int8", "tile", fallback=True)
    assert row is not None
    assert_same_codes(row.codes, row.scales, expected)
    assert_same_rest(row.rest, expected)
    if column is not None:
        assert_same_codes(column.codes, column.scales, quantize(x, "int8", "tile", -2))


def test_tiles_that_are_not_finite_have_no_rest_and_take_none_from_others() -> None:
    x = spoilt(140, 200, torch.float32)
    x[5, 3], x[0, 190], x[9, 150] = 1e9, 1e9, 1e-36
    row, _ = quantize_tiles(x.to(DEVICE), "int8", by_row=True, by_column=False, fallback=True)
    expected = quantize(x, "int8", "tile", fallback=True)
    assert row is not None
    assert_same_codes(row.codes, row.scales, expected)
    assert_same_rest(row.rest, expected)
    assert expected.rest is not None
    assert (expected.rest.scales[[0, 5]] > 0).tolist() == [[False, True], [True, False]]
    assert (expected.rest.scales[9] == 2.0**-126).all()  # of subnormal numbers


def test_a_rest_is_of_integers_along_rows_rounded_to_nearest() -> None:
    x = torch.ones(4, 6, device=DEVICE)
    for element, by_row, noise in (("e4m3", True, None), ("int8", False, None), ("int8", True, Noise())):
        with pytest.raises(PlanError, match="fall back"):
            quantize_tiles(x, element, by_row=by_row, by_column=not by_row, noise=noise, fallback=True)
    with pytest.raises(PlanError, match="fall back"):
        quantize_tiles(x, "int8", by_row=True, by_column=False, fallback=True, hadamard=(True, False))


@pytest.mark.parametrize("by_row", [True, False])
def test_one_axis_alone_gives_the_same_as_both(by_row: bool) -> None:
    x = matrix(64, 256, torch.bfloat16)
    row, column = quantize_tiles(x.to(DEVICE), "e4m3", by_row=by_row, by_column=not by_row)
    assert (row is None, column is None) == (not by_row, by_row)
    tiles = row or column
    assert tiles is not None
    assert_same_codes(tiles.codes, tiles.scales, quantize(x, "e4m3", "tile", -1 if by_row else -2))


@pytest.mark.parametrize("shape", [(1, 1), (128, 128), (3, 0)])
def test_small_whole_and_empty_matrices(shape: tuple[int, int]) -> None:
    x = torch.linspace(-3, 9, shape[0] * shape[1]).view(shape)
    row, column = quantize_tiles(x.to(DEVICE), "e4m3", by_row=True, by_column=True)
    assert row is not None
    assert column is not None
    assert_same_codes(row.codes, row.scales, quantize(x, "e4m3", "tile", -1))
    assert column.codes.shape == (shape[1], shape[0])
    assert column.scales.shape == (shape[1], 1)


@pytest.mark.parametrize("hadamard", [(True, True), (True, False), (False, True)])
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.every(3)
def test_rotated_tiles_are_padded_to_whole_groups(rounding: str, hadamard: tuple[bool, bool]) -> None:
    x = exact_under_rotation(200, 140)
    streams = (Noise(11, first_row=48), Noise(12, first_row=48)) if rounding == "stochastic" else (None, None)
    found = quantize_tiles(
        x.to(DEVICE),
        "int8",
        by_row=True,
        by_column=True,
        noise=streams[0],
        noise_column=streams[1],
        hadamard=hadamard,
    )
    for one, axis, rotated, noise in zip(found, (-1, -2), hadamard, streams, strict=True):
        assert one is not None
        expected = quantize(x, "int8", "tile", axis, rounding, hadamard=rotated, noise=noise)  # type: ignore[arg-type]
        assert one.codes.shape[1] % 16 == 0 or not rotated
        assert_same_codes(one.codes, one.scales, expected)


@pytest.mark.parametrize("axis", [-1, -2])
def test_rotated_blocks_are_padded_to_whole_groups(axis: int) -> None:
    w = exact_under_rotation(200, 140)
    blocks = quantize_blocks(w.to(DEVICE), "int8", axis, hadamard=True)
    assert_same_codes(blocks.codes, blocks.scales, quantize(w, "int8", "block", axis, hadamard=True))


@pytest.mark.parametrize("axis", [-1, -2])
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("element", ELEMENTS)
def test_blocks_lie_with_the_summed_axis_last(element: str, dtype: torch.dtype, axis: int) -> None:
    w = matrix(200, 130, dtype)
    blocks = quantize_blocks(w.to(DEVICE), element, axis)
    assert_same_codes(blocks.codes, blocks.scales, quantize(w, element, "block", axis))


def test_scales_of_tiles_lie_column_major_as_cublaslt_reads_them() -> None:
    row, _ = quantize_tiles(torch.ones(130, 256, device=DEVICE), "e4m3", by_row=True, by_column=False)
    assert row is not None
    assert row.scales.stride() == (1, 130)


def test_wrong_tensors_and_choices_are_refused_by_name() -> None:
    x = torch.ones(4, 6, device=DEVICE)
    for wrong, reason in ((x[0], "matrix"), (x.double(), "float64"), (x.T, "row-major")):
        with pytest.raises(PlanError, match=reason):
            quantize_tiles(wrong, "e4m3", by_row=True, by_column=False)
        with pytest.raises(PlanError, match=reason):
            quantize_blocks(wrong, "e4m3")
    with pytest.raises(PlanError, match="no such element"):
        quantize_tiles(x, "e3m4", by_row=True, by_column=False)
    with pytest.raises(PlanError, match="nothing to quantize"):
        quantize_tiles(x, "e4m3", by_row=False, by_column=False)
    with pytest.raises(PlanError, match="noise_column is for codes"):
        quantize_tiles(x, "e4m3", by_row=True, by_column=False, noise_column=Noise())
    with pytest.raises(PlanError, match="same noise"):
        quantize_tiles(x, "e4m3", by_row=True, by_column=True, noise=Noise(), noise_column=Noise())
    with pytest.raises(PlanError, match="not packed"):
        quantize_tiles(x, "e4m3", by_row=True, by_column=False, packed=(True, False))
    with pytest.raises(PlanError, match="of one matrix"):
        quantize_tiles(x, "e4m3", by_row=True, by_column=True, noise=Noise(), noise_column=Noise(1, 2))

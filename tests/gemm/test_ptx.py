"""What the compiler makes of kernels for Hopper gives the bits of `scrimp.formats` and `scrimp.optim`, without races.

test_triton_tiles.py and others beside it interpret the kernels' Python. Here their PTX runs, on a CPU.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Iterator

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from ptx_launch import PtxLauncher
from ptx_memory import AccessError
from test_triton_adamw import COMBINATIONS, STEP, started
from test_triton_adamw import assert_same_bits as assert_same_states
from test_triton_adamw import both as updated
from test_triton_rows import WAYS, assert_quantizes
from torch import Tensor
from triton_cases import (
    assert_same_bits,
    assert_same_codes,
    assert_same_groups,
    assert_same_rest,
    assert_same_tensor_scale,
    exact_under_rotation,
    fake_values,
    in_groups,
    matrix,
    outlying,
    spoilt,
)

from scrimp.formats import Noise, Operand, quantize
from scrimp.formats.codes import decode
from scrimp.formats.hadamard import rotate
from scrimp.gemm.backends.native import swizzle
from scrimp.gemm.kernels import (
    GroupsOf,
    add_rounded,
    apply_scales,
    group_values,
    quantize_blocks,
    quantize_groups,
    quantize_tiles,
    tensor_amax,
    widen_codes,
)
from scrimp.optim import MomentFormat
from scrimp.optim.targets import add_by_operators
from scrimp.precision import lookup_element

ALIGNED, RAGGED = (256, 144), (130, 75)
CASES = (
    (ALIGNED, torch.float32),
    (ALIGNED, torch.bfloat16),
    ((48, 32), torch.float32),
    (RAGGED, torch.float32),
    (RAGGED, torch.bfloat16),
    ((272, 75), torch.float32),
    ((75, 272), torch.bfloat16),
    ((1, 130), torch.float32),
    ((130, 1), torch.bfloat16),
)
"""Sizes that are multiples of 16, none, one of them, and sizes that are constants to the compiler."""
FEW_CASES = CASES[0], CASES[1], CASES[4]
SCALINGS = ("mx", "nvfp4", "nvfp4_2d")
KERNELS = ("tiles", "block_scaled", "groups", "hashes", "kept", "maxima", "outer_scales")
KERNELS += ("rows", "rounded_sums", "adamw")
CODED = (("e4m3", "mx"), *(("e2m1", scaling) for scaling in SCALINGS))
Launchers = Callable[[Callable[[str], str]], PtxLauncher]


@pytest.fixture
def launching(monkeypatch: pytest.MonkeyPatch) -> Iterator[Launchers]:
    """Makes kernels run as PTX, from a change of it that is given on."""
    made = []

    def launch(edit: Callable[[str], str]) -> PtxLauncher:
        made.append(PtxLauncher(edit))
        for name in KERNELS:
            module = importlib.import_module(f"scrimp.gemm.kernels.{name}")
            monkeypatch.setattr(module, "run", made[-1])
            monkeypatch.setattr(module, "check_devices", lambda **_: None, raising=name != "hashes")
        return made[-1]

    yield launch
    assert any(launcher.launches for launcher in made), "no kernel ran as PTX"


@pytest.fixture
def on_ptx(launching: Launchers) -> PtxLauncher:
    return launching(lambda ptx: ptx)


def matrices(shape: tuple[int, int], dtype: torch.dtype) -> list[Tensor]:
    """A matrix of finite numbers and, where there is room, one with a few others."""
    if min(shape) == 1:
        return [torch.linspace(-3, 9, max(shape)).view(shape).to(dtype)]
    found = [matrix(*shape, dtype)]
    return [*found, spoilt(*shape, dtype)] if shape == ALIGNED else found


@pytest.mark.parametrize("axis", [-1, -2])
@pytest.mark.parametrize(("shape", "dtype"), CASES)
@pytest.mark.every(18)
def test_blocks(on_ptx: PtxLauncher, shape: tuple[int, int], dtype: torch.dtype, axis: int) -> None:
    for x in matrices(shape, dtype):
        blocks = quantize_blocks(x, "e4m3", axis)
        assert_same_codes(blocks.codes, blocks.scales, quantize(x, "e4m3", "block", axis))


@pytest.mark.parametrize("stochastic", [False, True])
@pytest.mark.parametrize(("shape", "dtype"), CASES)
@pytest.mark.every(18)
def test_tiles_of_both_axes(
    on_ptx: PtxLauncher, shape: tuple[int, int], dtype: torch.dtype, stochastic: bool
) -> None:
    noise = Noise(11, first_row=1000, first_column=70_000) if stochastic else None
    other = noise.derive(1) if noise else None
    for x in matrices(shape, dtype):
        row, column = quantize_tiles(x, "e4m3", by_row=True, by_column=True, noise=noise, noise_column=other)
        assert row is not None
        assert column is not None
        for tiles, axis, stream in ((row, -1, noise), (column, -2, other)):
            expected = quantize(x, "e4m3", "tile", axis, "stochastic" if stream else "nearest", noise=stream)
            assert_same_codes(tiles.codes, tiles.scales, expected)


@pytest.mark.parametrize("everywhere", [True, False])
@pytest.mark.parametrize(("shape", "dtype"), FEW_CASES)
@pytest.mark.every(6)
def test_tiles_with_a_rest(
    on_ptx: PtxLauncher, shape: tuple[int, int], dtype: torch.dtype, everywhere: bool
) -> None:
    """Second codes of all blocks are written where each has a rest, and of none where none has."""
    x = outlying(*shape, dtype, everywhere=True) if everywhere else torch.ones(shape, dtype=dtype)
    row, _ = quantize_tiles(x, "int8", by_row=True, by_column=False, fallback=True)
    expected = quantize(x, "int8", "tile", fallback=True)
    assert row is not None
    assert row.rest is not None
    assert_same_codes(row.codes, row.scales, expected)
    assert_same_rest(row.rest, expected)
    assert bool(row.rest.blocks.bool().all() if everywhere else not row.rest.blocks.any())


@pytest.mark.parametrize("shape", [ALIGNED, RAGGED])
@pytest.mark.every(2)
def test_rotated_tiles_of_both_axes_and_rotated_blocks(on_ptx: PtxLauncher, shape: tuple[int, int]) -> None:
    x, noise = exact_under_rotation(*shape), Noise(11)
    tiles = quantize_tiles(x, "int8", by_row=True, by_column=True, noise_column=noise, hadamard=(True, True))
    for axis, found, stream in ((-1, tiles[0], None), (-2, tiles[1], noise)):
        blocks = quantize_blocks(x, "int8", axis, hadamard=True)
        assert found is not None
        rounding = "stochastic" if stream else "nearest"
        expected = quantize(x, "int8", "tile", axis, rounding, hadamard=True, noise=stream)
        assert_same_codes(found.codes, found.scales, expected)
        assert_same_codes(blocks.codes, blocks.scales, quantize(x, "int8", "block", axis, hadamard=True))


@pytest.mark.slow
@pytest.mark.parametrize("axis", [-1, -2])
@pytest.mark.parametrize(("shape", "dtype"), FEW_CASES)
def test_tiles_of_one_axis(
    on_ptx: PtxLauncher, shape: tuple[int, int], dtype: torch.dtype, axis: int
) -> None:
    x = matrix(*shape, dtype)
    row, column = quantize_tiles(x, "e4m3", by_row=axis == -1, by_column=axis == -2)
    tiles = row or column
    assert tiles is not None
    assert_same_codes(tiles.codes, tiles.scales, quantize(x, "e4m3", "tile", axis))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("scaling", ["row", "tensor"])
@pytest.mark.parametrize(("shape", "dtype"), FEW_CASES)
@pytest.mark.every(9)
def test_rows_and_whole_tensors(
    on_ptx: PtxLauncher, shape: tuple[int, int], dtype: torch.dtype, scaling: str, way: str
) -> None:
    for x in matrices(shape, dtype):
        assert_quantizes(x, scaling, "e4m3", way)
        assert_quantizes(x, scaling, "e5m2", way, Noise(3), Noise(4))


@pytest.mark.slow
@pytest.mark.parametrize("element", ["e2m1", "e5m2"])
def test_codes_of_other_elements(on_ptx: PtxLauncher, element: str) -> None:
    x = matrix(*ALIGNED, torch.bfloat16)
    row, column = quantize_tiles(x, element, by_row=True, by_column=True)
    assert row is not None
    assert column is not None
    assert_same_codes(row.codes, row.scales, quantize(x, element, "tile", -1))
    assert_same_codes(column.codes, column.scales, quantize(x, element, "tile", -2))
    for axis in (-1, -2):
        blocks = quantize_blocks(x, element, axis)
        assert_same_codes(blocks.codes, blocks.scales, quantize(x, element, "block", axis))


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.parametrize(("shape", "dtype"), FEW_CASES)
@pytest.mark.parametrize("axis", [-1, -2])
@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.every(36)
def test_groups(
    on_ptx: PtxLauncher, scaling: str, dtype: torch.dtype, axis: int, shape: tuple[int, int], rounding: str
) -> None:
    """With the maximum of the tensor where its scale needs one."""
    operand, noise = Operand("e2m1", scaling, rounding), Noise(5, first_row=40, first_column=900)  # type: ignore[arg-type]
    for x in matrices(shape, dtype):
        assert_same_values(x, operand, axis, noise)


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.parametrize("shape", [ALIGNED, RAGGED])
@pytest.mark.parametrize("axis", [-1, -2])
@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.every(24)
def test_rotated_groups(
    on_ptx: PtxLauncher, scaling: str, axis: int, shape: tuple[int, int], rounding: str
) -> None:
    operand = Operand("e2m1", scaling, rounding, hadamard=True)  # type: ignore[arg-type]
    assert_same_values(exact_under_rotation(*shape), operand, axis, None)


def assert_same_values(x: Tensor, operand: Operand, axis: int, noise: Noise | None) -> None:
    found = in_groups(x, GroupsOf(operand, "values", noise), axis)
    expected, expected_scale = fake_values(x, operand, axis, noise)
    assert_same_bits(found.codes, expected.bfloat16())
    assert_same_tensor_scale(found.tensor_scale, expected_scale)


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.parametrize(("shape", "dtype"), FEW_CASES)
@pytest.mark.parametrize("names", CODED, ids="-".join)
@pytest.mark.every(12)
def test_codes_of_groups_along_both_axes(
    on_ptx: PtxLauncher, names: tuple[str, str], dtype: torch.dtype, shape: tuple[int, int], rounding: str
) -> None:
    operand, noises = Operand(*names, rounding), (Noise(5, 40, 900), Noise(6, 40, 900))  # type: ignore[arg-type]
    for x in matrices(shape, dtype):
        found = quantize_groups(x, *(GroupsOf(operand, noise=noise) for noise in noises))
        for one, axis, noise in zip(found, (-1, -2), noises, strict=True):
            assert one is not None
            assert_same_groups(one, quantize(x, *names, axis, operand.rounding, noise=noise))


@pytest.mark.parametrize(("shape", "dtype"), FEW_CASES)
@pytest.mark.parametrize("names", [*CODED, ("e2m1", "tile")], ids="-".join)
@pytest.mark.every(3)
def test_kept_codes_are_read(
    on_ptx: PtxLauncher, names: tuple[str, str], dtype: torch.dtype, shape: tuple[int, int]
) -> None:
    x = matrix(*shape, dtype)
    codes = quantize(x, *names, -2)
    if names[1] == "tile":
        row, column = quantize_tiles(x, "e2m1", by_row=False, by_column=True, packed=(False, True))
        assert row is None
        assert column is not None
        assert torch.equal(column.codes, codes.payload)
        found = widen_codes(codes.payload, shape[0]).float()
        assert_same_bits(found, decode(codes.payload, lookup_element("e2m1"), shape[0]))
    else:
        values = group_values(codes.payload, codes.scales, codes.operand, shape[0])
        expected = codes.dequantize_matrix().values.T
        assert_same_bits(values, expected.to(torch.bfloat16).contiguous())
        product, scale = expected.contiguous(), torch.tensor(0.3)
        assert_same_bits(
            apply_scales(product, scale, scale, torch.bfloat16), (product * scale * scale).bfloat16()
        )


@pytest.mark.slow
@pytest.mark.parametrize("shape", [ALIGNED, RAGGED])
@pytest.mark.parametrize("scaling", SCALINGS)
def test_a_rotated_half_and_swizzled_scales(
    on_ptx: PtxLauncher, scaling: str, shape: tuple[int, int]
) -> None:
    x = exact_under_rotation(*shape)
    plain, rotated = Operand("e2m1", scaling), Operand("e2m1", scaling, hadamard=True)
    row, column = quantize_groups(x, GroupsOf(plain, "swizzled"), GroupsOf(rotated))
    assert row is not None
    assert column is not None
    assert_same_groups(column, quantize(x, "e2m1", scaling, -2, hadamard=True))
    expected = quantize(x, "e2m1", scaling, -1)
    by_row = expected.scales.view(torch.uint8)
    if scaling == "nvfp4_2d":
        by_row = by_row.repeat_interleave(16, 0)[: shape[0]]
    assert torch.equal(row.codes, expected.payload)
    assert torch.equal(row.scales.view(torch.uint8), swizzle(by_row))


@pytest.mark.slow
@pytest.mark.parametrize("hadamard", [False, True])
@pytest.mark.parametrize("axis", [-1, -2])
@pytest.mark.parametrize(("shape", "dtype"), FEW_CASES)
def test_the_largest_magnitude_of_a_tensor(
    on_ptx: PtxLauncher, shape: tuple[int, int], dtype: torch.dtype, axis: int, hadamard: bool
) -> None:
    x = exact_under_rotation(*shape).to(dtype)
    x[-1, -1] = 90
    pad = -x.shape[axis] % 16
    padded = torch.nn.functional.pad(x.float(), (0, pad) if axis == -1 else (0, 0, 0, pad))
    expected = (rotate(padded, axis) if hadamard else padded).abs().max()
    assert torch.equal(tensor_amax(x, hadamard, axis), expected)
    x[-1, -1] = torch.nan
    assert bool(tensor_amax(x, hadamard, axis).isnan())


# The machine sees what is wrong.


@pytest.mark.parametrize(("weight", "gradient", "format_"), COMBINATIONS)
@pytest.mark.slow
def test_updates(
    on_ptx: PtxLauncher, weight: torch.dtype, gradient: torch.dtype, format_: MomentFormat
) -> None:
    for shape in ((16, 256), (9, 131)):
        own, g = matrices(shape, weight)[0], matrices(shape, gradient)[0]
        assert_same_states(*updated(own, g, started(own, format_), STEP, Noise(2**63 + 5, 2**40, 7)))


@pytest.mark.slow
def test_sums_of_gradients(on_ptx: PtxLauncher) -> None:
    for shape, dtype in CASES[3:5]:
        total, gradient = matrices(shape, torch.bfloat16)[0], matrices(shape, dtype)[0].flip(0).contiguous()
        expected, noise = total.clone(), Noise(2**63 + 5, 2**40, 7)
        add_by_operators(expected, gradient, noise)
        add_rounded(total, gradient, noise)
        assert torch.equal(total, expected)


def without(pattern: str, number: int) -> Callable[[str], str]:
    """Leaves out what matches, the one of that number."""

    def edit(ptx: str) -> str:
        found = list(re.finditer(pattern, ptx))[number]
        return ptx[: found.start()] + ptx[found.end() :]

    return edit


def test_every_barrier_of_the_blocks_is_needed(launching: Launchers) -> None:
    x, barriers = matrix(*ALIGNED, torch.float32), []

    def count(ptx: str) -> str:
        barriers.extend(re.findall(r"bar\.sync", ptx))
        return ptx

    launching(count)
    quantize_blocks(x, "e4m3", -2)
    assert len(barriers) >= 3
    for number in range(len(barriers)):
        launching(without(r"bar\.sync\s+0;", number))
        with pytest.raises(AssertionError, match="what another thread"):
            quantize_blocks(x, "e4m3", -2)


def test_a_store_of_exchanged_registers_gives_wrong_codes(launching: Launchers) -> None:
    x = matrix(*ALIGNED, torch.float32)
    launching(lambda ptx: re.sub(r"(st\.global\.v4\.b32 .*\{ )(%r\d+), (%r\d+)", r"\1\3, \2", ptx, count=1))
    blocks = quantize_blocks(x, "e4m3")
    expected = quantize(x, "e4m3", "block", -1)
    assert torch.equal(blocks.scales, expected.scales)
    with pytest.raises(AssertionError):
        assert_same_codes(blocks.codes, blocks.scales, expected)


def test_a_store_left_out_is_seen(launching: Launchers) -> None:
    launching(without(r"@%p\d+ st\.global\.v4\.b32 .*;", 3))
    with pytest.raises(AssertionError, match="bytes are not written"):
        quantize_blocks(matrix(*ALIGNED, torch.float32), "e4m3")


def test_a_store_without_its_guard_leaves_the_buffer(launching: Launchers) -> None:
    launching(without(r"@%p\d+ (?=st\.global\.v4\.b32)", 3))
    with pytest.raises(AccessError, match=r"st\.global"):
        quantize_blocks(matrix(48, 128, torch.float32), "e4m3")

"""Matrices and comparisons shared by the tests of the triton kernels."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from scrimp.formats import Noise, Operand, QuantizedTensor, fake_quantize
from scrimp.formats.codes import decode
from scrimp.gemm.kernels import GroupsOf, QuantizedGroups, quantize_groups
from scrimp.gemm.kernels.launch import RestOfTiles
from scrimp.gemm.probe import ACCUMULATOR_STEP, INSTRUCTION_K
from scrimp.precision import lookup_element

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
"""Where kernels run: without a GPU in triton's interpreter."""
TILE = 128


def sums_step(device: str = DEVICE, promote_every: int = TILE) -> float:
    """What the sum of a tile of E4M3 codes may lose, relative to its sum of magnitudes.

    Interpreted, every addend is rounded to float32. FP8 tensor cores are reported to keep about 14 bits of the largest
    addend at each instruction of 32: what that may lose is derived in `scrimp.gemm.probe`. A lost instruction costs
    forty times more.
    """
    if device == "cpu":
        return TILE * 2.0**-24
    return promote_every / INSTRUCTION_K * ACCUMULATOR_STEP


def matrix(rows: int, columns: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Numbers over 40 binades and both signs, with exact ties, zeros, and a few tiles of nothing."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, columns, generator=generator)
    x *= torch.exp2(torch.randint(-20, 21, (rows, 1), generator=generator).float())
    x[::7] = x[::7].sign() * torch.randint(0, 13, x[::7].shape, generator=generator) / 4
    x[1, :128] = 0
    x[:, 3] = 0
    x[2, ::2] = -0.0
    return x.to(dtype)


def spoilt(rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    """A matrix with a NaN, both infinities, and subnormals."""
    x = matrix(rows, columns, torch.float32, seed=5)
    x[0, 0], x[5, 130], x[100, 2] = torch.nan, torch.inf, -torch.inf
    x[9], x[:, 140] = x[9] * 2.0**-130, x[:, 140] * 2.0**-135
    return x.to(dtype)


def fake_values(
    x: Tensor, operand: Operand, axis: int, noise: Noise | None = None
) -> tuple[Tensor, Tensor | None]:
    """The reference's values, left rotated, and its tensor scale of no axes."""
    found = fake_quantize(x, operand, axis, noise=noise, keep_rotation=True)
    return found.values, None if found.outer is None else found.outer.reshape(())


def assert_same_codes(codes: Tensor, scales: Tensor, expected: QuantizedTensor) -> None:
    """Scales equal bit for bit, NaN for NaN; codes equal wherever the scale is a number."""
    codes, scales = codes.cpu(), scales.cpu()
    element = lookup_element(expected.operand.element)
    assert scales.shape == expected.scales.shape
    is_number = ~expected.scales.isnan()
    assert torch.equal(scales.isnan(), ~is_number)
    assert torch.equal(scales[is_number].view(torch.int32), expected.scales[is_number].view(torch.int32))
    group = codes.shape[0] // scales.shape[0] if scales.shape[0] == codes.shape[0] else 128
    compared = is_number.repeat_interleave(group, 0)[: codes.shape[0]]
    compared = compared.repeat_interleave(128, 1)[:, : codes.shape[1]]
    if element.name == "e2m1":
        ours, theirs = codes.float(), decode(expected.payload, element, codes.shape[1])
        ours, theirs = ours.view(torch.int32), theirs.view(torch.int32)
    else:
        assert codes.dtype == expected.payload.dtype
        ours, theirs = codes.view(torch.uint8), expected.payload.view(torch.uint8)
    assert torch.equal(ours[compared], theirs[compared])


def outlying(rows: int, columns: int, dtype: torch.dtype, *, everywhere: bool = False) -> Tensor:
    """A matrix with outliers in some tiles of rows, or in one of each block."""
    x = matrix(rows, columns, torch.float32, seed=9)
    x[3, 5], x[4, min(130, columns - 1)] = 1e4 * x[3].abs().max(), -40 * x[4].abs().max()
    x[rows - 1, columns - 1] = 1e3 * x[rows - 1].abs().max()
    if everywhere:
        x[2::TILE, ::TILE] = 1e3 * x[2::TILE].abs().amax(1, keepdim=True) + 1
    return x.to(dtype)


def written_codes(rest: RestOfTiles) -> Tensor:
    """Second codes, with 0 in blocks without a rest, which are not written."""
    spread = rest.blocks.repeat_interleave(TILE, 0).repeat_interleave(TILE, 1)
    return rest.codes * spread[: rest.codes.shape[0], : rest.codes.shape[1]].to(torch.int8)


def assert_same_rest(rest: RestOfTiles | None, expected: QuantizedTensor) -> None:
    """Second codes, scales and flags, bit for bit."""
    assert rest is not None
    assert expected.rest is not None
    scales = expected.rest.scales
    assert torch.equal(rest.scales.cpu().view(torch.int32), scales.view(torch.int32))
    assert torch.equal(written_codes(rest).cpu(), expected.rest.payload)
    padded = F.pad(scales, (0, 0, 0, -len(scales) % TILE)).unflatten(0, (-1, TILE))
    assert torch.equal(rest.blocks.cpu(), (padded > 0).any(1).int())


def in_groups(x: Tensor, wanted: GroupsOf, axis: int) -> QuantizedGroups:
    """A matrix in groups along one axis, by the kernel."""
    row, column = quantize_groups(x, *((wanted, None) if axis == -1 else (None, wanted)))
    found = row or column
    assert found is not None
    return found


def assert_same_groups(found: QuantizedGroups, expected: QuantizedTensor) -> None:
    """Codes and scales equal bit for bit, but for the sign of a NaN, which differs between processors."""
    assert_same_tensor_scale(found.tensor_scale, expected.tensor_scale)
    for ours, theirs in ((found.codes, expected.payload), (found.scales, expected.scales)):
        assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape)
        is_nan = theirs.float().isnan()
        ours = ours.cpu()
        assert torch.equal(ours.float().isnan(), is_nan)
        assert torch.equal(ours.view(torch.uint8)[~is_nan], theirs.view(torch.uint8)[~is_nan])


def assert_same_tensor_scale(ours: Tensor | None, theirs: Tensor | None) -> None:
    assert (ours is None) == (theirs is None)
    if ours is not None and theirs is not None:
        assert ours.shape == theirs.shape
        assert (
            torch.equal(ours.cpu().view(torch.int32), theirs.view(torch.int32))
            or ours.isnan() & theirs.isnan()
        )


def assert_same_bits(ours: Tensor, theirs: Tensor) -> None:
    ours, theirs = ours.cpu(), theirs.cpu()
    assert ours.dtype == theirs.dtype
    assert ours.shape == theirs.shape
    assert torch.equal(ours.isnan(), theirs.isnan())
    same = theirs == theirs
    assert torch.equal(ours[same].view(torch.int16), theirs[same].view(torch.int16))


def exact_under_rotation(rows: int, columns: int) -> Tensor:
    """Small multiples of 1/16: every sum of 16 of them, over 4, is exact in float32 in any order."""
    generator = torch.Generator().manual_seed(3)
    return torch.randint(-200, 201, (rows, columns), generator=generator) / 16

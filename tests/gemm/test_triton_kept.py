"""Kept codes as products read them, and products times scales: against `scrimp.formats` and torch's operators."""

from __future__ import annotations

import pytest
import torch
from triton_cases import DEVICE, assert_same_bits, matrix, spoilt

from scrimp.errors import PlanError
from scrimp.formats import Noise, quantize
from scrimp.formats.codes import decode
from scrimp.gemm.backends import BACKENDS
from scrimp.gemm.kernels import apply_scales, group_values, widen_codes
from scrimp.gemm.problem import COLUMNS, ROWS, Use
from scrimp.precision import Operand, lookup_element

OPERANDS = (
    *((element, "mx") for element in ("e4m3", "e5m2", "e2m1")),
    *(("e2m1", scaling) for scaling in ("nvfp4", "nvfp4_2d")),
)


def test_every_code_of_four_bits_becomes_that_of_eight() -> None:
    every_byte = torch.arange(256, dtype=torch.uint8).reshape(4, 64)
    expected = decode(every_byte, lookup_element("e2m1"), 128)
    assert torch.equal(widen_codes(every_byte.to(DEVICE), 128).float().cpu(), expected)
    odd = widen_codes(every_byte.to(DEVICE), 127)
    assert torch.equal(odd.float().cpu(), expected[:, :127])
    assert torch.equal(odd.float().cpu().signbit(), expected[:, :127].signbit())


@pytest.mark.parametrize("hadamard", [False, True])
@pytest.mark.parametrize("shape", [(64, 128), (70, 141), (3, 5)])
@pytest.mark.parametrize("axis", [COLUMNS, ROWS])
@pytest.mark.parametrize("names", OPERANDS, ids="-".join)
@pytest.mark.every(7)
def test_values_of_groups_are_those_of_their_codes(
    names: tuple[str, str], axis: int, shape: tuple[int, int], hadamard: bool
) -> None:
    x = spoilt(101, 141, torch.bfloat16) if shape == (70, 141) else matrix(*shape, torch.bfloat16)
    codes = quantize(x, *names, axis, "stochastic", noise=Noise(3), hadamard=hadamard)
    expected = codes.dequantize_matrix()
    found = BACKENDS["triton"].load(codes)
    assert_same_bits(found.values.contiguous(), expected.values.to(torch.bfloat16).contiguous())
    assert found.outer is codes.tensor_scale


def test_every_scale_of_a_group() -> None:
    """Those of powers of two whose product with a code is no number of bfloat16 aside."""
    scales = torch.arange(256, dtype=torch.uint8)[:, None]
    payload = torch.full((256, 16), 0x1B, dtype=torch.uint8)  # -1.5 and 0.5
    for scaling, own in (("nvfp4", scales.view(torch.float8_e4m3fn)), ("mx", scales)):
        operand, length = Operand("e2m1", scaling), 16 if scaling == "nvfp4" else 32
        kept = payload[:, : length // 2].contiguous()
        found = group_values(kept.to(DEVICE), own.to(DEVICE), operand, length)
        like = quantize(torch.zeros(256, length), "e2m1", scaling, COLUMNS)
        expected = like.with_tensors(kept, own, None).dequantize_matrix().values
        assert_same_bits(found, expected.to(torch.bfloat16))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("which", [(True, True), (True, False), (False, True), (False, False)])
def test_a_product_times_its_scales(which: tuple[bool, bool], dtype: torch.dtype) -> None:
    product = spoilt(101, 141, torch.float32).to(DEVICE)
    scales = [
        torch.tensor(value, device=DEVICE) if is_there else None
        for value, is_there in zip((3e-4, 7.1), which, strict=True)
    ]
    expected = product
    for scale in scales:
        expected = expected if scale is None else expected * scale
    assert_same_bits(apply_scales(product, *scales, dtype), expected.to(dtype))


def test_other_codes_are_refused() -> None:
    packed = torch.zeros(4, 8, dtype=torch.uint8, device=DEVICE)
    for wrong, length in ((packed, 18), (packed.float(), 16), (packed.t(), 8)):
        with pytest.raises(PlanError):
            widen_codes(wrong, length)
    with pytest.raises(PlanError, match="so many numbers"):
        group_values(packed, packed[:, :1], Operand("e2m1", "nvfp4"), 18)
    with pytest.raises(PlanError, match="row-major"):
        apply_scales(torch.zeros(4, 8, device=DEVICE).t(), None, None, torch.float32)


def test_nothing_is_nothing() -> None:
    assert widen_codes(torch.zeros(0, 8, dtype=torch.uint8, device=DEVICE), 16).shape == (0, 16)
    use = Use(Operand("e4m3", "mx"), COLUMNS, Noise())
    assert BACKENDS["triton"].load(
        BACKENDS["triton"].store(torch.zeros(0, 64, device=DEVICE), use)
    ).values.shape == (0, 64)
    assert apply_scales(torch.zeros(0, 3, device=DEVICE), None, None, torch.bfloat16).shape == (0, 3)

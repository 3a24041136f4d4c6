"""Refused cuts are those whose pieces quantize otherwise than the whole matrix."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from scrimp.errors import PlanError
from scrimp.formats import fake_quantize
from scrimp.formats.hadamard import rotate
from scrimp.precision import HIGH_PRECISION, OPERANDS, LinearPrecision, check_cut, recipe

FEATURES = 256
AXES = {"fprop": (-1, -1), "dgrad": (-1, -2), "wgrad": (-2, -2)}
CUT_AXES = {"outputs": {"w": -2, "g": -1}, "inputs": {"w": -1, "x": -1}}


def agrees(name: str, gemm: str, split: str, begin: int) -> bool:
    """Whether two pieces, of which the second begins there, quantize as their whole, with its largest number."""
    entry, generator = recipe(name).gemm(gemm), torch.Generator().manual_seed(begin)
    assert entry is not None
    for tensor, operand, axis in zip(OPERANDS[gemm], (entry.a, entry.b), AXES[gemm], strict=True):
        cut = CUT_AXES[split].get(tensor)
        if cut is None:
            continue
        operand = dataclasses.replace(operand, rounding="nearest")  # where noise lies is another matter
        whole = torch.randn(FEATURES, FEATURES, generator=generator).mul_(8).exp2_()
        amax = whole.clone()

        def of_whole(largest: torch.Tensor, amax: torch.Tensor = amax) -> None:
            largest.fill_(amax.max())

        expected = fake_quantize(whole, operand, axis).dequantize()
        if operand.hadamard:
            amax.copy_(rotate(whole, axis).abs())
        for features in (slice(0, begin), slice(begin, FEATURES)):
            here = (features, slice(None)) if cut == -2 else (slice(None), features)
            found = fake_quantize(whole[here], operand, axis, reduce_amax=of_whole).dequantize()
            if not torch.equal(found, expected[here]):
                return False
    return True


@pytest.mark.parametrize("begin", [128, 96, 64, 48, 40])
@pytest.mark.parametrize("name", ["fp8", "mxfp8", "fp4", "nvfp4", "mxfp4", "int8_hadamard"])
def test_a_cut_is_refused_where_pieces_quantize_otherwise(name: str, begin: int) -> None:
    for split in ("outputs", "inputs"):
        said = ""
        try:
            check_cut("layer", LinearPrecision(name, name, name, name), split, {0, begin}, FEATURES)
        except PlanError as error:
            said = str(error)
        odd = [gemm for gemm in OPERANDS if not agrees(name, gemm, split, begin)]
        assert bool(said) == bool(odd)
        if odd:
            assert f"layer.{odd[0]} cannot run in {name}" in said
            assert f"a piece that begins at {begin} of its {FEATURES} {split}" in said


@pytest.mark.parametrize("name", ["fp8_tensor", "fp8_row", *HIGH_PRECISION])
def test_scales_that_a_reduction_finds_may_be_cut_anywhere(name: str) -> None:
    for split in ("outputs", "inputs"):
        check_cut("layer", LinearPrecision.of(name), split, {0, 37}, FEATURES)

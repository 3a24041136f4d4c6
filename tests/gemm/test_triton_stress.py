"""The quantizers again and again on a GPU, one launch after another, equal to the reference each time."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from triton_cases import assert_same_codes

from scrimp.formats import quantize
from scrimp.gemm.kernels import quantize_blocks, quantize_tiles

REPETITIONS = 200
SHAPES = ((256, 144), (48, 32))
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_repetition_gives_the_codes_of_the_reference(dtype: torch.dtype) -> None:
    """All launches are queued before a result is looked at, so that kernels follow each other without a pause."""
    generator = torch.Generator().manual_seed(0)
    given = [torch.randn(SHAPES[i % 2], generator=generator).to(dtype) for i in range(REPETITIONS)]
    there = [x.cuda() for x in given]
    found = [
        (quantize_blocks(x, "e4m3", -2), quantize_tiles(x, "e4m3", by_row=True, by_column=True))
        for x in there
    ]
    wrong = []
    for number, (x, (blocks, (row, column))) in enumerate(zip(given, found, strict=True)):
        assert row is not None
        assert column is not None
        for name, codes, scales, scaling, axis in (
            ("blocks", blocks.codes, blocks.scales, "block", -2),
            ("tiles of rows", row.codes, row.scales, "tile", -1),
            ("tiles of columns", column.codes, column.scales, "tile", -2),
        ):
            try:
                assert_same_codes(codes, scales, quantize(x, "e4m3", scaling, axis))
            except AssertionError:
                wrong.append(f"{name} of {tuple(x.shape)}, repetition {number}")
    assert not wrong, wrong

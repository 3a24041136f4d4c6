"""A product in float32 times the scales of its operands, rounded to what is wanted, in one pass.

Problem  NVFP4 has a scale of each whole tensor, which bfloat16 values leave to the product. As torch's operators two
         factors and a rounding read and write 22 bytes for each number of the result.
Method   p a b, one after the other as the operators do, and stored: 6 bytes into bfloat16, 8 into float32.
Limits   Not timed on a GPU yet.
Checked  tests/gemm/test_triton_kept.py: against torch's operators bit for bit
"""
# mypy: disable-error-code="import-untyped,no-untyped-def,no-untyped-call,untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from scrimp.gemm.kernels.arithmetic import to_bfloat16
from scrimp.gemm.kernels.launch import cdiv, check_devices, check_row_major, run

BLOCK, WARPS = 1024, 4


@triton.jit
def apply_scales_kernel(
    product, first, second, out, count, FIRST: tl.constexpr, SECOND: tl.constexpr, BLOCK: tl.constexpr
):
    """Some numbers of the product; FIRST and SECOND: whether there are these scales."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    found = tl.load(product + at, mask=at < count, other=0.0)
    if FIRST:
        found *= tl.load(first)
    if SECOND:
        found *= tl.load(second)
    if out.dtype.element_ty == tl.bfloat16:
        tl.store(out + at, to_bfloat16(found), mask=at < count)
    else:
        tl.store(out + at, found, mask=at < count)


def apply_scales(product: Tensor, first: Tensor | None, second: Tensor | None, dtype: torch.dtype) -> Tensor:
    """The product times one number, then another, each where it is there.

    Args:
        product: float32, row-major.
        first: float32, one element; second: likewise.
        dtype: bfloat16 or float32.

    Raises:
        PlanError: a product with gaps.
        DeviceError: not on a CUDA device.
    """
    check_devices(product=product, first=first, second=second)
    check_row_major("product", product)
    if first is None and second is None:
        return product.to(dtype)
    out = torch.empty(product.shape, dtype=dtype, device=product.device)
    if product.numel():
        run(
            apply_scales_kernel,
            (cdiv(product.numel(), BLOCK),),
            product,
            product if first is None else first,
            product if second is None else second,
            out,
            product.numel(),
            FIRST=first is not None,
            SECOND=second is not None,
            BLOCK=BLOCK,
            num_warps=WARPS,
        )
    return out

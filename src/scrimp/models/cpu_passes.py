"""Norms, gates and rotations of whole tensors by the kernels of `cpu_kernels`, and where these apply.

With these and the loss's kernel a forward and backward pass of llama-3m and 20m in bf16 took about a fifth less than
with torch's operators (docs/lab-log.md). Numbers differ in the last places of float32: products are fused with sums,
and these in another order.

Checked  tests/models/test_functions.py, tests/models/test_rope.py

Shapes: ... any leading dimensions, S rows (all of these as one), D width, F width of a gate; as in `rope`.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from scrimp.cpu import TYPES, has_kernels

if TYPE_CHECKING:
    from types import ModuleType

_BLOCK = 64
"""Rows whose gradients of a norm's weight are summed in one block."""


def can_take(*tensors: Tensor) -> bool:
    """Whether the kernels read these tensors, of a CPU."""
    return has_kernels() and all(x.dtype in TYPES for x in tensors)


@functools.cache
def _modules() -> tuple[ModuleType, ModuleType]:
    """Kernels, and what runs them: at first use, since numba takes half a second."""
    from scrimp.cpu import rows
    from scrimp.models import cpu_kernels

    return cpu_kernels, rows


def norm(x_SD: Tensor, weight_D: Tensor, eps: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """x r w in `dtype`, and r = 1 / sqrt(mean(x^2) + eps), shape (S,), in float32."""
    kernels, rows = _modules()
    y_SD, r_S = torch.empty_like(x_SD, dtype=dtype), x_SD.new_empty(len(x_SD), dtype=torch.float32)
    arrays = (rows.as_numpy(one) for one in (y_SD, r_S))
    rows.by_rows(
        kernels.norm, rows.as_numpy(x_SD), *x_SD.shape, rows.as_numpy(weight_D), np.float32(eps), *arrays
    )
    return y_SD, r_S


def norm_gradients(x_SD: Tensor, weight_D: Tensor, dy_SD: Tensor, r_S: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of x and, in float32, the parts of the weight's that sum up to it, shape (blocks, D)."""
    kernels, rows = _modules()
    blocks, width = -(-len(x_SD) // _BLOCK), x_SD.shape[1]
    dx_SD, dw_BD = torch.empty_like(x_SD), x_SD.new_empty(blocks, width, dtype=torch.float32)
    given = tuple(rows.as_numpy(one) for one in (weight_D, dy_SD, r_S))
    results = (rows.as_numpy(one) for one in (dx_SD, dw_BD))
    rows.by_rows(kernels.norm_gradients, rows.as_numpy(x_SD), blocks, _BLOCK * width, _BLOCK, given, *results)
    return dx_SD, dw_BD


def gated(x_SG: Tensor, *, is_gelu: bool) -> Tensor:
    """act(gate) up of rows with both, shape (S, F)."""
    kernels, rows = _modules()
    y_SF = x_SG.new_empty(len(x_SG), x_SG.shape[1] // 2)
    rows.by_rows(kernels.gated, rows.as_numpy(x_SG), *x_SG.shape, is_gelu, rows.as_numpy(y_SF))
    return y_SF


def gated_gradient(x_SG: Tensor, dy_SF: Tensor, *, is_gelu: bool) -> Tensor:
    """The gradient of both."""
    kernels, rows = _modules()
    dx_SG = torch.empty_like(x_SG)
    results = (rows.as_numpy(one) for one in (dy_SF, dx_SG))
    rows.by_rows(kernels.gated_gradient, rows.as_numpy(x_SG), *x_SG.shape, is_gelu, *results)
    return dx_SG


def can_rotate(out: Tensor, x: Tensor, cos_T1K: Tensor, sin_T1K: Tensor) -> bool:
    """Whether the kernel reads these tensors: (rows, tokens, heads, K), the numbers of a head side by side."""
    if x.device.type != "cpu" or x.dim() != 4 or not can_take(out, x):
        return False
    shape = (x.shape[1], 1, x.shape[3])
    reads_tables = all(
        table.shape == shape and table.dtype == torch.float32 and table.is_contiguous()
        for table in (cos_T1K, sin_T1K)
    )
    return reads_tables and out.shape == x.shape and x.stride(-1) == out.stride(-1) == 1


def rotate_into(out_BTHK: Tensor, x_BTHK: Tensor, cos_T1K: Tensor, sin_T1K: Tensor, *, back: bool) -> None:
    """As `rope.rotate_into`."""
    kernels, rows = _modules()
    B, T, H, K = x_BTHK.shape
    steps = x_BTHK.stride()[:3], out_BTHK.stride()[:3]
    tables = (rows.as_numpy(table[:, 0]) for table in (cos_T1K, sin_T1K))
    rows.by_rows(
        kernels.rotation,
        rows.span_of(x_BTHK),
        B * T,
        H * K,
        (T, H, K // 2),
        steps,
        *tables,
        np.float32(-1.0 if back else 1.0),
        rows.span_of(out_BTHK),
    )

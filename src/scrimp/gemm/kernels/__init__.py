"""Triton kernels: quantizers that read memory once, the GEMM over their codes, sums of gradients, AdamW, the loss.

The meaning of every number is `scrimp.formats`; these kernels give the same codes and scales, bit for
bit. They run on CUDA devices from compute capability 8.9 on (FP8 conversions; those for integers from 8.0 on), and
anywhere in Triton's interpreter (TRITON_INTERPRET=1 before triton is first imported), which is how the tests
check them without a GPU (triton 3.6's interpreter fails in loops under numpy 2.4; 3.9's does not).

Triton is imported at the first use of a name below, never before: a machine without it can import
this package, and gets a `DeviceError` when it calls a kernel.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

from scrimp.errors import DeviceError
from scrimp.gemm.kernels.launch import (
    ColumnTiles,
    GroupsOf,
    QuantizedGroups,
    RowTiles,
    ScaledRows,
    WeightBlocks,
)

if TYPE_CHECKING:
    from scrimp.gemm.kernels.adamw import update_adamw
    from scrimp.gemm.kernels.block_scaled import quantize_blocks
    from scrimp.gemm.kernels.gates import gate_matrix
    from scrimp.gemm.kernels.groups import group_maxima, quantize_groups
    from scrimp.gemm.kernels.kept import group_values, widen_codes
    from scrimp.gemm.kernels.loss import cross_entropy
    from scrimp.gemm.kernels.matmul import add_scaled_matmul, scaled_matmul, tune, tuning_bytes
    from scrimp.gemm.kernels.maxima import tensor_amax
    from scrimp.gemm.kernels.outer_scales import apply_scales
    from scrimp.gemm.kernels.rounded_sums import add_rounded
    from scrimp.gemm.kernels.rows import quantize_rows, quantize_tensor
    from scrimp.gemm.kernels.tiles import quantize_tiles

__all__ = [
    "ColumnTiles",
    "GroupsOf",
    "QuantizedGroups",
    "RowTiles",
    "ScaledRows",
    "WeightBlocks",
    "add_rounded",
    "add_scaled_matmul",
    "apply_scales",
    "cross_entropy",
    "gate_matrix",
    "group_maxima",
    "group_values",
    "quantize_blocks",
    "quantize_groups",
    "quantize_rows",
    "quantize_tensor",
    "quantize_tiles",
    "scaled_matmul",
    "tensor_amax",
    "tune",
    "tuning_bytes",
    "update_adamw",
    "widen_codes",
]

_HOMES = {
    "add_rounded": "rounded_sums",
    "add_scaled_matmul": "matmul",
    "apply_scales": "outer_scales",
    "cross_entropy": "loss",
    "gate_matrix": "gates",
    "group_maxima": "groups",
    "group_values": "kept",
    "quantize_blocks": "block_scaled",
    "quantize_groups": "groups",
    "quantize_rows": "rows",
    "quantize_tensor": "rows",
    "quantize_tiles": "tiles",
    "scaled_matmul": "matmul",
    "tensor_amax": "maxima",
    "tune": "matmul",
    "tuning_bytes": "matmul",
    "update_adamw": "adamw",
    "widen_codes": "kept",
}


def __getattr__(name: str) -> Any:
    """A launcher, imported now and from then on an attribute; without triton a function that refuses."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        importlib.import_module("triton")
    except ImportError as error:
        return _without_triton(name, error)
    found = globals()[name] = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    return found


def _without_triton(name: str, cause: ImportError) -> Callable[..., NoReturn]:
    def refuse(*_args: object, **_kwargs: object) -> NoReturn:
        raise DeviceError(
            f"{name} is a triton kernel, and triton cannot be imported",
            got=str(cause),
            expected="triton 3.6 or newer",
            do="install it with `pip install triton`, or plan the reference back end",
        ) from cause

    return refuse

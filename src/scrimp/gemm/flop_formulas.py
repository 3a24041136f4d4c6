"""FLOP formulas of the planned operators for torch's own counter, which knows only torch's operators.

`torch.utils.flop_counter` would count compiled planned layers, and `torch._scaled_mm_v2`, as nothing. It imports
Triton, so the formulas are registered only where someone asks for them.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch

from scrimp.gemm import operators, summed_linear


@functools.cache
def register_flop_formulas() -> None:
    """Teach `torch.utils.flop_counter.FlopCounterMode` the planned operators and torch's scaled products."""
    from torch.utils.flop_counter import register_flop_formula

    assert operators.planned_forward, summed_linear.summed_backward  # the imports define the operators
    register_flop_formula([torch.ops.scrimp.planned_forward])(_forward)
    register_flop_formula([torch.ops.scrimp.gated_forward])(_gated)
    register_flop_formula([torch.ops.scrimp.planned_backward])(_backward)
    register_flop_formula([torch.ops.scrimp.summed_backward])(_summed)
    register_flop_formula([torch.ops.aten._scaled_mm_v2])(_scaled)


def _forward(x_shape: Any, weight_shape: Any, *args: Any, **kwargs: Any) -> int:
    """fprop."""
    return int(2 * math.prod(x_shape) * weight_shape[0])


def _gated(halves_shape: Any, weight_shape: Any, *args: Any, **kwargs: Any) -> int:
    """fprop of what a gate makes."""
    return int(2 * halves_shape[0] * math.prod(weight_shape))


def _backward(
    g_shape: Any,
    x_shape: Any,
    packed_shape: Any,
    weight_shape: Any,
    handle_shape: Any,
    now_shape: Any,
    compute: torch.dtype,
    needs_x: bool,
    needs_weight: bool,
    total_shape: Any = None,
    **kwargs: Any,
) -> int:
    """dgrad and wgrad, each where it is needed."""
    return int(2 * math.prod(g_shape) * weight_shape[1] * (needs_x + needs_weight))


def _summed(
    g_shape: Any, x_shape: Any, weight_shape: Any, handle_shape: Any, needs_x: bool, **kwargs: Any
) -> int:
    """dgrad where it is needed, and wgrad."""
    return int(2 * math.prod(g_shape) * weight_shape[1] * (needs_x + 1))


def _scaled(a_shape: Any, b_shape: Any, *args: Any, **kwargs: Any) -> int:
    """One product of two matrices with their scales."""
    return int(2 * a_shape[0] * a_shape[1] * b_shape[1])

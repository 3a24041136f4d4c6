"""Weights as the operands of products, made once for all micro-batches of a step.

Problem  fprop and dgrad read a weight in the recipe's format, and make it anew in every micro-batch, though it is the
         same. In FP8 that moves 6 to 10 bytes for each number of a weight, however few tokens it is multiplied with.
Method   Inside `keeping`, which a step of several micro-batches enters where there is memory for it, the first pass
         leaves what it made, and later ones read it; all of it is dropped at the end. Rounding of weights is to
         nearest, so every bit is the same.
Bytes    Two operands a layer, scaled along different axes: in 8 bits 2 bytes for each number of a weight on a GPU, in
         emulation 4 to 8 (`scrimp.planner.memory.costs.StepCosts.operands`).
Not kept casts to high precision; weights that come as codes (gathered so, or frozen and stored so); experts, which not
         every micro-batch reaches.
Checked  tests/gemm/test_weight_operands.py
"""

from __future__ import annotations

import contextlib
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from scrimp.gemm.backends import Backend
from scrimp.gemm.coded_weight import CodedWeight
from scrimp.gemm.problem import Use
from scrimp.gemm.stored_weight import StoredWeight


@dataclass(frozen=True)
class _Kept:
    made_of: tuple[int, int, Backend, torch.dtype]
    """Where the weight lies, its version, and what made the operand of it in which type."""
    operand: Any


Kept = dict[Hashable, _Kept]
"""Operands by product."""
_kept: Kept | None = None


@contextlib.contextmanager
def keeping(wanted: bool = True) -> Iterator[Kept]:
    """Inside, operands of weights are kept from one micro-batch to the next."""
    global _kept
    before, found = _kept, Kept()
    _kept = found if wanted else None
    try:
        yield found
    finally:
        _kept = before
        found.clear()


def is_kept(use: Use) -> bool:
    """Whether an operand is worth keeping, and always the same."""
    return use.operand is not None and use.operand.rounding == "nearest"


def weight_operand(
    weight: Tensor, dtype: torch.dtype, backend: Backend, use: Use, product: Hashable = None
) -> Any:
    """The weight as an operand: of its codes where it was gathered so.

    Args:
        dtype: what it is quantized from.
        product: which one it is of, to keep it; None: it is not kept.
    """
    if isinstance(weight, CodedWeight):
        return weight.operand(use, dtype, backend.load)
    if isinstance(weight, StoredWeight):
        return backend.prepare(weight.values(dtype), use)
    if _kept is None or product is None or not is_kept(use):
        return _made(weight, dtype, backend, use)
    made_of = weight.data_ptr(), weight._version, backend, dtype
    found = _kept.get(product)
    if found is None or found.made_of != made_of:
        found = _kept[product] = _Kept(made_of, _made(weight, dtype, backend, use))
    return found.operand


def _made(weight: Tensor, dtype: torch.dtype, backend: Backend, use: Use) -> Any:
    # A weight that is kept transposed is copied for the product alone.
    return backend.prepare(weight.to(dtype).contiguous(), use)

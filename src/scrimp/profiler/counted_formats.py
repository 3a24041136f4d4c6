"""Launches and bytes of the quantization that a planned layer's products take, counted where no GPU is.

Problem  A product in 8 or 4 bits is followed by the making of its operands: reading the largest numbers, writing codes
         along rows and columns, scales, and what a kernel wants them padded and ordered as. How much that moves
         depends on the recipe and on the back end that runs it.
Method   The layer's own `forward`, as a compiled block keeps its codes, and `backward` run on small CPU tensors by the
         back end that a GPU would take, under the counter of operators (`counted_step.KernelCounter`). A kernel of
         Triton's is not run: it counts once, with each tensor that it is given; torch's scaled products and Triton's
         product over tiles count as products, so that what is left is quantization. Its bytes are linear in the sizes
         of a layer::

             bytes = x T I + y T O + w I O        T tokens, I inputs, O outputs

         of which three layers of different sizes give the figures x, y, w. What wgrad takes is what both gradients take
         less what dgrad takes alone: where one kernel quantizes a gradient both ways, dgrad pays for it.
         `units` says if the device multiplies the recipe: without them Triton's back end takes it.
Limits   Of a layer on one rank: where ranks of tp take their largest numbers together, the reference quantizes rows and
         tensors operator by operator.
         Scales of groups are bytes like others, and scales of tiles of a thousand numbers vanish. Weights are counted
         in bf16 and quantized in every pass, as they are where ranks do not gather codes.
Checked  tests/profiler/test_counted_formats.py
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from scrimp.gemm.backends import BACKENDS, Backend
from scrimp.gemm.deferred import Deferred, Matrix
from scrimp.gemm.layer import PlannedLayer, backward, forward
from scrimp.gemm.problem import Shape
from scrimp.gemm.storage import unpack
from scrimp.precision import GEMMS, LinearPrecision, Operand, capacity
from scrimp.profiler.counted_step import KernelCounter, Work

SIZES = ((256, 256, 256), (512, 256, 256), (256, 512, 256), (256, 256, 512))
"""Tokens, inputs and outputs of the layers that are counted: three figures, and the sum as a check."""


@dataclass(frozen=True)
class Quantized:
    """What a product takes beside itself."""

    launches: int
    inputs: float
    """Bytes for each number of the layer's input."""
    outputs: float
    """The same of its output, or of the gradient of that."""
    weights: float


def count_formats(
    recipe: str, *, units: bool, keeps: bool = True, gated: bool = False
) -> dict[str, Quantized]:
    """What the three products of a layer each take beside themselves in a recipe.

    Args:
        units: whether the device multiplies numbers of the recipe's.
        keeps: codes of the input wait for wgrad; else it quantizes the input, which was made again.
        gated: the input is what a gate makes, and gates read the result: their numbers are made where they are read.
    """
    sizes = SIZES[0], *SIZES  # the first makes what is kept, such as a rotation
    counted = [_count_layer(recipe, size, units=units, keeps=keeps, gated=gated) for size in sizes][1:]
    matrix = np.array([(t * i, t * o, i * o) for t, i, o in SIZES], dtype=float)
    found: dict[str, Quantized] = {}
    for at, gemm in enumerate(GEMMS):
        moved = np.array([one[at].moved for one in counted], dtype=float)
        figures, *_ = np.linalg.lstsq(matrix, moved, rcond=None)
        found[gemm] = Quantized(counted[0][at].launches, *(float(one) for one in figures))
    return found


def _count_layer(
    recipe: str, size: tuple[int, int, int], *, units: bool, keeps: bool, gated: bool
) -> list[Work]:
    """Work of fprop, dgrad and wgrad, without the products' own launches."""
    tokens, inputs, outputs = size
    device = torch.device("cuda")

    def choose(name: str, gemm: str, shape: Shape, here: torch.device) -> Backend:
        order = ("torch", "triton") if units else ("triton",)
        taken = (BACKENDS[one] for one in order if BACKENDS[one].refusal(gemm, name, shape, device) is None)
        return next(taken)

    layer = PlannedLayer("counted", LinearPrecision.of(recipe), choose=choose)
    x: Matrix = _bf16(tokens, inputs)
    grad: Matrix = _bf16(tokens, outputs)
    weight = _bf16(outputs, inputs)
    if gated:
        x = Deferred(_bf16(tokens, 2 * inputs), "silu")
        grad = Deferred(_bf16(tokens, outputs), "silu", _bf16(tokens, outputs // 2))
    packed = torch.empty(capacity(tokens, inputs), dtype=torch.uint8)
    room = unpack(packed, recipe, (tokens, inputs)) if keeps else None
    with torch.no_grad(), KernelCounter() as counter, _as_on_a_gpu(counter):
        _, codes = forward(x, weight, layer, torch.bfloat16, keep_codes=keeps, room=room)
        found = [_without_product(counter.take())]
        for needs_weight in (False, True):
            backward(
                grad,
                codes or x,
                weight,
                layer,
                torch.bfloat16,
                layer.clock.now,
                needs_x=True,
                needs_weight=needs_weight,
            )
            found.append(_without_product(counter.take()))
    return [found[0], found[1], found[2] - found[1]]


def _bf16(rows: int, columns: int) -> Tensor:
    return torch.randn(rows, columns).bfloat16()


def _without_product(work: Work) -> Work:
    return dataclasses.replace(work, launches=work.launches - work.product_launches)


@contextlib.contextmanager
def _as_on_a_gpu(counter: KernelCounter) -> Iterator[None]:
    """Kernels of a GPU count and are not run, and back ends choose as on one."""
    import triton

    from scrimp.gemm import kernels
    from scrimp.gemm.backends import native
    from scrimp.gemm.backends import triton as fused
    from scrimp.gemm.kernels import (
        block_scaled,
        gates,
        groups,
        hashes,
        kept,
        maxima,
        outer_scales,
        rows,
        tiles,
    )

    def launched(kernel: Any, grid: Any, *arguments: Any, **options: Any) -> None:
        tensors = {one.data_ptr(): one.nbytes for one in arguments if isinstance(one, Tensor)}
        counter.work += Work(1, moved=sum(tensors.values()))

    def product(a: Tensor, b: Tensor, *more: Any, **options: Any) -> Tensor:
        out = options.get("out_dtype") or options.get("output_dtype") or torch.bfloat16
        columns = b.shape[1]
        counter.work += Work(1, products=1, product_launches=1)
        return a.new_empty(a.shape[0], columns, dtype=out)

    def of_tiles(
        a: Tensor, a_scales: Tensor, b: Tensor, b_scales: Tensor, out: torch.dtype, *, rest: object = None
    ) -> Tensor:
        return product(a, b.t(), out_dtype=out)

    def wide(left: Tensor, right: Tensor) -> Tensor:
        return product(left, right, out_dtype=torch.float32)

    refusal = native._refusal

    def refused(a: Operand, b: Operand, shape: Shape | None, device: torch.device) -> str | None:
        return refusal(a, b, shape, torch.device("cuda"))

    interpreted = triton.knobs.runtime.interpret
    triton.knobs.runtime.interpret = True
    try:
        with contextlib.ExitStack() as stack:
            for module in (block_scaled, gates, groups, hashes, kept, maxima, outer_scales, rows, tiles):
                stack.enter_context(patch.object(module, "run", launched))
            for owner, name, stand_in in (
                (torch, "_scaled_mm", product),
                (F, "scaled_mm", product),
                (kernels, "scaled_matmul", of_tiles),
                (fused, "_wide", wide),
                (fused, "sums_in_float32", lambda x: True),
                (native, "_is_on_gpu", lambda x: True),
                (native, "_refusal", refused),
            ):
                stack.enter_context(patch.object(owner, name, stand_in))
            yield
    finally:
        triton.knobs.runtime.interpret = interpreted

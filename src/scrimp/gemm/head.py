"""The three GEMMs of the LM head for a loss that is computed in chunks of tokens.

The loss makes the head's gradients in its forward pass, chunk by chunk, so that the logits never exist as a
whole; the head is no module there but three products. Rows without a target must not count: where
GEMMs are plain their rows are zeroed on the small side of the product; where they are quantized the rows of
the gradient are zeroed first, or they would raise its scales.

Shapes: Q tokens of a chunk, D width, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from scrimp.gemm.layer import PlannedLayer, backward, forward
from scrimp.gemm.problem import DTYPE_NAMES
from scrimp.gemm.weight_sums import PlainProduct


class HeadGemms:
    """fprop, dgrad and wgrad of the head over chunks, by its plan, or in the compute type without one."""

    def __init__(self, weight_VD: Tensor, planned: PlannedLayer | None, compute: torch.dtype) -> None:
        if planned is not None and planned.is_plain(DTYPE_NAMES.get(compute, "")):
            planned = None
        self._planned, self._compute = planned, compute
        self._weight_VD = weight_VD.to(compute) if planned is None else weight_VD

    def fprop(self, hidden_QD: Tensor) -> Tensor:
        """logits_QV."""
        if self._planned is None:
            return hidden_QD @ self._weight_VD.T
        return forward(hidden_QD, self._weight_VD, self._planned, self._compute, keep_codes=False)[0]

    def backward(
        self,
        total_VD: Tensor | None,
        grad_QV: Tensor,
        hidden_QD: Tensor,
        real_Q1: Tensor,
        start: int,
        *,
        needs_hidden: bool,
        needs_weight: bool,
    ) -> tuple[Tensor | None, Tensor | None]:
        """dgrad and wgrad, each where it is needed; may change `grad_QV`.

        Args:
            total_VD: the weight's gradient of the chunks before, None for the first.
            real_Q1: which tokens have a target.
            start: number of the chunk's first token in the micro-batch.

        Returns:
            the gradient of the hidden states, zero in rows that are not real; and that of the weight with
            `total_VD`, in float32 or wider, added in place from the second time on.
        """
        real_Q1 = real_Q1.to(grad_QV.dtype)  # else torch does in each product, unseen by the memory account
        if self._planned is None:
            grad_QD = (grad_QV @ self._weight_VD).mul_(real_Q1) if needs_hidden else None
            if needs_weight:
                product = PlainProduct(grad_QV, hidden_QD * real_Q1, self._compute)
                total_VD = _plus(total_VD, product)
            return grad_QD, total_VD
        step, first_row = self._planned.clock.now
        grad_QD, grad_VD = backward(
            grad_QV.mul_(real_Q1),
            hidden_QD,
            self._weight_VD,
            self._planned,
            self._compute,
            (step, first_row + start),
            needs_x=needs_hidden,
            needs_weight=needs_weight,
        )
        if grad_VD is not None:
            total_VD = grad_VD.to(_wide(grad_VD.dtype)) if total_VD is None else total_VD.add_(grad_VD)
        return grad_QD, total_VD


def _plus(total_VD: Tensor | None, product: PlainProduct) -> Tensor:
    """A sum with one more product, which adds itself where it can."""
    if total_VD is None:
        return product.made(_wide(product.weight_dtype))
    if not product.adds(total_VD.dtype):
        return total_VD.add_(product.made())
    product.add(total_VD, None)
    return total_VD


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)

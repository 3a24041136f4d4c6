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
        if self._planned is None:
            grad_QD = (grad_QV @ self._weight_VD).mul_(real_Q1) if needs_hidden else None
            return grad_QD, _plus(total_VD, grad_QV.T, hidden_QD * real_Q1) if needs_weight else total_VD
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
            total_VD = _wide(grad_VD) if total_VD is None else total_VD.add_(grad_VD)
        return grad_QD, total_VD


def _plus(total_VD: Tensor | None, left: Tensor, right: Tensor) -> Tensor:
    """A sum with one more product."""
    if total_VD is None:
        return _wide(left @ right)
    if total_VD.dtype == left.dtype:
        return total_VD.addmm_(left, right)
    return total_VD.add_(left @ right)


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))

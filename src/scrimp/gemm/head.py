"""The three GEMMs of the LM head for a loss that is computed in chunks of tokens.

The loss makes the head's gradients in its forward pass, chunk by chunk, so that the logits never exist as a
whole; the head is no module there but three products. Rows without a target must not count: where
GEMMs are plain their rows are zeroed on the small side of the product; where they are quantized the rows of
the gradient are zeroed first, or they would raise its scales.

Shapes: Q tokens of a chunk, D width, V vocabulary.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from scrimp.gemm.layer import PlannedLayer, backward, forward
from scrimp.gemm.linear import COMPUTE_NAMES


class HeadGemms(ABC):
    """fprop, dgrad and wgrad of the head over chunks."""

    @abstractmethod
    def fprop(self, hidden_QD: Tensor) -> Tensor:
        """logits_QV."""

    @abstractmethod
    def dgrad(self, grad_QV: Tensor, real_Q1: Tensor, start: int) -> Tensor:
        """Gradient of the hidden states; zero in rows that are not real.

        Args:
            start: number of the chunk's first token in the micro-batch.
        """

    @abstractmethod
    def wgrad(
        self, total_VD: Tensor | None, grad_QV: Tensor, hidden_QD: Tensor, real_Q1: Tensor, start: int
    ) -> Tensor:
        """The weight's gradient added to `total_VD`, in float32 or wider, in place from the second time on."""


def head_gemms(weight_VD: Tensor, planned: PlannedLayer | None, compute: torch.dtype) -> HeadGemms:
    """The head's GEMMs by its plan, or in the compute type without one."""
    if planned is None or planned.is_plain(COMPUTE_NAMES.get(compute, "")):
        return _PlainHead(weight_VD, compute)
    return _PlannedHead(weight_VD, planned, compute)


class _PlainHead(HeadGemms):
    def __init__(self, weight_VD: Tensor, compute: torch.dtype) -> None:
        self._weight_VD = weight_VD.to(compute)

    def fprop(self, hidden_QD: Tensor) -> Tensor:
        return hidden_QD @ self._weight_VD.T

    def dgrad(self, grad_QV: Tensor, real_Q1: Tensor, start: int) -> Tensor:
        return (grad_QV @ self._weight_VD).mul_(real_Q1)

    def wgrad(
        self, total_VD: Tensor | None, grad_QV: Tensor, hidden_QD: Tensor, real_Q1: Tensor, start: int
    ) -> Tensor:
        left, right = grad_QV.T, hidden_QD * real_Q1
        if total_VD is None:
            return _wide(left @ right)
        if total_VD.dtype == left.dtype:
            return total_VD.addmm_(left, right)
        return total_VD.add_(left @ right)


class _PlannedHead(HeadGemms):
    def __init__(self, weight_VD: Tensor, planned: PlannedLayer, compute: torch.dtype) -> None:
        self._weight_VD, self._planned, self._compute = weight_VD, planned, compute

    def fprop(self, hidden_QD: Tensor) -> Tensor:
        return forward(hidden_QD, self._weight_VD, self._planned, self._compute, keep_codes=False)[0]

    def dgrad(self, grad_QV: Tensor, real_Q1: Tensor, start: int) -> Tensor:
        return self._backward(grad_QV, None, real_Q1, start)

    def wgrad(
        self, total_VD: Tensor | None, grad_QV: Tensor, hidden_QD: Tensor, real_Q1: Tensor, start: int
    ) -> Tensor:
        grad = self._backward(grad_QV, hidden_QD, real_Q1, start)
        return _wide(grad) if total_VD is None else total_VD.add_(grad)

    def _backward(self, grad_QV: Tensor, hidden_QD: Tensor | None, real_Q1: Tensor, start: int) -> Tensor:
        step, first_row = self._planned.clock.now
        grads = backward(
            grad_QV.mul_(real_Q1),
            hidden_QD,
            self._weight_VD,
            self._planned,
            self._compute,
            (step, first_row + start),
            needs_x=hidden_QD is None,
            needs_weight=hidden_QD is not None,
        )
        grad = grads[0] if hidden_QD is None else grads[1]
        assert grad is not None
        return grad


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))

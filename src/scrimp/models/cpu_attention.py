"""Attention on a CPU: splitting qkv, rotation, attention and their gradients in one autograd function.

Method   The gradients are written straight into the gradient of qkv, where plain operations would pad, add and
         concatenate them. Attention itself is the operators that `scaled_dot_product_attention` dispatches to on a CPU.
Widened  Short rows in bf16 have their gradients made in float32, by the same operator: its bf16 kernel takes as long
         for 32 tokens as for 128. Time in float32 over that in bf16 by head size and tokens (AMX, two threads; one
         thread is alike):

                  tokens    64    128    192    256    384    512   1,024
           size  16       0.19   0.20   0.35   0.31   0.39   0.46   0.48
                 32       0.14   0.18   0.41   0.49   0.57   0.65
                 64       0.44   0.55   0.88   0.94   1.03   1.03
                128       0.78   0.86   0.98   1.48   1.34   1.42

         Other CPUs with units for bf16 were not measured; those without multiply in float32 in any case
         (`scrimp.gemm.cpu_products`).

Limits   No second derivatives.
Checked  tests/models/test_attention.py

Shapes: as in `scrimp.models.attention`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from scrimp.models.rope import rotate_into

if TYPE_CHECKING:
    from scrimp.models.attention import AttentionLayout

WIDENED = 2**14
"""Tokens times head size up to which gradients in bf16 are made in float32; see the module."""


class CpuAttention(torch.autograd.Function):
    """out_BTHK of unrotated queries, keys and values qkv_BTGK, by a layout of the routes segments, causal or masked."""

    @staticmethod
    def forward(ctx: Any, qkv_BTGK: Tensor, layout: AttentionLayout) -> Tensor:
        H, N = layout.num_heads, layout.num_kv_heads
        turned_BTGK = torch.empty_like(qkv_BTGK)
        rotate_into(turned_BTGK[:, :, : H + N], qkv_BTGK[:, :, : H + N], *layout.rope)
        # Copied too, so that one tensor is kept for the backward pass and qkv can be freed.
        turned_BTGK[:, :, H + N :].copy_(qkv_BTGK[:, :, H + N :])
        if layout.segments:
            out_BTHK, lse = _segments_forward(turned_BTGK, layout)
        else:
            out, lse = _forward(turned_BTGK.transpose(1, 2), layout, layout.mask)
            out_BTHK = out.transpose(1, 2)
        ctx.save_for_backward(turned_BTGK, out_BTHK, lse)
        ctx.layout = layout
        return out_BTHK

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out_BTHK: Tensor) -> tuple[Tensor, None]:
        layout: AttentionLayout = ctx.layout
        turned_BTGK, out_BTHK, lse = ctx.saved_tensors
        if layout.segments:
            return _segments_backward(grad_out_BTHK, turned_BTGK, out_BTHK, lse, layout), None
        grad_out, turned, out = (x.transpose(1, 2) for x in (grad_out_BTHK, turned_BTGK, out_BTHK))
        grads = _backward(grad_out, turned, out, lse, layout, layout.mask)
        grad_BTGK = torch.empty_like(turned_BTGK)
        _turn_back(grad_BTGK, [grad.transpose(1, 2) for grad in grads], layout, *layout.rope)
        return grad_BTGK, None


def _forward(qkv_BGTK: Tensor, layout: AttentionLayout, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Results and their log-sum-exps, both by head."""
    heads = layout.num_heads, layout.num_kv_heads, layout.num_kv_heads
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        *qkv_BGTK.split(heads, dim=1), 0.0, mask is None, attn_mask=mask
    )
    return out, lse


def _backward(
    grad_BHTK: Tensor,
    qkv_BGTK: Tensor,
    out_BHTK: Tensor,
    lse: Tensor,
    layout: AttentionLayout,
    mask: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of queries, keys and values, by head; of short rows in float32."""
    heads = layout.num_heads, layout.num_kv_heads, layout.num_kv_heads
    if qkv_BGTK.shape[2] <= layout.widened_tokens:
        # All of qkv at once: parts of it do not lie in one piece.
        qkv_BGTK, grad_BHTK, out_BHTK = qkv_BGTK.float(), grad_BHTK.float(), out_BHTK.float()
        mask = None if mask is None else mask.float()
    given = (grad_BHTK, *qkv_BGTK.split(heads, dim=1), out_BHTK)
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(  # type: ignore[no-any-return]
        *given, lse, 0.0, mask is None, attn_mask=mask
    )


def _turn_back(
    place_TGK: Tensor, grads_TXK: Sequence[Tensor], layout: AttentionLayout, cos: Tensor, sin: Tensor
) -> None:
    """Write gradients of turned queries and keys, and of values, where they belong."""
    heads = layout.num_heads, layout.num_kv_heads, layout.num_kv_heads
    query, key, value = place_TGK.split(heads, dim=-2)
    rotate_into(query, grads_TXK[0], cos, sin, back=True)
    rotate_into(key, grads_TXK[1], cos, sin, back=True)
    value.copy_(grads_TXK[2])


def _segments_forward(turned_BTGK: Tensor, layout: AttentionLayout) -> tuple[Tensor, Tensor]:
    """Results of all rows, and log-sum-exps of shape (heads, tokens of all rows)."""
    rows, length, _, size = turned_BTGK.shape
    out_BTHK = turned_BTGK.new_empty(rows, length, layout.num_heads, size)
    lse_HS = turned_BTGK.new_empty(layout.num_heads, rows * length, dtype=torch.float32)
    for segment in layout.segments:
        mask = segment.mask(layout.mask, layout.window, turned_BTGK)
        out, lse = _forward(segment.of(turned_BTGK).transpose(1, 2), layout, mask)
        segment.of(out_BTHK).copy_(out.transpose(1, 2))
        segment.of_sums(lse_HS).copy_(lse)
        del out, lse, mask  # before the next ones are made
    return out_BTHK, lse_HS


def _segments_backward(
    grad_out_BTHK: Tensor, turned_BTGK: Tensor, out_BTHK: Tensor, lse_HS: Tensor, layout: AttentionLayout
) -> Tensor:
    """The gradient of qkv."""
    grad_BTGK, length = torch.empty_like(turned_BTGK), turned_BTGK.shape[1]
    for segment in layout.segments:
        grad_out, turned, out = (
            segment.of(x).transpose(1, 2) for x in (grad_out_BTHK, turned_BTGK, out_BTHK)
        )
        mask = segment.mask(layout.mask, layout.window, turned_BTGK)
        grads = _backward(grad_out, turned, out, segment.of_sums(lse_HS), layout, mask)
        first = segment.start % length
        tables = (table[first : first + segment.length] for table in layout.rope)
        _turn_back(segment.of(grad_BTGK), [grad.transpose(1, 2) for grad in grads], layout, *tables)
        del grads, mask  # before the next ones are made
    return grad_BTGK

"""Causal attention within documents: who may look at whom, and the kernel that does it.

Problem  Rows are packed: several documents follow each other in one row of T tokens. A token
         may look at itself and at earlier tokens of its own document, and with a sliding
         window of w only at the last w of them, itself included.
Method   `AttentionLayout.prepare` looks at the documents once per forward pass and chooses
         how all blocks attend; no block decides anything, and nothing waits for a device.

         causal    One causal call for all rows: nothing is masked, no window is reached.
         segments  CPU: one causal call per document, over views of the packed rows.
         varlen    CUDA, half precision: torch's variable-length kernel, where it exists.
         pieces    The same, or causal, where all rows at once would need too much memory in the backward pass: a few
                   rows at a time (`scrimp.model.flash`).
         masked    Everything else: one call with a boolean mask of T x T per row.

Rule     On the CPU segments are chosen when they hold 16 tokens or more on average and no
         document is longer than the window. Measured for one block, forward and backward (4
         rows of 512 tokens, 10 heads of 64, 2 threads), in ms by tokens per document:

                  masked   segments of 512   256   64   32   16    8
           fp32       46                41    22    9    7    8   14
           bf16       32                32    23   30   32   56   23

         The CPU kernel computes the masked triangle too, within blocks of 512 keys: that is
         why cutting rows into documents saves time and masking them does not.
CPU      Splitting qkv, rotation, attention and their gradients are one autograd function:
         the gradients are written straight into the gradient of qkv, where plain operations
         would pad, add and concatenate them. It calls the operators that
         `scaled_dot_product_attention` itself dispatches to on the CPU.
Limits   The CPU function has no second derivatives. The varlen route is checked for shapes
         only where there is no GPU; it is taken only if the kernel's signature has the
         arguments that it is called with, and the masked route otherwise.
Checked  tests/model/test_attention.py: every route against a float64 softmax over an explicit
         mask, forward and backward; test_decoder.py: packed documents against each alone.

Shapes: B rows, T tokens, S = B * T, H query heads, N KV heads, G = H + 2 N, K head size.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise
from typing import Any, Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from scrimp.config.architecture import Architecture
from scrimp.errors import ModelError
from scrimp.model.flash import Pieces, attend_in_pieces, flash_operators, rows_within_bound
from scrimp.model.functions import uses_cpu_functions
from scrimp.model.rope import rope_tables, rotate, rotate_into

Route = Literal["causal", "segments", "varlen", "pieces", "masked"]

SEGMENT_TOKENS = 16
"""Mean document length from which one call per document beats one call with a mask."""


@dataclass(frozen=True)
class AttentionLayout:
    """How every block of one forward pass attends."""

    num_heads: int
    """Query heads of qkv; the rest is half keys, half values."""
    num_kv_heads: int
    """Key heads, and as many value heads."""
    rope: tuple[Tensor, Tensor]
    """cos_T1K and sin_T1K of `rope_tables`."""
    route: Route
    """See the module's docstring."""
    lengths: tuple[int, ...] = ()
    """segments: tokens per document, over all rows."""
    starts: Tensor | None = None
    """varlen: cumulative document starts on the device, int32."""
    mask: Tensor | None = None
    """masked: True where a query may look at a key, (B or 1, 1, T, T)."""
    window: int | None = None
    """varlen: the sliding window, where any document reaches it."""
    pieces: Pieces | None = None
    """pieces: which rows go together."""

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Those that all blocks share."""
        starts = () if self.pieces is None else self.pieces.starts
        found = (*self.rope, self.starts, self.mask, *starts)
        return tuple(tensor for tensor in found if tensor is not None)

    @classmethod
    def prepare(
        cls,
        architecture: Architecture,
        tokens_BT: Tensor,
        document_starts: Tensor | None,
        *,
        dtype: torch.dtype,
        compiled: bool = False,
    ) -> AttentionLayout:
        """Choose the route for these rows.

        Args:
            architecture: head counts, RoPE and window.
            tokens_BT: for its shape and device.
            document_starts: cumulative starts over the flattened rows, on the CPU.
            dtype: what attention computes in.
            compiled: whether torch.compile runs the blocks; then lengths that change with
                every batch must not become part of the program.
        """
        rows, length = tokens_BT.shape
        device = tokens_BT.device
        if length > architecture.context:
            raise ModelError(
                "sequence is longer than the model's context",
                got=f"{length} tokens",
                expected=f"at most {architecture.context}",
                do="use shorter sequences or a model with a longer context",
            )
        heads = architecture.num_heads, architecture.num_kv_heads
        make = partial(cls, *heads, rope_tables(architecture, 0, length, device=device))
        lengths = _document_lengths(rows, length, document_starts)
        window = architecture.sliding_window
        if window is not None and window >= max(lengths):
            window = None
        pieces = _pieces(architecture, lengths, length, window, device, dtype)
        if pieces is not None:
            return make("pieces", pieces=pieces)
        if len(lengths) == rows and window is None:
            return make("causal")
        if (
            device.type == "cpu"
            and window is None
            and not compiled
            and rows * length >= SEGMENT_TOKENS * len(lengths)
        ):
            return make("segments", lengths=lengths)
        if varlen_runs(device, dtype, architecture.head_size):
            starts = _cumulative(lengths).to(device, non_blocking=True)
            return make("varlen", starts=starts, window=window)
        mask = allowed(rows, length, None if len(lengths) == rows else lengths, window, device)
        if device.type == "cpu":
            # Given a boolean mask, the operator would make this one anew in every block.
            mask = torch.zeros(mask.shape, dtype=dtype).masked_fill_(~mask, float("-inf"))
        return make("masked", mask=mask)


def _document_lengths(rows: int, length: int, document_starts: Tensor | None) -> tuple[int, ...]:
    if document_starts is None:
        return (length,) * rows
    # On the CPU, as Decoder.forward asks, so that reading it waits for nothing.
    starts = document_starts.tolist()
    lengths = tuple(stop - start for start, stop in pairwise(starts))
    assert (starts[0], starts[-1]) == (0, rows * length), "document starts do not cover the rows"
    assert min(lengths) > 0, "document starts do not rise"
    assert set(range(0, rows * length, length)) <= set(starts), "a document crosses rows"
    return lengths


def _cumulative(lengths: tuple[int, ...]) -> Tensor:
    return F.pad(torch.tensor(lengths).cumsum(0), (1, 0)).to(torch.int32)


def _pieces(
    architecture: Architecture,
    lengths: tuple[int, ...],
    length: int,
    window: int | None,
    device: torch.device,
    dtype: torch.dtype,
) -> Pieces | None:
    """The cut of the rows; None where all may go together, or no kernel takes pieces."""
    rows = sum(lengths) // length
    at_once = rows_within_bound(device.type, rows, length, architecture.attention_width)
    if not at_once or not flash_takes(device, dtype, architecture.head_size):
        return None
    bounds, step = [0, *accumulate(lengths)], at_once * length
    starts = [
        torch.tensor([one - begin for one in bounds if begin <= one <= begin + step], dtype=torch.int32)
        for begin in range(0, rows * length, step)
    ]
    return Pieces(at_once, tuple(one.to(device, non_blocking=True) for one in starts), window)


def allowed(
    rows: int, length: int, lengths: tuple[int, ...] | None, window: int | None, device: torch.device
) -> Tensor:
    """The boolean mask, (B or 1, 1, T, T): True where a query (third) may look at a key (fourth)."""
    position_T = torch.arange(length, device=device)
    distance_TT = position_T[:, None] - position_T[None, :]
    mask = distance_TT >= 0
    if window is not None:
        mask &= distance_TT < window
    if lengths is None:
        return mask[None, None]
    numbers = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    document_BT = numbers.view(rows, length).to(device, non_blocking=True)
    return (mask & (document_BT[:, :, None] == document_BT[:, None, :]))[:, None]


def varlen_runs(device: torch.device, dtype: torch.dtype, head_size: int) -> bool:
    """Whether flash attention, which the variable-length kernel calls unchecked, takes this model here."""
    return device.type == "cuda" and varlen_kernel() is not None and flash_takes(device, dtype, head_size)


def flash_takes(device: torch.device, dtype: torch.dtype, head_size: int) -> bool:
    """Whether flash attention takes heads of this size and type; a CPU is asked for the sake of a GPU it stands for."""
    if dtype not in (torch.bfloat16, torch.float16) or head_size % 8 or head_size > 256:
        return False
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= (8, 0)


def varlen_kernel() -> Callable[..., Tensor] | None:
    """torch's variable-length attention, or None where it lacks what we need."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    parameters = inspect.signature(varlen_attn).parameters
    positional = ["query", "key", "value", "cu_seq_q", "cu_seq_k", "max_q", "max_k"]
    if list(parameters)[:7] != positional or "window_size" not in parameters:
        return None
    kernel = cast("Callable[..., Tensor]", varlen_attn)
    return (
        partial(kernel, enable_gqa=True) if "enable_gqa" in parameters else partial(_with_own_heads, kernel)
    )


def _with_own_heads(
    kernel: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, *rest: Any, **options: Any
) -> Tensor:
    """Give every query head its own keys and values: torch 2.11's kernel does not share them."""
    groups = q.shape[1] // k.shape[1]
    if groups > 1:
        k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
    return kernel(q, k, v, *rest, **options)


def attend(qkv_BTGK: Tensor, layout: AttentionLayout) -> Tensor:
    """out_BTHK of unrotated queries, keys and values, the heads of each side by side."""
    if uses_cpu_functions(qkv_BTGK):
        assert layout.route != "pieces", "pieces are for plain operations"
        return cast(Tensor, _CpuAttention.apply(qkv_BTGK, layout))  # type: ignore[no-untyped-call]
    assert layout.route != "segments", "segments are for the CPU function"
    H, N = layout.num_heads, layout.num_kv_heads
    qk, v = qkv_BTGK.split([H + N, N], dim=2)
    q, k = rotate(qk, *layout.rope).split([H, N], dim=2)
    if layout.route == "varlen":
        return _varlen(q, k, v, layout)
    if layout.pieces is not None:
        return attend_in_pieces(q, k, v, layout.pieces)
    out_BHTK = F.scaled_dot_product_attention(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        attn_mask=layout.mask,
        is_causal=layout.mask is None,
        enable_gqa=H != N,
    )
    return out_BHTK.transpose(1, 2)


def attention_operators() -> frozenset[Any]:
    """The kernels that attention ends in: what recomputation keeps the results of, where attention is not to run
    again."""
    names = (
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention",
    )
    found = [getattr(torch.ops.aten, name).default for name in names if hasattr(torch.ops.aten, name)]
    varlen = getattr(getattr(torch.ops, "torch_attn", None), "_varlen_attn", None)
    found += flash_operators()
    return frozenset([*found, *([varlen.default] if varlen is not None else [])])


def _varlen(q_BTHK: Tensor, k_BTNK: Tensor, v_BTNK: Tensor, layout: AttentionLayout) -> Tensor:
    kernel = varlen_kernel()
    assert kernel is not None
    assert layout.starts is not None
    length = q_BTHK.shape[1]
    # Flash attention's window counts the keys to the left without the query's own.
    left = -1 if layout.window is None else layout.window - 1
    out_SHK = kernel(
        q_BTHK.flatten(0, 1),
        k_BTNK.flatten(0, 1),
        v_BTNK.flatten(0, 1),
        layout.starts,
        layout.starts,
        length,  # an upper bound of the documents' lengths, equal in every step: nothing recompiles
        length,
        window_size=(left, 0),
    )
    return out_SHK.view(q_BTHK.shape)


class _CpuAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, qkv_BTGK: Tensor, layout: AttentionLayout) -> Tensor:
        H, N = layout.num_heads, layout.num_kv_heads
        turned_BTGK = torch.empty_like(qkv_BTGK)
        rotate_into(turned_BTGK[:, :, : H + N], qkv_BTGK[:, :, : H + N], *layout.rope)
        # Copied too, so that one tensor is kept for the backward pass and qkv can be freed.
        turned_BTGK[:, :, H + N :].copy_(qkv_BTGK[:, :, H + N :])
        results = [
            torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                *part.split([H, N, N], dim=1), 0.0, layout.mask is None, attn_mask=layout.mask
            )
            for part in _parts(turned_BTGK, layout)
        ]
        outs = [out.transpose(1, 2) for out, _ in results]
        out_BTHK = outs[0] if len(outs) == 1 else torch.cat(outs, dim=1).view(*qkv_BTGK.shape[:2], H, -1)
        ctx.save_for_backward(turned_BTGK, out_BTHK, *(lse for _, lse in results))
        ctx.layout = layout
        return out_BTHK

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out_BTHK: Tensor) -> tuple[Tensor, None]:
        layout: AttentionLayout = ctx.layout
        H, N = layout.num_heads, layout.num_kv_heads
        turned_BTGK, out_BTHK, *lses = ctx.saved_tensors
        grads = [
            torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                grad_out,
                *part.split([H, N, N], dim=1),
                out,
                lse,
                0.0,
                layout.mask is None,
                attn_mask=layout.mask,
            )
            for grad_out, part, out, lse in zip(
                _parts(grad_out_BTHK, layout),
                _parts(turned_BTGK, layout),
                _parts(out_BTHK, layout),
                lses,
                strict=True,
            )
        ]
        grad_BTGK = torch.empty_like(turned_BTGK)
        places = grad_BTGK.split([H, N, N], dim=2)
        for kind, place in enumerate(places):
            pieces = [grad[kind].transpose(1, 2) for grad in grads]
            piece = pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=1).view(place.shape)
            if kind < 2:
                rotate_into(place, piece, *layout.rope, back=True)
            else:
                place.copy_(piece)
        return grad_BTGK, None


def _parts(x_BTXK: Tensor, layout: AttentionLayout) -> Iterator[Tensor]:
    """Views of shape (rows, heads, tokens, K): all rows at once, or one document at a time."""
    if layout.route != "segments":
        yield x_BTXK.transpose(1, 2)
        return
    start, x_SXK = 0, x_BTXK.flatten(0, 1)
    for length in layout.lengths:
        yield x_SXK[start : start + length].transpose(0, 1)[None]
        start += length

"""Flash attention over a few rows at a time: what its backward pass needs for itself stays bounded.

Problem  The backward kernel sums the queries' gradients in fp32 and, where query heads share keys, gives each of them
         key and value gradients of its own: 8 bytes per token and number of the queries, for all rows of a micro-batch
         at once. Of 32 rows of 1,024 tokens and 28 heads of 128 that is 940 MB in every block.
Method   Rows know nothing of each other. So the kernel runs over pieces of `rows_at_once` rows, and results and
         gradients are written into tensors for all rows: pieces that were joined afterwards would be saved twice, by
         the kernel and by the product that reads them.
         Pieces are packed documents to the kernel (cumulative starts), so that one call serves rows with one document
         and with many, with a window and without.
Exact    No number depends on the cut.
Limits   One row may need more than the bound. No second derivatives. On a CPU the kernel of the CPU stands in, to trace
         what a GPU will do, over rows of one document without a window. CUDA's calls were checked for shapes only.
Checked  tests/model/test_flash.py

Shapes: B rows, T tokens, S tokens of a piece, H query heads, N KV heads, K head size.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

State = tuple[Tensor, ...]
"""What backward needs besides queries, keys, values and results."""

WORKSPACE_BYTES: dict[str, int] = {"cuda": 2**28}
"""By device: what the backward pass of one call may take, unless one row takes more. None here: no bound."""
_PER_NUMBER = 8


def rows_within_bound(device_type: str, rows: int, length: int, attention_width: int) -> int:
    """Rows whose backward pass keeps the bound, at least one; 0 where all do."""
    bound = WORKSPACE_BYTES.get(device_type)
    if bound is None:
        return 0
    fitting = max(1, bound // (_PER_NUMBER * length * attention_width))
    return 0 if fitting >= rows else fitting


@dataclass(frozen=True)
class Pieces:
    """How rows are cut."""

    rows_at_once: int
    starts: tuple[Tensor, ...]
    """Cumulative document starts of each piece, int32, on the device."""
    window: int | None
    """Keys that a query may look at, its own included; None: all before it."""

    @property
    def left(self) -> int | None:
        """As the kernel counts: the keys to the left without the query's own."""
        return None if self.window is None else self.window - 1


def attend_in_pieces(q_BTHK: Tensor, k_BTNK: Tensor, v_BTNK: Tensor, pieces: Pieces) -> Tensor:
    """out_BTHK; causal within documents."""
    return cast(Tensor, _InPieces.apply(q_BTHK, k_BTNK, v_BTNK, pieces))  # type: ignore[no-untyped-call]


class _InPieces(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q_BTHK: Tensor, k_BTNK: Tensor, v_BTNK: Tensor, pieces: Pieces) -> Tensor:
        out_BTHK = torch.empty(q_BTHK.shape, dtype=q_BTHK.dtype, device=q_BTHK.device)
        states: list[Tensor] = []
        for number, (q, k, v, out) in enumerate(_cut(pieces, q_BTHK, k_BTNK, v_BTNK, out_BTHK)):
            found, state = _forward(q, k, v, pieces, number)
            out.copy_(found)
            states += state
        ctx.pieces, ctx.num_states = pieces, len(states) // len(pieces.starts)
        ctx.save_for_backward(q_BTHK, k_BTNK, v_BTNK, out_BTHK, *states)
        return out_BTHK

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_BTHK: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        pieces: Pieces = ctx.pieces
        q_BTHK, k_BTNK, v_BTNK, out_BTHK, *states = ctx.saved_tensors
        inputs = q_BTHK, k_BTNK, v_BTNK
        grads = tuple(torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in inputs)
        cut = _cut(pieces, grad_BTHK, *inputs, out_BTHK, *grads)
        for number, (grad, q, k, v, out, *places) in enumerate(cut):
            state = tuple(states[number * ctx.num_states : (number + 1) * ctx.num_states])
            for place, found in zip(
                places, _backward(grad, q, k, v, out, state, pieces, number), strict=True
            ):
                place.copy_(found)
        return (*cast("tuple[Tensor, Tensor, Tensor]", grads), None)


def _cut(pieces: Pieces, *tensors_BTXK: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Views of the same rows of all tensors, piece by piece."""
    return zip(*(tensor.split(pieces.rows_at_once) for tensor in tensors_BTXK), strict=True)


def _forward(q: Tensor, k: Tensor, v: Tensor, pieces: Pieces, number: int) -> tuple[Tensor, State]:
    """The results of one piece, of the queries' shape, and what backward needs."""
    if q.device.type == "cpu":
        found, sums = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), 0.0, True
        )
        return found.transpose(1, 2), (sums,)
    starts, length = pieces.starts[number], q.shape[1]
    found, sums, seed, offset, _ = torch.ops.aten._flash_attention_forward(
        *(x.flatten(0, 1) for x in (q, k, v)),
        starts,
        starts,
        length,  # an upper bound of the documents' lengths, equal in every step: nothing recompiles
        length,
        0.0,
        True,
        False,
        window_size_left=pieces.left,
        window_size_right=0,
    )
    return found.view(q.shape), (sums, seed, offset)


def _backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, state: State, pieces: Pieces, number: int
) -> Iterator[Tensor]:
    """Gradients of queries, keys and values of one piece, in their shapes."""
    if q.device.type == "cpu":
        found = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *(x.transpose(1, 2) for x in (grad, q, k, v, out)), *state, 0.0, True
        )
        return (x.transpose(1, 2) for x in found)
    starts, length = pieces.starts[number], q.shape[1]
    sums, seed, offset = state
    found = torch.ops.aten._flash_attention_backward(
        *(x.flatten(0, 1) for x in (grad, q, k, v, out)),
        sums,
        starts,
        starts,
        length,
        length,
        0.0,
        True,
        seed,
        offset,
        window_size_left=pieces.left,
        window_size_right=0,
    )
    return (x.view(like.shape) for x, like in zip(found, (q, k, v), strict=True))


def flash_operators() -> tuple[Any, ...]:
    """The kernels that are called here forward: recomputation may keep what they return."""
    names = ("_flash_attention_forward", "_scaled_dot_product_flash_attention_for_cpu")
    return tuple(getattr(torch.ops.aten, name).default for name in names)

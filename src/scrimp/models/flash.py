"""Flash attention over a few rows at a time: what its backward pass needs for itself stays bounded.

Problem  A deterministic backward kernel (`train.deterministic`) sums the queries' gradient in several copies in
         fp32, one for each group of blocks of keys, so that all multiprocessors have work, and adds the copies; another
         one adds into one copy, in any order.
         With D documents in a call, H query heads of size K, S multiprocessors and T tokens in all::

             copies  n = ceil(S / (D H)), or 1
             bytes   4 H (T + 128 D) (n K' + 1)          K' = K rounded up to 32, above 128 to 64
                     + 4 T H K                           where query heads share keys: gradients of their own

         128 rows a document, since a document may be followed by so many that nobody reads. Of 32 rows of 1,024 tokens
         and 28 heads of 128 over 4 key heads that is 1.0 GB in every block; of one row on 132 multiprocessors 97 MB.
Method   Rows know nothing of each other. So the kernel runs over pieces of a few rows, and results and
         gradients are written into tensors for all rows: pieces that were joined afterwards would be saved twice, by
         the kernel and by the product that reads them.
         Pieces are packed documents to the kernel (cumulative starts), so that one call serves rows with one document
         and with many, with a window and without.
cuDNN    Where torch may take cuDNN's kernel (`Gpu.prefers_cudnn`) rows whose documents are not kept apart go together:
         pieces are a call of FlashAttention's. So do rows whose heads are too wide for cuDNN
         (`scrimp.planner.layout.kernels`).
Cut      The most rows that keep the bound with documents of `MEAN_TOKENS` or more on average; where none do, those that
         take least. A batch of shorter documents that would pass both the bound and what was planned goes row by
         row. Fewer rows are not always less: they have more copies.
Exact    The cut follows from settings, the batch and the device's number of multiprocessors, never from what memory is
         free: a run repeats itself bit for bit on a device of the same kind. But it is part of the numbers. Results
         and the gradients of keys and values do not depend on it; the queries' gradient is summed in n groups, so
         another micro-batch, or a device with another S, rounds it otherwise.
Limits   One row may need more than the bound, since n H is at least S: 4 S T K bytes. No second derivatives. On a CPU
         the kernel of the CPU stands in, to trace what a GPU will do, over rows of one document without a window; its
         sums do not depend on the cut. CUDA's calls were checked for shapes only, the bytes against the source.
Source   torch: flash_attn/flash_api.cpp (mha_bwd, mha_varlen_bwd); FlashAttention 2: flash_bwd_launch_template.h
Checked  tests/models/test_flash.py

Shapes: B rows, T tokens, S tokens of a piece, H query heads, N KV heads, K head size.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from scrimp.models.spec import AttentionSpec

State = tuple[Tensor, ...]
"""What backward needs besides queries, keys, values and results."""

FLASH_CAPABILITY = (8, 0)
"""From which on flash attention runs on a GPU."""
CUDNN_CAPABILITIES = ((9, 0), (10, 0))
"""On which torch prefers cuDNN's attention, if that is recent and need not repeat itself (sdp_utils.cpp)."""
WORKSPACE_BYTES: dict[str, int] = {"cuda": 2**28}
"""By device: what the backward pass of one call may take, unless one row takes more. None here: no bound."""
MEAN_TOKENS = 128
"""Tokens per document, on average over a piece, from which what is planned for a backward pass holds."""
_PADDING = 128
"""Rows that the kernel for packed documents leaves after each."""


@dataclass(frozen=True)
class Gpu:
    """What attention depends on of a card; where there is none to be asked, an H100 SXM is assumed."""

    multiprocessors: int = 132
    capability: tuple[int, int] = (9, 0)
    deterministic: bool = True
    """Whether the run wants kernels that repeat themselves."""

    @property
    def prefers_cudnn(self) -> bool:
        """Whether torch takes cuDNN's attention where nothing keeps tokens apart."""
        return not self.deterministic and self.capability in CUDNN_CAPABILITIES


STAND_IN: dict[str, Gpu] = {}
"""The GPU that a CPU stands for, while it is traced for one."""


@dataclass(frozen=True)
class Heads:
    """What the bytes of attention depend on besides its rows."""

    queries: int
    keys: int
    size: int
    multiprocessors: int
    """The device's number of multiprocessors."""
    deterministic: bool = True

    @classmethod
    def of(cls, attends: AttentionSpec, device: torch.device) -> Heads:
        """The heads of a block on a device."""
        a = attends
        gpu = gpu_of(device)
        return cls(a.num_heads, a.num_kv_heads, a.head_size, gpu.multiprocessors, gpu.deterministic)

    def copies(self, documents: int) -> int:
        """In how many a call of so many documents sums the queries' gradient."""
        return -(-self.multiprocessors // (documents * self.queries)) if self.deterministic else 1


def gpu_of(device: torch.device) -> Gpu:
    """A GPU as it is, with the kernels that are in force; on a CPU, the GPU that it stands for."""
    if device.type != "cuda":
        return STAND_IN.get(device.type, Gpu())
    count = int(torch.cuda.get_device_properties(device).multi_processor_count)
    capability = torch.cuda.get_device_capability(device)
    return Gpu(count, capability, torch.are_deterministic_algorithms_enabled())


def flash_takes(device: torch.device, dtype: torch.dtype, head_size: int) -> bool:
    """Whether flash attention takes heads of this size and type; a CPU is asked for the sake of a GPU it stands for."""
    return not head_size % 8 and flash_runs(dtype, head_size, capability_of(device))


def flash_runs(dtype: torch.dtype, head_size: int, capability: tuple[int, int]) -> bool:
    """Whether flash attention runs where torch pads heads to multiples of 8: in calls without documents or a mask."""
    takes = dtype in (torch.bfloat16, torch.float16) and head_size <= 256
    return takes and capability >= FLASH_CAPABILITY


def capability_of(device: torch.device) -> tuple[int, int]:
    """A GPU's own compute capability; on a CPU, that of the GPU that it stands for."""
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device)
    return STAND_IN.get(device.type, Gpu()).capability


def backward_bytes(heads: Heads, tokens: int, documents: int) -> int:
    """What the backward pass of one call takes for itself, in bf16 or fp16."""
    copies = heads.copies(documents)
    step = 32 if heads.size <= 128 else 64
    padded = -(-heads.size // step) * step
    sums = 4 * heads.queries * (tokens + _PADDING * documents) * (copies * padded + 1)
    own_keys = 4 * tokens * heads.queries * heads.size if heads.keys != heads.queries else 0
    return sums + own_keys


@cache
def most_backward_bytes(heads: Heads, rows: int, length: int) -> int:
    """The most that rows take together, of one document each to documents of `MEAN_TOKENS` on average."""
    tokens = rows * length
    most = max(rows, tokens // MEAN_TOKENS)
    # More documents take more, except where there is one copy less of everything; of one copy, the most take most.
    one_copy = heads.copies(1)  # documents from which on there is one
    counts = {*range(rows, min(most, one_copy) + 1), most}
    return max(backward_bytes(heads, tokens, documents) for documents in counts)


@cache
def rows_within(bound: int, heads: Heads, rows: int, length: int) -> int:
    """Rows of a piece: the most whose backward pass keeps a bound, else those that take least."""

    def peak(at_once: int) -> int:
        """The last piece, if smaller, may take more than the others."""
        sizes = {at_once, rows % at_once} - {0}
        return max(most_backward_bytes(heads, size, length) for size in sizes)

    choices = range(rows, 0, -1)
    fitting = next((at_once for at_once in choices if peak(at_once) <= bound), None)
    return min(choices, key=peak) if fitting is None else fitting


def rows_at_once(device: torch.device, heads: Heads, length: int, documents: tuple[int, ...]) -> int:
    """Rows of a piece; 0 where all go together.

    Args:
        documents: in each row.
    """
    bound = WORKSPACE_BYTES.get(device.type)
    rows = len(documents)
    if bound is None:
        return 0
    at_once = rows_within(bound, heads, rows, length)
    pieces = [documents[first : first + at_once] for first in range(0, rows, at_once)]
    most = max(bound, *(most_backward_bytes(heads, len(piece), length) for piece in pieces))
    if any(backward_bytes(heads, len(piece) * length, sum(piece)) > most for piece in pieces):
        at_once = 1
    return 0 if at_once == rows else at_once


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
        """Keys to the left without the query's own, which is how the kernel counts; None: all."""
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

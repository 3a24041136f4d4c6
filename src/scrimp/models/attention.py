"""Causal attention within documents: who may look at whom, and the kernel that does it.

Problem  Rows are packed: several documents follow each other in one row of T tokens. A token
         may look at itself and at earlier tokens of its own document, and with a sliding
         window of w only at the last w of them, itself included.
Method   `AttentionLayout.prepare` looks at the documents once per forward pass and chooses
         how blocks of one kind attend; no block decides anything, and nothing waits for a device.

         causal    One causal call for all rows: nothing is masked, no window is reached.
         segments  CPU, not compiled: calls over neighbouring documents of the packed rows (see segments).
         varlen    CUDA, half precision: torch's variable-length kernel, where it exists.
         pieces    The same, or causal, where all rows at once would need too much memory in the backward pass: a few
                   rows at a time (`scrimp.models.flash`).
         masked    Everything else: one call with a boolean mask of T x T per row.

         Where ranks share rows (`scrimp.models.context_parallel`) a rank has t of the T tokens:

         ring      Keys and values travel past the queries of all ranks.
         ulysses   Tokens are exchanged for heads: whole rows of some heads then take one of the routes above.

Rule     On the CPU rows are always cut into segments. Measured for one block, forward and backward (4 rows of
         512 tokens, 10 heads of 64, 2 threads, no window), in ms by tokens per document, before tiny ones shared a
         call and short ones in bf16 were widened (`scrimp.models.cpu_attention`):

                  masked   segments of 512   256   64   32   16    8
           fp32       46                41    22    9    7    8   14
           bf16       32                32    23   30   32   56   23

         The CPU kernel computes the masked triangle too, within blocks of 512 keys: that is
         why cutting rows into documents saves time and masking them does not.
CPU      One autograd function: `scrimp.models.cpu_attention`.
Limits   The varlen route is checked for shapes only where there is no GPU; it is taken only if the kernel's
         signature has the arguments that it is called with, and the masked route otherwise.
Checked  tests/models/test_attention.py: every route against a float64 softmax over an explicit
         mask, forward and backward; test_decoder.py: packed documents against each alone.

Shapes: B rows, T tokens, S = B * T, H query heads, N KV heads, G = H + 2 N, K head size.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, pairwise
from typing import Any, Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from scrimp.models.context_parallel import ContextParallel, Ring, Ulysses, ring_attention
from scrimp.models.cpu_attention import WIDENED, CpuAttention
from scrimp.models.flash import (
    FLASH_CAPABILITY,
    STAND_IN,
    Heads,
    Pieces,
    attend_in_pieces,
    flash_operators,
    flash_runs,
    flash_takes,
    gpu_of,
    rows_at_once,
)
from scrimp.models.functions import runs_cpu_functions, uses_cpu_functions
from scrimp.models.masks import added, allowed
from scrimp.models.rope import rope_tables, rope_tables_at, rotate
from scrimp.models.segments import Segment, segments_of, window_mask, worst_segments
from scrimp.models.spec import AttentionSpec

Route = Literal["causal", "segments", "varlen", "pieces", "masked", "ring", "ulysses"]


@dataclass(frozen=True)
class AttentionLayout:
    """How the blocks of one kind attend in one forward pass."""

    num_heads: int
    """Query heads of qkv; the rest is half keys, half values."""
    num_kv_heads: int
    """Key heads, and as many value heads."""
    rope: tuple[Tensor, Tensor]
    """cos_T1K and sin_T1K of `rope_tables`; ring: at this rank's positions."""
    route: Route
    """See the module's docstring."""
    segments: tuple[Segment, ...] = ()
    """segments: over all rows."""
    starts: Tensor | None = None
    """varlen: cumulative document starts on the device, int32."""
    mask: Tensor | None = None
    """masked: where a query may look at a key, (B or 1, 1, T, T); segments: the same for the longest document, where it
    reaches the window. Boolean, on a CPU what is added to scores."""
    window: int | None = None
    """segments, varlen, pieces: the sliding window, where any document reaches it."""
    pieces: Pieces | None = None
    """pieces: which rows go together."""
    ring: Ring | None = None
    """ring: the ranks; `starts` are then those of whole rows, on the CPU."""
    ulysses: Ulysses | None = None
    """ulysses: the exchange."""
    whole: AttentionLayout | None = None
    """ulysses: how whole rows of a rank's heads attend."""
    widened_tokens: int = 0
    """segments: rows of up to so many tokens have their gradients made in float32."""

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Those that all blocks share."""
        starts = () if self.pieces is None else self.pieces.starts
        shared = () if self.whole is None else self.whole.tensors
        ring = () if self.ring is None else (self.ring.handle,)
        ulysses = () if self.ulysses is None else (self.ulysses.handle, self.ulysses.index)
        found = (*self.rope, self.starts, self.mask, *starts, *shared, *ring, *ulysses)
        return tuple(tensor for tensor in found if tensor is not None)

    @classmethod
    def prepare(
        cls,
        attends: AttentionSpec,
        tokens_BT: Tensor,
        document_starts: Tensor | None,
        *,
        dtype: torch.dtype,
        compiled: bool = False,
        parallel: ContextParallel | None = None,
        documents: bool = False,
    ) -> AttentionLayout:
        """Choose the route for these rows.

        Args:
            attends: heads, RoPE and window.
            tokens_BT: for its shape and device.
            document_starts: cumulative starts over the flattened rows, on the CPU.
            dtype: what attention computes in.
            compiled: whether torch.compile runs the blocks; then lengths that change with
                every batch must not become part of the program.
            parallel: the ranks that share these rows; then tokens_BT are this rank's, and document_starts
                those of whole rows.
            documents: rows of other batches may hold several, though these do not.

        Raises:
            ConfigError, DeviceError: these ranks cannot share them.
        """
        if parallel is not None:
            return _in_parts(cls, parallel, attends, tokens_BT, document_starts, dtype, compiled)
        rows, length = tokens_BT.shape
        device = tokens_BT.device
        tables = rope_tables(attends.rope, attends.head_size, 0, length, device=device)
        make = partial(cls, attends.num_heads, attends.num_kv_heads, tables)
        lengths = _document_lengths(rows, length, document_starts)
        window = attends.window
        if window is not None and window >= max(lengths):
            window = None
        is_whole = window is None and document_starts is None and not documents
        by_cudnn = is_whole and gpu_of(device).prefers_cudnn
        pieces = None if by_cudnn else _pieces(attends, lengths, length, window, device, dtype)
        if pieces is not None:
            return make("pieces", pieces=pieces)
        if device.type == "cpu" and not compiled and runs_cpu_functions():
            mask, found = window_mask(lengths, window, dtype), segments_of(lengths, length)
            widened = WIDENED // attends.head_size if dtype == torch.bfloat16 else 0
            return make("segments", segments=found, window=window, mask=mask, widened_tokens=widened)
        if len(lengths) == rows and window is None:
            return make("causal")
        if varlen_runs(device, dtype, attends.head_size):
            starts = _cumulative(lengths).to(device, non_blocking=True)
            return make("varlen", starts=starts, window=window)
        mask = allowed(rows, length, None if len(lengths) == rows else lengths, window, device)
        if device.type == "cpu" and not STAND_IN:
            # Given a boolean mask, the operator would make this one anew in every block.
            mask = added(mask, dtype)
        return make("masked", mask=mask)

    @classmethod
    def worst(
        cls,
        attends: AttentionSpec,
        tokens_BT: Tensor,
        *,
        dtype: torch.dtype,
        documents: bool,
        stands_for_gpu: bool,
        compiled: bool = False,
    ) -> AttentionLayout:
        """That of rows which need most memory, whatever documents they hold; arguments as of `prepare`.

        Args:
            documents: rows may hold several.
            stands_for_gpu: a CPU is asked for the sake of a GPU.
        """
        found = cls.prepare(attends, tokens_BT, None, dtype=dtype, compiled=compiled, documents=documents)
        keeps_apart = stands_for_gpu and flash_takes(tokens_BT.device, dtype, attends.head_size)
        if keeps_apart and found.mask is not None:
            # The kernel knows windows and documents.
            return replace(found, route="causal", mask=None)
        if keeps_apart or not documents:
            return found
        rows, length = tokens_BT.shape
        if not stands_for_gpu and not compiled:
            calls = worst_segments(rows, length, found.widened_tokens)
            return replace(found, route="segments", segments=calls)
        kind = torch.bool if stands_for_gpu else dtype
        mask = torch.empty((rows, 1, length, length), dtype=kind, device=tokens_BT.device)
        return replace(found, route="masked", mask=mask)


def _in_parts(
    make: type[AttentionLayout],
    parallel: ContextParallel,
    attends: AttentionSpec,
    tokens_Bt: Tensor,
    document_starts: Tensor | None,
    dtype: torch.dtype,
    compiled: bool,
) -> AttentionLayout:
    """The layout of rows that ranks share."""
    rows, part = tokens_Bt.shape
    device, length = tokens_Bt.device, part * parallel.size
    parallel.check(attends, length, device=device, dtype=dtype)
    heads = attends.num_heads, attends.num_kv_heads
    if parallel.method == "ulysses":
        exchange, tokens_BT = parallel.ulysses(attends, device), tokens_Bt[:, :1].expand(rows, length)
        whole = make.prepare(exchange.attends, tokens_BT, document_starts, dtype=dtype, compiled=compiled)
        return make(*heads, whole.rope, "ulysses", ulysses=exchange, whole=whole)
    position = parallel.division(length).positions(parallel.rank).to(device, non_blocking=True)
    tables = rope_tables_at(attends.rope, attends.head_size, position)
    starts = _cumulative(_document_lengths(rows, length, document_starts))
    if compiled:
        # Batches differ in their numbers of documents: one program for all.
        torch._dynamo.maybe_mark_dynamic(starts, 0)
    return make(*heads, tables, "ring", starts=starts, ring=parallel.ring(attends.window))


def _document_lengths(rows: int, length: int, document_starts: Tensor | None) -> tuple[int, ...]:
    if document_starts is None:
        return (length,) * rows
    # On the CPU, as Model.forward asks, so that reading it waits for nothing.
    starts = document_starts.tolist()
    lengths = tuple(stop - start for start, stop in pairwise(starts))
    assert (starts[0], starts[-1]) == (0, rows * length), "document starts do not cover the rows"
    assert min(lengths) > 0, "document starts do not rise"
    assert set(range(0, rows * length, length)) <= set(starts), "a document crosses rows"
    return lengths


def _cumulative(lengths: tuple[int, ...]) -> Tensor:
    return F.pad(torch.tensor(lengths).cumsum(0), (1, 0)).to(torch.int32)


def _pieces(
    attends: AttentionSpec,
    lengths: tuple[int, ...],
    length: int,
    window: int | None,
    device: torch.device,
    dtype: torch.dtype,
) -> Pieces | None:
    """The cut of the rows; None where all may go together, or no kernel takes pieces."""
    rows, bounds = sum(lengths) // length, [0, *accumulate(lengths)]
    if not flash_takes(device, dtype, attends.head_size):
        return None
    documents = Counter(begin // length for begin in bounds[:-1])
    per_row = tuple(documents[row] for row in range(rows))
    at_once = rows_at_once(device, Heads.of(attends, device), length, per_row)
    if not at_once:
        return None
    step = at_once * length
    starts = [
        torch.tensor([one - begin for one in bounds if begin <= one <= begin + step], dtype=torch.int32)
        for begin in range(0, rows * length, step)
    ]
    return Pieces(at_once, tuple(one.to(device, non_blocking=True) for one in starts), window)


def varlen_runs(device: torch.device, dtype: torch.dtype, head_size: int) -> bool:
    """Whether flash attention, which the variable-length kernel calls unchecked, takes this model here."""
    return device.type == "cuda" and varlen_kernel() is not None and flash_takes(device, dtype, head_size)


def fuses_attention(
    attends: AttentionSpec,
    dtype: torch.dtype,
    capability: tuple[int, int] = FLASH_CAPABILITY,
    *,
    masks: bool = False,
) -> bool:
    """Whether a run uses one kernel for this attention on a GPU.

    Not in fp32, and not below compute capability 8.0: flash attention takes 16 bits from there on. The memory-efficient
    kernel takes 32 bits and older cards, but Scrimp does not use it, whatever `train.deterministic` says: that its
    backward pass repeats itself was not tested on a GPU, and no account knows its bytes (`scrimp.runtime.determinism`).
    Scores of T x T are then in memory.

    Args:
        masks: documents or a window keep tokens apart, which flash attention does for heads of whole multiples of 8.
    """
    size = attends.head_size
    return flash_runs(dtype, size, capability) and not (masks and size % 8)


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
    if layout.ring is not None:
        return _attend_in_ring(qkv_BTGK, layout, layout.ring)
    if layout.ulysses is not None:
        assert layout.whole is not None
        return layout.ulysses.to_tokens(attend(layout.ulysses.to_heads(qkv_BTGK), layout.whole))
    if uses_cpu_functions(qkv_BTGK):
        assert layout.route != "pieces", "pieces are for plain operations"
        return cast(Tensor, CpuAttention.apply(qkv_BTGK, layout))  # type: ignore[no-untyped-call]
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
    found += [*flash_operators(), torch.ops.scrimp.ring_attention.default]
    return frozenset([*found, *([varlen.default] if varlen is not None else [])])


def _attend_in_ring(qkv_BtGK: Tensor, layout: AttentionLayout, ring: Ring) -> Tensor:
    H, N = layout.num_heads, layout.num_kv_heads
    q, k, v = qkv_BtGK.split([H, N, N], dim=2)
    assert layout.starts is not None
    # Turned apart, so that neither keeps the other in memory.
    return ring_attention(
        rotate(q, *layout.rope), torch.stack([rotate(k, *layout.rope), v]), ring, layout.starts
    )


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

"""Tiles as calls of the flash pair: attention of some queries over some keys, and its gradients by global sums.

Problem  A tile gives a part of what its queries see. Parts are added up with their log-sum-exps (lse), and a part's
         gradients are right if the kernel is given the results and the lse of the whole row in place of its own:

             p = exp(q k - lse)      the whole softmax's probabilities, though only a part of the keys is at hand

         So a kernel that returns the lse, with a backward pass that takes results and lse, is all that it needs. torch
         has such a pair for each device.
Calls    On a CPU each tile is a call, of which those with a window are cut into strips first. On CUDA the kernel knows
         windows; tiles of one kind (that is one `causal` and one `left`) go together, packed, as documents of the
         variable-length kernel, and a tile that is alone of its kind is a call on views.
Cost     CPU: about 0.2 ms for a call, its merge and its gradients, so that documents of fewer than 16 tokens on a rank
         cost more than they compute. A strip's mask takes (left + 64) (2 left + 64) numbers at most, and never more
         than its tile. CUDA: what is packed is copied; the kernel's backward pass takes
         `scrimp.models.flash.backward_bytes` for all rows at once.
Limits   CUDA's kernel takes 16 bits and heads of whole multiples of 8, at most 256. CUDA's calls were checked for
         shapes, and their packing against a reference of the kernel on the CPU; they have not run on a GPU.
Checked  tests/models/test_tiles.py, tests/models/test_context_parallel.py

Shapes: B rows, T tokens of a rank, H query heads, N KV heads, K head size; S tokens of a packed call; X any heads.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

import torch
from torch import Tensor

from scrimp.models.context_parallel.tiles import Tile, strips
from scrimp.models.masks import band

_Lengths = tuple[Tensor | None, Tensor | None, int, int]
"""Where documents begin among queries and among keys (None: rows of one length), and the longest of each."""


class Call(Protocol):
    """Some queries and some keys. Tensors that it takes have tokens first (B, T, or S), then heads."""

    def queries(self, x_BTX: Tensor) -> Tensor:
        """Its queries' part of a tensor: a view, or a copy that `put_queries` writes back."""

    def put_queries(self, x_BTX: Tensor, part: Tensor) -> None:
        """Write back what was made of `queries`."""

    def keys(self, x_BTX: Tensor) -> Tensor:
        """Its keys' part of a tensor, likewise."""

    def put_keys(self, x_BTX: Tensor, part: Tensor) -> None:
        """Write back what was made of `keys`."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Results of the parts, shape of q, and their lse, the same without K."""

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of q, k and v, for results and lse of all that the queries see."""


def calls_of(tiles: Sequence[Tile], length: int, device: torch.device) -> tuple[Call, ...]:
    """The calls that carry out tiles on a device.

    Args:
        length: T, of a rank.
    """
    if device.type == "cpu":
        return tuple(OnCpu(piece) for tile in tiles for piece in strips(tile))
    return calls_by_kind(tiles, length, device)


def calls_by_kind(tiles: Sequence[Tile], length: int, device: torch.device) -> tuple[Call, ...]:
    """The calls of CUDA's kernel; arguments as of `calls_of`."""
    kinds: dict[tuple[bool, int | None, int], list[Tile]] = {}
    for tile in tiles:
        kinds.setdefault((tile.causal, tile.left, tile.place), []).append(tile)
    return tuple(
        OnViews(alike[0]) if len(alike) == 1 else Packed.of(alike, length, device) for alike in kinds.values()
    )


@dataclass(frozen=True)
class _OnSlices:
    """One tile, on views."""

    tile: Tile

    def queries(self, x_BTX: Tensor) -> Tensor:
        return x_BTX[self.tile.rows, self.tile.queries]

    def put_queries(self, x_BTX: Tensor, part: Tensor) -> None:
        """It is a view."""

    def keys(self, x_BTX: Tensor) -> Tensor:
        return x_BTX[self.tile.rows, self.tile.keys]

    def put_keys(self, x_BTX: Tensor, part: Tensor) -> None:
        """It is a view."""


@dataclass(frozen=True)
class OnCpu(_OnSlices):
    """The CPU's kernel, which knows causal squares, rectangles and masks."""

    def _how(self, like: Tensor) -> tuple[bool, Tensor | None]:
        tile = self.tile
        if not tile.needs_mask:
            return tile.causal, None
        return False, band(
            tile.num_queries, tile.num_keys, causal=tile.causal, left=tile.left, dtype=like.dtype
        )

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        causal, mask = self._how(q)
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            *(x.transpose(1, 2) for x in (q, k, v)), 0.0, causal, attn_mask=mask
        )
        return out.transpose(1, 2), lse.transpose(1, 2)

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        causal, mask = self._how(q)
        dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *(x.transpose(1, 2) for x in (grad, q, k, v, out, lse)), 0.0, causal, attn_mask=mask
        )
        return dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)


@dataclass(frozen=True)
class OnViews(_OnSlices):
    """CUDA's kernel for rows of one length."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = _flash(q, k, v, self._lengths(q, k), self.tile.causal, self.tile.left)
        return out, lse.transpose(1, 2)

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        lse = lse.transpose(1, 2).contiguous()
        return _flash_gradients(
            grad, q, k, v, out, lse, self._lengths(q, k), self.tile.causal, self.tile.left
        )

    def _lengths(self, q: Tensor, k: Tensor) -> _Lengths:
        return None, None, q.shape[1], k.shape[1]


@dataclass(frozen=True)
class Packed:
    """CUDA's kernel for documents of many lengths: tiles of one kind, of which no two share queries or keys."""

    causal: bool
    left: int | None
    query_index: Tensor
    """Tokens of the flattened rows."""
    key_index: Tensor
    query_starts: Tensor
    """Cumulative, int32."""
    key_starts: Tensor
    most_queries: int
    """Where a document lies."""
    most_keys: int

    @classmethod
    def of(cls, tiles: Sequence[Tile], length: int, device: torch.device) -> Packed:
        """The same tiles as one call."""
        every = [(row, tile) for tile in tiles for row in range(tile.rows.start, tile.rows.stop)]
        queries = [(row, tile.queries) for row, tile in every]
        keys = [(row, tile.keys) for row, tile in every]
        return cls(
            tiles[0].causal,
            tiles[0].left,
            _index(queries, length, device),
            _index(keys, length, device),
            _starts((tile.num_queries for _, tile in every), device),
            _starts((tile.num_keys for _, tile in every), device),
            max(tile.num_queries for tile in tiles),
            max(tile.num_keys for tile in tiles),
        )

    def queries(self, x_BTX: Tensor) -> Tensor:
        return x_BTX.flatten(0, 1)[self.query_index]

    def put_queries(self, x_BTX: Tensor, part: Tensor) -> None:
        x_BTX.flatten(0, 1).index_copy_(0, self.query_index, part)

    def keys(self, x_BTX: Tensor) -> Tensor:
        return x_BTX.flatten(0, 1)[self.key_index]

    def put_keys(self, x_BTX: Tensor, part: Tensor) -> None:
        x_BTX.flatten(0, 1).index_copy_(0, self.key_index, part)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = _flash(q, k, v, self._lengths, self.causal, self.left)
        return out, lse.transpose(0, 1)

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        lse = lse.transpose(0, 1).contiguous()
        return _flash_gradients(grad, q, k, v, out, lse, self._lengths, self.causal, self.left)

    @property
    def _lengths(self) -> _Lengths:
        return self.query_starts, self.key_starts, self.most_queries, self.most_keys


def _flash(
    q: Tensor, k: Tensor, v: Tensor, lengths: _Lengths, causal: bool, left: int | None
) -> tuple[Tensor, Tensor]:
    """CUDA's kernel: results and lse, in its own order of dimensions."""
    out, lse, *_ = torch.ops.aten._flash_attention_forward(
        q, k, v, *lengths, 0.0, causal, False, **_window(causal, left)
    )
    return out, lse


def _flash_gradients(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    lengths: _Lengths,
    causal: bool,
    left: int | None,
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.ops.aten._flash_attention_backward(  # type: ignore[no-any-return]
        grad, q, k, v, out, lse, *lengths, 0.0, causal, *_no_dropout(q), **_window(causal, left)
    )


def _window(causal: bool, left: int | None) -> dict[str, int | None]:
    """As the kernel counts: keys to the left and to the right of the diagonal; None: all."""
    return {"window_size_left": left, "window_size_right": 0 if causal and left is not None else None}


def _no_dropout(like: Tensor) -> tuple[Tensor, Tensor]:
    """The state of a generator that is not asked, in the shapes that the forward kernel returns."""
    return like.new_empty(2, dtype=torch.uint64), like.new_empty((), dtype=torch.uint64)


def _index(spans: Iterable[tuple[int, slice]], length: int, device: torch.device) -> Tensor:
    found = [torch.arange(row * length + span.start, row * length + span.stop) for row, span in spans]
    return torch.cat(found).to(device, non_blocking=True)


def _starts(lengths: Iterable[int], device: torch.device) -> Tensor:
    bounds = [0, *accumulate(lengths)]
    return torch.tensor(bounds, dtype=torch.int32).to(device, non_blocking=True)

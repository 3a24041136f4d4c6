"""Tiles against the definition of who sees whom, and CUDA's packed calls against a reference of its kernel."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import assume, example, given
from hypothesis import strategies as st
from property_tests import examples
from torch import Tensor

from scrimp.models.context_parallel import tiles as tiles_module
from scrimp.models.context_parallel.calls import Call, OnViews, Packed, calls_by_kind, calls_of
from scrimp.models.context_parallel.division import SCHEMES, Division
from scrimp.models.context_parallel.ring import add_gradients, merge
from scrimp.models.context_parallel.tiles import Tile, documents_of, strips, tiles_of
from scrimp.models.masks import band


@st.composite
def rows_of_documents(draw: st.DrawFn) -> tuple[Division, tuple[int, ...]]:
    """A division, and the documents of two or three rows."""
    scheme, ranks = draw(st.sampled_from(SCHEMES)), draw(st.integers(1, 4))
    length = draw(st.integers(1, 12)) * ranks * (2 if scheme == "zigzag" else 1)
    rows = draw(st.integers(1, 3))
    more = draw(st.sets(st.integers(1, rows * length - 1), max_size=4)) if rows * length > 1 else set()
    bounds = sorted({*range(0, rows * length + 1, length), *more})
    return Division(scheme, length, ranks), tuple(bounds)


def visible(division: Division, bounds: tuple[int, ...], window: int | None, causal: bool) -> Tensor:
    """By definition: (rows, T, T)."""
    T = division.length
    document = torch.cat([torch.full((j - i,), i) for i, j in itertools.pairwise(bounds)]).view(-1, T)
    distance = torch.arange(T)[:, None] - torch.arange(T)[None, :]
    seen = document[:, :, None] == document[:, None, :]
    return seen & (distance >= 0) & (distance < (window or T)) if causal else seen


def sees(tile: Tile) -> Tensor:
    """By the tile's own words: (queries, keys)."""
    offset = tile.num_keys - tile.num_queries
    i, j = torch.arange(tile.num_queries)[:, None], torch.arange(tile.num_keys)[None, :]
    seen = torch.ones(tile.num_queries, tile.num_keys, dtype=torch.bool)
    if tile.causal:
        seen &= j <= i + offset
    if tile.left is not None:
        seen &= j >= i + offset - tile.left
    return seen


@pytest.mark.parametrize("cut", [False, True], ids=["tiles", "strips"])
@given(rows_of_documents(), st.one_of(st.none(), st.integers(1, 20)), st.booleans())
@examples(400)
@pytest.mark.every(2)
def test_what_ranks_see_of_each_other_is_what_is_visible_each_pair_once(
    cut: bool, rows: tuple[Division, tuple[int, ...]], window: int | None, causal: bool
) -> None:
    assume(causal or window is None)
    division, bounds = rows
    expected = visible(division, bounds, window, causal)
    found = torch.zeros(expected.shape, dtype=torch.int64)
    documents = documents_of(bounds, division.length)
    for rank, source in itertools.product(range(division.ranks), repeat=2):
        tiles = tiles_of(division, rank, source, documents, window=window, causal=causal)
        for tile in (piece for one in tiles for piece in (_strips(one) if cut else [one])):
            seen = sees(tile)
            # The kernel's sums of a query that sees nothing would not be finite.
            assert bool(seen.any(1).all())
            mask = band(*seen.shape, causal=tile.causal, left=tile.left, dtype=torch.float32)
            assert torch.equal(mask[0, 0] == 0, seen)
            assert tile.needs_mask or tile.causal or bool(seen.all())
            assert tile.left is None or tile.num_queries <= tile.num_keys
            i = division.positions(rank)[tile.queries]
            j = division.positions(source)[tile.keys]
            for row in range(tile.rows.start, tile.rows.stop):
                found[row, i[:, None], j[None, :]] += seen
    assert torch.equal(found, expected.long())


def _strips(tile: Tile) -> list[Tile]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiles_module, "SHORTEST_STRIP", 2)
        return list(strips(tile))


def area(tiles: list[Tile]) -> int:
    return sum(tile.num_queries * tile.num_keys for tile in tiles)


def test_blocks_that_no_query_sees_are_not_computed() -> None:
    division, rows = Division("zigzag", 8192, 4), documents_of((0, 8192), 8192)
    pairs = {
        (rank, source): [
            piece for tile in tiles_of(division, rank, source, rows, window=128) for piece in strips(tile)
        ]
        for rank, source in itertools.product(range(4), repeat=2)
    }
    # Chunks see themselves and the one before: chunk 1 (rank 1) chunk 0, chunk 4 (rank 3) chunk 3, which it has too.
    assert [pair for pair, tiles in pairs.items() if not tiles] == [
        (0, 2), (0, 3), (1, 3), (2, 0), (3, 0), (3, 1)
    ]  # fmt: skip
    assert sum(map(area, pairs.values())) < 8192 * 2 * 128
    documents = documents_of(tuple(range(0, 8193, 512)), 8192)
    short = [tiles_of(division, rank, source, documents) for rank, source in pairs if rank != source]
    assert not any(short)


def test_equal_rows_share_a_call_and_others_do_not() -> None:
    documents = documents_of((0, 8, 16, 20, 24, 28, 32), 8)
    assert [(one.rows, one.start, one.stop) for one in documents] == [
        (slice(0, 2), 0, 8),
        (slice(2, 4), 0, 4),
        (slice(2, 4), 4, 8),
    ]


def _as_the_kernel_takes(window: dict[str, int | None], causal: bool, most_keys: int) -> tuple[int, int]:
    """flash_api.cpp: mha_varlen_fwd, and set_params_fprop; -1 stands for no bound."""
    left, right = (-1 if bound is None else bound for bound in window.values())
    right = 0 if causal else right
    left, right = (-1 if bound >= most_keys else bound for bound in (left, right))
    if left < 0 and right < 0:
        return 2**30, 2**30
    return (most_keys if left < 0 else left), (most_keys if right < 0 else right)


class ReferenceKernel:
    """What CUDA's kernel does, on any device: the diagonal ends in each document's lower right corner, lse is by head,
    and a window that is open on one side reaches as far there as the longest document has keys."""

    def __init__(self, q: Tensor, k: Tensor, *arguments: Any, **window: int | None) -> None:
        query_starts, key_starts, most_queries, most_keys, dropout, self.causal, *_ = arguments
        assert dropout == 0.0
        self.is_packed = query_starts is not None
        if self.is_packed:
            bounds = [list(itertools.pairwise(starts.tolist())) for starts in (query_starts, key_starts)]
            assert all(stop - start <= most_queries for start, stop in bounds[0])
            assert all(stop - start <= most_keys for start, stop in bounds[1])
        else:
            assert (most_queries, most_keys) == (q.shape[1], k.shape[1])
            most = most_queries, most_keys
            bounds = [[(row * count, row * count + count) for row in range(len(q))] for count in most]
        self.documents = list(zip(*bounds, strict=True))
        self.left, self.right = _as_the_kernel_takes(window, self.causal, most_keys)

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        """By head, of one document."""
        scores = torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(q.shape[1] // k.shape[1], 1))
        ahead = torch.arange(len(k))[None] - torch.arange(len(q))[:, None] - len(k) + len(q)
        hidden = (ahead > self.right) | (ahead < -self.left)
        return (scores / q.shape[-1] ** 0.5).masked_fill(hidden, float("-inf"))

    def by_document(self, *tensors: Tensor) -> list[tuple[Tensor, ...]]:
        """Queries' parts of the first of them, keys' parts of the last two."""
        flat = [x if self.is_packed else x.flatten(0, 1) for x in tensors]
        return [
            (*(x[slice(*here)] for x in flat[:-2]), *(x[slice(*there)] for x in flat[-2:]))
            for here, there in self.documents
        ]

    @classmethod
    def forward(
        cls, q: Tensor, k: Tensor, v: Tensor, *arguments: Any, **window: int | None
    ) -> tuple[Tensor, Tensor]:
        kernel = cls(q, k, *arguments, **window)
        outs, sums = [], []
        for one_q, one_k, one_v in kernel.by_document(q, k, v):
            scores = kernel.scores(one_q, one_k)
            values = one_v.repeat_interleave(q.shape[-2] // k.shape[-2], 1)
            outs.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1), values))
            sums.append(scores.logsumexp(-1))
        lse = torch.cat(sums, 1) if kernel.is_packed else torch.stack(sums)
        return torch.cat(outs).view(q.shape), lse

    @classmethod
    def backward(
        cls,
        grad: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        *arguments: Any,
        **window: Any,
    ) -> tuple[Tensor, ...]:
        kernel = cls(q, k, *arguments, **window)
        assert lse.is_contiguous()
        lse_SH = lse.T if kernel.is_packed else lse.transpose(1, 2)
        found: list[list[Tensor]] = [[], [], []]
        for one_grad, one_q, one_out, one_lse, one_k, one_v in kernel.by_document(grad, q, out, lse_SH, k, v):
            p = torch.exp(kernel.scores(one_q, one_k) - one_lse.T[..., None])
            groups = q.shape[-2] // k.shape[-2]
            keys, values = (x.repeat_interleave(groups, 1) for x in (one_k, one_v))
            dp = torch.einsum("qhd,khd->hqk", one_grad, values)
            ds = p * (dp - (one_grad * one_out).sum(-1).T[..., None]) / q.shape[-1] ** 0.5
            of_keys = (torch.einsum("hqk,qhd->khd", *pair) for pair in ((ds, one_q), (p, one_grad)))
            summed = (x.unflatten(1, (-1, groups)).sum(2) for x in of_keys)
            for place, one in zip(found, (torch.einsum("hqk,khd->qhd", ds, keys), *summed), strict=True):
                place.append(one)
        return tuple(torch.cat(parts).view(x.shape) for parts, x in zip(found, (q, k, v), strict=True))


CallsOf = Callable[[tuple[Tile, ...], int, torch.device], tuple[Call, ...]]


def in_one_process(
    division: Division,
    bounds: tuple[int, ...],
    window: int | None,
    causal: bool,
    tensors: tuple[Tensor, Tensor, Tensor, Tensor],
    calls: CallsOf,
) -> list[Tensor]:
    """What all ranks of a ring find together, without anything sent: out, dq, dk, dv of whole rows."""
    ranks, device = range(division.ranks), tensors[0].device
    q, k, v, grad = ([division.cut(x, rank) for rank in ranks] for x in tensors)
    kv = [torch.stack(pair) for pair in zip(k, v, strict=True)]
    documents = documents_of(bounds, division.length)
    outs, dqs = [], []
    dkv = [torch.zeros_like(x, dtype=torch.float32) for x in kv]
    for rank in ranks:
        per_source = [
            calls(
                tiles_of(division, rank, source, documents, window=window, causal=causal),
                division.part,
                device,
            )
            for source in ranks
        ]
        out = torch.zeros_like(q[rank], dtype=torch.float32)
        lse = torch.full(out.shape[:3], float("-inf"), device=device)
        dq = torch.zeros_like(out)
        for source in ranks:
            for call in per_source[source]:
                k_part, v_part = (call.keys(x) for x in kv[source])
                merge(out, lse, call, *call.forward(call.queries(q[rank]), k_part, v_part))
        out = out.to(q[rank].dtype)
        for source in ranks:
            for call in per_source[source]:
                add_gradients(dq, dkv[source], call, grad[rank], q[rank], kv[source], out, lse)
        outs.append(out)
        dqs.append(dq)
    return [division.joined(parts) for parts in (outs, dqs, [x[0] for x in dkv], [x[1] for x in dkv])]


def exactly(
    division: Division,
    bounds: tuple[int, ...],
    window: int | None,
    causal: bool,
    tensors: tuple[Tensor, Tensor, Tensor, Tensor],
) -> list[Tensor]:
    """The same in float64 over an explicit mask."""
    q, k, v, grad = (x.detach().cpu().double() for x in tensors)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    keys, values = (x.repeat_interleave(q.shape[2] // k.shape[2], 2) for x in (k, v))
    scores = torch.einsum("bqhd,bkhd->bhqk", q, keys) / q.shape[-1] ** 0.5
    seen = visible(division, bounds, window, causal)[:, None]
    out = torch.einsum("bhqk,bkhd->bqhd", scores.masked_fill(~seen, float("-inf")).softmax(-1), values)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


def drawn(rows: int, length: int, size: int = 8) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rows * length)
    q, k, v, grad = (torch.randn(rows, length, heads, size, generator=generator) for heads in (4, 2, 2, 4))
    return q, k, v, grad


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@example((Division("zigzag", 10, 1), (0, 1, 2, 3, 10)), 5, True)  # a window over many queries and few keys
@given(rows_of_documents(), st.one_of(st.none(), st.integers(1, 20)), st.booleans())
def test_the_calls_of_all_ranks_add_up_to_attention(
    device: str, rows: tuple[Division, tuple[int, ...]], window: int | None, causal: bool
) -> None:
    """CUDA's with a reference in place of its kernel: what is packed, in which order, and where it goes."""
    assume(causal or window is None)
    division, bounds = rows
    tensors = drawn(bounds[-1] // division.length, division.length)
    case = division, bounds, window, causal, tensors
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiles_module, "SHORTEST_STRIP", 2)
        patch.setattr(torch.ops.aten, "_flash_attention_forward", ReferenceKernel.forward)
        patch.setattr(torch.ops.aten, "_flash_attention_backward", ReferenceKernel.backward)
        found = in_one_process(*case, calls_of if device == "cpu" else calls_by_kind)
    for one, right in zip(found, exactly(*case), strict=True):
        torch.testing.assert_close(one.double(), right, atol=2e-5, rtol=1e-5)


def test_cudas_kernel_takes_our_arguments() -> None:
    """Shapes only (its fake kernel): the calls themselves need CUDA."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    alike = [
        Tile(slice(0, 1), slice(0, 4), slice(0, 4), True, 2),
        Tile(slice(1, 2), slice(1, 4), slice(1, 4), True, 2),
    ]
    with FakeTensorMode(allow_non_fake_inputs=True):
        q, k = torch.empty(2, 8, 4, 8), torch.empty(2, 8, 2, 8)
        for call in (OnViews(alike[0]), Packed.of(alike, 8, torch.device("cpu"))):
            part_q, part_k = call.queries(q), call.keys(k)
            out, lse = call.forward(part_q, part_k, part_k)
            assert (out.shape, lse.shape) == (part_q.shape, part_q.shape[:-1])
            dq, dk, dv = call.backward(out, part_q, part_k, part_k, out, lse)
            assert (dq.shape, dk.shape, dv.shape) == (part_q.shape, part_k.shape, part_k.shape)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("bounds", [(0, 256, 512), (0, 10, 200, 256, 300, 511, 512)])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_calls_on_cuda_add_up_to_attention(scheme: Any, bounds: tuple[int, ...], window: int | None) -> None:
    q, k, v, grad = (x.bfloat16().cuda() for x in drawn(2, 256, 64))
    case = Division(scheme, 256, 4), bounds, window, True, (q, k, v, grad)
    for one, right in zip(in_one_process(*case, calls_of), exactly(*case), strict=True):
        assert (one.cpu() - right).norm() < 0.02 * right.norm()

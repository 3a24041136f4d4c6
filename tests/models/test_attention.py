"""Every route of attention against a softmax over an explicit mask in float64."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from decoder_reference import LLAMA
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from scrimp.models import attention, segments, spec_of
from scrimp.models.attention import AttentionLayout, attend, varlen_kernel
from scrimp.profiler.memory_trace.tracker import StorageTracker

ATTENDS = spec_of(LLAMA).block(0).attention
ROWS, LENGTH, HEADS, KV, K = 2, 40, 4, 2, 8
DOCUMENTS = [0, 3, 30, 40, 41, 80]


def prepare(
    starts: list[int] | None,
    window: int | None = None,
    *,
    compiled: bool = False,
    dtype: torch.dtype = torch.float32,
) -> AttentionLayout:
    attends = replace(ATTENDS, window=window)
    document_starts = None if starts is None else torch.tensor(starts, dtype=torch.int32)
    tokens = torch.zeros(ROWS, LENGTH, dtype=torch.int64)
    return AttentionLayout.prepare(attends, tokens, document_starts, dtype=dtype, compiled=compiled)


def expected(qkv: Tensor, starts: list[int] | None, window: int | None) -> Tensor:
    """out_BTHK, element by element of the definition."""
    bounds = starts or [0, 40, 80]
    document = torch.cat([torch.full((j - i,), i) for i, j in itertools.pairwise(bounds)]).view(ROWS, LENGTH)
    position = torch.arange(LENGTH, dtype=torch.float64)
    frequency = LLAMA.rope_theta ** (-torch.arange(0, K, 2, dtype=torch.float64) / K)
    turn = torch.exp(1j * position[:, None] * frequency)[:, None]
    point = torch.complex(qkv[:, :, : HEADS + KV, : K // 2], qkv[:, :, : HEADS + KV, K // 2 :]) * turn
    qk = torch.cat([point.real, point.imag], dim=-1)
    q, k = qk[:, :, :HEADS], qk[:, :, HEADS:].repeat_interleave(HEADS // KV, dim=2)
    v = qkv[:, :, HEADS + KV :].repeat_interleave(HEADS // KV, dim=2)
    distance = position[:, None] - position[None, :]
    visible = (distance >= 0) & (distance < (window or LENGTH))
    visible = visible & (document[:, :, None] == document[:, None, :])
    scores = torch.einsum("bthk,bshk->bhts", q, k) / math.sqrt(K)
    return torch.einsum("bhts,bshk->bthk", scores.masked_fill(~visible[:, None], -math.inf).softmax(-1), v)


CASES = {
    "rows": (None, None),
    "segments": (DOCUMENTS, None),
    "segments in a window they do not reach": (DOCUMENTS, 39),
    "rows and window": (None, 5),
    "documents and window": (DOCUMENTS, 5),
    "documents, some reach the window": (DOCUMENTS, 15),
    "tiny documents and window": ([*range(0, 20, 2), 20, 40, *range(46, 80, 6), 80], 3),
    "segments of tiny documents": ([*range(0, 80, 2), 80], None),
    "segments of tiny documents and others": ([0, 3, 5, 21, 23, 30, 40, 41, 80], None),
}


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "laid out for compile"])
@pytest.mark.parametrize("name", CASES)
def test_every_route_is_exact_forward_and_backward(name: str, compiled: bool) -> None:
    starts, window = CASES[name]
    layout = prepare(starts, window, compiled=compiled)
    in_compiled = "causal" if (starts, window) == (None, None) else "masked"
    assert layout.route == (in_compiled if compiled else "segments")
    generator = torch.Generator().manual_seed(0)
    qkv = torch.randn(ROWS, LENGTH, HEADS + 2 * KV, K, generator=generator).requires_grad_()
    weight = torch.randn(ROWS, LENGTH, HEADS, K, generator=generator)
    reference = qkv.detach().double().requires_grad_()
    out, right = attend(qkv, layout), expected(reference, starts, window)
    torch.testing.assert_close(out.double(), right, atol=1e-5, rtol=1e-5)
    (out * weight).sum().backward()
    (right * weight).sum().backward()
    assert qkv.grad is not None
    torch.testing.assert_close(qkv.grad.double(), reference.grad, atol=1e-5, rtol=1e-5)


class Gradients(TorchDispatchMode):
    """Notes tokens and types of the rows whose gradients the operator makes."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[tuple[int, torch.dtype]] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket is torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward:
            self.found.add((args[0].shape[2], args[0].dtype))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("window", [None, 20])
def test_short_rows_in_bf16_have_their_gradients_in_float32(
    window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "WIDENED", 27 * K)
    qkv = torch.randn(ROWS, LENGTH, HEADS + 2 * KV, K).bfloat16().requires_grad_()
    out = attend(qkv, prepare([0, 27, 40, 80], window, dtype=torch.bfloat16))
    with Gradients() as gradients:
        out.sum().backward()
    assert gradients.found == {(13, torch.float32), (27, torch.float32), (40, torch.bfloat16)}


@pytest.mark.parametrize("widened", [0, 20, LENGTH])
@pytest.mark.parametrize("name", CASES)
def test_bf16_on_every_route_stays_within_its_rounding(
    name: str, widened: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    starts, window = CASES[name]
    monkeypatch.setattr(attention, "WIDENED", widened * K)
    layout = prepare(starts, window, dtype=torch.bfloat16)
    qkv = torch.randn(ROWS, LENGTH, HEADS + 2 * KV, K, generator=torch.Generator().manual_seed(0)).bfloat16()
    reference = qkv.double().requires_grad_()
    qkv.requires_grad_()
    out, right = attend(qkv, layout), expected(reference, starts, window)
    assert out.dtype == torch.bfloat16
    assert (out - right).norm() < 0.01 * right.norm()
    out.sum().backward()
    right.sum().backward()
    assert qkv.grad is not None
    assert reference.grad is not None
    assert (qkv.grad - reference.grad).norm() < 0.02 * reference.grad.norm()


def test_plain_operations_agree_with_the_cpu_function(monkeypatch: pytest.MonkeyPatch) -> None:
    """What CUDA and torch.compile run, here on the CPU."""
    for starts, window in ((None, None), (DOCUMENTS, None), (DOCUMENTS, 5)):
        layout = prepare(starts, window, compiled=True)
        qkv = torch.randn(
            ROWS, LENGTH, HEADS + 2 * KV, K, generator=torch.Generator().manual_seed(0)
        ).requires_grad_()
        fast = attend(qkv, layout)
        (gradient,) = torch.autograd.grad(fast.square().sum(), qkv)
        with monkeypatch.context() as patch:
            patch.setattr(attention, "uses_cpu_functions", lambda x: False)
            plain = attend(qkv, layout)
        torch.testing.assert_close(plain, fast, atol=1e-6, rtol=1e-5)
        torch.testing.assert_close(
            torch.autograd.grad(plain.square().sum(), qkv)[0], gradient, atol=1e-5, rtol=1e-5
        )


def test_plain_operations_refuse_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "uses_cpu_functions", lambda x: False)
    with pytest.raises(AssertionError):
        attend(torch.randn(ROWS, LENGTH, HEADS + 2 * KV, K), prepare(DOCUMENTS))


def test_document_starts_that_do_not_fit_the_rows_are_a_bug_of_the_caller() -> None:
    for wrong in ([0, 50, 80], [0, 40, 79], [1, 40, 80], [0, 40, 40, 80]):
        with pytest.raises(AssertionError):
            prepare(wrong)


def test_rows_of_one_document_go_together_up_to_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens, starts = torch.zeros(5, LENGTH, dtype=torch.int64), torch.arange(0, 5 * LENGTH + 1, LENGTH)
    lay_out = partial(AttentionLayout.prepare, ATTENDS, tokens, starts, dtype=torch.float32)
    all_at_once, together = lay_out(compiled=True), lay_out()
    monkeypatch.setattr(segments, "ROWS_TOKENS", 2 * LENGTH)
    apart = lay_out()
    assert (all_at_once.route, together.route, apart.route) == ("causal", "segments", "segments")
    assert [segment.rows for segment in together.segments] == [5]
    assert [segment.rows for segment in apart.segments] == [2, 2, 1]
    qkv = torch.randn(5, LENGTH, HEADS + 2 * KV, K).requires_grad_()
    first, *others = [attend(qkv, layout) for layout in (all_at_once, together, apart)]
    gradient, *same = [torch.autograd.grad(out.square().sum(), qkv)[0] for out in (first, *others)]
    assert all(torch.equal(first, other) for other in others)
    assert all(torch.equal(gradient, other) for other in same)


@pytest.mark.parametrize("starts", [[0, 40, 80], [0, 39, 40, 79, 80]], ids=["rows", "documents"])
def test_segments_take_memory_for_one_of_them_at_a_time(
    monkeypatch: pytest.MonkeyPatch, starts: list[int]
) -> None:
    monkeypatch.setattr(segments, "ROWS_TOKENS", LENGTH)
    layout = prepare(starts)
    qkv = torch.randn(ROWS, LENGTH, HEADS + 2 * KV, K).requires_grad_()
    with StorageTracker() as tracker:
        out = attend(qkv, layout)
    results, row = qkv.nbytes + out.nbytes + 4 * HEADS * ROWS * LENGTH, out.nbytes // ROWS
    assert tracker.peak <= results + row + 4 * HEADS * LENGTH
    gradient = torch.ones_like(out)
    with StorageTracker() as tracker:
        torch.autograd.grad(out, qkv, gradient)
    assert tracker.peak <= qkv.nbytes * 3 // 2 + qkv.nbytes // ROWS // 2


def test_the_varlen_kernel_is_found_and_takes_our_arguments() -> None:
    """Shapes only (its fake kernel): the call itself needs CUDA."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    layout = replace(prepare(None, 5), route="varlen", window=5, mask=None)
    assert varlen_kernel() is not None
    with FakeTensorMode(allow_non_fake_inputs=True):
        starts = torch.tensor(DOCUMENTS, dtype=torch.int32)
        q, k = torch.empty(ROWS, LENGTH, HEADS, K), torch.empty(ROWS, LENGTH, KV, K)
        out = attention._varlen(q, k, k, replace(layout, starts=starts))
    assert out.shape == (ROWS, LENGTH, HEADS, K)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", CASES)
def test_cuda_routes_agree_with_the_reference(name: str) -> None:
    starts, window = CASES[name]
    attends = replace(ATTENDS, window=window)
    tokens = torch.zeros(ROWS, LENGTH, dtype=torch.int64, device="cuda")
    document_starts = None if starts is None else torch.tensor(starts, dtype=torch.int32)
    for dtype, tolerance in ((torch.float32, 1e-4), (torch.bfloat16, 0.02)):
        layout = AttentionLayout.prepare(attends, tokens, document_starts, dtype=dtype)
        qkv = torch.randn(ROWS, LENGTH, HEADS + 2 * KV, K, device="cuda", dtype=dtype)
        reference = qkv.cpu().double().requires_grad_()
        qkv.requires_grad_()
        out, right = attend(qkv, layout), expected(reference, starts, window)
        assert (out.cpu() - right).norm() < tolerance * right.norm()
        out.sum().backward()
        right.sum().backward()
        assert qkv.grad is not None
        assert reference.grad is not None
        assert (qkv.grad.cpu() - reference.grad).norm() < tolerance * reference.grad.norm()

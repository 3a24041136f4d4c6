"""Attention over a few rows at a time: the bits of all rows at once, and a bounded workspace."""

from __future__ import annotations

import itertools

import pytest
import torch
from decoder_reference import LLAMA
from torch import Tensor

from scrimp.config.activations import Activations
from scrimp.config.architecture import Architecture
from scrimp.model import Decoder, attention, flash, initialise
from scrimp.model.attention import AttentionLayout, attend
from scrimp.model.flash import Pieces, attend_in_pieces, rows_within_bound
from scrimp.profiler.memory_trace import trace_costs

ROWS, LENGTH, HEADS, KV, K = 7, 40, 4, 2, 8
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def inputs(dtype: torch.dtype, device: str = "cpu") -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(ROWS, LENGTH, heads, K, generator=generator).to(device, dtype).requires_grad_()
        for heads in (HEADS, KV, KV)
    ]


def passed(q: Tensor, k: Tensor, v: Tensor, at_once: int) -> list[Tensor]:
    """Results and gradients."""
    starts = tuple(
        torch.arange(0, (last - first + 1) * LENGTH, LENGTH, dtype=torch.int32, device=q.device)
        for first in range(0, ROWS, at_once)
        for last in [min(first + at_once, ROWS)]
    )
    out = attend_in_pieces(q, k, v, Pieces(at_once, starts, None))
    weight = torch.linspace(-1, 1, out.numel(), device=out.device).view(out.shape)
    return [out.detach(), *torch.autograd.grad((out * weight).sum(), (q, k, v))]


@pytest.mark.parametrize("at_once", [1, 2, 3, 6])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pieces_give_the_bits_of_all_rows_at_once(dtype: torch.dtype, at_once: int) -> None:
    tensors = inputs(dtype)
    for found, whole in zip(passed(*tensors, at_once), passed(*tensors, ROWS), strict=True):
        assert torch.equal(found, whole)


def test_all_rows_at_once_are_plain_attention() -> None:
    q, k, v = inputs(torch.float32)
    found = passed(q, k, v, ROWS)
    out = torch.nn.functional.scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in (q, k, v)), is_causal=True, enable_gqa=True
    ).transpose(1, 2)
    weight = torch.linspace(-1, 1, out.numel()).view(out.shape)
    expected = [out, *torch.autograd.grad((out * weight).sum(), (q, k, v))]
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("bound", [1, 8 * LENGTH * HEADS * K, 30_000, 10**9])
def test_rows_keep_the_bound_or_are_one(bound: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(flash.WORKSPACE_BYTES, "cpu", bound)
    rows = rows_within_bound("cpu", ROWS, LENGTH, HEADS * K)
    whole = 8 * ROWS * LENGTH * HEADS * K
    assert (rows == 0) == (whole <= bound)
    if rows:
        assert rows == 1 or 8 * rows * LENGTH * HEADS * K <= bound < 8 * (rows + 1) * LENGTH * HEADS * K


def test_every_piece_starts_its_own_documents(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(flash.WORKSPACE_BYTES, "cpu", 3 * 8 * LENGTH * HEADS * K)
    cuts = [0, 7, 40, 80, 81, 119, 120, 160, 199, 200, 240, 280]
    tokens = torch.zeros(ROWS, LENGTH, dtype=torch.int64)
    layout = AttentionLayout.prepare(
        LLAMA, tokens, torch.tensor(cuts, dtype=torch.int32), dtype=torch.bfloat16, compiled=True
    )
    assert layout.route == "pieces"
    assert layout.pieces is not None
    assert layout.pieces.rows_at_once == 3
    found = [starts.tolist() for starts in layout.pieces.starts]
    assert found == [[0, 7, 40, 80, 81, 119, 120], [0, 40, 79, 80, 120], [0, 40]]
    lengths = [b - a for starts in found for a, b in itertools.pairwise(starts)]
    assert lengths == [b - a for a, b in itertools.pairwise(cuts)]


def test_plain_operations_take_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """The way through a model that a GPU takes, rotation included."""
    tokens = torch.zeros(ROWS, LENGTH, dtype=torch.int64)
    monkeypatch.setattr(attention, "uses_cpu_functions", lambda x: False)
    qkv = torch.randn(ROWS, LENGTH, HEADS + 2 * KV, K, generator=torch.Generator().manual_seed(0))
    qkv = qkv.bfloat16().requires_grad_()
    outs = []
    for bound in (10**9, 2 * 8 * LENGTH * HEADS * K):
        monkeypatch.setitem(flash.WORKSPACE_BYTES, "cpu", bound)
        layout = AttentionLayout.prepare(LLAMA, tokens, None, dtype=torch.bfloat16)
        assert layout.route == ("causal" if bound == 10**9 else "pieces")
        out = attend(qkv, layout)
        outs.append((out.detach(), *torch.autograd.grad(out.float().square().sum(), qkv)))
    for found, expected in zip(*outs, strict=True):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("level", ["keep", "mlp", "qkv", "attention", "block"])
def test_blocks_that_recompute_give_the_same_gradients_in_pieces(
    level: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "uses_cpu_functions", lambda x: False)
    tokens = torch.randint(LLAMA.vocab_size, (ROWS, 33), generator=torch.Generator().manual_seed(0))
    found = []
    for bound, activations in ((10**9, "keep"), (2 * 8 * 32 * LLAMA.attention_width, level)):
        monkeypatch.setitem(flash.WORKSPACE_BYTES, "cpu", bound)
        model = Decoder(LLAMA, dtype=torch.bfloat16)
        initialise(model, 0)
        for block in model.blocks:
            block.activations = Activations.parse(activations)  # type: ignore[assignment]
        model.loss(tokens[:, :-1], tokens[:, 1:]).total.backward()
        found.append({name: parameter.grad for name, parameter in model.named_parameters()})
    for name, gradient in found[0].items():
        assert gradient is not None
        assert torch.equal(gradient, found[1][name]), name


def test_cudas_kernel_takes_our_arguments_forward_and_backward() -> None:
    """Shapes only, by its kernel for tensors without memory: the call itself needs CUDA."""
    q, k, v = (
        torch.empty(5, LENGTH, heads, K, dtype=torch.bfloat16, device="meta") for heads in (HEADS, KV, KV)
    )
    starts = tuple(torch.empty(n, dtype=torch.int32, device="meta") for n in (4, 3))
    pieces = Pieces(3, starts, 9)
    for number, rows in enumerate((slice(0, 3), slice(3, 5))):
        out, state = flash._forward(q[rows], k[rows], v[rows], pieces, number)
        assert out.shape == q[rows].shape
        found = flash._backward(out, q[rows], k[rows], v[rows], out, state, pieces, number)
        assert [one.shape for one in found] == [x[rows].shape for x in (q, k, v)]


def test_the_trace_of_a_gpu_knows_the_bound_and_no_second_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    wide = Architecture(
        family="llama3",
        vocab_size=64,
        num_layers=1,
        width=512,
        num_heads=8,
        num_kv_heads=2,
        head_size=64,
        ffn_width=64,
        context=512,
    )

    def traced(bound: int) -> tuple[int, int]:
        monkeypatch.setitem(flash.WORKSPACE_BYTES, "cuda", bound)
        costs = trace_costs(
            wide,
            precision="bf16",
            parameters="bf16",
            master_weights=False,
            micro_batch=16,
            sequence=512,
            loss_chunk=512,
            device_functions="cuda",
        )
        cost = costs.classes[0].choices["keep"]
        return cost.kept, cost.backward_peak

    kept, peak = traced(2**40)
    kept_in_pieces, peak_in_pieces = traced(8 * 2 * 512 * 512)
    whole, two_rows = 8 * 16 * 512 * 512, 8 * 2 * 512 * 512
    assert kept_in_pieces - kept <= 8 * 4096  # softmax sums are rounded up per piece
    assert 0.6 * (whole - two_rows) <= peak - peak_in_pieces <= whole


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("at_once", [1, 3])
def test_on_a_gpu_pieces_give_the_numbers_of_all_rows(at_once: int) -> None:
    tensors = inputs(torch.bfloat16, "cuda")
    torch.use_deterministic_algorithms(True)
    try:
        found, whole = passed(*tensors, at_once), passed(*tensors, ROWS)
    finally:
        torch.use_deterministic_algorithms(False)
    for one, other in zip(found, whole, strict=True):
        assert torch.equal(one, other)
    plain = torch.nn.functional.scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in tensors), is_causal=True, enable_gqa=True
    ).transpose(1, 2)
    torch.testing.assert_close(found[0], plain, atol=0.02, rtol=0.02)

"""Attention over a few rows at a time: the results of all rows at once, and a bounded workspace."""

from __future__ import annotations

import itertools
import math
import random

import pytest
import torch
from decoder_reference import LLAMA
from losses import next_token_loss
from torch import Tensor

from scrimp.config.activations import Activations
from scrimp.config.architecture import Architecture
from scrimp.models import attention, flash, spec_of
from scrimp.models.attention import AttentionLayout, attend
from scrimp.models.flash import (
    Gpu,
    Heads,
    Pieces,
    attend_in_pieces,
    backward_bytes,
    most_backward_bytes,
    rows_at_once,
    rows_within,
)
from scrimp.models.initialise import initialise
from scrimp.models.model import build_model
from scrimp.optim.adamw_run import AdamWMemory
from scrimp.profiler.memory_trace import TracedStep

ROWS, LENGTH, HEADS, KV, K = 7, 40, 4, 2, 8
CPU = torch.device("cpu")
ATTENDS = spec_of(LLAMA).block(0).attention
ONE_COPY = Heads(HEADS, KV, K, 1)
"""A device with one multiprocessor: whatever the cut, gradients are summed in one copy."""
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.fixture
def one_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(flash.STAND_IN, "cpu", Gpu(1))


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


@pytest.mark.parametrize(
    ("heads", "tokens", "documents", "nbytes"),
    [
        # 132 multiprocessors and 28 heads: five copies; key heads are shared, so their gradients are expanded.
        (Heads(28, 4, 128, 132), 1024, 1, 4 * 28 * 1152 * (5 * 128 + 1) + 2 * 2 * 1024 * 28 * 128),
        (Heads(28, 4, 128, 132), 32 * 1024, 32, 4 * 28 * 36_864 * (128 + 1) + 2 * 2 * 32_768 * 28 * 128),
        (Heads(12, 12, 64, 108), 8 * 1024, 8, 57_065_472),  # two copies: 4 * 12 * 9,216 * 129
        (Heads(32, 32, 80, 128), 2048, 1, 107_233_280),  # heads of 80 are padded to 96: 4 * 32 * 2,176 * 385
        (Heads(8, 8, 160, 132), 1000, 3, 51_064_064),  # of 160 to 192, six copies: 4 * 8 * 1,384 * 1,153
        # In any order: one copy, however many multiprocessors there are.
        (Heads(28, 4, 128, 132, False), 1024, 1, 4 * 28 * 1152 * 129 + 2 * 2 * 1024 * 28 * 128),
        (Heads(8, 8, 160, 132, False), 1000, 3, 4 * 8 * 1384 * 193),
    ],
)
def test_the_bytes_of_a_backward_pass_by_hand(heads: Heads, tokens: int, documents: int, nbytes: int) -> None:
    assert backward_bytes(heads, tokens, documents) == nbytes


@pytest.mark.parametrize("heads", [Heads(28, 4, 128, 132), Heads(6, 6, 72, 108), Heads(64, 8, 256, 148)])
@pytest.mark.parametrize("documents", [1, 5, 40])
def test_the_bytes_are_those_of_the_kernels_own_tensors(heads: Heads, documents: int) -> None:
    """As mha_varlen_bwd allocates them, and for one document a row never less than what mha_bwd does."""
    rows, length = 4, 1000
    splits = (heads.multiprocessors + documents * heads.queries - 1) // (documents * heads.queries)
    step = 32 if heads.size <= 128 else 64
    size = (heads.size + step - 1) // step * step
    total = rows * length

    def empty(*sizes: int, dtype: torch.dtype = torch.float32) -> int:
        return torch.empty(sizes, dtype=dtype, device="meta").nbytes

    expanded = empty(2, total, heads.queries, heads.size, dtype=torch.bfloat16)
    expanded = expanded if heads.keys != heads.queries else 0
    padded = total + 128 * documents
    packed = empty(heads.queries, padded) + empty(splits, padded, heads.queries, size) + expanded
    assert backward_bytes(heads, total, documents) == packed
    splits = (heads.multiprocessors + rows * heads.queries - 1) // (rows * heads.queries)
    dense = empty(rows, heads.queries, 1024) + empty(splits, rows, 1024, heads.queries, size) + expanded
    assert dense <= most_backward_bytes(heads, rows, length)


def kernels_own_bytes(heads: Heads, tokens: int, documents: int) -> int:
    """As mha_varlen_bwd allocates, written apart from the code that is tested."""
    copies = math.ceil(heads.multiprocessors / (documents * heads.queries))
    size = next(size for size in (32, 64, 96, 128, 192, 256) if size >= heads.size)
    sums = heads.queries * (tokens + 128 * documents)
    expanded = 0 if heads.keys == heads.queries else 2 * tokens * heads.queries * heads.size * 2
    return sums * 4 + copies * sums * size * 4 + expanded


@pytest.mark.parametrize(
    ("heads", "rows", "length"),
    [
        (Heads(14, 2, 64, 108), 4, 512),  # qwen2.5-0.5b: 7 documents take more than 4, 8 or 16
        (Heads(28, 4, 128, 108), 2, 512),
        (Heads(32, 8, 64, 128), 2, 512),
        (Heads(4, 4, 32, 132), 6, 200),  # 9 documents of 133 tokens on average: more than one a row
    ],
)
def test_no_number_of_documents_takes_more_than_the_most(heads: Heads, rows: int, length: int) -> None:
    generator = random.Random(f"{heads} {rows} {length}")
    cases = [(heads, rows, length)]
    for _ in range(100):
        keys = generator.choice([1, 2, 4, 8])
        drawn = Heads(
            keys * generator.randint(1, 8),
            keys,
            generator.choice([32, 64, 80, 128, 160, 256]),
            generator.choice([16, 20, 46, 58, 108, 128, 132, 148, 170]),
        )
        cases.append((drawn, generator.randint(1, 32), generator.randint(1, 4096)))
    for one, number, tokens in cases:
        documents = range(number, max(number, number * tokens // 128) + 1)
        most = max(kernels_own_bytes(one, number * tokens, count) for count in documents)
        assert most_backward_bytes(one, number, tokens) == most, (one, number, tokens)


@pytest.mark.parametrize("heads", [ONE_COPY, Heads(28, 4, 128, 132), Heads(8, 8, 64, 16)])
@pytest.mark.parametrize("bound", [1, 10**5, 10**6, 2**27, 2**28, 10**12])
def test_rows_keep_the_bound_or_take_least(heads: Heads, bound: int) -> None:
    length, rows = 1024, 7

    def peak(at_once: int) -> int:
        sizes = [min(at_once, rows - first) for first in range(0, rows, at_once)]
        return max(most_backward_bytes(heads, size, length) for size in sizes)

    found = rows_within(bound, heads, rows, length)
    peaks = {at_once: peak(at_once) for at_once in range(1, rows + 1)}
    fitting = [at_once for at_once, most in peaks.items() if most <= bound]
    assert found == max(fitting) if fitting else peaks[found] == min(peaks.values())


def test_fewer_rows_may_take_more() -> None:
    """What a cut by bytes per row overlooks: a row alone needs five copies, five rows together one."""
    heads = Heads(28, 28, 128, 132)
    one, four, five = (backward_bytes(heads, rows * 1024, rows) for rows in (1, 4, 5))
    assert four > five
    assert 5 * one > 4 * five


def test_a_device_with_other_multiprocessors_may_cut_otherwise() -> None:
    rows = {count: rows_within(2**27, Heads(8, 2, 128, count), 16, 2048) for count in (16, 132)}
    assert len(set(rows.values())) == 2


def test_batches_of_short_documents_go_row_by_row_where_they_pass_the_bound(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bound = most_backward_bytes(ONE_COPY, 3, 1024)
    monkeypatch.setitem(flash.WORKSPACE_BYTES, "cpu", bound)
    assert rows_at_once(CPU, ONE_COPY, 1024, (8,) * ROWS) == 3, "as planned: 128 tokens each"
    assert rows_at_once(CPU, ONE_COPY, 1024, (1, 1, 8, 8, 8, 8, 8)) == 3
    assert rows_at_once(CPU, ONE_COPY, 1024, (8, 8, 9, 8, 8, 8, 8)) == 1
    monkeypatch.setitem(flash.WORKSPACE_BYTES, "cpu", 10**9)
    assert rows_at_once(CPU, ONE_COPY, 1024, (1024,) * ROWS) == 0, "far below the bound nothing is cut"


@pytest.mark.parametrize(
    ("gpu", "documents", "route"),
    [
        (Gpu(132, (9, 0)), False, "pieces"),
        (Gpu(132, (9, 0)), True, "pieces"),
        (Gpu(132, (9, 0), deterministic=False), False, "causal"),
        (Gpu(132, (10, 0), deterministic=False), False, "causal"),
        (Gpu(132, (9, 0), deterministic=False), True, "pieces"),
        (Gpu(132, (10, 3), deterministic=False), False, "pieces"),
        (Gpu(132, (8, 9), deterministic=False), False, "pieces"),
    ],
)
def test_rows_are_not_cut_where_cudnn_takes_all_of_them(
    gpu: Gpu, documents: bool, route: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pieces are calls of FlashAttention's, which would keep the faster kernel away."""
    monkeypatch.setitem(flash.STAND_IN, "cpu", gpu)
    monkeypatch.setitem(flash.WORKSPACE_BYTES, "cpu", 1)
    tokens = torch.zeros(ROWS, LENGTH, dtype=torch.int64)
    starts = torch.arange(ROWS + 1, dtype=torch.int32) * LENGTH if documents else None
    found = AttentionLayout.prepare(ATTENDS, tokens, starts, dtype=torch.bfloat16, compiled=True)
    assert found.route == route
    worst = AttentionLayout.worst(
        ATTENDS, tokens, dtype=torch.bfloat16, documents=documents, stands_for_gpu=True, compiled=True
    )
    assert worst.route == route, "the account counts what runs"


def test_every_piece_starts_its_own_documents(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []
    monkeypatch.setattr(attention, "rows_at_once", lambda *arguments: asked.extend(arguments) or 3)
    cuts = [0, 7, 40, 80, 81, 119, 120, 160, 199, 200, 240, 280]
    tokens = torch.zeros(ROWS, LENGTH, dtype=torch.int64)
    layout = AttentionLayout.prepare(
        ATTENDS, tokens, torch.tensor(cuts, dtype=torch.int32), dtype=torch.bfloat16, compiled=True
    )
    assert layout.route == "pieces"
    assert layout.pieces is not None
    assert asked[2:] == [LENGTH, (2, 1, 3, 1, 2, 1, 1)]
    found = [starts.tolist() for starts in layout.pieces.starts]
    assert found == [[0, 7, 40, 80, 81, 119, 120], [0, 40, 79, 80, 120], [0, 40]]
    lengths = [b - a for starts in found for a, b in itertools.pairwise(starts)]
    assert lengths == [b - a for a, b in itertools.pairwise(cuts)]


def test_plain_operations_take_pieces(monkeypatch: pytest.MonkeyPatch, one_copy: None) -> None:
    """The way through a model that a GPU takes, rotation included."""
    tokens = torch.zeros(ROWS, LENGTH, dtype=torch.int64)
    monkeypatch.setattr(attention, "uses_cpu_functions", lambda x: False)
    monkeypatch.setattr(attention, "runs_cpu_functions", lambda: False)
    qkv = torch.randn(ROWS, LENGTH, HEADS + 2 * KV, K, generator=torch.Generator().manual_seed(0))
    qkv = qkv.bfloat16().requires_grad_()
    outs = []
    for bound in (10**9, backward_bytes(ONE_COPY, 2 * LENGTH, 2)):
        monkeypatch.setitem(flash.WORKSPACE_BYTES, "cpu", bound)
        layout = AttentionLayout.prepare(ATTENDS, tokens, None, dtype=torch.bfloat16)
        assert layout.route == ("causal" if bound == 10**9 else "pieces")
        out = attend(qkv, layout)
        outs.append((out.detach(), *torch.autograd.grad(out.float().square().sum(), qkv)))
    for found, expected in zip(*outs, strict=True):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("level", ["keep", "mlp", "qkv", "attention", "block"])
def test_blocks_that_recompute_give_the_same_gradients_in_pieces(
    level: str, monkeypatch: pytest.MonkeyPatch, one_copy: None
) -> None:
    monkeypatch.setattr(attention, "uses_cpu_functions", lambda x: False)
    monkeypatch.setattr(attention, "runs_cpu_functions", lambda: False)
    tokens = torch.randint(LLAMA.vocab_size, (ROWS, 33), generator=torch.Generator().manual_seed(0))
    found = []
    for bound, activations in ((10**9, "keep"), (backward_bytes(ONE_COPY, 2 * 32, 2), level)):
        monkeypatch.setitem(flash.WORKSPACE_BYTES, "cpu", bound)
        model = build_model(LLAMA, dtype=torch.bfloat16)
        initialise(model, 0)
        for block in model.blocks:
            block.activations = Activations.parse(activations)  # type: ignore[assignment]
        next_token_loss(model, tokens[:, :-1], tokens[:, 1:]).total.backward()
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


@pytest.mark.slow
def test_the_trace_of_a_gpu_knows_the_bound_and_no_second_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    wide = Architecture(
        family="llama",
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
        costs = TracedStep(
            wide,
            precision="bf16",
            parameters="bf16",
            optimizer=AdamWMemory("bf16"),
            micro_batch=16,
            sequence=512,
            loss_chunk=512,
            device_functions="cuda",
            gpu=Gpu(16),
        ).costs()
        cost = costs.classes[0].choices["keep"]
        return cost.kept, cost.backward_peak

    whole, two_rows = (most_backward_bytes(Heads(8, 2, 64, 16), rows, 512) for rows in (16, 2))
    kept, peak = traced(2**40)
    kept_in_pieces, peak_in_pieces = traced(two_rows)
    assert kept_in_pieces - kept <= 8 * 4096  # softmax sums are rounded up per piece
    assert 0.6 * (whole - two_rows) <= peak - peak_in_pieces <= whole


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("at_once", [1, 3])
def test_on_a_gpu_only_the_queries_gradient_depends_on_the_cut(at_once: int) -> None:
    tensors = inputs(torch.bfloat16, "cuda")
    torch.use_deterministic_algorithms(True)
    try:
        found, whole = passed(*tensors, at_once), passed(*tensors, ROWS)
    finally:
        torch.use_deterministic_algorithms(False)
    for name, one, other in zip(("out", "q", "k", "v"), found, whole, strict=True):
        if name == "q":
            torch.testing.assert_close(one, other, atol=0.02, rtol=0.02)
        else:
            assert torch.equal(one, other), name
    plain = torch.nn.functional.scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in tensors), is_causal=True, enable_gqa=True
    ).transpose(1, 2)
    torch.testing.assert_close(found[0], plain, atol=0.02, rtol=0.02)

"""What products of bf16 matrices take on this processor, by torch's profiler, and what is said of them."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from allocator import allocator_peak
from torch import Tensor

from scrimp.gemm.cpu_products import widens_bf16_products
from scrimp.profiler.memory_trace import products
from scrimp.profiler.memory_trace.products import product_bytes, unit_here
from scrimp.profiler.memory_trace.workspace import cpu_workspace

SIZES = (16, 17, 64, 100, 192, 512, 576, 1024, 1632, 2048, 4096)
LARGEST = 2**28
"""Multiplications of a product."""
LAYOUTS = ("forward", "dgrad", "wgrad")


def operands(layout: str, m: int, n: int, k: int) -> tuple[Tensor, Tensor]:
    """As a linear layer stores them."""
    left = (
        torch.zeros(k, m, dtype=torch.bfloat16).t()
        if layout == "wgrad"
        else torch.zeros(m, k, dtype=torch.bfloat16)
    )
    right = (
        torch.zeros(n, k, dtype=torch.bfloat16).t()
        if layout == "forward"
        else torch.zeros(k, n, dtype=torch.bfloat16)
    )
    return left, right


def hidden_bytes(left: Tensor, right: Tensor) -> int:
    return allocator_peak(lambda: torch.mm(left, right)) - 2 * left.shape[0] * right.shape[1]


@pytest.mark.parametrize("threads", [1, 2, 16])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.slow
def test_a_product_takes_at_most_what_is_said(layout: str, threads: int) -> None:
    torch.set_num_threads(threads)
    shapes = [
        shape for shape in itertools.product(SIZES, repeat=3) if shape[0] * shape[1] * shape[2] <= LARGEST
    ]
    for m, n, k in random.Random(threads).sample(shapes, 30):
        left, right = operands(layout, m, n, k)
        said = cpu_workspace(torch.ops.aten.mm.default, (left, right), {})
        assert hidden_bytes(left, right) <= said, (m, n, k)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.every(3)
def test_products_of_the_smallest_preset_leave_little_room(layout: str) -> None:
    """llama-3m: at most 2.5 MB, of steps that take more than 100."""
    width, ffn, vocabulary, tokens = 192, 512, 4096, 1024
    for outputs, inputs in ((3 * width, width), (2 * ffn, width), (width, ffn), (vocabulary, width)):
        m, n, k = {
            "forward": (tokens, outputs, inputs),
            "dgrad": (tokens, inputs, outputs),
            "wgrad": (outputs, inputs, tokens),
        }[layout]
        said = product_bytes(m, n, k, unit_here(), 2, transposed=layout == "wgrad")
        if widens_bf16_products():
            said = cpu_workspace(torch.ops.aten.mm.default, operands(layout, m, n, k), {})
        room = said - hidden_bytes(*operands(layout, m, n, k))
        assert 0 <= room <= (0 if widens_bf16_products() else 2_500_000), (m, n, k, room)


def test_fp32_and_tiny_products_take_nothing() -> None:
    mm = torch.ops.aten.mm.default
    assert cpu_workspace(mm, (torch.ones(64, 64), torch.ones(64, 64)), {}) == 0
    tiny = torch.ones(16, 16, dtype=torch.bfloat16)
    assert cpu_workspace(mm, (tiny, tiny), {}) == hidden_bytes(tiny, tiny)
    assert hidden_bytes(tiny, tiny) == (2560 if widens_bf16_products() else 0)


def test_the_bias_and_a_sum_take_what_is_said() -> None:
    left, right = operands("forward", 512, 192, 256)
    bias, total = torch.zeros(192, dtype=torch.bfloat16), torch.zeros(512, 192, dtype=torch.bfloat16)
    said = cpu_workspace(torch.ops.aten.mm.default, (left, right), {})
    beside, onto = (
        cpu_workspace(operator, (first, left, right), {})
        for operator, first in ((torch.ops.aten.addmm.default, bias), (torch.ops.aten.addmm_.default, total))
    )
    # What is added is widened too where products are made in fp32.
    assert (beside == onto == said) != widens_bf16_products()
    assert allocator_peak(lambda: torch.addmm(bias, left, right)) - total.nbytes <= beside
    assert allocator_peak(lambda: total.addmm_(left, right)) <= onto


@pytest.mark.parametrize(
    ("allowed", "unit"),
    [
        ("AVX2", "none"),
        ("AVX512_CORE", "avx512"),
        ("avx512_core_bf16", "avx512_bf16"),
        ("AVX512_CORE_AMX", "amx"),
    ],
)
def test_what_onednn_is_held_to_is_what_counts(
    allowed: str, unit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(products, "_unit_of_processor", lambda: "amx")
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", allowed)
    assert unit_here() == unit
    monkeypatch.setattr(products, "_unit_of_processor", lambda: "none")
    assert unit_here() == "none"  # it cannot give what is not there

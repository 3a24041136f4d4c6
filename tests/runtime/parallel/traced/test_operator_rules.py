"""Rules of operators against the operators themselves.

An axis that a rule leaves free in arguments and results is cut: the operator on the halves of its arguments must give
the halves of its results. This is all that a plan relies on.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from scrimp.runtime.parallel.traced.axes import Axis
from scrimp.runtime.parallel.traced.shares import TracedModel
from scrimp.runtime.parallel.traced.tracing import trace, twin_of

Run = Callable[..., Tensor]
CASES: dict[str, tuple[Run, list[tuple[int, ...]]]] = {
    "product": (lambda x, w: x @ w, [(4, 6), (6, 8)]),
    "batched product": (lambda x, w: torch.bmm(x, w), [(2, 4, 6), (2, 6, 8)]),
    "product and bias": (lambda b, x, w: torch.addmm(b, x, w), [(8,), (4, 6), (6, 8)]),
    "broadcast sum": (lambda x, y: x + y, [(4, 6, 8), (6, 1)]),
    "activation": (lambda x: F.gelu(x), [(4, 6)]),
    "softmax": (lambda x: x.softmax(1), [(4, 6, 8)]),
    "layer norm": (lambda x, w: F.layer_norm(x, (8,), w), [(4, 6, 8), (8,)]),
    "mean": (lambda x: x.mean(-1, keepdim=True), [(4, 6, 8)]),
    "norm": (lambda x: torch.linalg.vector_norm(x, dim=-1), [(4, 6, 8)]),
    "running sum": (lambda x: x.cumsum(1), [(4, 6)]),
    "permuted": (lambda x: x.permute(2, 0, 1), [(4, 6, 8)]),
    "transposed": (lambda x: x.transpose(0, 2), [(4, 6, 8)]),
    "joined": (lambda x, y: torch.cat([x, y], 1), [(4, 6), (4, 2)]),
    "stacked": (lambda x, y: torch.stack([x, y], 1), [(4, 6), (4, 6)]),
    "split": (lambda x: x.split(4, 1)[1].contiguous(), [(6, 8)]),
    "sliced with steps": (lambda x: x[:, ::2].contiguous(), [(4, 8)]),
    "one number": (lambda x: x[:, 2].contiguous(), [(4, 8)]),
    "padded": (lambda x: F.pad(x, (0, 2)), [(4, 6)]),
    "repeated": (lambda x: x.repeat(1, 2), [(4, 6)]),
    "expanded": (lambda x: x[:, None].expand(4, 2, 6).contiguous(), [(4, 6)]),
    "looked up": (lambda w: F.embedding(torch.tensor([[1, 2, 4], [0, 3, 1]]), w), [(6, 8)]),
    "attention": (
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
        [(2, 4, 6, 8)] * 3,
    ),
    "attention with a mask": (
        lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, m),
        [(2, 4, 6, 8), (2, 4, 10, 8), (2, 4, 10, 8), (4, 6, 10)],
    ),
    "attention of groups": (
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, enable_gqa=True),
        [(2, 8, 6, 8), (2, 4, 6, 8), (2, 4, 6, 8)],
    ),
    "unknown": (lambda x: x.roll(1, 1), [(4, 6)]),
}
FREE = {"product": 2, "broadcast sum": 3, "activation": 2, "attention": 2, "unknown": 0, "looked up": 1}
"""Axes that some rules must leave free: else a rule that blocks all of them would pass."""


class Module(nn.Module):
    """A function of parameters."""

    def __init__(self, run: Run, tensors: list[Tensor]) -> None:
        super().__init__()
        self.run, self.tensors = run, nn.ParameterList(tensors)

    def forward(self) -> Tensor:
        return self.run(*self.tensors)


def half(tensor: Tensor, dims: list[Axis | None], leaf: Axis, rank: int) -> Tensor:
    for number, dim in enumerate(dims):
        ranges = None if dim is None else dim.shared_ranges(leaf)
        if ranges:
            own = [one[len(one) // 2 * rank : len(one) // 2 * (rank + 1)] for one in ranges]
            return tensor.index_select(number, torch.tensor([index for one in own for index in one]))
    return tensor


@pytest.mark.parametrize("name", CASES)
def test_free_axes_can_be_cut(name: str) -> None:
    run, shapes = CASES[name]
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(shape, generator=generator) for shape in shapes]
    found = trace(*twin_of(Module(run, tensors)), (), {})
    inputs = [found.values[number].dims for number in found.parameters.values()]
    (output,) = (found.values[number].dims for number in found.outputs)
    leaves = {leaf for dim in output if dim is not None for leaf in dim.leaves() if not leaf.blocked}
    expected = run(*tensors)
    for leaf in leaves:
        having = [dim for dim in output if dim is not None and leaf in dim.leaves()]
        if any(dim.shared_ranges(leaf) is None for dim in having):
            continue  # a part of a dimension alone is never cut
        for rank in range(2):
            parts = [half(tensor, dims, leaf, rank) for tensor, dims in zip(tensors, inputs, strict=True)]
            if name not in ("split", "expanded"):  # their code says sizes
                torch.testing.assert_close(run(*parts), half(expected, output, leaf, rank))
    assert len(leaves) >= FREE.get(name, 0)
    assert name != "unknown" or not leaves


def test_a_sum_over_an_axis_is_seen_by_what_it_lacks() -> None:
    twin, mode = twin_of(Module(lambda x: x.sum(1), [torch.zeros(4, 6)]))
    traced = TracedModel(twin, trace(twin, mode, (), {}), 2)
    columns = traced.value("tensors.0").dims[1]
    assert columns is not None
    assert traced.share(columns.root) == "aten.sum adds it up"


def random(x: Tensor) -> Any:
    return F.dropout(x, 0.5, training=True)


def test_random_numbers_block() -> None:
    found = trace(*twin_of(Module(random, [torch.zeros(4, 6)])), (), {})
    dims = found.values[found.parameters["tensors.0"]].dims
    assert all(dim is not None and "random" in str(dim.blocked) for dim in dims)

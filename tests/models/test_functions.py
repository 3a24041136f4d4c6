"""RMSNorm and gates, by kernels, by hand-written operators and plain, against their formulas in float64."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from kernel_ways import BOTH, Way, kernels
from torch import Tensor

from scrimp.models.functions import geglu, plain_operations, rms_norm, swiglu


def norm_formula(x: Tensor, weight: Tensor) -> Tensor:
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + 1e-3) * weight


def swiglu_formula(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return gate / (1 + torch.exp(-gate)) * up


def geglu_formula(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return 0.5 * gate * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (gate + 0.044715 * gate**3))) * up


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return rms_norm(x, weight, 1e-3)


CASES: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor], list[tuple[int, ...]]]] = {
    "norm": (norm, norm_formula, [(2, 5, 16), (16,)]),
    "norm of heads": (norm, norm_formula, [(2, 5, 3, 8), (8,)]),
    "swiglu": (swiglu, swiglu_formula, [(2, 5, 24)]),
    "geglu": (geglu, geglu_formula, [(2, 5, 24)]),
}


def plain() -> contextlib.AbstractContextManager[None]:
    return plain_operations(lambda x, weight, eps: F.rms_norm(x, x.shape[-1:], weight, eps))


by_each_way = pytest.mark.parametrize("way", [*BOTH, plain], ids=["kernels", "operators", "plain operations"])


def check(
    name: str, dtypes: list[torch.dtype], tolerance: float, context: Callable[[], object] | None = None
) -> Tensor:
    function, formula, shapes = CASES[name]
    generator = torch.Generator().manual_seed(0)
    inputs = [
        torch.randn(s, generator=generator).to(t).requires_grad_()
        for s, t in zip(shapes, dtypes, strict=False)
    ]
    exact = [x.detach().double().requires_grad_() for x in inputs]
    out, right = function(*inputs), formula(*exact)
    upstream = torch.randn(out.shape, generator=generator)
    out.backward(upstream.to(out.dtype))
    right.backward(upstream.to(out.dtype).double())
    assert (out - right).norm() < tolerance * right.norm()
    for x, reference in zip(inputs, exact, strict=True):
        assert x.grad is not None
        assert reference.grad is not None
        assert x.grad.dtype == x.dtype
        assert (x.grad - reference.grad).norm() < tolerance * reference.grad.norm()
    return out


@by_each_way
@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients_equal_the_formula(name: str, way: Way) -> None:
    with way():
        check(name, [torch.float32, torch.float32], 1e-6)


@by_each_way
@pytest.mark.parametrize("name", CASES)
def test_bf16_is_rounded_and_not_worse(name: str, way: Way) -> None:
    with way():
        assert check(name, [torch.bfloat16, torch.bfloat16], 0.01).dtype == torch.bfloat16


@by_each_way
def test_autocast_hands_on_its_type_but_sums_in_float32(way: Way) -> None:
    with way(), torch.autocast("cpu", torch.bfloat16):
        assert check("norm", [torch.float32, torch.float32], 0.005).dtype == torch.bfloat16
        assert check("norm of heads", [torch.bfloat16, torch.float32], 0.01).dtype == torch.bfloat16


def test_the_incoming_gradient_and_the_input_stay_as_they_are() -> None:
    for name, (function, _, shapes) in CASES.items():
        inputs = [torch.randn(s).requires_grad_() for s in shapes]
        kept = [x.detach().clone() for x in inputs]
        out = function(*inputs)
        upstream = torch.randn_like(out)
        copy = upstream.clone()
        out.backward(upstream)
        assert torch.equal(upstream, copy), name
        assert all(torch.equal(x, y) for x, y in zip(inputs, kept, strict=True)), name


def test_gradients_of_expanded_and_transposed_layouts_are_right() -> None:
    """sum() hands an expanded gradient, transpose a strided one."""
    x = torch.randn(4, 6, requires_grad=True)
    exact = x.detach().double().requires_grad_()
    swiglu(x).sum().backward()
    swiglu_formula(exact).sum().backward()
    torch.testing.assert_close(x.grad, exact.grad, check_dtype=False, rtol=1e-5, atol=1e-6)
    y = torch.randn(6, 4, requires_grad=True)
    weight = torch.ones(6, requires_grad=True)
    exact = y.detach().double().requires_grad_()
    (rms_norm(y.T, weight, 1e-3).T * torch.arange(24.0).view(6, 4)).sum().backward()
    (norm_formula(exact.T, torch.ones(6)).T * torch.arange(24.0).view(6, 4)).sum().backward()
    torch.testing.assert_close(y.grad, exact.grad, check_dtype=False, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", CASES)
def test_what_is_not_finite_comes_out_of_kernels_as_out_of_operators(
    name: str,
) -> None:
    function, _, shapes = CASES[name]
    found = []
    for way in BOTH:
        with way():
            inputs = [torch.randn(s, generator=torch.Generator().manual_seed(1)) for s in shapes]
            for place, number in enumerate([float("nan"), float("inf"), -float("inf"), 3e38, -300.0, 1e-40]):
                inputs[0].view(-1, shapes[0][-1])[place, place] = number
            for x in inputs:
                x.requires_grad_()
            out = function(*inputs)
            out.sum().backward()
            found.append([out.detach(), *(x.grad for x in inputs)])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize("name", CASES)
def test_threads_change_nothing(name: str) -> None:
    function, _, shapes = CASES[name]
    sizes = [(513, 200), (200,)][: len(shapes)]
    tensors = [torch.randn(size) for size in sizes]
    threads, found = torch.get_num_threads(), []
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            given = [one.clone().requires_grad_() for one in tensors]
            with kernels():
                out = function(*given)
                (out * tensors[0][:, : out.shape[1]]).sum().backward()
            found.append([out.detach(), *(one.grad for one in given)])
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(one, two) for one, two in zip(*found, strict=True))


@pytest.mark.parametrize("name", CASES)
def test_nothing_gives_nothing(name: str) -> None:
    """A rank whose experts no token chose has no rows."""
    function, _, shapes = CASES[name]
    inputs = [torch.empty(0, *shapes[0][1:]), *(torch.ones(shape) for shape in shapes[1:])]
    expected, kept = [], [x.requires_grad_() for x in inputs]
    for way in BOTH:
        with way():
            out = function(*kept)
            expected.append([out.shape, *torch.autograd.grad(out.sum(), kept)])
    (ours, *mine), (theirs, *others) = expected
    assert ours == theirs
    assert all(torch.equal(one, two) for one, two in zip(mine, others, strict=True))

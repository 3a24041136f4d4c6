"""Kernels that make a gate's numbers where they read: against float64, and against themselves on whole matrices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from torch import Tensor
from triton_cases import DEVICE

from scrimp.errors import PlanError
from scrimp.formats import Noise, Operand
from scrimp.gemm.deferred import Deferred, Gate, Matrix
from scrimp.gemm.gated_products import gates_run
from scrimp.gemm.kernels import GroupsOf, quantize_groups, quantize_rows, quantize_tensor, quantize_tiles

GATES: tuple[Gate, Gate] = ("silu", "gelu")
SHAPES = ((128, 128), (131, 75), (1, 3))
"""Tokens and features, ragged ones too."""


def tensors(shape: tuple[int, int], dtype: torch.dtype, scale: float = 2.0) -> tuple[Tensor, Tensor]:
    """Gate and up side by side, and a gradient."""
    generator = torch.Generator().manual_seed(shape[0])
    rows, columns = shape
    gate_up = scale * torch.randn(rows, 2 * columns, generator=generator)
    grad = torch.randn(shape, generator=generator)
    return gate_up.to(DEVICE, dtype), grad.to(DEVICE, dtype)


def both(shape: tuple[int, int], dtype: torch.dtype, gate: Gate) -> list[Deferred]:
    """What a gate makes, and its gradients."""
    gate_up, grad = tensors(shape, dtype)
    return [Deferred(gate_up, gate), Deferred(gate_up, gate, grad)]


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.every(3)
def test_numbers_are_those_of_autograd_in_float64_rounded_once(
    shape: tuple[int, int], dtype: torch.dtype, gate: Gate
) -> None:
    gate_up, grad = tensors(shape, dtype)
    wide = gate_up.double().requires_grad_()
    first, up = wide.chunk(2, dim=-1)
    act = (
        torch.nn.functional.silu(first)
        if gate == "silu"
        else torch.nn.functional.gelu(first, approximate="tanh")
    )
    expected = act * up
    expected.backward(grad.double())
    assert wide.grad is not None
    rounding = 2.0**-8 if dtype == torch.bfloat16 else 1e-6
    for found, exact in zip(both(shape, dtype, gate), (expected.detach(), wide.grad), strict=True):
        matrix = found.made()
        assert matrix.dtype == dtype
        assert matrix.shape == found.shape == exact.shape
        torch.testing.assert_close(matrix.double(), exact, rtol=1.01 * rounding, atol=2e-5)


def test_what_is_large_or_not_finite_stays_what_it_is() -> None:
    gate = torch.tensor([[300.0, -300.0, torch.inf, torch.nan, 1.0]], device=DEVICE)
    up = torch.tensor([[2.0, 2.0, 2.0, 2.0, torch.inf]], device=DEVICE)
    found = Deferred(torch.cat([gate, up], 1), "silu").made()[0].tolist()
    assert found[:3] == [600.0, 0.0, float("inf")]
    assert found[3] != found[3]
    assert found[4] == float("inf")


def same(found: object, expected: object) -> None:
    """Every tensor of two results, bit for bit."""
    for name, tensor in vars(expected).items():
        if isinstance(tensor, Tensor):
            bits = [one.reshape(-1).view(torch.uint8) for one in (getattr(found, name), tensor)]
            assert torch.equal(*bits), name


Quantizer = Callable[[Matrix], tuple[Any, Any]]
QUANTIZERS: dict[str, Quantizer] = {
    "tiles": lambda x: quantize_tiles(x, "e4m3", by_row=True, by_column=True),
    "tiles along rows": lambda x: quantize_tiles(
        x, "e2m1", by_row=False, by_column=True, noise_column=Noise(3)
    ),
    "rows": lambda x: quantize_rows(x, "e4m3", by_row=True, by_column=True),
    "rows along columns": lambda x: quantize_rows(x, "e4m3", by_row=True, by_column=False),
    "tensor": lambda x: quantize_tensor(x, "e5m2", by_row=True, by_column=True),
    "mx": lambda x: quantize_groups(x, GroupsOf(Operand("e4m3", "mx")), GroupsOf(Operand("e4m3", "mx"))),
    "nvfp4": lambda x: quantize_groups(
        x,
        GroupsOf(Operand("e2m1", "nvfp4")),
        GroupsOf(Operand("e2m1", "nvfp4", "stochastic", hadamard=True), noise=Noise(7)),
    ),
}


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("quantizer", QUANTIZERS)
@pytest.mark.every(7)
def test_quantizers_make_the_codes_of_the_whole_matrix(
    quantizer: str, dtype: torch.dtype, gate: Gate
) -> None:
    for source in both((67, 75), dtype, gate):
        for found, expected in zip(*map(QUANTIZERS[quantizer], (source, source.made())), strict=True):
            assert (found is None) == (expected is None)
            if expected is not None:
                same(found, expected)


def test_tensors_that_do_not_fit_are_refused() -> None:
    gate_up, grad = tensors((8, 4), torch.float32)
    for wrong in (grad[:4], grad.bfloat16(), grad.t()):
        with pytest.raises(PlanError):
            Deferred(gate_up, "silu", wrong).made()


def test_a_device_is_tried() -> None:
    assert gates_run(torch.device(DEVICE))

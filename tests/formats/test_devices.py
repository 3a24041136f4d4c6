"""Codes and scales do not depend on the device: a CPU's, which the oracles confirm, are a GPU's."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from scrimp.formats import Noise, QuantizedTensor, quantize
from scrimp.gemm.problem import operands_of
from scrimp.precision import GEMMS, RECIPES, Operand

OPERANDS = sorted(
    {o for name in RECIPES for gemm in GEMMS for o in operands_of(gemm, name) if o is not None}, key=str
)


def numbers() -> Tensor:
    """Multiples of 1/16, which 16 by 16 may be rotated in any order without error; maxima that no power of two is."""
    generator = torch.Generator().manual_seed(7)
    return torch.randint(-200, 201, (160, 192), generator=generator) / 16


def codes_of(x: Tensor, operand: Operand) -> QuantizedTensor:
    return quantize(
        x,
        operand.element,
        operand.scaling,
        rounding=operand.rounding,
        hadamard=operand.hadamard,
        four_over_six=operand.four_over_six,
        fallback=operand.fallback,
        noise=Noise(3),
    )


class Divisions(TorchDispatchMode):
    """Notes what is divided by as a Python number: torch's CUDA kernel multiplies by its rounded reciprocal instead."""

    def __init__(self) -> None:
        super().__init__()
        self.divisors: list[float] = []

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func.overloadpacket in (torch.ops.aten.div, torch.ops.aten.div_) and not isinstance(
            args[1], Tensor
        ):
            self.divisors.append(args[1])
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("operand", OPERANDS, ids=str)
def test_only_powers_of_two_divide_as_python_numbers(operand: Operand) -> None:
    with Divisions() as watched:
        codes_of(numbers(), operand)
    assert [divisor for divisor in watched.divisors if math.frexp(divisor)[0] != 0.5] == []


def test_the_watch_sees_a_division() -> None:
    with Divisions() as watched:
        torch.ones(1) / 448.0
    assert watched.divisors == [448.0]


@pytest.mark.gpu
@pytest.mark.parametrize("operand", OPERANDS, ids=str)
def test_a_gpu_gives_the_codes_and_scales_of_a_cpu(operand: Operand) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    x = numbers()
    x[3, 5], x[4:6] = 1e4, x[4:6] * 1e-4
    x[4, 130] = 7.0
    there, here = codes_of(x.cuda(), operand), codes_of(x, operand)
    assert (there.rest is not None) == (here.rest is not None) == operand.fallback
    for a, b in ((there, here), (there.rest, here.rest)):
        for name in ("payload", "scales", "tensor_scale"):
            ours, theirs = getattr(a, name, None), getattr(b, name, None)
            assert (ours is None) == (theirs is None)
            if theirs is not None:
                assert torch.equal(
                    ours.cpu().reshape(-1).view(torch.uint8), theirs.reshape(-1).view(torch.uint8)
                ), name

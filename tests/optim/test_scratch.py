"""Temporary memory of updates and gradient sums against what torch's allocator gave them."""

import pytest
import torch
from allocator import allocator_peak

from scrimp.formats import Noise
from scrimp.optim.moments import MomentFormat, Moments
from scrimp.optim.scratch import sum_scratch, update_scratch
from scrimp.optim.targets import add_by_operators
from scrimp.optim.update import PIECE_ELEMENTS, Step, update

SHAPES = [(768, 128), (96, 704), (1000, 300), (50000,), (4, 40000)]
STEP = Step(1, 1e-3, 0.9, 0.95, 1e-8, 0.1)


@pytest.mark.parametrize("moments", ["bf16", "8bit"])
@pytest.mark.parametrize("shape", SHAPES)
def test_an_update_takes_what_is_predicted(shape: tuple[int, ...], moments: MomentFormat) -> None:
    weight = torch.randn(shape).to(torch.bfloat16)
    gradient, states = torch.randn_like(weight), Moments.zeros(moments, weight)
    real = allocator_peak(lambda: update(weight, gradient, states, STEP, Noise(1)))
    eight_bit = moments == "8bit" and len(shape) > 1
    predicted = update_scratch([weight], PIECE_ELEMENTS["cpu"], eight_bit=eight_bit)
    assert real <= predicted <= 1.1 * real


@pytest.mark.parametrize("shape", SHAPES)
def test_a_rounded_sum_takes_what_is_predicted(shape: tuple[int, ...]) -> None:
    total = torch.randn(shape).to(torch.bfloat16)
    gradient = torch.randn_like(total)
    real = allocator_peak(lambda: add_by_operators(total, gradient, Noise(1)))
    assert real <= sum_scratch(total, PIECE_ELEMENTS["cpu"]) <= 1.2 * real

"""Rounding noise has the address of its use: independent between uses, indifferent to how a batch is cut."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from planned_cases import blocks, planned, random, run, same, start
from torch import Tensor

from scrimp.formats import quantize
from scrimp.gemm.clock import Clock
from scrimp.precision import GEMMS


def stream(clock: Clock, layer: str = "a", gemm: str = "dgrad", operand: int = 0) -> Tensor:
    """Some of its numbers."""
    return clock.noise(layer, gemm, operand, clock.now).uniform(64, 64, "cpu").flatten()


def test_noise_is_independent_between_steps_layers_gemms_operands_and_seeds() -> None:
    """Correlation of 4096 independent pairs is normal with deviation 1/64: 5 deviations allow 10^5 comparisons."""
    streams = []
    for seed, step in itertools.product((0, 1), (1, 2, 256, 2**20)):
        clock = Clock(seed)
        clock.begin(step)
        for layer, gemm, operand in itertools.product(("a", "b", "blocks.1.mlp"), GEMMS, (0, 1)):
            streams.append(stream(clock, layer, gemm, operand))
    correlation = torch.corrcoef(torch.stack(streams)) - torch.eye(len(streams))
    assert correlation.abs().max() < 5 / 64


def test_noise_is_the_same_again_for_the_same_address() -> None:
    first, second = Clock(3), Clock(3)
    first.begin(7)
    second.begin(9)
    assert not torch.equal(stream(first), stream(second))
    second.begin(7)
    assert torch.equal(stream(first), stream(second))


def test_a_row_has_the_noise_of_its_place_in_the_batch() -> None:
    whole, part = Clock(), Clock()
    whole.begin(4)
    part.begin(4, first_row=40)
    numbers = whole.noise("a", "dgrad", 0, whole.now).uniform(64, 8, "cpu")
    assert torch.equal(part.noise("a", "dgrad", 0, part.now).uniform(24, 8, "cpu"), numbers[40:])


@pytest.mark.parametrize("cuts", [(0, 128), (0, 32, 96), (0, 5, 6, 77)])
def test_micro_batches_give_the_input_gradients_of_the_whole_batch(cuts: tuple[int, ...]) -> None:
    """In mxfp4, whose products and their sums here are exact in fp32, whatever their order."""
    x, g = random(160, 128), random(160, 64, seed=9)
    layer = planned("mxfp4", 128, 64)
    clock = layer.planned.clock  # type: ignore[union-attr]

    def input_gradient(rows: slice, first_row: int) -> Tensor:
        part = x[rows].detach().requires_grad_()
        clock.begin(3, first_row)  # type: ignore[operator]
        layer(part).backward(g[rows])
        assert part.grad is not None
        return part.grad

    whole = input_gradient(slice(None), 0)
    ends = (*cuts[1:], 160)
    parts = [input_gradient(slice(a, b), a) for a, b in zip(cuts, ends, strict=True)]
    assert torch.equal(torch.cat(parts), whole)
    repeated = [input_gradient(slice(a, b), 0) for a, b in zip(cuts, ends, strict=True)]
    assert not torch.equal(torch.cat(repeated), whole)


@pytest.mark.parametrize("is_compiled", [False, True])
def test_dgrad_and_wgrad_round_the_gradient_by_streams_of_their_own(is_compiled: bool) -> None:
    """In mxfp4, whose products are exact here: equal bit for bit to a product of values rounded by those streams."""
    layer, x, g = planned("mxfp4", 64, 32, bias=False), random(48, 64), random(48, 32, seed=9)
    clock = Clock(seed=5)
    clock.begin(6, first_row=11)
    layer.planned.clock.begin(6, first_row=11)  # type: ignore[union-attr, operator]
    call = torch.compile(layer, backend="aot_eager") if is_compiled else layer
    found = run(call, x, weight=layer)

    def rounded(gemm: str, axis: int) -> Tensor:
        noise = clock.noise("", gemm, 0, clock.now)
        return quantize(g, "e2m1", "mx", axis, "stochastic", noise=noise).dequantize()

    w, kept = quantize(layer.weight, "e2m1", "mx", -2), quantize(x, "e2m1", "mx", -2)
    assert torch.equal(found.x_grad, rounded("dgrad", -1) @ w.dequantize())
    assert torch.equal(found.weight_grad, rounded("wgrad", -2).T @ kept.dequantize())


def test_backward_uses_the_reading_of_its_own_forward_pass() -> None:
    x, g = random(48, 100), random(48, 37, seed=9)
    layer = planned("nvfp4")
    clock = layer.planned.clock  # type: ignore[union-attr]
    expected = []
    for step in (1, 2):
        clock.begin(step)  # type: ignore[operator]
        expected.append(run(layer, x).weight_grad)
    assert not torch.equal(*expected)
    passes = []
    for step in (1, 2):
        clock.begin(step)  # type: ignore[operator]
        passes.append(layer(x))
    for y, weight_grad in zip(passes, expected, strict=True):
        layer.zero_grad()
        y.backward(g)
        assert torch.equal(layer.weight.grad, weight_grad)  # type: ignore[arg-type]


def test_a_loop_that_sets_no_clock_gets_a_new_step_for_every_training_pass() -> None:
    model = blocks(2)
    clock = start(model, "nvfp4").clock
    clock.is_set = False
    model(random(8, 64))
    assert clock.step == 2
    model.eval()
    model(random(8, 64))
    assert clock.step == 2
    model.train()
    model(random(8, 64))
    assert clock.step == 3
    clock.begin(10, first_row=5)
    model(random(8, 64))
    assert clock.now == (10, 5)


@pytest.mark.slow
def test_passes_under_inference_mode_leave_a_clock_that_autograd_can_keep() -> None:
    layer = planned("nvfp4")
    with torch.inference_mode():
        layer.planned.clock.begin(2)  # type: ignore[union-attr, operator]
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    x = random(8, 100).requires_grad_()
    compiled(x).sum().backward()
    assert x.grad is not None
    assert x.grad.isfinite().all()
    assert layer.planned.clock.now == (2, 0)  # type: ignore[union-attr]


def test_a_copied_model_keeps_time_with_the_first() -> None:
    model = blocks(1)
    clock = start(model, same("nvfp4")).clock
    clock.is_set = False
    other = copy.deepcopy(model)
    other(random(8, 64))
    assert clock.step == 2
    assert other[0].up.planned.clock is clock

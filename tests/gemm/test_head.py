"""The head's three GEMMs inside the chunked loss: what they mean, which rows count, and where chunks end.

Oracle: operands quantized by `scrimp.formats` alone, multiplied in float64, the loss spelled out there too. The
gradient of the logits is rounded to a format: a difference in its last bit may move a code, so it is
compared first, and its products with it as it was.
"""

from __future__ import annotations

import pytest
import torch
from planned_cases import random, same, watching_gemms
from torch import Tensor

from scrimp.formats import quantize
from scrimp.gemm import Clock, HeadGemms, LinearPrecision, PlannedLayer
from scrimp.gemm.observe import Execution
from scrimp.gemm.problem import AXES, multiply, operands_of
from scrimp.objectives.cross_entropy import IGNORED, cross_entropy_sums

TOKENS, WIDTH, VOCABULARY = 384, 64, 160
FP32 = 1e-6
"""Relative distance that sums of a few hundred fp32 products may have."""
STOCHASTIC_BY_GROUP = ("fp4", "mxfp4")
"""Gradients rounded stochastically in groups that chunks of 128 do not cut."""


def layer(precision: LinearPrecision | str, *, step: int = 1, first_row: int = 0) -> PlannedLayer:
    """The head's plan, on a clock that is set."""
    precision = same(precision) if isinstance(precision, str) else precision
    planned = PlannedLayer("head", precision, Clock(5))
    planned.clock.begin(step, first_row)
    return planned


def case(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states, the head's matrix, and targets of which every seventh is ignored."""
    hidden = random(TOKENS, WIDTH, seed=1).to(dtype).requires_grad_()
    weight = (random(VOCABULARY, WIDTH, seed=2) * 0.3).to(dtype).requires_grad_()
    targets = torch.randint(VOCABULARY, (TOKENS,), generator=torch.Generator().manual_seed(3))
    targets[::7] = IGNORED
    return hidden, weight, targets


def gradients(
    planned: PlannedLayer | None, dtype: torch.dtype = torch.float32, *, chunk: int = 0, z_loss: float = 0.0
) -> tuple[Tensor, Tensor, Tensor]:
    """Loss, and gradients of hidden states and of the matrix."""
    hidden, weight, targets = case(dtype)
    sums = cross_entropy_sums(hidden, weight, targets, chunk=chunk, z_loss=z_loss, planned=planned)
    sums.total.backward()
    assert hidden.grad is not None
    assert weight.grad is not None
    return sums.total.detach(), hidden.grad, weight.grad


def distance(found: Tensor, expected: Tensor) -> float:
    """Relative, by norm."""
    return float((found.double() - expected.double()).norm() / expected.double().norm())


# ---- without quantization


@pytest.mark.parametrize(("name", "dtype"), [("bf16", torch.bfloat16), ("fp32", torch.float32)])
@pytest.mark.parametrize("chunk", [0, 100])
def test_a_head_planned_in_the_compute_format_is_the_plain_head_bit_for_bit(
    name: str, dtype: torch.dtype, chunk: int
) -> None:
    plain = gradients(None, dtype, chunk=chunk)
    for found, expected in zip(gradients(layer(name), dtype, chunk=chunk), plain, strict=True):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("chunk", [0, 100])
def test_unquantized_gemms_of_a_planned_head_are_the_plain_ones(chunk: int) -> None:
    """Saving in another format makes the plan run, though nothing is quantized."""
    planned = layer(LinearPrecision("bf16", "bf16", "bf16", "fp32"))
    with watching_gemms() as ran:
        found = gradients(planned, torch.bfloat16, chunk=chunk)
    assert len(ran) == 3 * -(-TOKENS // (chunk or TOKENS))
    loss, hidden, weight = gradients(None, torch.bfloat16, chunk=chunk)
    assert torch.equal(found[0], loss)
    assert torch.equal(found[1], hidden)
    # The plain head adds chunks in the product itself, before the sum is rounded.
    assert distance(found[2], weight) < 2.0**-8


# ---- against float64


def values(x: Tensor, gemm: str, index: int, recipe: str) -> Tensor:
    """An operand that is rounded to nearest, in float64."""
    operand = operands_of(gemm, recipe)[index]
    assert operand is not None
    assert operand.rounding == "nearest"
    axis = AXES[gemm][index]
    return quantize(x.detach(), operand.element, operand.scaling, axis).dequantize(torch.float64)


def product(gemm: str, a: Tensor, b: Tensor, recipe: str) -> Tensor:
    """A GEMM of a recipe in float64."""
    (a_axis, b_axis) = AXES[gemm]
    return multiply(values(a, gemm, 0, recipe), a_axis, values(b, gemm, 1, recipe), b_axis)


@pytest.mark.parametrize("z_loss", [0.0, 0.01])
@pytest.mark.parametrize("recipe", ["fp8", "fp8_tensor", "fp8_row", "mxfp8"])
def test_loss_and_gradients_are_those_of_quantized_operands_in_float64(recipe: str, z_loss: float) -> None:
    hidden, weight, targets = case()
    logits = product("fprop", hidden, weight, recipe).requires_grad_()
    partition = torch.logsumexp(logits, -1)
    real = targets != IGNORED
    nll = partition - logits.gather(1, targets.clamp_min(0)[:, None])[:, 0]
    expected_loss = ((nll + z_loss * partition.square()) * real).sum()
    expected_loss.backward()
    assert logits.grad is not None

    seen: list[Tensor] = []
    with watching_gemms() as ran:
        loss, hidden_grad, weight_grad = gradients(layer(recipe), z_loss=z_loss)
        seen = [execution.a for execution in ran if execution.gemm != "fprop"]
    assert distance(loss, expected_loss.detach()) < FP32
    assert all(distance(g, logits.grad) < 1e-5 for g in seen)
    assert distance(hidden_grad, product("dgrad", seen[0], weight, recipe)) < FP32
    assert distance(weight_grad, product("wgrad", seen[1], hidden, recipe)) < FP32
    # And quantization is not lost in that: without it the gradients are further away.
    plain = gradients(None, z_loss=z_loss)
    assert distance(hidden_grad, plain[1]) > 1e-3
    assert distance(weight_grad, plain[2]) > 1e-3


# ---- ignored targets


@pytest.mark.parametrize("recipe", ["fp8", "fp8_tensor", "nvfp4", "mxfp4"])
def test_rows_without_a_target_change_no_gradient_and_no_scale(recipe: str) -> None:
    grad = random(TOKENS, VOCABULARY, seed=4) * 1e-3
    real = (torch.arange(TOKENS) % 7 != 0)[:, None]
    hidden, weight, _ = case()
    found = []
    for of_ignored in (0.0, 1e6):
        head = HeadGemms(weight.detach(), layer(recipe), torch.float32)
        huge = torch.where(real, grad, of_ignored)
        found.append(
            head.backward(None, huge.clone(), hidden.detach(), real, 0, needs_hidden=True, needs_weight=True)
        )
    for quiet, loud in zip(*found, strict=True):
        assert torch.equal(quiet, loud)
    assert not found[1][0][~real[:, 0]].any()
    assert found[1][0][real[:, 0]].any(-1).all()


def test_a_chunk_without_any_target_gives_nothing() -> None:
    hidden, weight, targets = case()
    targets[128:256] = IGNORED
    cross_entropy_sums(hidden, weight, targets, chunk=128, planned=layer("nvfp4")).total.backward()
    assert hidden.grad is not None
    assert weight.grad is not None
    assert not hidden.grad[128:256].any()
    assert hidden.grad[256:].any()
    assert weight.grad.isfinite().all()


# ---- chunks


def in_chunks(recipe: str, chunk: int) -> tuple[Tensor, Tensor, list[Execution]]:
    """dX and dW of one given gradient of the logits, made in chunks; and what ran."""
    grad, real = random(TOKENS, VOCABULARY, seed=4), torch.ones(TOKENS, 1, dtype=torch.bool)
    hidden, weight, _ = case()
    head = HeadGemms(weight.detach(), layer(recipe, first_row=1000), torch.float32)
    parts, total = [], None
    with watching_gemms() as ran:
        for start in range(0, TOKENS, chunk):
            part = slice(start, start + chunk)
            g = grad[part].clone()
            of_hidden, total = head.backward(
                total, g, hidden.detach()[part], real[part], start, needs_hidden=True, needs_weight=True
            )
            parts.append(of_hidden)
    assert total is not None
    return torch.cat(parts), total, ran


def codes(ran: list[Execution], gemm: str) -> Tensor:
    """The gradient's values after rounding, all chunks of it."""
    found = []
    for execution in ran:
        operand, use = execution.uses[0].operand, execution.uses[0]
        if execution.gemm == gemm and operand is not None:
            q = quantize(
                execution.a, operand.element, operand.scaling, use.axis, operand.rounding, noise=use.noise
            )
            found.append(q.dequantize())
    return torch.cat(found)


@pytest.mark.parametrize("recipe", ["fp8", "mxfp8", *STOCHASTIC_BY_GROUP])
def test_chunks_of_whole_tiles_change_only_the_order_of_sums(recipe: str) -> None:
    dgrad, wgrad, _ = in_chunks(recipe, TOKENS)
    for chunk in (128, 256):
        found = in_chunks(recipe, chunk)
        assert distance(found[0], dgrad) < FP32
        assert distance(found[1], wgrad) < FP32


@pytest.mark.parametrize("gemm", ["dgrad", "wgrad"])
@pytest.mark.parametrize("recipe", STOCHASTIC_BY_GROUP)
def test_noise_has_the_address_of_its_row_whichever_chunk_it_is_in(recipe: str, gemm: str) -> None:
    whole = codes(in_chunks(recipe, TOKENS)[2], gemm)
    assert torch.equal(codes(in_chunks(recipe, 128)[2], gemm), whole)
    assert len(whole) == TOKENS
    rows = [execution.uses[0].noise.first_row for execution in in_chunks(recipe, 128)[2]]
    assert rows == [1000, 1000, 1128, 1128, 1256, 1256]


@pytest.mark.slow
def test_chunks_that_cut_tiles_still_give_a_gradient_near_the_plain_one() -> None:
    plain = gradients(None)
    for chunk in (1, 100, 130):
        found = gradients(layer("fp8"), chunk=chunk)
        assert distance(found[0], plain[0]) < 1e-2
        assert distance(found[1], plain[1]) < 0.1
        assert distance(found[2], plain[2]) < 0.1


def test_steps_draw_new_noise() -> None:
    first, again, later = (gradients(layer("mxfp4", step=step)) for step in (1, 1, 2))
    assert torch.equal(first[2], again[2])
    assert not torch.equal(first[2], later[2])


def test_the_head_is_multiplied_in_its_own_formats_under_autocast() -> None:
    hidden, weight, targets = case()
    with watching_gemms() as ran, torch.autocast("cpu", torch.bfloat16):
        sums = cross_entropy_sums(hidden, weight, targets, chunk=128, planned=layer("fp8"))
    sums.total.backward()
    assert [execution.gemm for execution in ran] == ["fprop", "dgrad", "wgrad"] * 3
    assert {execution.recipe for execution in ran} == {"fp8"}
    assert weight.grad is not None
    assert weight.grad.dtype == torch.float32
    assert distance(weight.grad, gradients(None)[2]) < 0.1

"""The update of one tensor against float64, cut into any pieces, and over steps."""

from dataclasses import replace

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from property_tests import examples
from torch import Tensor

from scrimp.formats import Noise
from scrimp.optim import MomentFormat, Moments, Step, update
from scrimp.optim.moments import dense

STEP = Step(number=1, lr=0.01, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1)
FORMATS = ["fp32", "bf16", "8bit"]
DTYPES = [torch.float32, torch.bfloat16]


def made(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> tuple[Tensor, list[Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(shape, generator=generator).to(dtype)
    return weight, [torch.randn(shape, generator=generator).mul_(1e-3).to(dtype) for _ in range(4)]


def oracle(weight: Tensor, gradient: Tensor, m: Tensor, v: Tensor, step: Step) -> tuple[Tensor, ...]:
    w, g, m, v = (x.double() for x in (weight, gradient, m, v))
    m, v = m * step.beta1 + g * (1 - step.beta1), v * step.beta2 + g * g * (1 - step.beta2)
    t = step.number
    root = (v / (1 - step.beta2**t)).sqrt() + step.eps
    return w * (1 - step.lr * step.weight_decay) - step.lr * m / (1 - step.beta1**t) / root, m, v


@pytest.mark.parametrize("format_", FORMATS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(5, 200), (40,), (3, 4, 50), ()])
def test_every_step_is_that_of_float64_from_the_same_state(
    format_: MomentFormat, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    weight, gradients = made(shape, dtype)
    moments = Moments.zeros(format_, weight)
    for number, gradient in enumerate(gradients, start=1):
        step = replace(STEP, number=number)
        before = [dense(one, weight).clone() for one in (moments.mean, moments.square)]
        expected, m, v = oracle(weight, gradient, *before, step)
        update(weight, gradient, moments, step, Noise(number))
        if dtype == torch.float32:
            torch.testing.assert_close(weight.double(), expected, rtol=2e-6, atol=1e-8)
        else:
            # One of the two neighbours in bf16: a whole step off at most.
            assert ((weight.double() - expected).abs() <= 2.0**-7 * expected.abs() + 1e-7).all()
        tolerance = {"fp32": 1e-6, "bf16": 2.0**-7, "8bit": 1 / 15}[format_]
        for found, wanted in zip((moments.mean, moments.square), (m, v), strict=True):
            error = (dense(found, weight).double() - wanted).abs()
            assert (error <= tolerance * wanted.abs() + 3e-4 * float(wanted.abs().max())).all()


@given(
    rows=st.integers(1, 30),
    columns=st.integers(1, 300),
    piece=st.sampled_from([1, 128, 200, 777, 4096]),
    format_=st.sampled_from(FORMATS),
    dtypes=st.sampled_from([(a, b) for a in DTYPES for b in DTYPES]),
)
@examples(60)
def test_pieces_and_shards_by_rows_change_no_bit(
    rows: int, columns: int, piece: int, format_: MomentFormat, dtypes: tuple[torch.dtype, torch.dtype]
) -> None:
    results = []
    for cut in (None, piece, "shards"):
        weight, gradients = made((rows, columns), dtypes[0])
        moments = Moments.zeros(format_, weight)
        for number, gradient in enumerate(gradients[:2], start=1):
            step, noise = replace(STEP, number=number), Noise(number)
            gradient = gradient.to(dtypes[1])
            if cut == "shards":
                half = rows // 2
                for first, last in ((0, half), (half, rows)):
                    if first < last:
                        part = Moments.over({n: t[first:last] for n, t in moments.tensors().items()})
                        shard = replace(noise, first_row=first)
                        update(weight[first:last], gradient[first:last], part, step, shard, piece=500)
            else:
                update(weight, gradient, moments, step, noise, piece=cut)
        results.append([weight, *moments.tensors().values()])
    if torch.float32 == dtypes[0] == dtypes[1] and format_ == "fp32":
        # torch's fused update: cut tensors may end in its scalar loop, which fuses products and sums.
        for result in results[1:]:
            for found, wanted in zip(result, results[0], strict=True):
                torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-9)
    else:
        assert all(
            torch.equal(found, wanted)
            for result in results[1:]
            for found, wanted in zip(result, results[0], strict=True)
        )


def test_bf16_weights_move_by_updates_far_below_their_step_on_average() -> None:
    weight = torch.ones(64, 128, dtype=torch.bfloat16)
    moments = Moments.zeros("bf16", weight)
    steps = 300
    for number in range(1, steps + 1):
        step = Step(number, 1e-4, 0.9, 0.95, 1e-8, 0.0)
        update(weight, torch.ones_like(weight), moments, step, Noise(1).derive(number))
    moved = 1 - weight.double()
    # 300 updates of 1e-4, each 1/39 of the step below 1.
    step_size = 2.0**-8
    deviation = (steps * 1e-4 * step_size) ** 0.5
    assert float(moved.mean()) == pytest.approx(steps * 1e-4, abs=5 * deviation / 8192**0.5 + 3e-5)
    # A constant seed would move 1 in 39 elements every time, and the others never.
    assert float(moved.std()) == pytest.approx(deviation, rel=0.1)
    # Noise shared among neighbours would move them together.
    pairs = torch.corrcoef(torch.stack([moved[:, ::2].flatten(), moved[:, 1::2].flatten()]))
    assert abs(float(pairs[0, 1])) < 5 / 4096**0.5


def test_temporary_memory_does_not_grow_with_the_tensor() -> None:
    weight, gradients = made((2048, 1024), torch.bfloat16)
    moments = Moments.zeros("8bit", weight)
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profile:
        update(weight, gradients[0], moments, STEP, Noise(0))
    live = peak = 0
    for event in profile.profiler.kineto_results.events():  # type: ignore[union-attr]
        if event.name() == "[memory]":
            live += event.nbytes()
            peak = max(peak, live)
    assert 2**20 < peak < 5 * 2**20
    assert peak < 4 * weight.numel()

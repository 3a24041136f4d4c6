"""Formats of moving averages against float64: bounds of single roundings, means of many, slow averages."""

from collections.abc import Callable

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from property_tests import examples
from torch import Tensor

from scrimp.formats import Noise
from scrimp.formats.moment_codes import BLOCK, SMALLEST_SCALE
from scrimp.optim.moments import Moment, MomentFormat, Moments, _scales_of, dense
from scrimp.optim.stochastic_rounding import NoiseTable, Scratch

CPU = torch.device("cpu")
C = 2.0**-15
TOP = {torch.int8: 2.0**-7 * 31 / 32 - C, torch.uint8: 2.0 * 31 / 32 - C}
"""From the module's text: c, and the largest y - c of m and of v."""


def store(moment: Moment, values: Tensor, key: int = 0) -> Tensor:
    """Write values and read them back."""
    whole = slice(0, values.shape[0]), slice(0, values.shape[1])
    scratch = Scratch(CPU)
    table = NoiseTable(Noise(key), values.shape[1], scratch, CPU)
    piece = moment.read(whole, torch.empty_like(values), scratch).copy_(values)
    moment.write(whole, piece, table.streams(*whole), scratch)
    return dense(moment, values).float().clone()


def of(format_: MomentFormat, shape: tuple[int, int], which: str) -> Moment:
    return getattr(Moments.zeros(format_, torch.zeros(shape)), which)


@given(
    seed=st.integers(0, 2**32),
    columns=st.sampled_from([1, 7, 127, 128, 129, 300]),
    exponent=st.integers(-32, 26),  # scales of larger numbers leave float32
    spread=st.sampled_from([0.1, 1.0, 4.0]),
    which=st.sampled_from(["mean", "square"]),
)
@examples(100)
def test_8_bits_are_off_by_less_than_a_step(
    seed: int, columns: int, exponent: int, spread: float, which: str
) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(3, columns, generator=generator) * torch.exp(
        spread * torch.randn(3, columns, generator=generator)
    )
    x = x * 10.0**exponent
    x = x if which == "mean" else x.abs()
    moment = of("8bit", (3, columns), which)
    found = store(moment, x, seed).double()
    codes, scales = moment.tensors()[""], moment.tensors()["_scale"].double()
    s = scales.repeat_interleave(BLOCK, 1)[:, :columns]
    largest = torch.stack([block.abs().amax(1) for block in x.split(BLOCK, 1)], 1).double()
    enough = (largest / TOP[codes.dtype]).clamp(min=SMALLEST_SCALE)
    assert ((scales >= enough) & (scales <= 1.01 * enough)).all()
    step = (x.double().abs() / s + C) / 16 * s
    assert ((found - x.double()).abs() <= 1.001 * step).all()
    assert ((found * x >= 0) | (found == 0)).all()


def test_a_block_with_a_nan_whose_mantissa_is_full_has_a_scale_that_is_none() -> None:
    """A GPU's own NaN, which rounding up as an integer carries into minus zero."""
    nan = torch.full((2, 1), 0x7FFFFFFF, dtype=torch.int32).view(torch.float32)
    for top in TOP.values():
        assert _scales_of(nan, top).isnan().all()


@pytest.mark.parametrize("which", ["mean", "square"])
def test_codes_mean_what_the_text_says(which: str) -> None:
    moment = of("8bit", (2, 128), which)
    codes, scales = moment.tensors()[""], moment.tensors()["_scale"]
    dtype = codes.dtype
    codes.copy_(torch.arange(256).view(2, 128).to(dtype))
    scales.fill_(3.0)
    magnitude = codes.double() if dtype == torch.uint8 else torch.where(codes < 0, -1 - codes, codes).double()
    power, mantissa = torch.floor(magnitude / 16), magnitude % 16
    expected = (2.0 ** (power - 15) * (1 + mantissa / 16) - C) * 3.0
    expected = torch.where(codes.double() < 0, -expected, expected)
    assert torch.equal(dense(moment, codes).double(), expected)


@pytest.mark.parametrize("format_", ["bf16", "8bit"])
@pytest.mark.parametrize("which", ["mean", "square"])
def test_the_mean_of_many_roundings_is_the_value(format_: MomentFormat, which: str) -> None:
    x = torch.logspace(-4, 0, 128) * torch.tensor([1.0, -1.0]).repeat(64)
    x = (x if which == "mean" else x.abs()).repeat(4096, 1)
    found = store(of(format_, (4096, 128), which), x, 11).double()
    deviation = found.std(0).clamp_min(1e-12) / 64
    error = (found.mean(0) - x[0].double()).abs()
    assert (error < 5 * deviation + 1e-6 * x[0].abs().double()).all()
    assert (found.std(0) > 0).double().mean() > 0.9


def average(format_: MomentFormat, which: str, beta: float, steps: int, target: float) -> Tensor:
    """A moving average of a constant, stored in the format after each step."""
    moment = of(format_, (32, 128), which)
    values = torch.zeros(32, 128)
    for step in range(steps):
        values = store(moment, values.mul(beta).add_((1 - beta) * target), step)
    return values.double()


@pytest.mark.parametrize("format_", ["fp32", "bf16", "8bit"])
@pytest.mark.parametrize(
    ("which", "beta", "target"),
    [("mean", 0.99, -3e-4), pytest.param("square", 0.999, 2e-7, marks=pytest.mark.slow)],
)
def test_a_slow_average_of_a_constant_converges_to_it(
    format_: MomentFormat, which: str, beta: float, target: float
) -> None:
    steps = round(1.5 / (1 - beta))
    expected = target * (1 - beta**steps)
    found = average(format_, which, beta, steps, target)
    assert float(found.mean()) == pytest.approx(expected, rel=0.02)
    assert float((found - expected).abs().max()) < 0.7 * abs(expected)


def test_rounded_to_nearest_the_same_average_stops_far_below() -> None:
    """Why rounding is stochastic: bf16, beta 0.999, the limit is 1."""
    value = torch.zeros((), dtype=torch.bfloat16)
    for _ in range(20_000):
        value = (value.float() * 0.999 + 0.001).bfloat16()
    assert float(value) < 0.4


def test_second_moments_beside_an_outlier_never_become_zero() -> None:
    x = torch.full((8, 128), 1e-12)
    x[:, 5] = 1.0
    x[:, 6] = 0.0
    found = store(of("8bit", (8, 128), "square"), x)
    assert (found > 0).all()
    # The floor: a millionth of the block's largest, and nothing but the smallest ones are lifted to it.
    assert found[:, 7].max() < 2e-6
    assert ((found[:, 5] - 1).abs() < 0.07).all()


@pytest.mark.parametrize("which", ["mean", "square"])
def test_a_block_of_zeros_stays_zero(which: str) -> None:
    x = torch.zeros(2, 300)
    x[0, 0] = 1.0
    found = store(of("8bit", (2, 300), which), x)
    assert torch.equal(found[1], x[1])
    assert torch.equal(found[0, 128:], x[0, 128:])


def worst_update(of_stored: Callable[[Tensor], Tensor]) -> float:
    """Largest |m / sqrt v| that a gradient meets where v was stored beside an outlier, from 1 at rest."""
    g = torch.full((1, 128), 1e-3)
    g[:, 0] = 1.0
    m, v = g, of_stored(g.square())
    return float((m / (0.95 * v + 0.05 * (0.01 * g).square()).sqrt()).max())


def test_updates_beside_an_outlier_are_not_blown_up() -> None:
    def int8(v: Tensor) -> Tensor:
        return (v * 255).round() / 255

    def ours(v: Tensor) -> Tensor:
        return store(of("8bit", (1, 128), "square"), v)

    # v of the others is 10^-6 of the outlier's: linear codes make it zero.
    assert worst_update(int8) > 100
    assert worst_update(ours) < 2


def test_vectors_keep_fp32_and_matrices_have_two_bytes_and_their_scales() -> None:
    norm, matrix = (Moments.zeros("8bit", torch.zeros(shape)) for shape in ((300,), (10, 300)))
    assert norm.are_fp32
    assert not matrix.are_fp32
    assert sum(t.nbytes for t in matrix.tensors().values()) == 2 * (3000 + 10 * 3 * 2)
    again = Moments.over(matrix.tensors())
    assert {n: t.data_ptr() for n, t in again.tensors().items()} == {
        n: t.data_ptr() for n, t in matrix.tensors().items()
    }

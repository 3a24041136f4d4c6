"""Noise and stochastic rounding to bf16."""

from itertools import combinations, islice

import pytest
import torch
from torch import Tensor

from scrimp.formats import Noise
from scrimp.optim.stochastic_rounding import NoiseTable, Scratch, high_bits, to_bf16

CPU = torch.device("cpu")


def streams(noise: Noise, rows: int, columns: int, count: int) -> list[Tensor]:
    scratch = Scratch(CPU)
    table = NoiseTable(noise, columns, scratch, CPU)
    return [h.clone() for h in islice(table.streams(slice(0, rows), slice(0, columns)), count)]


def rounded(x: Tensor, key: int) -> Tensor:
    scratch = Scratch(CPU)
    table = NoiseTable(Noise(key), x.shape[1], scratch, CPU)
    hashes = next(table.streams(slice(0, x.shape[0]), slice(0, x.shape[1])))
    return to_bf16(x, hashes, scratch).clone()


def test_the_first_stream_is_the_noise_of_every_other_rounding() -> None:
    noise = Noise(7, first_row=3)
    (hashes,) = streams(noise, 5, 200, 1)
    numbers = high_bits(hashes, 20, Scratch(CPU)) * 2.0**-20
    assert torch.equal((numbers + 0.5) % 1, noise.uniform(5, 200, CPU))


def test_streams_keys_and_neighbours_are_uncorrelated() -> None:
    first, second, third = (h.double().flatten() for h in streams(Noise(1), 256, 256, 3))
    (other_key,) = (h.double().flatten() for h in streams(Noise(1).derive(0), 256, 256, 1))
    below, beside = (first.view(256, 256).roll(1, axis).flatten() for axis in (0, 1))
    for a, b in [*combinations((first, second, third, other_key), 2), (first, below), (first, beside)]:
        # 65,536 pairs: 5 standard deviations.
        assert abs(float(torch.corrcoef(torch.stack([a, b]))[0, 1])) < 5 / 256
    for numbers in (first, second, third):
        assert abs(float(numbers.mean())) < 5 * 2.0**31 / 3**0.5 / 256


def test_carries_of_two_streams_are_independent() -> None:
    """Weight, m and v of one element round up together as often as chance has it."""
    one, two, three = (high_bits(h, 16, Scratch(CPU)).clone() for h in streams(Noise(9), 256, 256, 3))
    for a, b in combinations((one, two, three), 2):
        for p in (1 / 64, 0.5):
            both = float(((a < p * 2**16) & (b < p * 2**16)).double().mean())
            assert abs(both - p * p) < 5 * (p * p / 2**16) ** 0.5


def test_a_number_that_bf16_has_stays() -> None:
    exact = torch.randn(64, 64).bfloat16().float()
    exact[0] = 0.0
    assert torch.equal(rounded(exact, 3), exact)


@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
def test_the_mean_of_many_roundings_is_the_number(scale: float) -> None:
    x = torch.tensor([1.001, -1.001, 1.9999, 3.3, -0.37]) * scale
    found = rounded(x.repeat(40_000, 1), 5).double()
    assert torch.equal(found, found.bfloat16().double())
    step = 2.0**-7 * x.abs().double()
    assert ((found.mean(0) - x.double()).abs() < 5 * 0.5 * step / 200).all()


@pytest.mark.parametrize("bits", [0x7FFFFFFF, -1, 0x7FC00000, 0x7F800001])
def test_no_nan_becomes_a_number(bits: int) -> None:
    nan = torch.full((16, 16), bits, dtype=torch.int32).view(torch.float32)
    assert rounded(nan, 1).isnan().all()

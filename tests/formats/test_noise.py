"""The noise of stochastic rounding: uniform, independent, addressable; and rounding with it: unbiased."""

from __future__ import annotations

import math

import pytest
import torch
from slow_oracle import COMBINATIONS, LARGEST, NOISE_BITS, WIDTH, all_values
from torch import Tensor

from scrimp.formats import Noise, Operand, QuantizedTensor, fake_quantize, grouping, quantize
from scrimp.formats.rounding import round_
from scrimp.formats.scales import e8m0_value
from scrimp.precision import lookup_element

EACH_ELEMENT = pytest.mark.parametrize("element", list(LARGEST))
EVERY_COMBINATION = pytest.mark.parametrize(("element", "scaling"), COMBINATIONS)
UNIT = 2.0**-20
SIGMA = 1 / math.sqrt(12)


def noise_of(step: int) -> Noise:
    return Noise(key=0x5EED).derive(step)


def uniform(noise: Noise, rows: int = 1024, columns: int = 1024) -> Tensor:
    return noise.uniform(rows, columns, "cpu").double()


def correlation(one: Tensor, other: Tensor) -> float:
    """In standard deviations of the correlation of independent numbers."""
    product = (one - 0.5) * (other - 0.5)
    return (product.mean() / SIGMA**2 * math.sqrt(product.numel())).item()


# The stream


def documented_number(key: int, row: int, column: int) -> float:
    """The formula of the module's docstring, in Python's integers."""
    mask = 2**64 - 1

    def mix(x: int) -> int:
        x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & mask
        x = (x ^ x >> 27) * 0x94D049BB133111EB & mask
        return x ^ x >> 31

    def signed(x: int) -> int:
        return (x + 2**31) % 2**32 - 2**31

    golden = 0x9E3779B97F4A7C15
    h = signed(mix(key ^ row * golden & mask) + mix(~key & mask ^ column * golden & mask))
    for shift, multiplier in ((15, 0x2C1B3C6D), (12, 0x297A2D39)):
        h = signed((h ^ h >> shift) * multiplier)
    return (h >> 12) * 2.0**-20 + 0.5


@pytest.mark.parametrize("key", [0, 1, 2**63 + 12345, 2**64 - 1])
def test_numbers_are_those_of_the_documented_formula(key: int) -> None:
    ours = uniform(Noise(key, first_row=2**33, first_column=70_000), 5, 7)
    for row in range(5):
        for column in range(7):
            assert ours[row, column].item() == documented_number(key, 2**33 + row, 70_000 + column)


def test_numbers_have_20_bits_below_1_and_the_mean_of_uniform_ones() -> None:
    for step in range(4):
        u = uniform(noise_of(step))
        assert u.min() >= 0
        assert u.max() <= 1 - UNIT
        assert (u / UNIT).frac().eq(0).all()
        assert abs(u.mean().item() - (0.5 - UNIT / 2)) < 5 * SIGMA / math.sqrt(u.numel())
        assert u.var().item() == pytest.approx(1 / 12, rel=0.01)


def chi_square(counts: Tensor) -> float:
    """In standard deviations from its mean."""
    expected = counts.sum().double() / counts.numel()
    freedom = counts.numel() - 1
    return ((counts - expected).square().sum() / expected - freedom).item() / math.sqrt(2 * freedom)


@pytest.mark.parametrize("bins", [256, 4096, 2**16])
def test_numbers_are_uniform_in_every_bin(bins: int) -> None:
    counts = torch.zeros(bins, dtype=torch.int64)
    for step in range(4):
        counts += torch.bincount((uniform(noise_of(step)) * bins).long().flatten(), minlength=bins)
    assert abs(chi_square(counts)) < 5
    # The control: a twentieth too many in one half is found.
    crooked = counts.double()
    crooked[: bins // 2] *= 1.05
    assert chi_square(crooked) > 5


@pytest.mark.parametrize("bit", [2.0**-k for k in (1, 4, 10, 16, 20)])
def test_every_bit_is_one_half_of_the_time(bit: float) -> None:
    ones = (uniform(noise_of(0)) / bit).floor().remainder(2)
    assert abs(ones.mean().item() - 0.5) < 5 * 0.5 / math.sqrt(ones.numel())


def test_neighbouring_rows_and_columns_are_independent() -> None:
    for step in range(3):
        u = uniform(noise_of(step))
        for distance in (1, 2, 16, 128):
            assert abs(correlation(u[distance:], u[:-distance])) < 5
            assert abs(correlation(u[:, distance:], u[:, :-distance])) < 5
        assert abs(correlation(u[1:, 1:], u[:-1, :-1])) < 5
        assert abs(correlation(u, u.T)) < 5
        pairs = (u[:, 1:] * 64).long() * 64 + (u[:, :-1] * 64).long()
        assert abs(chi_square(torch.bincount(pairs.flatten(), minlength=4096))) < 5


def test_four_corners_of_a_rectangle_are_independent() -> None:
    # Addresses are added, row and column: a weak mix would show here first.
    for step in range(3):
        u = uniform(noise_of(step)) - 0.5
        for rows, columns in ((1, 1), (1, 16), (32, 2), (128, 128)):
            corners = u[rows:, columns:] * u[:-rows, columns:] * u[rows:, :-columns] * u[:-rows, :-columns]
            assert abs(corners.mean().item()) < 5 * SIGMA**4 / math.sqrt(corners.numel())


@pytest.mark.slow
def test_consecutive_keys_are_independent() -> None:
    streams = [uniform(noise_of(step), 400, 400) for step in range(12)]
    for i, one in enumerate(streams):
        for other in streams[:i]:
            assert abs(correlation(one, other)) < 5
    # One element over many steps.
    series = torch.stack([uniform(noise_of(step), 8, 8) for step in range(3000)])
    assert abs(correlation(series[1:], series[:-1])) < 5
    assert (series.mean(0) - 0.5).abs().max() < 5 * SIGMA / math.sqrt(3000)


def test_streams_differ_in_every_identifier_and_in_their_order() -> None:
    root = Noise(1)
    noises = [root, root.derive(0), root.derive(1), root.derive(0, 0), root.derive(0, 1), root.derive(1, 0)]
    noises += [Noise(2).derive(0), root.derive(0).derive(1, 0), root.derive(2**40)]
    assert len({noise.key for noise in noises}) == len(noises)
    assert root.derive(3, 4) == root.derive(3).derive(4)
    moved = Noise(1, first_row=5, first_column=6).derive(3)
    assert (moved.first_row, moved.first_column) == (5, 6)


def test_a_piece_has_the_numbers_of_the_whole() -> None:
    whole = Noise(9).uniform(60, 80, "cpu")
    piece = Noise(9, first_row=17, first_column=33).uniform(20, 30, "cpu")
    assert piece.equal(whole[17:37, 33:63])


@pytest.mark.parametrize(("scaling", "axis"), [("tile", -1), ("tile", -2), ("row", -1), ("mx", -1)])
def test_a_piece_of_a_tensor_rounds_as_in_the_whole(scaling: str, axis: int) -> None:
    x = torch.randn(256, 384, generator=torch.Generator().manual_seed(0))
    operand = Operand("e4m3", scaling, "stochastic")
    whole = fake_quantize(x, operand, axis, noise=Noise(2)).dequantize()
    packed = quantize(x, "e4m3", scaling, axis, "stochastic", noise=Noise(2)).dequantize()
    assert packed.equal(whole)
    columns = slice(0, 384) if scaling == "row" else slice(128, 384)
    piece = Noise(2, first_row=128, first_column=columns.start)
    cut = x[128:, columns]
    assert fake_quantize(cut, operand, axis, noise=piece).dequantize().equal(whole[128:, columns])
    ours = quantize(cut, "e4m3", scaling, axis, "stochastic", noise=piece).dequantize()
    assert ours.equal(whole[128:, columns])


@EVERY_COMBINATION
@pytest.mark.parametrize("axis", [-1, -2])
@pytest.mark.every(11)
def test_the_size_of_working_pieces_changes_nothing(
    element: str, scaling: str, axis: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = torch.randn(150, 290, generator=torch.Generator().manual_seed(0))
    operand = Operand(element, scaling, "stochastic")
    found = []
    for size in (1, 1000, 5000, 2**26):
        monkeypatch.setitem(grouping.PIECE_ELEMENTS, "cpu", size)
        fake = fake_quantize(x, operand, axis, noise=Noise(2)).dequantize()
        packed = quantize(x, element, scaling, axis, "stochastic", noise=Noise(2))
        found.append((fake, packed.dequantize(), packed.scales.float()))
    for other in found[:-1]:
        assert all(one.equal(two) for one, two in zip(other, found[-1], strict=True))


@EVERY_COMBINATION
def test_equal_matrices_of_a_stack_round_differently(element: str, scaling: str) -> None:
    x = torch.randn(32, 48, generator=torch.Generator().manual_seed(0)).expand(2, 32, 48)
    for axis in (-1, -2):
        one, other = quantize(x, element, scaling, axis, "stochastic").dequantize()
        assert not one.equal(other)


# Rounding with it


@EACH_ELEMENT
def test_values_of_the_format_never_move(element: str) -> None:
    grid = torch.from_numpy(all_values(element)).float()
    for u in (0.0, UNIT, 0.5, 1 - UNIT):
        assert round_(grid.clone(), lookup_element(element), torch.full_like(grid, u)).equal(grid)
    x = torch.cat([grid, grid.new_zeros(-len(grid) % 32)]).repeat_interleave(32).view(-1, 32) * 2.0**-7
    x[:, 0] = x.max()
    for scaling in ("tensor", "row", "mx"):
        for step in range(5):
            values = quantize(x, element, scaling, -1, "stochastic", noise=noise_of(step)).dequantize()
            assert values.equal(x)


@EACH_ELEMENT
def test_the_probability_to_go_up_is_the_distance_to_the_last_bit_of_the_noise(element: str) -> None:
    every_u = torch.arange(2**20, dtype=torch.float32) * UNIT
    grid = torch.from_numpy(all_values(element))
    generator = torch.Generator().manual_seed(0)
    for index in torch.randint(0, len(grid) - 1, (12,), generator=generator).tolist():
        lower, upper = grid[index].item(), grid[index + 1].item()
        for distance in (1e-4, 0.25, 0.3, 0.9999):
            x = torch.tensor(lower + distance * (upper - lower), dtype=torch.float32)
            exact = (x.double().item() - lower) / (upper - lower)
            ours = round_(x.repeat(2**20), lookup_element(element), every_u)
            assert (ours.eq(lower) | ours.eq(upper)).all()
            assert abs(ours.eq(upper).double().mean().item() - exact) <= 2.0 ** -NOISE_BITS.get(element, 20)


@EACH_ELEMENT
@pytest.mark.parametrize("value", [0.97, -0.97, 0.001, 3.3, -5.01])
def test_the_mean_of_many_draws_is_the_number(element: str, value: float) -> None:
    u = noise_of(1).uniform(400, 400, "cpu")
    x = torch.full_like(u, value)
    ours = round_(x.clone(), lookup_element(element), u).double()
    assert len(ours.unique()) == 2
    assert abs(ours.mean().item() - x[0, 0].item()) < 5 * ours.std().item() / math.sqrt(u.numel())


def moving_averages(element: str, noises: list[Noise], value: float = 0.97, decay: float = 0.95) -> Tensor:
    """Averages, kept in the format, of a constant; each element's mean over the second half of the steps."""
    average, total = torch.zeros(24, 24), torch.zeros(24, 24, dtype=torch.float64)
    for step, noise in enumerate(noises):
        new = decay * average + (1 - decay) * value
        average = round_(new, lookup_element(element), noise.uniform(24, 24, "cpu"))
        if step >= len(noises) // 2:
            total += average
    return total / (len(noises) - len(noises) // 2)


@EACH_ELEMENT
@pytest.mark.every(3)
@pytest.mark.slow
def test_a_moving_average_over_steps_reaches_the_number_but_not_with_a_constant_seed(element: str) -> None:
    steps = 3000
    fresh = moving_averages(element, [noise_of(step) for step in range(steps)])
    assert abs(fresh.mean().item() - 0.97) < 0.01
    assert (fresh - 0.97).abs().max() < 0.2
    # The control: every step draws the same numbers, and most averages get stuck somewhere else.
    stuck = moving_averages(element, [noise_of(0)] * steps)
    assert (stuck - 0.97).abs().mean() > 5 * (fresh - 0.97).abs().mean()
    assert abs(stuck.mean().item() - 0.97) > 0.05


@EVERY_COMBINATION
@pytest.mark.parametrize("axis", [-1, -2])
@pytest.mark.every(8)
def test_rounding_is_unbiased_and_nothing_clips(element: str, scaling: str, axis: int) -> None:
    x = torch.randn(40, 96, generator=torch.Generator().manual_seed(3))
    operand, steps = Operand(element, scaling, "stochastic"), 150
    draws = torch.stack(
        [fake_quantize(x, operand, axis, noise=noise_of(step)).dequantize() for step in range(steps)]
    ).double()
    error, variance = draws.mean(0) - x, draws.var(0) / steps
    groups = x.abs().unflatten(axis, (-1, 16 if axis == -1 else 8))
    largest = groups.amax(-1 if axis == -1 else -2, keepdim=True)
    is_largest = (groups == largest).flatten(-2) if axis == -1 else (groups == largest).flatten(0, 1)
    for chosen in (x.abs() >= 0, x > 0, x < 0, x.abs() > 1, x.abs() < 0.1, is_largest):
        sigma = variance[chosen].sum().sqrt().item()
        # Beside chance only the rounding of float32 and the last bit of the noise.
        assert abs(error[chosen].sum().item()) < 5 * sigma + 1e-5 * chosen.sum().item()
    assert variance.sum() > 0


@EVERY_COMBINATION
def test_nearest_rounding_would_fail_the_test_of_bias(element: str, scaling: str) -> None:
    x = torch.full((4, 256), 0.3)
    x[:, ::16] = 1.0
    ours = fake_quantize(x, Operand(element, scaling), -1).dequantize()
    assert (ours - x)[:, 1].abs().min() > 1e-4


def scales_of_elements(packed: QuantizedTensor, shape: torch.Size) -> Tensor:
    """float64 scale of every element of a matrix scaled along its columns."""
    stored = e8m0_value(packed.scales) if packed.operand.scaling == "mx" else packed.scales.float()
    wide = stored.double().view(-1, stored.shape[-1])
    height, width = -(-shape[0] // wide.shape[0]), WIDTH.get(packed.operand.scaling) or shape[1]
    height = width if packed.operand.scaling in ("block", "nvfp4_2d") else height
    spread = wide.repeat_interleave(height, 0).repeat_interleave(width, 1)[: shape[0], : shape[1]]
    return spread if packed.tensor_scale is None else spread * packed.tensor_scale


@EVERY_COMBINATION
def test_every_result_is_one_of_the_two_neighbours(element: str, scaling: str) -> None:
    x = torch.randn(40, 290, generator=torch.Generator().manual_seed(3))
    grid = torch.from_numpy(all_values(element))
    slack = 1e-5
    lowest = highest = 0
    for step in range(5):
        packed = quantize(x, element, scaling, -1, "stochastic", noise=noise_of(step))
        scale = scales_of_elements(packed, x.shape)
        t, q = x.double() / scale, packed.dequantize().double() / scale
        assert t.abs().max() <= LARGEST[element] * (1 + slack)
        place = torch.searchsorted(grid, t.clamp(grid[0], grid[-1]), right=True).clamp(1, len(grid) - 1)
        lower, upper = grid[place - 1], grid[place]
        is_lower, is_upper = (
            (q - lower).abs() <= slack * lower.abs(),
            (q - upper).abs() <= slack * upper.abs(),
        )
        assert (is_lower | is_upper).all()
        lowest, highest = lowest + int(is_lower.sum()), highest + int(is_upper.sum())
    assert 0.4 < lowest / (lowest + highest) < 0.6


def test_columns_in_several_ranges_have_the_numbers_of_their_places() -> None:
    whole, ranges = Noise(7, first_row=3).uniform(5, 60, "cpu"), (range(4, 9), range(20, 20), range(31, 47))
    here = [column for one in ranges for column in one]
    assert torch.equal(Noise(7, first_row=3, columns=ranges).uniform(5, 21, "cpu"), whole[:, here])
    # Rotations pad the last range.
    assert torch.equal(
        Noise(7, first_row=3, columns=ranges).uniform(5, 24, "cpu"), whole[:, [*here, 47, 48, 49]]
    )

"""Ticks, ranges, smoothing and downsampling, against brute force."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scrimp.report.axes import Scale, axis, downsample, log_ticks, nice_ticks, smooth

NUMBERS = st.floats(min_value=-1e9, max_value=1e9, allow_nan=False)


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [(0, 10, [0, 2, 4, 6, 8, 10]), (0, 1, [0, 0.2, 0.4, 0.6, 0.8, 1]), (2.9, 9.4, [3, 4, 5, 6, 7, 8, 9]),
     (-1, 1, [-1, -0.5, 0, 0.5, 1]), (1, 1000, [200, 400, 600, 800, 1000])],
)  # fmt: skip
def test_ticks_are_the_round_numbers_one_would_write(low, high, ticks):
    assert nice_ticks(low, high) == ticks


@given(NUMBERS, st.floats(min_value=1e-6, max_value=1e9), st.integers(3, 9))
def test_ticks_lie_inside_and_are_evenly_spaced(low, span, count):
    high = low + span
    if (high - low) < 1e-9 * max(abs(low), abs(high)):
        return
    ticks = nice_ticks(low, high, count)
    assert 1 <= len(ticks) <= 2 * count + 1
    assert all(
        low - span * 1e-6 - abs(low) * 1e-9 <= tick <= high + span * 1e-6 + abs(high) * 1e-9 for tick in ticks
    )


def test_log_ticks_cover_many_decades_and_few():
    assert log_ticks(1e-3, 1e3, 7) == [0.001, 0.01, 0.1, 1, 10, 100, 1000]
    assert log_ticks(0.2, 3, 5) == [0.2, 0.5, 1, 2]
    assert len(log_ticks(1e-30, 1e30, 5)) <= 6
    assert log_ticks(0, 1) == []


def test_places_are_linear_in_the_logarithm():
    np.testing.assert_allclose(
        Scale(1, 100, log=True).place(np.array([1, 10, 100, 0.0])), [0, 0.5, 1, math.nan]
    )
    np.testing.assert_allclose(Scale(2, 4).place(np.array([2.0, 3.0, 5.0])), [0, 0.5, 1.5])


def test_one_spike_does_not_flatten_the_rest():
    values = np.r_[np.linspace(3, 8, 500), 1e6]
    scale = axis(values)
    assert scale.high < 20
    assert scale.num_beyond(values) == 1
    assert axis(values, always=np.array([1e6])).num_beyond(values) == 0


@given(st.lists(NUMBERS, min_size=1, max_size=19))
def test_without_spikes_all_values_are_inside(values):
    numbers = np.array(values)
    for zero in (False, True):
        scale = axis(numbers, zero=zero)
        assert scale.low < scale.high
        assert scale.num_beyond(numbers) == 0


@pytest.mark.parametrize("values", [[], [math.nan], [0.0, 0.0], [math.inf, -math.inf], [1e-300], [-5.0]])
@pytest.mark.parametrize("log", [False, True])
def test_any_values_have_a_scale(values, log):
    scale = axis(np.array(values, dtype=float), log=log)
    assert math.isfinite(scale.low)
    assert scale.low < scale.high
    assert scale.ticks()


def brute_force(places, values, buckets):
    """(bucket, smallest, largest) of every bucket with a finite value."""
    found = {}
    for place, value in zip(places, values, strict=True):
        if math.isfinite(value):
            bucket = min(int(place * buckets), buckets - 1)
            low, high = found.get(bucket, (value, value))
            found[bucket] = (min(low, value), max(high, value))
    return found


@given(st.integers(0, 2**32 - 1), st.integers(50, 3000))
def test_each_bucket_keeps_its_smallest_and_largest_value(seed, count):
    random = np.random.default_rng(seed)
    values = random.normal(size=count)
    values[random.random(count) < 0.1] = math.nan
    # Half steps keep the places off the edges of the buckets, where rounding decides.
    places = (np.arange(count) + 0.5) / count + 1e-7
    buckets = 20
    lines = downsample(places, values, buckets)
    points = [point for line in lines for point in line]
    assert len(points) <= 2 * buckets
    assert points == sorted(points)
    assert brute_force(*zip(*points, strict=True), buckets) == brute_force(places, values, buckets)


def test_a_short_series_is_drawn_as_it_is_with_gaps():
    values = np.array([1, 2, math.nan, 4, math.inf, 6, 7.0])
    lines = downsample(np.linspace(0, 1, 7), values, 100)
    assert [[value for _, value in line] for line in lines] == [[1, 2], [4], [6, 7]]


def test_a_long_gap_stays_a_gap_when_downsampled():
    values = np.ones(10_000)
    values[4000:6000] = math.nan
    lines = downsample(np.linspace(0, 1, 10_000), values, 100)
    assert len(lines) == 2
    assert lines[0][-1][0] < 0.41
    assert lines[1][0][0] > 0.59


@given(st.lists(NUMBERS | st.just(math.nan), max_size=60), st.integers(0, 8))
def test_smoothing_is_the_centred_mean_of_what_is_finite(values, radius):
    got = smooth(np.array(values, dtype=float), radius)
    for index, value in enumerate(values):
        reach = min(index, radius)
        window = [other for other in values[index - reach : index + reach + 1] if math.isfinite(other)]
        if math.isfinite(value):
            assert got[index] == pytest.approx(sum(window) / len(window), rel=1e-6, abs=1e-3)
        else:
            assert math.isnan(got[index])


def test_a_spike_leaves_the_mean_of_later_values_alone():
    values = np.array([1.0, 1e25, *np.linspace(2, 3, 50)])
    np.testing.assert_allclose(smooth(values, 2)[5:40], values[5:40], rtol=1e-12)
    assert np.isfinite(smooth(np.array([1e308] * 50), 5)).all()

"""Thinning, ranges and smoothing of long curves, against brute force."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scrimp.report.curves import BUCKETS, bounded, buckets, smooth, thinned, usual_range

NUMBERS = st.floats(min_value=-1e9, max_value=1e9, allow_nan=False)


def range_of(values, steps=None, **options):
    values = np.asarray(values, dtype=float)
    steps = np.arange(1.0, len(values) + 1) if steps is None else steps
    return usual_range([(steps, values)], **options)


def brute_force(places, values, count):
    """(smallest, largest) finite value of every bucket, None for a bucket without one; places are in [0, 1]."""
    found = {}
    for place, value in zip(places, values, strict=True):
        low, high = found.get(bucket := min(int(place * count), count - 1)) or (math.inf, -math.inf)
        found[bucket] = (min(low, value), max(high, value)) if math.isfinite(value) else found.get(bucket)
    return found


@given(st.integers(0, 2**32 - 1), st.integers(50, 3000), st.booleans())
def test_each_bucket_keeps_its_smallest_and_largest_value(seed, length, log):
    random = np.random.default_rng(seed)
    values = random.normal(size=length)
    values[random.random(length) < 0.3] = math.nan
    places = np.sort([0, *random.random(length - 2), 1])
    steps = np.exp(places * 9) if log else places * 700 + 3
    kept = thinned(steps, [values], log=log, count=20)
    assert kept == sorted(set(kept))
    assert len(kept) <= 2 * 20 + 2
    assert {0, length - 1} <= set(kept)
    assert brute_force(places[kept], values[kept], 20) == brute_force(places, values, 20)


def test_all_columns_decide_which_steps_are_kept():
    one, other = np.zeros(5000), np.zeros(5000)
    one[1234], other[4321] = 1, -1
    kept = thinned(np.arange(5000.0), [one, other])
    assert {1234, 4321} <= set(kept)
    assert len(kept) <= 4 * BUCKETS


def test_a_short_curve_is_kept_whole():
    assert thinned(np.arange(7.0), [np.full(7, math.nan)]) == list(range(7))
    assert thinned(np.empty(0), []) == []


def test_a_long_gap_stays_a_gap():
    values = np.ones(10_000)
    values[4000:6000] = math.nan
    kept = np.array(thinned(np.arange(10_000.0), [values], count=100))
    missing = kept[np.isnan(values[kept])]
    assert len(missing) == 20
    assert ((missing >= 4000) & (missing < 6000)).all()


@given(st.integers(1, 500), st.integers(1, 30), st.booleans())
def test_buckets_hold_every_step_once(length, count, log):
    parts = buckets(np.arange(length, dtype=float), log=log, count=count)
    assert [index for part in parts for index in range(part.start, part.stop)] == list(range(length))
    assert len(parts) <= count


def test_a_few_spikes_do_not_flatten_the_rest():
    values = np.r_[np.linspace(3, 8, 5000), 1e6]
    low, high = range_of(values)
    assert 2.5 <= low <= 3
    assert 8 <= high < 20
    low, high = range_of(values, always=[np.array([-100.0])])
    assert low <= -100
    assert high < 200
    assert range_of(values, always=[np.array([1e6])]) is None


def test_noise_is_no_spike():
    """The largest of a million normal values is far from the median of any bucket, and inside all the same."""
    values = np.random.default_rng(0).normal(9700, 300, 1_000_000)
    assert range_of(values) is None
    low, high = range_of(np.r_[values, 1e9])
    assert ((values < low) | (values > high)).mean() < 0.005
    assert high < 12_000


def test_a_spike_of_a_logarithmic_axis_is_ten_times_its_span():
    values = np.r_[np.geomspace(0.1, 10, 500), 1e3]
    assert range_of(values, log=True) is None
    assert range_of(values) is not None
    low, high = range_of(np.r_[values, 1e40], log=True)
    assert 0 < low <= 0.11
    assert 9 <= high < 100


def test_the_steep_beginning_is_usual_over_logarithmic_steps():
    values = 3 + 7 * np.exp(-np.arange(200_000) / 300)
    values[150_000] = 1e12
    assert range_of(values)[1] < 5
    assert 9 < range_of(values, log_steps=True)[1] < 15


@given(st.lists(NUMBERS, max_size=19), st.booleans())
def test_few_values_are_all_shown(values, log):
    assert range_of(values, log=log) is None


@pytest.mark.parametrize(
    "values", [[], [math.nan] * 50, [0.0] * 50, [1e-300] * 50, [-5.0] * 50, [math.inf] * 50]
)
@pytest.mark.parametrize("log", [False, True])
def test_values_without_a_span_have_no_range(values, log):
    assert range_of(values, log=log) is None


def test_values_are_bounded_so_that_sums_stay_finite():
    np.testing.assert_array_equal(
        bounded(np.array([1e300, -1e300, math.inf, math.nan, 2])), [1e290, -1e290, math.nan, math.nan, 2]
    )


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

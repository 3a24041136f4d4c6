"""Numbers for people: units, rounding at the edges of a unit, and what is no number."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scrimp.report import units


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.00 KiB"), (2**20 - 1, "1.00 MiB"), (1.5 * 2**30, "1.50 GiB"),
     (17179869184, "16.0 GiB"), (-2048, "-2.00 KiB"), (2.0**70, "1048576 PiB")],
)  # fmt: skip
def test_bytes_use_binary_units(count, text):
    assert units.format_bytes(count) == text


@pytest.mark.parametrize(
    ("count", "text"),
    [(999, "999"), (1000, "1.00k"), (999_999, "1.00M"), (3_145_728, "3.15M"), (7e12, "7.00T")],
)
def test_counts_use_decimal_units(count, text):
    assert units.format_count(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0 s"), (3.5e-5, "35.0 µs"), (0.9996, "1.00 s"), (0.012, "12.0 ms"), (4.2, "4.20 s"), (59.96, "1m 00s"),
     (125, "2m 05s"), (3599.6, "1h 00m"), (90061, "1d 01h"), (-125, "-2m 05s")],
)  # fmt: skip
def test_durations_read_like_a_clock(seconds, text):
    assert units.format_duration(seconds) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(3.04173, "3.042"), (9.99996, "10.00"), (12345.6, "12,346"), (0.05, "0.05000"), (0.0003, "3e-4"),
     (-1.5, "-1.500"), (0, "0"), (1e300, "1e300")],
)  # fmt: skip
def test_numbers_keep_significant_digits(value, text):
    assert units.format_number(value) == text


def test_rates_shares_and_flops_carry_their_unit():
    assert units.format_rate(19150.0) == "19.1k tok/s"
    assert units.format_percent(0.4178) == "41.8%"
    assert units.format_flops(46.6e9) == "46.6 GFLOP"
    assert units.format_integer(1e6) == "1,000,000"


@pytest.mark.parametrize("value", [None, math.nan, math.inf, -math.inf, True, "7", 10**400])
@pytest.mark.parametrize(
    "form",
    [units.format_bytes, units.format_count, units.format_duration, units.format_number, units.format_rate,
     units.format_percent, units.format_flops, units.format_integer],
)  # fmt: skip
def test_what_is_no_finite_number_is_a_dash(form, value):
    assert form(value) == units.MISSING


@given(st.floats(min_value=0, max_value=1e17, allow_nan=False))
def test_bytes_are_right_to_half_a_percent(count):
    number, unit = units.format_bytes(count).split(" ")
    back = float(number) * 1024 ** ["B", "KiB", "MiB", "GiB", "TiB", "PiB"].index(unit)
    assert back == pytest.approx(count, rel=0.0051, abs=0.0051)

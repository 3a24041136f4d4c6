"""Laws of loss: planted ones are found again, whatever the seeds' noise, and what cannot be fitted is refused."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from property_tests import examples

from scrimp.errors import ConfigError
from scrimp.recipes.data_limited.laws import Law, fit

SIZES = (1e6, 3e6, 1e7, 3e7, 1e8)


@examples(40)
@given(
    limit=st.floats(0.5, 5.0),
    share=st.floats(0.05, 1.0),
    exponent=st.floats(0.2, 2.0),
    seeds=st.integers(1, 3),
)
def test_a_planted_law_is_found_again(limit: float, share: float, exponent: float, seeds: int) -> None:
    planted = Law(limit, share * SIZES[0] ** exponent, exponent)
    found = fit(SIZES, [[planted.at(x)] * seeds for x in SIZES])
    assert found.limit == pytest.approx(limit, rel=1e-3)
    assert found.exponent == pytest.approx(exponent, rel=0.02)
    assert found.at(5e7) == pytest.approx(planted.at(5e7), rel=1e-3)
    assert found.x_of(found.at(2e6)) == pytest.approx(2e6, rel=1e-6)


def test_the_interval_of_the_limit_holds_the_planted_one_about_as_often_as_it_says() -> None:
    """Members of an ensemble: with a = 1 the law is a line, whose limit has noise of a known size."""
    generator, planted, hits = np.random.default_rng(1), Law(3.0, 0.5, 1.0), 0
    members = (1.0, 2.0, 4.0, 8.0)
    for _ in range(100):
        losses = [[planted.at(x) + 0.01 * one for one in generator.standard_normal(12)] for x in members]
        low, high = fit(members, losses, exponent=1.0).interval or (0.0, 0.0)
        hits += low <= 3.0 <= high
    assert 80 <= hits <= 99


def test_a_law_never_falls_below_what_it_ends_at() -> None:
    growing = fit((1.0, 2.0, 4.0), [[1.0], [1.1], [1.2]])
    assert growing.factor == 0
    assert growing.limit == pytest.approx(1.1)
    assert growing.x_of(1.0) == float("inf")


@pytest.mark.parametrize(
    ("xs", "losses", "exponent"),
    [
        ((1.0, 2.0), [[1.0], [0.9]], None),
        ((1.0, 1.0, 1.0), [[1.0], [1.0], [1.0]], None),
        ((1.0,), [[1.0]], 1.0),
        ((1.0, 2.0, 3.0), [[1.0, 2.0], [1.0], [1.0, 3.0]], None),
        ((1.0, 2.0, 3.0), [[], [], []], None),
    ],
)
def test_what_says_no_law_is_refused(
    xs: tuple[float, ...], losses: list[list[float]], exponent: float | None
) -> None:
    with pytest.raises(ConfigError, match="law cannot be fitted"):
        fit(xs, losses, exponent=exponent)

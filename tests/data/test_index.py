"""The index is a bijection in every epoch, and its order depends on seed and epoch alone."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scrimp.data import SampleIndex


@given(num_samples=st.integers(1, 700), seed=st.integers(0, 2**63), epoch=st.integers(0, 1000))
def test_every_epoch_visits_every_sample_once(num_samples: int, seed: int, epoch: int) -> None:
    index = SampleIndex(num_samples, seed)
    first = epoch * num_samples
    assert sorted(index[first + i] for i in range(num_samples)) == list(range(num_samples))


@pytest.mark.parametrize("num_samples", range(1, 130))
def test_it_is_a_bijection_for_every_small_number(num_samples: int) -> None:
    index = SampleIndex(num_samples, 7)
    assert {index[i] for i in range(num_samples)} == set(range(num_samples))


@given(num_samples=st.integers(1, 2**50), position=st.integers(0, 2**60))
def test_large_numbers_stay_in_range(num_samples: int, position: int) -> None:
    assert 0 <= SampleIndex(num_samples, 3)[position] < num_samples


def test_orders_differ_by_seed_and_epoch_and_repeat_exactly() -> None:
    orders = [
        tuple(SampleIndex(1000, seed)[epoch * 1000 + i] for i in range(1000))
        for seed in (0, 1)
        for epoch in (0, 1)
    ]
    assert len(set(orders)) == 4
    assert orders[0] == tuple(SampleIndex(1000, 0)[i] for i in range(1000))


def test_neighbours_are_unrelated() -> None:
    order = np.array([SampleIndex(4096, 5)[i] for i in range(4096)])
    assert abs(np.corrcoef(np.arange(4096), order)[0, 1]) < 0.05
    assert abs(np.corrcoef(order[:-1], order[1:])[0, 1]) < 0.05
    assert (np.abs(np.diff(order)) == 1).mean() < 0.005


@pytest.mark.slow
def test_each_sample_is_about_equally_likely_at_each_position() -> None:
    counts = np.zeros((8, 8), dtype=int)
    for seed in range(2000):
        index = SampleIndex(8, seed)
        for position in range(8):
            counts[position, index[position]] += 1
    assert counts.min() > 180
    assert counts.max() < 325  # expected 250, standard deviation 15


def test_bad_use_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one"):
        SampleIndex(0, 0)
    with pytest.raises(IndexError):
        SampleIndex(5, 0)[-1]

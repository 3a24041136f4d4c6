"""Measured rates give back the seconds that they were made of."""

from __future__ import annotations

import pytest
import torch

from scrimp.planner.layout.kernels import Kernels
from scrimp.profiler import resolve_device
from scrimp.profiler.measured_cluster import (
    HEAD_SIZE,
    HEADS,
    KEYS,
    RankRates,
    cluster_of,
    measure_rates,
)

RATES = RankRates(4e10, 1e10, 2e10, 3e10, 8e9, 5e-6, link=2e9, latency_seconds=1e-4)


def test_kernels_take_the_seconds_that_were_measured() -> None:
    kernels = Kernels(cluster_of(RATES, ranks=2, name="here", memory_bytes=2**33).groups[0].node.device)
    flops = 2.0 * 1024**3
    assert kernels.product(1024, 1024, 1024, "bf16") == pytest.approx(flops / 4e10, rel=0.01)
    assert kernels.product(1024, 1024, 1024, "nvfp4") == pytest.approx(flops / 1e10, rel=0.01)
    assert kernels.moved(8e9) == pytest.approx(1.0)
    pairs, widths = KEYS**2 / 2, 2 * HEADS * HEAD_SIZE
    taken = kernels.attention(pairs, widths, keys=KEYS, head_size=HEAD_SIZE)
    assert taken == pytest.approx(2 * pairs * widths / 2e10)


def test_a_link_takes_what_was_measured() -> None:
    link = cluster_of(RATES, ranks=4, name="here", memory_bytes=2**33).groups[0].node.link.inside
    assert (link.bandwidth, link.latency_seconds) == (2e9, 1e-4)


@pytest.mark.slow
def test_a_product_is_predicted_as_it_runs_and_an_emulated_one_slower() -> None:
    torch.manual_seed(0)
    found = measure_rates(resolve_device("cpu"), compute="fp32", recipe="nvfp4")
    assert all(value > 0 for value in vars(found).values())
    assert found.low < found.product  # no CPU has units for it

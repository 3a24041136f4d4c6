"""Rates of memory: of the right size, and in the form that the planner takes."""

from __future__ import annotations

import time

import torch

from scrimp.profiler.bandwidth import COPY_BYTES, measure_links


def test_rates_are_those_of_this_memory() -> None:
    rates = measure_links(torch.device("cpu"))
    source, target = (torch.zeros(COPY_BYTES["cpu"], dtype=torch.uint8) for _ in range(2))
    target.copy_(source)
    began = time.perf_counter()
    target.copy_(source)
    once = COPY_BYTES["cpu"] / (time.perf_counter() - began)
    # The best of several against one copy on a busy machine: the same to an order of magnitude.
    assert once / 10 < rates.upload < once * 10
    assert rates.upload_together < rates.upload
    assert 1e6 < rates.cpu_adam < 1e12
    assert rates.device_memory > rates.upload / 10


def test_a_machine_is_made_of_rates_and_of_the_memory_that_may_be_used() -> None:
    rates = measure_links(torch.device("cpu"))
    machine = rates.machine(device_bytes=5, host_bytes=7, pinned_bytes=3)
    assert (machine.device_bytes, machine.host_bytes, machine.pinnable) == (5, 7, 3)
    assert machine.upload == rates.upload

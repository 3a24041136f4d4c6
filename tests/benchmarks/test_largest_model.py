"""The table of what trains where is made with the limits that a run has."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from largest_model import CONTEXT_BYTES, HOST_RESERVE, machine_of

from scrimp.config import Config
from scrimp.profiler import Device
from scrimp.training.memory import limits


@pytest.mark.parametrize(("card", "host"), [(12, 32), (24, 64), (80, 256)])
def test_a_card_and_a_host_have_what_the_product_may_use_of_them(
    card: int, host: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = int(card * 2**30) - CONTEXT_BYTES
    monkeypatch.setattr(limits, "host_memory_available", lambda: host * 10**9 - HOST_RESERVE)
    device = Device(torch.device("cuda"), "a card", free, "for the test")
    machine = machine_of(card, host)
    assert machine.device_bytes == limits.device_limit(Config(), device, copy_bytes=0) < 0.97 * free
    compiled = dataclasses.replace(Config(), train=dataclasses.replace(Config().train, compile="off"))
    assert machine.host_bytes == limits.host_limit(compiled, device) < 0.91 * host * 10**9

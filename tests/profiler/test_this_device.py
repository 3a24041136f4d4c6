"""Which hardware file a device has, and what the model of time sees of a device without one."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

import scrimp.profiler.this_device as here
from scrimp.planner.hardware import load_device
from scrimp.profiler import Device
from scrimp.profiler.measured_cluster import RankRates
from scrimp.profiler.this_device import cluster_here, known_name

GB = 10**9
RATES = RankRates(
    product=1e11,
    low=5e10,
    attention_forward=4e10,
    attention_backward=3e10,
    memory=1e10,
    operation_seconds=1e-5,
)


def card(name: str, memory: float, monkeypatch: pytest.MonkeyPatch) -> Device:
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=int(memory * GB))
    )
    return Device(torch.device("cuda", 0), name, int(memory * GB), "")


@pytest.mark.parametrize(
    ("name", "memory", "file"),
    [
        ("NVIDIA H100 80GB HBM3", 85, "h100"),
        ("NVIDIA H100 NVL", 100, "h100-96"),
        ("NVIDIA A100-SXM4-40GB", 42, "a100-40"),
        ("NVIDIA A100-SXM4-80GB", 85, "a100-80"),
        ("NVIDIA GeForce RTX 4090", 25.4, "rtx4090"),
        ("NVIDIA GeForce RTX 4060 Ti", 16.9, "rtx4060ti"),
        ("NVIDIA GeForce RTX 4060", 8.3, None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", 17, None),
        ("NVIDIA H100 80GB HBM3 MIG 3g.40gb", 42, None),
        ("NVIDIA H100 PCIe", 85, None),
        ("NVIDIA RTX PRO 6000 Blackwell Max-Q", 102, None),
    ],
)
def test_a_card_is_known_by_its_name_and_its_memory(
    name: str, memory: float, file: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert known_name(card(name, memory, monkeypatch)) == file


def test_a_known_card_is_its_file_and_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(here, "_rates_once", lambda *one: pytest.fail("was measured"))
    device = card("NVIDIA H100 80GB HBM3", 85, monkeypatch)
    known = load_device("h100")
    as_bf16 = replace(
        known,
        peak=replace(known.peak, int8=known.peak.bf16),
        achieved=replace(known.achieved, int8=known.achieved.bf16),
    )
    assert cluster_here(device, compute="bf16", recipe="fp8").groups[0].node.device == as_bf16
    plain = cluster_here(device, compute="fp32", recipe=None).groups[0].node.device
    assert plain.rate("bf16") == plain.rate("fp32") == load_device("h100").rate("fp32")


def test_any_other_device_is_what_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def rates(*one: object) -> RankRates:
        asked.append(one[2:])
        return RATES

    monkeypatch.setattr(here, "_rates_once", rates)
    found = cluster_here(Device(torch.device("cpu"), "a CPU", GB, ""), compute="fp32", recipe="fp8")
    device = found.groups[0].node.device
    assert (found.devices, device.memory_bytes, device.bandwidth) == (1, GB, 1e10)
    assert (device.rate("bf16"), device.rate("fp8")) == (1e11, 5e10)
    # A planned layer of a GPU would be tuned first: no recipe is timed there.
    cluster_here(card("another", 10, monkeypatch), compute="bf16", recipe="fp8")
    # Once for each kind of kernels: a run that need not repeat itself has others.
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    cluster_here(card("another", 10, monkeypatch), compute="bf16", recipe="fp8")
    assert asked == [("fp32", "fp8", False), ("bf16", None, False), ("bf16", None, True)]

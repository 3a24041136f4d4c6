"""The device of this process as the planner's model of time knows one.

Problem  Recomputation and offload are weighed before a block has run, with the seconds that the search for layouts
         predicts (`scrimp.planner.layout.block_times`). It needs a hardware file, which this machine may not have.
Method   A card that ships (`planner/hardware/devices`), by the words of its name and its memory, is that file. Any
         other device is measured once in a process as ranks are (`scrimp.profiler.measured_cluster`): products and
         attention in the working format, a planned layer in the recipe of the run on a CPU, memory, and what an
         operation costs the host. Of several ranks the first measures, alone, for all of them. A device that works in
         fp32 stands there with its rate of fp32 as that of bf16, as measured ranks do. Where a file has no rate of INT8
         products, they count as bf16's.
Limits   Slices of a card, laptops' versions and PCIe versions have other rates than the card of that name: measured.
         Attention in fp32 is taken to reach the share of its peak that bf16's does.
Checked  tests/profiler/test_this_device.py
"""

from __future__ import annotations

import os
import re
from dataclasses import asdict, replace
from functools import cache

import torch

from scrimp.planner.hardware import DEVICES, Cluster, load_device, load_hardware
from scrimp.profiler.device import Device
from scrimp.profiler.measured_cluster import RankRates, cluster_of, measure_rates
from scrimp.world import ALONE

MEMORY_TOLERANCE = 0.15
"""Drivers and error correction keep a part of a device's memory."""
_OTHER_NAMES = {"dgxspark": "gb10"}
_VARIANTS = ("ti", "super")
"""Words that make another device of a name."""
_OTHER_CARDS = {"mig", "laptop", "pcie", "max"}
"""Words of a name whose card has other rates than its file."""


def cluster_here(device: Device, *, compute: str, recipe: str | None) -> Cluster:
    """One device like this process's, alone.

    Args:
        compute: working format, fp32 or bf16.
        recipe: that most products run in; None: no single one.
    """
    name = known_name(device)
    if name is not None:
        return _as_run(load_hardware(name), compute)
    rates = device.world.once(
        "measuring what the device reaches",
        lambda: _rates_once(
            device.torch_device,
            device.name,
            compute,
            recipe if device.is_host else None,
            torch.are_deterministic_algorithms_enabled(),
        ),
        write=asdict,
        read=lambda told: RankRates(**told),
    )
    return cluster_of(rates, ranks=1, name=device.name, memory_bytes=device.available_bytes)


@cache
def _rates_once(
    here: torch.device, name: str, compute: str, recipe: str | None, is_deterministic: bool
) -> RankRates:
    """Once for each kind of kernels that the caller has put in force."""
    alone = Device(here, name, 0, "", ALONE)
    return measure_rates(alone, compute=compute, recipe=recipe)


def known_name(device: Device) -> str | None:
    """The hardware file of this device; None: there is none."""
    if device.is_host or _OTHER_CARDS & set(_words(device.name)):
        return None
    bytes_here = memory_bytes(device)
    sizes = {name: load_device(name).memory_bytes for name in DEVICES if is_same_name(name, device.name)}
    near = {name: abs(size / bytes_here - 1.0) for name, size in sizes.items()}
    best = min(near, key=lambda name: near[name], default=None)
    return best if best is not None and near[best] <= MEMORY_TOLERANCE else None


def _as_run(cluster: Cluster, compute: str) -> Cluster:
    """A card's file with the rates that a run on it is weighed by."""
    (group,) = cluster.groups
    one = group.node.device
    peak, achieved = one.peak, one.achieved
    if compute == "fp32":  # what the model of time calls bf16 is the working format
        peak, achieved = replace(peak, bf16=peak.fp32), replace(achieved, bf16=achieved.fp32)
    if one.rate("int8") is None:
        # No source has it. Products in INT8 run here whatever is known of them: counted as bf16's, no plan needs it.
        peak, achieved = replace(peak, int8=peak.bf16), replace(achieved, int8=achieved.bf16)
    device = replace(one, peak=peak, achieved=achieved)
    return replace(cluster, groups=(replace(group, node=replace(group.node, device=device)),))


def is_same_name(planned: str, here: str) -> bool:
    """Whether a hardware file's device is what the vendor's name says: h100-96 is an "NVIDIA H100 NVL", rtx4060 is no
    "RTX 4060 Ti"."""
    word = _OTHER_NAMES.get(
        planned.lower(), re.sub(r"-\d+$", "", planned.lower())
    )  # a100-40: memory says the rest
    wanted, words = "".join(_words(word)), [*_words(here), ""]
    return any(
        "".join(words[first:after]) == wanted and words[after] not in _VARIANTS
        for first in range(len(words))
        for after in range(first + 1, len(words))
    )


def _words(name: str) -> list[str]:
    return re.findall(r"[a-z0-9]+", name.lower())


def memory_bytes(device: Device) -> int:
    """All memory of the device; of a host each rank's part."""
    if device.is_host:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // device.ranks_here
    return int(torch.cuda.get_device_properties(device.torch_device).total_memory)

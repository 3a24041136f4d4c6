"""The device a run computes on, by the name that the user gave.

`auto` takes the CUDA device with the most free memory, else the CPU, and says why. Everything
else is taken literally and refused when it is not there: a run that was asked to use a GPU
never continues on a CPU. Of several ranks each one takes the device that became its current one when it joined
(`scrimp.joining`), by `auto` and by `cuda`; two ranks on one device are refused by name.

A GPU that was resolved is the process's current device from then on: libraries ask that one for its multiprocessors,
its stream and its capability, whatever device their tensors lie on. cuBLAS gets the workspace with which its products
repeat themselves (`CUBLAS_WORKSPACE_CONFIG`), unless the environment names one.
"""

from __future__ import annotations

import os
import platform
import socket
from collections import Counter
from dataclasses import dataclass, field, replace

import torch

from scrimp.errors import DeviceError
from scrimp.gemm.cpu_products import widen_bf16_products
from scrimp.host_memory import host_memory_available
from scrimp.launchers import num_cores
from scrimp.world import ALONE, World, ranks_text


@dataclass(frozen=True)
class Device:
    """One compute device."""

    torch_device: torch.device
    name: str
    """The vendor's name, as in 'NVIDIA H100 80GB HBM3'."""
    available_bytes: int
    """Device memory that was free when it was resolved; of several ranks, where the least was."""
    reason: str
    """Why this device."""
    world: World = field(default_factory=World)
    """The ranks that train together, each on such a device: what is decided by its figures is decided by all."""
    ranks_here: int = 1
    """Most of them on one host, whose memory they divide."""

    @property
    def is_host(self) -> bool:
        """Whether the device computes in host memory."""
        return self.torch_device.type == "cpu"

    @property
    def spelling(self) -> str:
        """The name that gives this device again, for the saved configuration: of several ranks to each its own."""
        return self.torch_device.type if self.world.size > 1 else str(self.torch_device)


def resolve_device(name: str, world: World = ALONE) -> Device:
    """The device called `name`: auto, cpu, cuda or cuda:N.

    A CPU without units for bf16 multiplies it in float32 from now on (`scrimp.gemm.cpu_products`).

    Args:
        world: ranks that compute together, each on a device of its own.

    Raises:
        DeviceError: an unknown name, a CUDA device that is not there, or one that several ranks name.
        TrainingError: ranks have devices of different kinds.
    """
    with world.together("finding the device"):
        device = _own_device(name, world)
        world.agree("their devices", device.name, do="start all ranks on one kind of device")
        if not device.is_host:
            _refuse_shared(device.torch_device, world)
        ranks_here = max(Counter(world.gathered(socket.gethostname())).values())
        available = int(world.smallest(device.available_bytes)) // (ranks_here if device.is_host else 1)
        return replace(device, available_bytes=available, world=world, ranks_here=ranks_here)


def _refuse_shared(device: torch.device, world: World) -> None:
    """Refuse two ranks on one CUDA device: NCCL refuses them too, but later and without naming them."""
    own = f"{socket.gethostname()} {torch.cuda.get_device_properties(device).uuid}" if world.size > 1 else ""
    found = world.gathered(own)
    sharing = [rank for rank, one in enumerate(found) if found.count(one) > 1]
    if sharing:
        raise DeviceError(
            f"{ranks_text(sharing)} share a CUDA device",
            got=f"{device} of {socket.gethostname()} on rank {world.rank}",
            expected="a device for each rank",
            do="give --device cuda, which is each rank's own, and start as many ranks as there are devices",
        )


def _own_device(name: str, world: World) -> Device:
    """The device of this process alone."""
    if world.size > 1 and name in ("auto", "cuda") and torch.cuda.is_available():
        return _cuda(torch.cuda.current_device(), f"{name}: the CUDA device of this rank")
    if name == "auto":
        if torch.cuda.is_available():
            free = [torch.cuda.mem_get_info(index)[0] for index in range(torch.cuda.device_count())]
            return _cuda(free.index(max(free)), "auto: the CUDA device with the most free memory")
        return _cpu("auto: this machine has no CUDA device that torch can use")
    if name == "cpu":
        return _cpu("set by the user")
    kind, _, number = name.partition(":")
    if kind != "cuda" or (number and not number.isdecimal()) or name.endswith(":"):
        raise DeviceError("device is not known", got=name, expected="auto, cpu, cuda or cuda:N")
    if not torch.cuda.is_available():
        raise DeviceError(
            "no CUDA device can be used",
            got=name,
            expected="cpu on this machine"
            + ("" if torch.version.cuda else ": this torch is a build without CUDA"),
            do="use --device cpu, or install the CUDA build of torch and the driver",
        )
    index = int(number or 0)
    if index >= torch.cuda.device_count():
        raise DeviceError(
            "device is not there", got=name, expected=f"cuda:0 to cuda:{torch.cuda.device_count() - 1}"
        )
    return _cuda(index, "set by the user")


def _cuda(index: int, reason: str) -> Device:
    # Deterministic products need it, and it is read at the first product of the process, which may be a probe's.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.cuda.set_device(index)
    free, _ = torch.cuda.mem_get_info(index)
    return Device(torch.device("cuda", index), torch.cuda.get_device_name(index), free, reason)


def _cpu(reason: str) -> Device:
    widen_bf16_products()
    return Device(torch.device("cpu"), _cpu_name(), host_memory_available(), reason)


def _cpu_name() -> str:
    model = platform.processor() or platform.machine()
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            model = next(
                (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), model
            )
    except OSError:
        pass  # not Linux: the platform module's name serves
    return f"{model}, {num_cores()} cores"

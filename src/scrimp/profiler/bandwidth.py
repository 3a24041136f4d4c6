"""How fast memory moves: between device and host each way alone and together, inside the device, and CPU Adam.

Method   Copies of `COPY_BYTES` through pinned memory on streams of their own, the best of a few: a plan needs the
         rate of an idle link, and derates it itself where both ways are busy. The device's own memory by an
         addition that reads and writes. CPU Adam by torch's fused kernel on fp32 tensors that no cache holds,
         all threads. On a CPU "device" and host are parts of one memory: both ways are its copy rate, and half
         of it together.
Limits   A second in all. Not measured under computing: a copy that shares the memory with a kernel is slower. The CUDA
         part was not run without a GPU.
Checked  tests/profiler/test_bandwidth.py
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from scrimp.planner.memory.machine import Machine
from scrimp.timing import best

COPY_BYTES = {"cpu": 2**25, "cuda": 2**28}
ADAM_ELEMENTS = 2**23


@dataclass(frozen=True)
class LinkRates:
    """Per second, measured."""

    upload: float
    """Bytes, host to device, nothing going the other way."""
    download: float
    upload_together: float
    """Bytes, while the other way is busy."""
    download_together: float
    device_memory: float
    """Bytes read and written by a kernel."""
    cpu_adam: float
    """Parameters that the fused CPU Adam updates."""

    def machine(self, *, device_bytes: int, host_bytes: int, pinned_bytes: int | None = None) -> Machine:
        """With the memory that may be used, what the planner needs."""
        return Machine(
            device_bytes=device_bytes,
            host_bytes=host_bytes,
            pinned_bytes=pinned_bytes,
            upload=self.upload,
            download=self.download,
            upload_together=min(self.upload, self.upload_together),
            download_together=min(self.download, self.download_together),
            cpu_adam=self.cpu_adam,
            device_memory=self.device_memory,
        )


def measure_links(device: torch.device) -> LinkRates:
    """Measure all of it on this machine, in about a second."""
    adam = _cpu_adam()
    if device.type != "cuda":
        nbytes = COPY_BYTES["cpu"]
        source, target = _touched(nbytes, device), _touched(nbytes, device)
        rate = nbytes / best(lambda: target.copy_(source), device)
        both = 2 * nbytes / best(lambda: torch.add(source, 1, out=target), device)
        return LinkRates(rate, rate, rate / 2, rate / 2, both, adam)
    return _measure_cuda(device, adam)


def _measure_cuda(device: torch.device, adam: float) -> LinkRates:
    nbytes = COPY_BYTES["cuda"]
    hosts = [torch.empty(nbytes, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
    devices = [_touched(nbytes, device) for _ in range(2)]
    streams = [torch.cuda.Stream(device) for _ in range(2)]

    def run(*ways: int) -> Callable[[], None]:
        def copies() -> None:
            for way in ways:
                with torch.cuda.stream(streams[way]):
                    pair = (devices[0], hosts[0]) if way == 0 else (hosts[1], devices[1])
                    pair[0].copy_(pair[1], non_blocking=True)

        return copies

    together = nbytes / best(run(0, 1), device)
    return LinkRates(
        upload=nbytes / best(run(0), device),
        download=nbytes / best(run(1), device),
        upload_together=together,
        download_together=together,
        device_memory=2 * nbytes / best(lambda: torch.add(devices[0], 1, out=devices[1]), device),
        cpu_adam=adam,
    )


def _cpu_adam() -> float:
    """Parameters per second."""
    weight, gradient, mean, square = (torch.zeros(ADAM_ELEMENTS) for _ in range(4))
    count = [torch.ones(())]

    def step() -> None:
        torch._fused_adamw_(
            [weight],
            [gradient],
            [mean],
            [square],
            [],
            count,
            lr=1e-3,
            beta1=0.9,
            beta2=0.95,
            weight_decay=0.1,
            eps=1e-8,
            amsgrad=False,
            maximize=False,
        )

    return ADAM_ELEMENTS / best(step, torch.device("cpu"))


def _touched(nbytes: int, device: torch.device) -> Tensor:
    """Memory whose pages exist."""
    return torch.zeros(nbytes, dtype=torch.uint8, device=device)

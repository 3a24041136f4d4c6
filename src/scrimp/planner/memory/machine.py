"""What the planner knows of the machine, and what of a step is fixed before it plans."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from scrimp.errors import PlanError

Update = Literal["device", "cpu"]
"""Who updates blocks whose optimizer states are on the host."""


@dataclass(frozen=True)
class Machine:
    """Memory that may be used, and rates; measured (`scrimp.profiler`) or from a data sheet."""

    device_bytes: int
    host_bytes: int
    upload: float
    """Bytes/s from host to device while nothing goes the other way."""
    download: float
    """Bytes/s from device to host while nothing goes the other way."""
    upload_together: float
    """Bytes/s from host to device while the other way is busy."""
    download_together: float
    cpu_adam: float | None
    """Parameters/s of the fused CPU Adam, all threads; None: no optimizer runs on the CPU."""
    device_memory: float
    """Bytes/s of the device's own memory: what bounds an update there."""
    pinned_bytes: int | None = None
    """The part of the host's bytes that may be pinned; None: all."""

    def __post_init__(self) -> None:
        rates = (self.upload, self.download, self.upload_together, self.download_together)
        if min(*rates, self.device_memory, *([] if self.cpu_adam is None else [self.cpu_adam])) <= 0:
            raise PlanError("a rate of the machine is not above zero", got=str(self))
        if self.upload_together > self.upload or self.download_together > self.download:
            raise PlanError(
                "a link is faster while both ways are busy than alone",
                got=f"{self.upload_together:g} and {self.download_together:g} bytes/s together, "
                f"{self.upload:g} and {self.download:g} alone",
                do="measure again while nothing else uses the link",
            )

    @property
    def pinnable(self) -> int:
        """Host bytes that may be pinned."""
        return self.host_bytes if self.pinned_bytes is None else min(self.host_bytes, self.pinned_bytes)


@dataclass(frozen=True)
class Setup:
    """What is fixed while the planner looks for a plan."""

    micro_batches: int = 1
    """Micro-batches of one optimizer step."""
    updaters: tuple[Update, ...] = ("device", "cpu")
    """Who may update blocks whose optimizer states are on the host; the CPU where `Machine.cpu_adam` says how fast."""

    def __post_init__(self) -> None:
        if self.micro_batches < 1:
            raise PlanError("a step has at least one micro-batch", got=self.micro_batches)

    def updaters_on(self, machine: Machine) -> tuple[Update, ...]:
        """Those of `updaters` that the machine has; the device where it has none."""
        found = tuple(one for one in self.updaters if one == "device" or machine.cpu_adam is not None)
        return found or ("device",)

    @property
    def accumulates(self) -> bool:
        """Whether gradients exist already when a backward pass begins."""
        return self.micro_batches > 1

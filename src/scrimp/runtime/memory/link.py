"""Copies between the device and places in host memory, and when they may be relied on.

Problem  A copy that hides behind computing runs on a stream of its own. Whoever reads its target too early, or gives
         its source's memory away too early, gets wrong numbers and no error.
Method   `Link.send` (device to host) and `Link.fetch` (host to device) start a copy and return a `Ticket`. The rules

             the copy comes after everything that the compute stream was told before
             the target may be read, and the source freed or overwritten, after `ticket.wait()`
             whoever started the copy holds source and target until then

         `wait` makes the compute stream wait, not the host. So memory that was allocated on the compute stream,
         and is freed after `wait`, goes back to a pool whose next user comes after the copy; and a place that was read
         by a copy that was waited for may be written by the next one, in whichever direction.

         CudaLink   one side stream per direction, pinned memory, events
         HostLink   device cpu: copies at once

Limits   The compute stream is the current one when the copy starts; waiting also holds back the stream that is
         current then. Copies of places that are not pinned make the host wait.
Checked  tests/runtime/memory/test_link.py; that users of a link keep the rules: by tests/late_link.py. CudaLink was not
         run without a GPU.
"""

from __future__ import annotations

import abc
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from scrimp.errors import DeviceError
from scrimp.runtime.memory.arena import Place


class Ticket(Protocol):
    """A copy that was started."""

    def wait(self) -> None:
        """Let nothing that the compute stream is told from now on come before the copy. Twice is harmless."""

    def finish(self) -> None:
        """Let the host wait until the copy is over: before it reads or writes the place itself, from any thread."""

    def is_done(self) -> bool:
        """Whether the copy is over already, so that waiting costs nothing."""


class Link(abc.ABC):
    """Copies in both directions, counted.

    Args:
        device: the side that is no host memory.
    """

    kind: ClassVar[type[Tensor]] = Tensor
    """Exact type of the tensors whose bytes it copies; those of a subclass, as DTensor, may lie elsewhere."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.bytes_sent = 0
        """Device to host."""
        self.bytes_fetched = 0
        """Host to device."""

    def send(self, source: Tensor, place: Place) -> Ticket:
        """Start to copy a contiguous tensor of the device to the beginning of a place."""
        self.bytes_sent += source.nbytes
        return self._copy_out(source, place)

    def fetch(self, place: Place, target: Tensor) -> Ticket:
        """Start to copy the beginning of a place to a contiguous tensor of the device."""
        self.bytes_fetched += target.nbytes
        return self._copy_back(place, target)

    def finish(self) -> None:  # noqa: B027 (copies within the host are over when they were waited for)
        """Let the host wait for every copy that was started: before it reads or writes places itself."""

    @abc.abstractmethod
    def _copy_out(self, source: Tensor, place: Place) -> Ticket: ...

    @abc.abstractmethod
    def _copy_back(self, place: Place, target: Tensor) -> Ticket: ...


class _Done:
    def wait(self) -> None:
        pass

    def finish(self) -> None:
        pass

    def is_done(self) -> bool:
        return True


class HostLink(Link):
    """Between two parts of host memory, at once."""

    def _copy_out(self, source: Tensor, place: Place) -> Ticket:
        _in(place, source).copy_(source)
        return _Done()

    def _copy_back(self, place: Place, target: Tensor) -> Ticket:
        target.copy_(_in(place, target))
        return _Done()


class CudaLink(Link):
    """Between a CUDA device and pinned memory, beside the compute stream."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(
            torch.device("cuda", torch.cuda.current_device()) if device.index is None else device
        )
        device = self.device
        self._out, self._back = torch.cuda.Stream(device), torch.cuda.Stream(device)

    def finish(self) -> None:
        """Wait for both side streams."""
        self._out.synchronize()
        self._back.synchronize()

    def _copy_out(self, source: Tensor, place: Place) -> Ticket:
        return self._copy(self._out, source, _in(place, source))

    def _copy_back(self, place: Place, target: Tensor) -> Ticket:
        return self._copy(self._back, _in(place, target), target)

    def _copy(self, side: torch.cuda.Stream, source: Tensor, target: Tensor) -> Ticket:
        # Asked for before the side stream is entered: inside, the current stream is the side stream itself.
        compute = torch.cuda.current_stream(self.device)
        if compute in (self._out, self._back):
            raise DeviceError("a copy was started on a stream of the link", expected="the compute stream")
        side.wait_stream(compute)
        with torch.cuda.stream(side):
            target.copy_(source, non_blocking=True)
            event = side.record_event()
        return _CudaTicket(event, compute, (source, target))


class _CudaTicket:
    def __init__(
        self, event: torch.cuda.Event, compute: torch.cuda.Stream, held: tuple[Tensor, Tensor]
    ) -> None:
        self._event, self._compute = event, compute
        self._held: tuple[Tensor, Tensor] | None = held

    def wait(self) -> None:
        current = torch.cuda.current_stream(self._compute.device)
        self._compute.wait_event(self._event)
        if current != self._compute:
            current.wait_event(self._event)
        self._held = None

    def finish(self) -> None:
        self._event.synchronize()

    def is_done(self) -> bool:
        return bool(self._event.query())


def _in(place: Place, tensor: Tensor) -> Tensor:
    assert tensor.is_contiguous(), "links copy contiguous tensors"
    return place.view(tensor.shape, tensor.dtype)

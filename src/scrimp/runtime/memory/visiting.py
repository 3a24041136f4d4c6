"""Tensors that visit the device: at home in the arena, on the device only while their block computes.

A guest is a tensor whose object, shape and views stay what they are while its storage is emptied and filled again (as
FSDP2 does): autograd may hold the tensor or a view of it from the forward pass, and finds its numbers in backward.

Checked  tests/runtime/memory/test_blocks.py
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from scrimp.runtime.memory.arena import HostArena, Place
from scrimp.runtime.memory.link import Link, Ticket


class Guest:
    """One tensor with a place in the arena.

    Args:
        tensor: contiguous, alone in its storage, on the link's device.
    """

    def __init__(self, tensor: Tensor, place: Place, link: Link) -> None:
        self.tensor, self.place, self._link = tensor, place, link
        self._nbytes = tensor.nbytes
        self._coming: Ticket | None = None

    @property
    def is_here(self) -> bool:
        """Whether it has memory on the device, filled or being filled."""
        return self.tensor.untyped_storage().nbytes() > 0

    @property
    def home(self) -> Tensor:
        """The values at home, no copy: what checkpoints write and read."""
        return self.place.view(self.tensor.shape, self.tensor.dtype)

    def start(self) -> None:
        """Begin to come, unless it is here or on its way."""
        if not self.is_here:
            self.tensor.untyped_storage().resize_(self._nbytes)
            # Of `data`: autograd's version counter is for changes of value, and there is none.
            self._coming = self._link.fetch(self.place, self.tensor.data)

    def ready(self) -> None:
        """Be here, for what the compute stream is told from now on."""
        self.start()
        if self._coming is not None:
            self._coming.wait()
            self._coming = None

    def save(self) -> Ticket:
        """Begin to copy what is here to its home."""
        return self._link.send(self.tensor.data, self.place)

    def leave(self) -> None:
        """Give the device's memory back; the home keeps what it has."""
        if self._coming is not None:
            self._coming.wait()
            self._coming = None
        self.tensor.untyped_storage().resize_(0)


def settle(tensors: Sequence[Tensor], arena: HostArena, link: Link) -> list[Guest]:
    """Give tensors places, copy them there, and free their memory on the device."""
    guests = [Guest(tensor, arena.take(tensor.nbytes), link) for tensor in tensors]
    for ticket in [guest.save() for guest in guests]:
        ticket.wait()
    for guest in guests:
        guest.leave()
    return guests


def moved_to(arena: HostArena, tensor: Tensor) -> Place:
    """A place in the arena with the tensor's values."""
    place = arena.take(tensor.nbytes)
    place.view(tensor.shape, tensor.dtype).copy_(tensor.detach())
    return place


def on_device(parameter: torch.nn.Parameter, link: Link, place: Place) -> Guest:
    """A parameter whose values lie in a place becomes one of the device that is at home there."""
    parameter.data = torch.empty(parameter.shape, dtype=parameter.dtype, device=link.device)
    guest = Guest(parameter, place, link)
    guest.leave()
    return guest

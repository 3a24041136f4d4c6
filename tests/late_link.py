"""A link whose copies come as late as the rules of `scrimp.runtime.memory.link` allow: when their ticket is waited for.

Until then the target holds garbage (NaN in floats); if the source's memory is gone by then, garbage is what arrives.
Code that breaks a rule gives wrong numbers every time, on any machine, where a GPU would give them now and then.
"""

from __future__ import annotations

import threading

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from scrimp.errors import DeviceError
from scrimp.runtime.memory import Link, Ticket
from scrimp.runtime.memory.arena import Place

GARBAGE = 0xFF


class LateLink(Link):
    """Between two parts of host memory; see the module."""

    def _copy_out(self, source: Tensor, place: Place) -> Ticket:
        return _LateTicket(source, place.view(source.shape, source.dtype))

    def _copy_back(self, place: Place, target: Tensor) -> Ticket:
        return _LateTicket(place.view(target.shape, target.dtype), target)


class _LateTicket:
    """Knows source and target without keeping their memory alive, as a stream does."""

    def __init__(self, source: Tensor, target: Tensor) -> None:
        _spoil(target)
        self._source, self._target = _Ghost(source), _Ghost(target)
        self._is_done = False
        self._lock = threading.Lock()

    def wait(self) -> None:
        with self._lock:
            if not self._is_done:
                self._is_done = True
                self._copy()

    def finish(self) -> None:
        self.wait()

    def _copy(self) -> None:
        target = self._target.appear()
        if target is None:
            raise DeviceError("the target of a copy was freed before the copy was waited for")
        source = self._source.appear()
        if source is None:
            _spoil(target)
        else:
            target.copy_(source)

    def is_done(self) -> bool:
        return self._is_done


class _Ghost:
    """A contiguous tensor that does not hold its memory."""

    def __init__(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        self._alive = StorageWeakRef(storage)
        self._offset, self._shape, self._dtype = tensor.storage_offset(), tensor.shape, tensor.dtype

    def appear(self) -> Tensor | None:
        """The tensor, if its memory is still there."""
        storage = torch.UntypedStorage._new_with_weak_ptr(self._alive.cdata)
        if storage is None:
            return None
        flat = torch.empty(0, dtype=self._dtype).set_(storage, self._offset, (self._shape.numel(),))  # type: ignore[call-overload]
        return flat.view(self._shape)  # type: ignore[no-any-return]


def _spoil(tensor: Tensor) -> None:
    tensor.view(-1).view(torch.uint8).fill_(GARBAGE)

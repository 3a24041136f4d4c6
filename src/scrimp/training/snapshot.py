"""A copy of the training state on the host, so that training goes on while it is written.

Problem  The optimizer changes its tensors a few milliseconds after a checkpoint was asked for;
         writing them takes seconds.
Method   On CPU each tensor is cloned. From CUDA all tensors are copied without waiting into
         pinned slabs of `SLAB_BYTES`, and the stream is waited for once; the slabs are kept
         for the next snapshot, because pinning is slow (and rounds up to powers of two: one
         allocation per tensor would waste up to half). Where the host cannot hold a pinned
         copy, a pageable one is made; where it cannot hold any, or a budget of host memory has
         no room for it, there is no snapshot and the caller writes the live tensors while
         training waits.
Limits   Host memory for one copy of what this rank writes while a checkpoint is being written (with
         CUDA: from the first checkpoint on).
Checked  tests/training/test_snapshot.py, test_checkpoint.py (CPU), tests/training/test_checkpoint_gpu.py (CUDA)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import torch
from torch import Tensor

from scrimp.host_memory import host_memory_available

SLAB_BYTES: Final = 256 << 20
_ALIGNMENT: Final = 64
_PINNED_SHARE: Final = 0.5
"""Most of the free host memory that is pinned: the data loader and the page cache need the rest."""
_HOST_SHARE: Final = 0.8
"""Most of the free host memory that a snapshot may take."""


class HostCopies:
    """Makes snapshots; keeps pinned memory from one to the next, so one snapshot lives at a time.

    Args:
        room: bytes that a budget of host memory leaves; None: there is none.
    """

    def __init__(self, room: int | None = None) -> None:
        self._room = room
        self._slabs: list[Tensor] = []
        self._can_pin = True

    def take(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor] | None:
        """Contiguous host copies; None if the host cannot hold them."""
        needed = sum(tensor.nbytes for tensor in tensors.values())
        if self._room is not None and needed > self._room:
            return None
        available = host_memory_available() + sum(slab.nbytes for slab in self._slabs)
        if needed > _HOST_SHARE * available:
            return None
        with torch.no_grad():
            on_cuda = {name: tensor for name, tensor in tensors.items() if tensor.is_cuda}
            pinned = self._to_pinned(on_cuda, available) if on_cuda else {}
            return {
                name: pinned[name] if name in pinned else _cloned(tensor) for name, tensor in tensors.items()
            }

    def _to_pinned(self, tensors: Mapping[str, Tensor], available: int) -> dict[str, Tensor]:
        places, sizes = _lay_out(tensors)
        if not self._can_pin or sum(sizes) > _PINNED_SHARE * available:
            return {}
        if [slab.nbytes for slab in self._slabs] != sizes:
            self._slabs = []
            try:
                self._slabs = [torch.empty(size, dtype=torch.uint8, pin_memory=True) for size in sizes]
            except RuntimeError:  # the system's limit on locked memory: a pageable copy will do
                self._can_pin, self._slabs = False, []
                return {}
        copies = {}
        for name, (slab, start) in places.items():
            tensor = tensors[name]
            flat = self._slabs[slab][start : start + tensor.nbytes]
            copies[name] = flat.view(tensor.dtype).view(tensor.shape)
            copies[name].copy_(tensor.detach(), non_blocking=True)
        for device in {tensor.device for tensor in tensors.values()}:
            torch.cuda.current_stream(device).synchronize()
        return copies


def _lay_out(tensors: Mapping[str, Tensor]) -> tuple[dict[str, tuple[int, int]], list[int]]:
    """Slab and offset of every tensor, and the size of every slab; a large tensor has its own."""
    places: dict[str, tuple[int, int]] = {}
    sizes: list[int] = []
    current, filled = -1, SLAB_BYTES
    for name, tensor in tensors.items():
        size = -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
        if size > SLAB_BYTES:
            places[name] = (len(sizes), 0)
            sizes.append(size)
            continue
        if filled + size > SLAB_BYTES:
            current, filled = len(sizes), 0
            sizes.append(0)
        places[name] = (current, filled)
        filled += size
        sizes[current] = filled
    return places, sizes


def _cloned(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    if tensor.is_cuda:
        return tensor.cpu().contiguous()
    return tensor.clone(memory_format=torch.contiguous_format)

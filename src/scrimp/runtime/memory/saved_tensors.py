"""What autograd gets in the place of a tensor that it saves, and how the tensor is made from it again.

    KeptTensor      the tensor itself: parameters, what is excluded, small, or of a block that stays
    CastParameter   a parameter's copy in another type (autocast's): cast again, which gives the same bits
    StoredView      one view of a storage whose bytes are in the arena, on the device, or on the way

Autograd does not look at version counters of tensors that hooks pack. So these do, and refuse in backward what
autograd would have refused: a tensor that was changed in place since it was saved.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from scrimp.errors import TrainingError
from scrimp.runtime.memory.arena import Place, rounded
from scrimp.runtime.memory.link import Link, Ticket


@dataclass(frozen=True)
class Geometry:
    """How a tensor lies in its storage."""

    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, tensor: Tensor) -> Geometry:
        """The geometry of a strided tensor."""
        return cls(tensor.dtype, tensor.shape, tensor.stride(), int(tensor.storage_offset()))

    def on(self, memory: Tensor) -> Tensor:
        """The tensor that lies so in the storage of `memory`."""
        empty = torch.empty(0, dtype=self.dtype, device=memory.device)
        with torch.no_grad():
            return empty.set_(memory.untyped_storage(), self.offset, self.shape, self.stride)


class BlockRecord:
    """One forward pass through one block, as long as any tensor of it is saved."""

    def __init__(self, index: int, previous: BlockRecord | None, leaves: bool) -> None:
        self.index, self.leaves = index, leaves
        self._previous = None if previous is None else weakref.ref(previous)
        self._stored: dict[int, weakref.ref[StoredBytes]] = {}
        self.nbytes = 0
        """Taken in the arena."""

    @property
    def previous(self) -> BlockRecord | None:
        """The block before it, if it is still to be run backward."""
        return None if self._previous is None else self._previous()

    def add(self, stored: StoredBytes) -> None:
        """A storage that leaves."""
        self._stored[stored.identity.cdata] = weakref.ref(stored)
        self.nbytes += rounded(stored.nbytes)

    def find(self, tensor: Tensor) -> StoredBytes | None:
        """What was stored of the tensor's storage, if it has not changed since."""
        known = self._stored.get(tensor.untyped_storage()._cdata)
        stored = None if known is None else known()
        return stored if stored is not None and stored.version == tensor._version else None

    def living(self) -> list[StoredBytes]:
        """Whatever autograd still holds."""
        return [stored for known in self._stored.values() if (stored := known()) is not None]


class Bytes:
    """The bytes of one storage: source on the device, place in the arena, buffer on the device again."""

    def __init__(self, tensor: Tensor, place: Place, link: Link) -> None:
        storage = tensor.untyped_storage()
        self.nbytes, self.version = storage.nbytes(), tensor._version
        self._link, self._place = link, cast("Place | None", place)
        self._witness = _witness(tensor)
        self._source: Tensor | None = _bytes_on(tensor.device, self.nbytes, storage)
        self._buffer: Tensor | None = None
        self._fetching: Ticket | None = None
        self._sending: Ticket | None = link.send(self._source, place)

    @property
    def is_sent(self) -> bool:
        """Whether settling costs no waiting."""
        return self._sending is None or self._sending.is_done()

    def settle(self) -> None:
        """Wait for the copy to the arena and let the device memory go."""
        if self._sending is not None:
            self._sending.wait()
        self._sending = self._source = None

    def fetch(self) -> None:
        """Start the copy back, unless the bytes are on the device or on the way."""
        if self._source is None and self._buffer is None and self._place is not None:
            buffer = _bytes_on(self._link.device, self.nbytes)
            self._fetching, self._buffer = self._link.fetch(self._place, buffer), buffer

    def arrive(self) -> None:
        """Wait for the copy back."""
        if self._fetching is not None:
            self._fetching.wait()
            self._fetching = None

    def retire(self) -> None:
        """Let the fetched copy go; the one in the arena stays."""
        self.arrive()
        self._buffer = None

    def memory(self) -> Tensor:
        """The bytes on the device.

        Raises:
            TrainingError: they were changed since they were saved, or given up.
        """
        if self._place is None:
            raise TrainingError(
                "backward needs activations that were given up",
                do="after an offload's reset(), run forward again before backward",
            )
        if self._witness._version != self.version:
            raise changed_in_place()
        self.fetch()
        self.arrive()
        return cast(Tensor, self._source if self._buffer is None else self._buffer)

    def close(self) -> None:
        """Give everything up, once no copy runs any more."""
        self.settle()
        self.retire()
        if self._place is not None:
            self._place.free()
            self._place = None


class StoredBytes:
    """Autograd's share in `Bytes`: they are given up with the last view of them."""

    def __init__(
        self, tensor: Tensor, content: Bytes, block: BlockRecord, bury: Callable[[Bytes], None]
    ) -> None:
        self.identity = StorageWeakRef(tensor.untyped_storage())  # held: no other storage gets this address
        self.content, self.block, self._bury = content, block, bury
        self.nbytes, self.version = content.nbytes, content.version

    def __del__(self) -> None:
        self._bury(self.content)


@dataclass(frozen=True)
class StoredView:
    """A tensor whose storage left."""

    block: BlockRecord
    stored: StoredBytes
    geometry: Geometry

    def tensor(self) -> Tensor:
        """On the device."""
        return self.geometry.on(self.stored.content.memory())


@dataclass(frozen=True)
class KeptTensor:
    """A tensor that stayed."""

    block: BlockRecord
    kept: Tensor
    version: int

    def tensor(self) -> Tensor:
        """Itself."""
        if self.kept._version != self.version:
            raise changed_in_place()
        return self.kept


@dataclass(frozen=True)
class CastParameter:
    """A view of a parameter's cast copy."""

    block: BlockRecord
    parameter: nn.Parameter
    version: int
    geometry: Geometry

    def tensor(self) -> Tensor:
        """Cast anew."""
        if self.parameter._version != self.version:
            raise changed_in_place()
        return self.geometry.on(self.parameter.detach().to(self.geometry.dtype))


def cast_parameter(tensor: Tensor) -> nn.Parameter | None:
    """The parameter of which a tensor is the cast copy, or a view of it; None where it is anything else."""
    root = tensor if tensor._base is None else tensor._base
    if root.grad_fn is None or root.grad_fn.name() != "ToCopyBackward0":
        return None
    leaf = getattr(root.grad_fn.next_functions[0][0], "variable", None)
    if type(leaf) is not nn.Parameter or leaf.shape != root.shape or leaf.device != root.device:
        return None
    is_whole = root.is_contiguous() and root.untyped_storage().nbytes() == root.nbytes
    return leaf if is_whole and leaf.is_contiguous() else None


def changed_in_place() -> TrainingError:
    """The error that autograd itself would raise."""
    return TrainingError(
        "a tensor that backward needs was changed in place after the forward pass saved it",
        do="use an operation that makes a new tensor, or step the optimizer after backward",
    )


def _witness(tensor: Tensor) -> Tensor:
    """Has the tensor's version counter, and none of its memory."""
    witness = tensor.detach()
    witness.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return witness


def _bytes_on(device: torch.device, nbytes: int, storage: torch.UntypedStorage | None = None) -> Tensor:
    """A storage as bytes, or new memory."""
    if storage is None:
        return torch.empty(nbytes, dtype=torch.uint8, device=device)
    flat = torch.empty(0, dtype=torch.uint8, device=device)
    with torch.no_grad():
        return flat.set_(storage, 0, (nbytes,), (1,))

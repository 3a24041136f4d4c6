"""Saved activations of chosen blocks wait in host memory between forward and backward pass.

Problem  What autograd saves lies on the device until its backward pass, of the first block longest. Copied away
         and back beside the computing, it costs time only where the link is slower than the block.
Method   ``with offload.block(i, module):`` around a block's forward pass puts hooks on all that autograd saves in it.
         A storage is sent once, however many views of it are saved. Per pass, blocks in order::

             forward of i    sends its storages as they are saved; those of i - 1 are waited for at its end
             backward of i   its first unpacked tensor waits for what was fetched of i and starts to fetch i - 1

         so at most two blocks' tensors are on the device for the sake of copies. The order within a block is of no
         account: tensors are not unpacked in the reverse order of being packed. What was not fetched before is
         when it is asked for; what is still on the device is used there. The last block of a pass can stay
         (`keep_last`): its backward pass follows at once; else compute waits for it before the head.

         Not sent: parameters, buffers and views of them, what `exclude` names (RoPE tables, masks), storages
         of less than `min_bytes`, tensor subclasses (DTensor), memory of another device. Autocast's copies of
         parameters, 2 bytes each, are dropped and cast again: the same bits for a read of the parameter.

         Around ``torch.utils.checkpoint(use_reentrant=False)`` the hooks see what it saves, the inputs; around a
         block that recomputes at another level, what that level still saves. A graph that is dropped gives its
         places back. With ``retain_graph`` every backward pass fetches anew.

Exact    Bytes are copied, never converted: losses and gradients are those of a run without offload.
Limits   Wrap every block of the model, with ``leaves=False`` where it keeps its tensors: a block's end is when
         the one before is waited for, and its backward is when the one before is fetched. A tensor that several
         blocks save is sent by each of them: name it in `exclude`. In a compiled block autocast's copies are
         results like all others, and sent. One forward pass at a time (threads).
Source   ProTrain's SWAP (arXiv 2406.08334)
Checked  tests/runtime/memory/test_offload.py: bit-equal, with copies as late as a link may make them
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from scrimp.runtime.memory.arena import ArenaTooSmallError, HostArena
from scrimp.runtime.memory.link import Link
from scrimp.runtime.memory.saved_tensors import (
    BlockRecord,
    Bytes,
    CastParameter,
    Geometry,
    KeptTensor,
    StoredBytes,
    StoredView,
    cast_parameter,
)

MIN_BYTES = 16 * 1024
Packed = StoredView | KeptTensor | CastParameter


class ActivationOffload:
    """Sends what blocks save for backward to an arena and fetches it again.

    Args:
        arena: where to; may serve others too.
        link: how.
        num_blocks: of the model.
        keep_last: what the model's last block saves stays on the device.
        min_bytes: smaller storages stay.
        exclude: tensors that never leave, nor any that shares memory with them.
    """

    def __init__(
        self,
        arena: HostArena,
        link: Link,
        *,
        num_blocks: int,
        keep_last: bool = True,
        min_bytes: int = MIN_BYTES,
        exclude: Iterable[Tensor] = (),
    ) -> None:
        self.arena, self.link = arena, link
        self._num_blocks, self._keep_last, self._min_bytes = num_blocks, keep_last, min_bytes
        self._exclude = tuple(exclude)
        self._lock = threading.Lock()
        self._living: weakref.WeakSet[StoredBytes] = weakref.WeakSet()
        self._sending: deque[weakref.ref[StoredBytes]] = deque()
        self._dead: deque[Bytes] = deque()
        self._last: weakref.ref[BlockRecord] | None = None
        self._now: BlockRecord | None = None
        self._fetched: list[BlockRecord] = []
        self._largest_block = 0

    @contextlib.contextmanager
    def block(
        self,
        index: int,
        module: nn.Module | None = None,
        *,
        exclude: Iterable[Tensor] = (),
        leaves: bool = True,
    ) -> Iterator[None]:
        """Around the forward pass of one block; without gradients it does nothing.

        Args:
            index: of the block, rising within a pass.
            module: whose parameters and buffers stay; they are looked up when the first tensor is saved.
            exclude: tensors of this pass that stay.
            leaves: False: all that it saves stays.

        Raises:
            ArenaTooSmallError: out of the forward pass; call `reset` before the next step.
        """
        if not torch.is_grad_enabled():
            yield
            return
        with self._lock:
            block = self._begin(index, leaves and not (self._keep_last and index == self._num_blocks - 1))
        stays = _Stays(module, (*self._exclude, *exclude))
        with saved_tensors_hooks(partial(self._pack, block, stays), self._unpack):
            yield
        with self._lock:
            self._end(block)

    def reset(self) -> None:
        """Give up all that was saved, after a step that failed: every place is free again.

        A backward pass of what was given up raises TrainingError.
        """
        with self._lock:
            self._bury()
            for stored in list(self._living):
                stored.content.close()
            self._sending.clear()
            self._fetched, self._now, self._last = [], None, None

    # -- forward -------------------------------------------------------------------------------

    def _begin(self, index: int, leaves: bool) -> BlockRecord:
        self._bury()
        for block in self._fetched:  # of a graph that was retained
            _retire(block)
        self._fetched, self._now = [], None
        last = None if self._last is None else self._last()
        previous = last if last is not None and last.index < index else None
        block = BlockRecord(index, previous, leaves)
        self._last = weakref.ref(block)
        return block

    def _pack(self, block: BlockRecord, stays: _Stays, tensor: Tensor) -> Packed:
        parameter = cast_parameter(tensor) if block.leaves else None
        if parameter is not None:
            return CastParameter(block, parameter, parameter._version, Geometry.of(tensor))
        if not block.leaves or not self._may_leave(tensor) or stays.has(tensor):
            # Without its history: a result that its own function saves would hold itself.
            kept = tensor if tensor.grad_fn is None else tensor.detach()
            return KeptTensor(block, kept, tensor._version)
        with self._lock:
            self._bury()
            self._settle(lambda stored: stored.content.is_sent)
            stored = block.find(tensor) or self._send(block, tensor)
        return StoredView(block, stored, Geometry.of(tensor))

    def _may_leave(self, tensor: Tensor) -> bool:
        return (
            type(tensor) is self.link.kind
            and tensor.device == self.link.device
            and tensor.layout == torch.strided
            and not (tensor.is_conj() or tensor.is_neg())
            and tensor.untyped_storage().nbytes() >= self._min_bytes
        )

    def _send(self, block: BlockRecord, tensor: Tensor) -> StoredBytes:
        try:
            place = self.arena.take(tensor.untyped_storage().nbytes())
        except ArenaTooSmallError as error:
            raise self._too_small(block, error) from error
        try:
            content = Bytes(tensor, place, self.link)
        except BaseException:
            place.free()
            raise
        stored = StoredBytes(tensor, content, block, self._give_up)
        block.add(stored)
        self._living.add(stored)
        self._sending.append(weakref.ref(stored))
        return stored

    def _too_small(self, block: BlockRecord, error: ArenaTooSmallError) -> ArenaTooSmallError:
        enough = f"more than {self.arena.capacity:,} bytes of host memory"
        if self._largest_block:
            num_leaving = self._num_blocks - self._keep_last
            enough = (
                f"up to {num_leaving * self._largest_block:,} bytes of host memory "
                f"({num_leaving} blocks of {self._largest_block:,})"
            )
        return ArenaTooSmallError(
            f"activations of block {block.index} do not fit the arena in host memory",
            got=error.got,
            do=f"plan {enough}, offload fewer blocks, or take a smaller micro-batch",
        )

    def _end(self, block: BlockRecord) -> None:
        self._largest_block = max(self._largest_block, block.nbytes)
        is_last = block.index == self._num_blocks - 1
        self._settle(lambda stored: is_last or stored.block is not block)

    def _settle(self, is_due: Callable[[StoredBytes], bool]) -> None:
        """In the order of sending, as far as it is due."""
        while self._sending:
            stored = self._sending[0]()
            if stored is not None:
                if not is_due(stored):
                    return
                stored.content.settle()
            self._sending.popleft()

    # -- backward ------------------------------------------------------------------------------

    def _unpack(self, packed: Any) -> Tensor:
        saved: Packed = packed
        with self._lock:
            self._bury()
            if saved.block is not self._now:
                self._turn_to(saved.block)
            return saved.tensor()

    def _turn_to(self, block: BlockRecord) -> None:
        """The backward pass has come to this block."""
        near = [block] if block.previous is None else [block, block.previous]
        for other in self._fetched:
            if other not in near:
                _retire(other)
        self._now, self._fetched = block, near
        for stored in block.living():
            stored.content.fetch()
        for stored in block.living():
            stored.content.arrive()
        for before in near[1:]:
            for stored in before.living():
                stored.content.fetch()

    # -- the end of saved tensors ---------------------------------------------------------------

    def _give_up(self, content: Bytes) -> None:
        """Autograd has let go, perhaps from another thread or inside the garbage collector."""
        self._dead.append(content)
        if self._lock.acquire(blocking=False):  # else whoever holds it, or comes next, buries
            try:
                self._bury()
            finally:
                self._lock.release()

    def _bury(self) -> None:
        while self._dead:
            self._dead.popleft().close()


class _Stays:
    """Storages that do not leave."""

    def __init__(self, module: nn.Module | None, tensors: Iterable[Tensor]) -> None:
        self._module, self._tensors = module, tensors
        self._storages: set[int] | None = None

    def has(self, tensor: Tensor) -> bool:
        """Whether the tensor is a view of any of them, or of any parameter."""
        if isinstance(tensor, nn.Parameter) or isinstance(tensor._base, nn.Parameter):
            return True
        if self._storages is None:
            # Only now: FSDP2 gathers a block's parameters at the beginning of its forward pass.
            own = [] if self._module is None else [*self._module.parameters(), *self._module.buffers()]
            self._storages = {_storage_of(t) for t in chain(own, self._tensors)}
        return tensor.untyped_storage()._cdata in self._storages


def _storage_of(tensor: Tensor) -> int:
    with torch.no_grad():
        local: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return int(local.untyped_storage()._cdata)


def _retire(block: BlockRecord) -> None:
    for stored in block.living():
        stored.content.retire()

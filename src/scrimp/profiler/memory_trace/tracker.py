"""Counts live bytes of tensors while torch code runs, for real or on tensors without memory.

Problem  A plan needs the memory peak of code that may not fit the device; and on a CPU torch counts no peak at all.
Method   Every operator passes a dispatch mode. A storage that comes out and was not seen before is new memory; a weak
         reference tells when it is freed. Storages that only go in (parameters made earlier) count nothing.
         `MetaMode` outside makes the same code run without memory or arithmetic::

             with MetaMode(), StorageTracker() as tracker:
                 step()
             tracker.peak

         What a kernel allocates for itself and frees before it returns is not seen; `workspace` knows the large ones.
Limits   Memory of one device. A block that the allocator keeps for later use is not live.
Checked  tests/profiler/memory_trace/test_tracker.py: equal to torch's own profiler.
"""

from __future__ import annotations

import contextlib
import inspect
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from scrimp.profiler.memory_trace.workspace import WorkspaceRule, no_workspace
from scrimp.tracing import DispatchMode, made_of_others

_AROUND_DISPATCH = ("torch._compile", "torch._dynamo.eval_frame")
"""Modules whose functions torch calls between an operator and a dispatch mode."""


@dataclass
class Measured:
    """Filled when a measurement ends."""

    peak: int = 0


class StorageTracker(DispatchMode):
    """Live and peak bytes of all storages that are made while it is entered.

    Args:
        granule: the allocator gives whole multiples of so many bytes (512 on CUDA, 1 on a CPU).
        workspace: bytes that kernels take beside their results.
    """

    def __init__(self, *, granule: int = 1, workspace: WorkspaceRule = no_workspace) -> None:
        super().__init__()
        self.live = 0
        """Bytes that live now."""
        self.peak = 0
        """Most that lived at once since the start or the last `reset_peak`."""
        self.peak_operator = ""
        """What ran then."""
        self._granule, self._workspace = granule, workspace
        self._storages: dict[int, tuple[weakref.ref[Any], int]] = {}
        """By address of the C++ object: a reference that reports its end, and its bytes."""

    def reset_peak(self) -> None:
        """Measure the peak from here on."""
        self.peak, self.peak_operator = self.live, ""

    def touch(self, num_bytes: int) -> None:
        """For a moment so many bytes more lived than do now."""
        self._note(self.live + num_bytes, "remembered")

    @contextlib.contextmanager
    def measuring(self) -> Iterator[Measured]:
        """The peak of what runs inside, above what lives now; the outer peak goes on."""
        start, peak, operator = self.live, self.peak, self.peak_operator
        measured = Measured()
        self.reset_peak()
        try:
            yield measured
        finally:
            measured.peak = self.peak - start
            if peak >= self.peak:
                self.peak, self.peak_operator = peak, operator

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if made_of_others(types):
            return NotImplemented
        for tensor in _tensors((args, kwargs)):
            self._count(tensor, is_new=False)
        result = func(*args, **(kwargs or {}))
        before = self.live
        for tensor in _tensors(result):
            self._count(tensor, is_new=True)
        # Under a mode autograd sums gradients out of place, without one in place: the old sum goes at once.
        at_once = before if _is_sum_of_gradients(func) else self.live
        self._note(at_once + self._workspace(func, args, kwargs or {}), str(func))
        return result

    def _note(self, bytes_now: int, operator: str) -> None:
        if bytes_now > self.peak:
            self.peak, self.peak_operator = bytes_now, operator

    def _count(self, tensor: Tensor, *, is_new: bool) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        known = self._storages.get(key)
        if known is not None and (known[1] == 0 or not is_new):
            return
        num_bytes = -(-storage.nbytes() // self._granule) * self._granule if is_new else 0
        if known is not None:  # resized in place, perhaps
            self.live += num_bytes - known[1]
            self._storages[key] = known[0], num_bytes
            return
        self.live += num_bytes
        self._storages[key] = weakref.ref(storage, lambda _: self._free(key)), num_bytes

    def _free(self, key: int) -> None:
        self.live -= self._storages.pop(key)[1]


def _is_sum_of_gradients(func: Any) -> bool:
    """Whether autograd's engine itself adds what two paths give to one tensor: no Python code asked for it."""
    if func is not torch.ops.aten.add.Tensor or torch._C._current_graph_task_id() == -1:
        return False
    frame = inspect.currentframe()
    while frame is not None and frame.f_globals.get("__name__") in (__name__, *_AROUND_DISPATCH):
        frame = frame.f_back
    return frame is not None and frame.f_globals.get("__name__") == "torch.autograd.graph"


def _tensors(value: Any) -> Iterator[Tensor]:
    """All tensors in nested sequences and mappings."""
    if isinstance(value, Tensor):
        if value.layout == torch.strided:
            yield value
    elif isinstance(value, tuple | list):
        for part in value:
            yield from _tensors(part)
    elif isinstance(value, dict):
        yield from _tensors(tuple(value.values()))

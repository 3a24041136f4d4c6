"""Most bytes of tensors that live at once while code runs on a CPU, counted by torch itself.

Problem  torch's CPU allocator keeps no peak, and the resident set of the process holds much that is no tensor:
         libraries, and heap that was freed but not given back.
Method   Storages that live at the beginning are found among the objects of the garbage collector. torch's profiler
         then reports every allocation and release, and with ``a_i`` the bytes of event i::

             peak = bytes alive at the beginning + max over k of (a_1 + ... + a_k)

         No operator runs differently under the profiler, so no number changes; a dispatch mode would make some take
         other paths. The storages of the beginning are held until the end, because the profiler cannot say how
         large a block is whose allocation it did not see.
Limits   Counts this thread and autograd's work for it, not helper threads: of what attention's backward pass takes
         for every thread, one share is seen. What libraries allocate past torch's allocator is in no event. Cost
         in process CPU time, llama-3m: a few per cent of the step in fp32,
         40 % of it in emulated fp4, whose steps have 30 times as many operators.
Checked  tests/profiler/test_tensor_peak.py
"""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.autograd.profiler import profile


@dataclass
class TensorPeak:
    """Filled when the count ends."""

    num_bytes: int | None = None
    """None: not counted, because a profiler of the caller was running."""


@contextlib.contextmanager
def counting_tensors(is_apart: Callable[[Tensor], bool] = lambda _: False) -> Iterator[TensorPeak]:
    """Count what lives on the CPU while the body runs.

    Args:
        is_apart: whether a tensor that lives at the beginning belongs to another account, as host memory does that
            stands for a device's.
    """
    found = TensorPeak()
    if torch._C._autograd._profiler_enabled():  # only one at a time
        yield found
        return
    # Read at its first use: the start and end of each profile would be a line on the terminal.
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")
    alive = _storages(is_apart)
    before = sum(storage.nbytes() for storage in alive)
    with profile(profile_memory=True) as events:
        yield found
    del alive
    now = peak = 0
    results = events.kineto_results
    assert results is not None
    for event in results.events():
        if event.name() == "[memory]":
            now += event.nbytes()
            peak = max(peak, now)
    found.num_bytes = before + peak


def _storages(is_apart: Callable[[Tensor], bool]) -> list[torch.UntypedStorage]:
    """Every storage in the CPU's memory that a tensor of Python has, once."""
    found: dict[int, torch.UntypedStorage] = {}
    # By exact type: subclasses need not have a storage of their own, and `isinstance` would wake lazy objects.
    tensors = [thing for thing in gc.get_objects() if type(thing) in (Tensor, nn.Parameter)]
    gradients = [tensor.grad for tensor in tensors if tensor.is_leaf and tensor.grad is not None]
    for tensor in (*tensors, *gradients):
        if _is_in_memory(tensor) and not is_apart(tensor):
            storage = tensor.untyped_storage()
            found[storage.data_ptr()] = storage
    return list(found.values())


def _is_in_memory(tensor: Tensor) -> bool:
    """Whether it is on the CPU, and does not only say so, as what a trace of the compiler leaves behind does."""
    if tensor.device.type != "cpu" or tensor.layout is not torch.strided:
        return False
    try:
        tensor.untyped_storage().data_ptr()
    except RuntimeError:  # no attribute tells: "access the data pointer on an invalid python storage"
        return False
    return True

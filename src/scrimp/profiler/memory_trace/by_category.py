"""Live bytes by what they are for, and how many of each there were when most lived.

Problem  A peak says nothing of where a prediction of it is wrong.
Method   Each storage gets a category when it is made. Whoever makes it is found among the frames of Python: sharded
         data parallelism (`torch.distributed.fsdp`) gathers, objectives make logits, optimizers sum gradients. What is
         made while a model or an optimizer is built is theirs; all else is activations. When a new peak is reached,
         live bytes are noted by category, and gradients that autograd has left in parameters are found there.
         FSDP2 frees what it gathered by resizing storages, which is no operator: the method is watched.
Limits   A gradient of a weight is an activation between its product and its parameter: one at a time.
Checked  tests/profiler/memory_trace/test_by_category.py: torch's own MemTracker has the same peak
"""

from __future__ import annotations

import contextlib
import inspect
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from scrimp.profiler.memory_trace.tracker import StorageTracker
from scrimp.profiler.memory_trace.workspace import WorkspaceRule, no_workspace

WEIGHTS, GRADIENTS, OPTIMIZER, GATHERED, ACTIVATIONS, LOGITS = (
    "weights",
    "gradients",
    "optimizer",
    "gathered",
    "activations",
    "logits",
)
_OWNERS = {
    "torch.distributed.fsdp": GATHERED,
    "scrimp.objectives": LOGITS,
    "scrimp.runtime.parallel": GATHERED,
    "scrimp.optim": GRADIENTS,
    "scrimp.runtime.memory.gradients": GRADIENTS,
    "scrimp.runtime.memory.saved_tensors": ACTIVATIONS,
    "scrimp.models": ACTIVATIONS,
    "scrimp.gemm.head": LOGITS,
    "scrimp.gemm": ACTIVATIONS,
    "scrimp.runtime.pipeline": ACTIVATIONS,
}
"""Package to the category of what it makes; the innermost frame of any of them decides."""
_PLAIN = {Tensor, nn.Parameter, FakeTensor}
Found = Callable[[], Mapping[str, Iterable[Tensor]]]
"""Tensors whose category is known by where they are kept."""


class CategoryTracker(StorageTracker):
    """A tracker that tells categories apart.

    Args:
        found: asked at each new peak.
    """

    def __init__(
        self,
        *,
        granule: int = 1,
        workspace: WorkspaceRule = no_workspace,
        found: Found = dict,
    ) -> None:
        super().__init__(granule=granule, workspace=workspace)
        self._making: str | None = None
        self.at_peak: Counter[str] = Counter()
        """Bytes by category when most lived; kernels' workspaces are activations."""
        self.most: Counter[str] = Counter()
        """Most bytes of each category at any time, by who made them."""
        self._found = found
        self._live_by: Counter[str] = Counter()
        self._category: dict[int, str] = {}
        """By address of the storage."""
        self._resize = torch.UntypedStorage.resize_

    @contextlib.contextmanager
    def making(self, category: str) -> Iterator[None]:
        """All that is made inside is of this category."""
        before, self._making = self._making, category
        try:
            yield
        finally:
            self._making = before

    def __enter__(self) -> CategoryTracker:
        """Watch storages that are resized, too."""
        original, tracker = self._resize, self

        def resize(storage: Any, size: int) -> Any:
            result = original(storage, size)
            tracker._resized(storage)
            return result

        torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign,assignment]
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        """No longer."""
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Operators of tensors that hold others are seen when they reach those."""
        if not set(types) <= _PLAIN:
            return NotImplemented
        return super().__torch_dispatch__(func, types, args, kwargs)

    def reset_peak(self) -> None:
        """Measure peaks from here on."""
        super().reset_peak()
        self.at_peak, self.most = Counter(self._live_by), Counter(self._live_by)

    def _note(self, bytes_now: int, operator: str) -> None:
        if bytes_now <= self.peak:
            return
        super()._note(bytes_now, operator)
        self.at_peak = Counter(self._live_by)
        for category, tensors in self._found().items():
            for tensor in tensors:
                key = tensor.untyped_storage()._cdata
                if key in self._storages:
                    size = self._storages[key][1]
                    self.at_peak[self._category.get(key, ACTIVATIONS)] -= size
                    self.at_peak[category] += size
        self.at_peak[ACTIVATIONS] += bytes_now - self.at_peak.total()

    def _count(self, tensor: Tensor, *, is_new: bool) -> None:
        before = self.live
        super()._count(tensor, is_new=is_new)
        if self.live == before:
            return
        key = tensor.untyped_storage()._cdata
        if key not in self._category:
            self._category[key] = self._making or _category_of_maker()
        self._add(key, self.live - before)

    def _add(self, key: int, size: int) -> None:
        category = self._category[key]
        self._live_by[category] += size
        self.most[category] = max(self.most[category], self._live_by[category])

    def _free(self, key: int) -> None:
        size = self._storages[key][1]
        super()._free(key)
        category = self._category.pop(key, None)
        if category is not None:
            self._live_by[category] -= size

    def _resized(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key not in self._category:
            return
        reference, before = self._storages[key]
        now = -(-storage.nbytes() // self._granule) * self._granule
        self._storages[key] = reference, now
        self.live += now - before
        self._add(key, now - before)
        self._note(self.live, "resized")


def _category_of_maker() -> str:
    frame = inspect.currentframe()
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        for owner, category in _OWNERS.items():
            if name.startswith(owner):
                return category
        frame = frame.f_back
    return ACTIVATIONS

"""The reference back end under a trace: each quantization runs once, and afterwards only its bytes are repeated.

Problem  The reference quantizes piece by piece; of a large layer that is thousands of operators, in every pass of every
         choice of activations again, though the bytes are the same each time.
Method   Per operand and shape the first run is measured: what came out, and the most that lived meanwhile. Later ones
         allocate the same results, and tell the tracker of the same peak.
Limits   For fake tensors only: repeated results hold no numbers.
Checked  tests/profiler/memory_trace/test_tracker.py: equal to a trace without it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor

from scrimp.formats import QuantizedTensor
from scrimp.gemm.backends import ReferenceBackend
from scrimp.gemm.problem import Shape, Use
from scrimp.profiler.memory_trace.tracker import StorageTracker

Maker = Callable[[], Any]


class RememberedBackend(ReferenceBackend):
    """The reference's bytes. Set `tracker` before each trace."""

    def __init__(self) -> None:
        self.tracker: StorageTracker | None = None
        self._known: dict[Hashable, tuple[int, Maker]] = {}

    def choose(self, recipe: str, gemm: str, shape: Shape, device: torch.device) -> RememberedBackend:
        """Itself, as a `scrimp.gemm.BackendChooser`."""
        return self

    def prepare(self, x: Tensor, use: Use) -> Any:
        """As the reference; high precision is handed through."""
        if use.operand is None:
            return super().prepare(x, use)
        return self._remember(
            ("prepare", *_key(x, use)), lambda: super(RememberedBackend, self).prepare(x, use)
        )

    def store(self, x: Tensor, use: Use) -> QuantizedTensor:
        """As the reference."""
        found = self._remember(("store", *_key(x, use)), lambda: super(RememberedBackend, self).store(x, use))
        assert isinstance(found, QuantizedTensor)
        return found

    def load(self, codes: QuantizedTensor) -> Any:
        """As the reference."""
        key = ("load", tuple(codes.shape), codes.operand, codes.axis)
        return self._remember(key, lambda: super(RememberedBackend, self).load(codes))

    def _remember(self, key: Hashable, run: Maker) -> Any:
        tracker = self.tracker
        if tracker is None:
            return run()
        if key not in self._known:
            with tracker.measuring() as measured:
                result = run()
            self._known[key] = measured.peak, _maker(result)
            return result
        extra, make = self._known[key]
        tracker.touch(extra)
        return make()


def _key(x: Tensor, use: Use) -> tuple[Hashable, ...]:
    return tuple(x.shape), x.stride(), x.dtype, use.operand, use.axis


def _maker(value: Any) -> Maker:
    """Makes tensors of the same sizes, in the same dataclasses."""
    if isinstance(value, Tensor):
        size, stride, dtype, device = value.shape, value.stride(), value.dtype, value.device
        return lambda: torch.empty_strided(size, stride, dtype=dtype, device=device)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        kind = type(value)
        makers = {field.name: _maker(getattr(value, field.name)) for field in dataclasses.fields(value)}
        return lambda: kind(**{name: make() for name, make in makers.items()})
    return lambda: value

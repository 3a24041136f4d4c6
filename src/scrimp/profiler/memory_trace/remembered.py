"""The emulation under a trace: each quantization runs once, and afterwards only its bytes are repeated.

Problem  The emulation quantizes with dozens of operators, in every pass of every choice of activations again, though
         the bytes are the same each time; and a run is traced several times before it starts.
Method   Per operand, shape and device the first run of the process is measured: what came out, and the most that lived
         meanwhile. It and all later ones return tensors of these sizes, and tell the tracker of the same peak.
Limits   For tensors without memory only: repeated results hold no numbers.
Checked  tests/profiler/memory_trace/test_tracker.py: equal to a trace without it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor

from scrimp.formats import QuantizedTensor
from scrimp.formats.quantized import INEXACT_IN_BF16
from scrimp.gemm.backends import NumbaBackend
from scrimp.gemm.backends.reference import ReferenceOperand
from scrimp.gemm.deferred import Matrix, made
from scrimp.gemm.problem import Shape, Use
from scrimp.profiler.memory_trace.tracker import StorageTracker

Maker = Callable[[], Any]
_KNOWN: dict[Hashable, tuple[int, Maker]] = {}
"""Bytes that lived beside the results, and what makes results of the same sizes."""


class RememberedBackend(NumbaBackend):
    """The bytes of Numba's kernels on a CPU that has them, else the reference's. Set `tracker` before each trace, and
    whether CUDA's way is traced."""

    def __init__(self) -> None:
        self.tracker: StorageTracker | None = None
        self.stands_for_cuda = False
        self.is_reference = False
        """Whether the run is told to quantize by the reference."""

    def choose(self, recipe: str, gemm: str, shape: Shape, device: torch.device) -> RememberedBackend:
        """Itself, as a `scrimp.gemm.BackendChooser`."""
        return self

    def prepare(self, x: Matrix, use: Use) -> Any:
        """As it is; high precision is handed through."""
        x = made(x)
        if use.operand is None:
            return super().prepare(x, use)
        return self._remember(
            ("prepare", *_key(x, use)), lambda: super(RememberedBackend, self).prepare(x, use)
        )

    def takes(self, device: torch.device) -> bool:
        """What stands for CUDA is no CPU's."""
        return not (self.stands_for_cuda or self.is_reference) and super().takes(device)

    def multiplies_bf16_fast(self, device: torch.device) -> bool:
        """On CUDA always, whatever the CPU that traces it does."""
        return self.stands_for_cuda or super().multiplies_bf16_fast(device)

    def store(self, x: Matrix, use: Use) -> QuantizedTensor:
        """As it is."""
        x = made(x)
        found = self._remember(("store", *_key(x, use)), lambda: super(RememberedBackend, self).store(x, use))
        assert isinstance(found, QuantizedTensor)
        return found

    def load(self, codes: QuantizedTensor) -> Any:
        """As it is; scales beside values are those of the codes, and no memory of their own."""
        key = ("load", tuple(codes.shape), codes.operand, codes.axis)
        found = self._remember(key, lambda: _with_inner(super(RememberedBackend, self).load(codes), None))
        has_inner = found.is_exact_in_bf16 and codes.operand.scaling in INEXACT_IN_BF16
        if not has_inner:
            return found
        scales = codes.scale_values()
        return _with_inner(found, scales if codes.axis % 2 else scales.T)

    def _remember(self, key: Hashable, run: Maker) -> Any:
        tracker = self.tracker
        if tracker is None:
            return run()
        key = (self.stands_for_cuda, self.is_reference, key)
        if key not in _KNOWN:
            with tracker.measuring() as measured:
                result = run()
            _KNOWN[key] = measured.peak, _maker(result)
            del result
        extra, make = _KNOWN[key]
        tracker.touch(extra)
        return make()


def _with_inner(operand: ReferenceOperand, scales: Tensor | None) -> ReferenceOperand:
    """The same values with other scales beside them."""
    return dataclasses.replace(operand, quantized=dataclasses.replace(operand.quantized, inner=scales))


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

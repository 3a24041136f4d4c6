"""Tensors without memory that pass for tensors of the CPU: code runs on them as on real ones, and computes nothing.

Problem  A trace of a model that fits no device needs tensors without memory. torch's `FakeTensorMode` has them, and
         loads torch's compiler: a second before the first operator, which is as long as loading torch itself.
Method   torch's meta device knows, for every operator, the shape, type and storage of its result. A `MetaTensor` is a
         meta tensor that says it is on the CPU, so that autocast, autograd and attention choose what they choose
         there. `MetaMode` hands each operator the meta tensors inside and wraps what comes out::

             with MetaMode(), StorageTracker() as tracker:
                 step()

         A real tensor becomes one without memory where an operator reads it. Only a tensor of one number that is made
         inside stays real while it meets numbers alone, and can be read: optimizers count their steps so.
Limits   One device, the CPU; tensors without memory mean nothing outside the mode. Numbers of them cannot be read.
Checked  tests/profiler/memory_trace/test_meta_mode.py: equal to a trace by `FakeTensorMode`
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from scrimp.profiler.memory_trace.result_shapes import result_of
from scrimp.tracing import DispatchMode, made_of_others

_CPU, _META = torch.device("cpu"), torch.device("meta")
_DEVICE_OF = torch.ops.prim.device.default
"""What torch calls to ask a tensor for its device."""
_MADE_OF_NUMBERS = torch.ops.aten.lift_fresh.default
"""What `torch.tensor` calls."""
_MAY_BE_REPLACED = torch.ops.aten._has_compatible_shallow_copy_type.default
"""What torch asks when a tensor is made to be another."""


class MetaTensor(Tensor):
    """Shape, type and storage of a meta tensor, on the CPU as all code sees it."""

    meta: Tensor
    """What operators are given."""

    @staticmethod
    def __new__(cls, meta: Tensor) -> MetaTensor:
        made = Tensor._make_subclass(cls, meta, dispatch_device=True, device_for_backend_keys=_CPU)
        made.meta = meta
        return made

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """Python's question; C++ asks below."""
        return _CPU

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """What torch asks of a tensor itself; an operator outside of a mode has no result."""
        answers = {_DEVICE_OF: _CPU, _MAY_BE_REPLACED: True}
        return answers.get(func, NotImplemented)


class MetaMode(DispatchMode):
    """Inside, all that is made is a `MetaTensor`."""

    def __init__(self) -> None:
        super().__init__()
        self._numbers = WeakTensorKeyDictionary()
        """Tensors of one number that is known, as a count of steps: real ones that were made inside."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator on the meta device, or on numbers that are known."""
        if made_of_others(types):
            return NotImplemented
        if func is _DEVICE_OF:
            return _CPU
        named = kwargs or {}
        inputs = _tensors([*args, *named.values()])
        is_made = func is _MADE_OF_NUMBERS and not isinstance(args[0], MetaTensor)
        if is_made or (inputs and all(one in self._numbers for one in inputs)):
            result = func(*args, **named)
            if is_made or all(one.numel() == 1 for one in _tensors([result])):
                self._numbers.update({one: True for one in _tensors([result]) if one.numel() == 1})
                return result
        for one in _written(func, args, named):
            self._numbers.pop(one, None)
        given, named = [_meta(value) for value in args], {name: _meta(value) for name, value in named.items()}
        if named.get("device") is not None:
            named["device"] = _META
        result = result_of(func, given, named)
        if result is None:
            result = func(*given, **named)
        if torch.Tag.inplace_view in func.tags:
            args[0].data = MetaTensor(args[0].meta)  # of another shape now
        return _wrapped(result, inputs)


def _tensors(values: Sequence[Any]) -> list[Tensor]:
    """All of them, also in sequences."""
    found: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, list | tuple):
            found += _tensors(value)
    return found


def _written(func: Any, args: Sequence[Any], named: Mapping[str, Any]) -> list[Tensor]:
    """The tensors that an operator changes."""
    if not func._schema.is_mutable:
        return []
    given = {**named, **{one.name: value for one, value in zip(func._schema.arguments, args, strict=False)}}
    names = [
        one.name for one in func._schema.arguments if one.alias_info is not None and one.alias_info.is_write
    ]
    return _tensors([given.get(name) for name in names])


def _meta(value: Any) -> Any:
    """An operator's argument, with meta tensors for all tensors."""
    if isinstance(value, MetaTensor):
        return value.meta
    if isinstance(value, list | tuple):
        return [_meta(one) for one in value]
    if isinstance(value, Tensor):
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=_META)
    return value


def _wrapped(result: Any, inputs: Sequence[Tensor]) -> Any:
    """What an operator returns; of one in place, or into a tensor that it was given, that tensor."""
    if isinstance(result, Tensor):
        for one in inputs:
            if isinstance(one, MetaTensor) and one.meta is result:
                return one
        return MetaTensor(result)
    if isinstance(result, list | tuple):
        return cast(Any, type(result))([_wrapped(one, inputs) for one in result])
    return result

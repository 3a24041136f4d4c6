"""One forward pass of a module on tensors without memory, every operator noted with the axes of its tensors.

The module that runs is a twin: a copy of the user's whose parameters and buffers are fake tensors on the CPU, so that
no weight is read, copied or changed. It runs in training mode, without gradients: autograd is known, what has to be
found is the forward pass.

Values     Tensors are numbered in the order in which they come to life, parameters and buffers by their names. What an
           operator reads is noted as such numbers, so that two passes can be compared.
Gradients  Whether a value needs one, and whether it is made of parameters alone, is followed beside the axes.
Limits     Code that asks for a number (`item`, `if tensor`) cannot run so, and is refused.
Checked    tests/runtime/parallel/traced/test_share_finding.py
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from scrimp.errors import ModelError
from scrimp.runtime.parallel.traced.axes import Dims
from scrimp.runtime.parallel.traced.operator_rules import (
    RULES,
    Call,
    axes_after,
    free,
    slice_of,
    values_are_read,
)

CONSTANT = "it is a constant"
_SAME_NUMBERS = ("aten.clone", "aten.alias", "aten.detach", "aten.lift_fresh")


@dataclass
class Value:
    """A tensor of the pass."""

    number: int
    shape: tuple[int, ...]
    dims: Dims
    needs_gradient: bool = False
    parameters: frozenset[str] = frozenset()
    """Those that it is made of, if of nothing else that needs a gradient."""
    is_of_parameters: bool = False
    is_floating: bool = True
    is_input: bool = False
    """Whether it is one of the example's tensors, in any shape."""


@dataclass(frozen=True)
class Record:
    """One call of an operator."""

    name: str
    module: str
    """The innermost module that ran."""
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    arguments: tuple[Any, ...]
    """Those that are no tensors."""
    start: tuple[int, int] | None
    """Where a slice is taken: the dimension, and the first index."""
    reads_values: bool


@dataclass
class Trace:
    """One forward pass."""

    values: list[Value] = field(default_factory=list)
    records: list[Record] = field(default_factory=list)
    parameters: dict[str, int] = field(default_factory=dict)
    """Values of the parameters by their names."""
    outputs: list[int] = field(default_factory=list)
    """Values that the module returned."""
    returned: list[tuple[str, int]] = field(default_factory=list)
    """Modules that returned one tensor, with its value, in the order in which they did."""
    calls: dict[str, int] = field(default_factory=dict)
    draws: bool = False
    """Whether random numbers were drawn."""
    opaque: list[str] = field(default_factory=list)
    """Types of returned objects that may hold tensors and cannot be looked into."""


def twin_of(module: nn.Module) -> tuple[nn.Module, FakeTensorMode]:
    """A copy without memory, in training mode, and the mode that its tensors live in.

    Raises:
        ModelError: it cannot be copied.
    """
    tensors = dict([*module.named_parameters(), *module.named_buffers()])
    _refuse_others_than_plain(tensors)
    mode, known = FakeTensorMode(allow_non_fake_inputs=True), dict[int, Any]()
    with mode:
        for tensor in tensors.values():
            fake = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
            is_parameter = isinstance(tensor, nn.Parameter)
            known[id(tensor)] = (
                nn.Parameter(fake, requires_grad=tensor.requires_grad) if is_parameter else fake
            )
    try:
        twin = copy.deepcopy(module, known)
    except Exception as error:
        raise ModelError(
            "the model cannot be copied, and so not traced",
            got=f"{type(error).__name__}: {error}",
            expected="a module that copy.deepcopy takes",
            do="find the plan before the model is compiled or wrapped",
        ) from error
    return twin.train(), mode


def _refuse_others_than_plain(tensors: Mapping[str, Tensor]) -> None:
    for name, tensor in tensors.items():
        if type(tensor.detach()) is not Tensor:
            raise ModelError(
                "only plain tensors are shared out among ranks",
                got=f"{name}, a {type(tensor.detach()).__name__}",
                do="cut layers first, and lay what is left over other ranks then",
            )


def trace(
    twin: nn.Module, mode: FakeTensorMode, arguments: Sequence[Any], keywords: Mapping[str, Any]
) -> Trace:
    """A pass of a twin; its parameters and the tensors among the arguments are its beginnings.

    Raises:
        ModelError: the module failed on tensors without memory.
    """
    with mode:
        inputs, keys = pytree.tree_map_only(Tensor, _fake, (tuple(arguments), dict(keywords)))
    recorder = _Recorder(twin, inputs, keys)
    try:
        with torch.no_grad(), mode, recorder.following(twin), recorder:
            returned = twin(*inputs, **keys)
    except Exception as error:
        raise ModelError(
            "the model cannot be traced",
            got=f"{type(error).__name__}: {error}",
            expected="a forward pass of the example that asks for no number of a tensor",
            do="give an example that the model runs on; leave masks out where they are optional",
        ) from error
    recorder.end(returned)
    return recorder.trace


def _fake(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", requires_grad=tensor.requires_grad)


class _Recorder(TorchDispatchMode):
    def __init__(self, twin: nn.Module, *inputs: Any) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.trace = Trace()
        self._numbers: dict[int, int] = {}
        self._kept: list[Any] = []  # tensors, so that no other gets the id of one that is gone
        self._sharing: dict[int, list[int]] = {}
        self._stack = [""]
        for name, parameter in twin.named_parameters():
            value = self._new(parameter, free(parameter.shape))
            value.needs_gradient, value.is_of_parameters = parameter.requires_grad, True
            value.parameters = frozenset([name])
            self.trace.parameters[name] = value.number
        for buffer in twin.buffers():
            self._new(buffer, free(buffer.shape, CONSTANT))
        for tensor in pytree.tree_leaves(inputs):
            if isinstance(tensor, Tensor):
                value = self._new(tensor, free(tensor.shape, "it is the model's input"))
                value.is_input, value.needs_gradient = True, tensor.requires_grad

    def _new(self, tensor: Tensor, dims: Dims) -> Value:
        value = Value(len(self.trace.values), tuple(tensor.shape), dims)
        value.is_floating = tensor.is_floating_point()
        self.trace.values.append(value)
        self._numbers[id(tensor)] = value.number
        self._kept.append(tensor)
        if isinstance(tensor, FakeTensor):
            self._sharing.setdefault(tensor.untyped_storage()._cdata, []).append(value.number)
        return value

    def _value(self, tensor: Tensor) -> Value:
        number = self._numbers.get(id(tensor))
        return (
            self._new(tensor, free(tensor.shape, CONSTANT)) if number is None else self.trace.values[number]
        )

    @contextlib.contextmanager
    def following(self, twin: nn.Module) -> Iterator[None]:
        """Inside, it is known which module runs."""
        handles = []
        for name, module in twin.named_modules():
            handles.append(
                module.register_forward_pre_hook(lambda *_, name=name: self._enter(name), prepend=True)
            )
            handles.append(
                module.register_forward_hook(lambda _, __, found, name=name: self._leave(name, found))
            )
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _enter(self, name: str) -> None:
        self._stack.append(name)
        self.trace.calls[name] = self.trace.calls.get(name, 0) + 1

    def _leave(self, name: str, found: Any) -> None:
        self._stack.pop()
        number = self._numbers.get(id(found)) if isinstance(found, Tensor) else None
        # Anything else that a module returns has no one value.
        self.trace.returned.append((name, -1 if number is None else number))

    def end(self, returned: Any) -> None:
        """Note what the module returned."""
        for leaf in pytree.tree_leaves(returned):
            if isinstance(leaf, Tensor):
                self.trace.outputs.append(self._value(leaf).number)
            elif leaf is not None and not isinstance(leaf, (bool, int, float, str)):
                self.trace.opaque.append(type(leaf).__name__)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = f"{function.namespace}.{function._schema.name.split('::')[1]}".replace("_unsafe_view", "view")
        if name.startswith("prim."):
            return function(*args, **(kwargs or {}))
        arguments = _in_order(function, args, kwargs or {})
        found = function(*args, **(kwargs or {}))
        results = tuple(one for one in pytree.tree_leaves(found) if isinstance(one, Tensor))
        if name in _SAME_NUMBERS and len(results) == 1:
            # Whether a copy is made at all depends on sizes alone: it is the same value.
            self._numbers[id(found)] = self._value(args[0]).number
            self._kept.append(found)
            return found
        call = Call(name, function, arguments, results, lambda tensor: self._value(tensor).dims)
        read = [self._value(tensor) for tensor in call.tensors]
        self.trace.draws |= name not in RULES and torch.Tag.nondeterministic_seeded in function.tags
        after = axes_after(call)
        outputs = tuple(self._note(tensor, dims, read) for tensor, dims in zip(results, after, strict=True))
        others = tuple(leaf for leaf in pytree.tree_leaves(arguments) if not isinstance(leaf, Tensor))
        inputs = tuple(value.number for value in read)
        start = (call.at(1, 0) % call.at(0).dim(), slice_of(call)[0]) if name == "aten.slice" else None
        self.trace.records.append(
            Record(name, self._stack[-1], inputs, outputs, others, start, values_are_read(call))
        )
        return found

    def _note(self, tensor: Tensor, dims: Dims, read: Sequence[Value]) -> int:
        """A result, which may be one of the arguments, changed in place."""
        known = self._numbers.get(id(tensor))
        value = self._new(tensor, dims) if known is None else self.trace.values[known]
        if value.shape != tuple(tensor.shape):  # `transpose_` and the like
            value.shape, value.dims = tuple(tensor.shape), dims
        needing = [one for one in read if one.needs_gradient]
        is_number = tensor.is_floating_point() or tensor.is_complex()
        value.needs_gradient = bool(needing) and is_number
        value.is_of_parameters = bool(read) and all(one.is_of_parameters for one in read)
        value.parameters = frozenset[str]().union(*(one.parameters for one in needing))
        value.is_input = len(read) == 1 and read[0].is_input
        if known is not None and value.needs_gradient:  # and with it all that has the same memory
            for number in self._sharing.get(tensor.untyped_storage()._cdata, ()):
                other = self.trace.values[number]
                other.needs_gradient, other.is_of_parameters = True, False
        return value.number


def _in_order(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
    """All arguments in the order of the schema."""
    found = list(args)
    for argument in function._schema.arguments[len(args) :]:
        default = argument.default_value if argument.has_default_value() else None
        found.append(kwargs.get(argument.name, default))
    return tuple(found)

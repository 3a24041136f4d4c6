"""Where the residual stream of a model is, found by watching one forward pass.

Problem  Noise in one layer reaches others through the residual stream. To say how much, the planner must know which
         linear layers read the stream at which point, and which one writes their result back.
Method   Pre-norm transformers share one form, whatever their modules are called:

             x[s+1] = x[s] + exit(... entries(norm(x[s])))          s = 0 .. S-1, a sub-layer

         A *node* is a norm whose input is the stream. Norm-like modules are watched as they are called; the
         first one is node 0. A later one is the next node if its input has the same shape and equals the
         last node's plus the output of the last linear layer that ran, to rounding. That layer is
         the sub-layer's exit, all others since the last node are its entries.
         Routed experts end in no linear layer: what a module around a grouped one returns may be what is added, too.
Limits   Post-norm and parallel blocks, dropout on branches, and modules without norms have no such
         form: `find_structure` says None, and gains are then measured exactly, with a pass per layer.
Checked  tests/statistics/test_structure.py
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from scrimp.gemm.grouped import GroupedLinear

_BRANCH_TOLERANCE = 0.05


@dataclass(frozen=True)
class SubLayer:
    """The linear layers between two nodes."""

    entries: tuple[str, ...]
    exit: str
    branch: str = ""
    """The module whose result is added to the stream; empty: the exit itself."""


@dataclass(frozen=True)
class Structure:
    """A residual stream with S sub-layers and S + 1 nodes."""

    nodes: tuple[str, ...]
    """Names of the norms, in order."""
    sublayers: tuple[SubLayer, ...]

    def place(self, layer: str) -> int | None:
        """Number of a layer's sub-layer, None for what is not on the stream."""
        return self._places.get(layer)

    @cached_property
    def _places(self) -> dict[str, int]:
        return {name: s for s, sub in enumerate(self.sublayers) for name in (*sub.entries, sub.exit)}


def find_structure(
    model: nn.Module, layers: Collection[str], forward: Callable[[], object]
) -> Structure | None:
    """Watch one forward pass.

    Args:
        layers: names of the linear layers that must all lie on the stream.
        forward: runs the model once, without gradients.
    """
    tracer = _Tracer(set(layers))
    _watch(model, tracer, forward)
    return tracer.structure()


def find_part(
    model: nn.Module, layers: Collection[str], forward: Callable[[], object]
) -> dict[str, SubLayer | None]:
    """What the stages of a pipeline have here: node to the sub-layer after it; None: it is the last node, or no
    sub-layer was recognised. Arguments as of `find_structure`."""
    tracer = _Tracer(set(layers))
    _watch(model, tracer, forward, in_stages=True)
    return tracer.after


def joined(
    parts: Sequence[Mapping[str, SubLayer | None]], order: Callable[..., list[str]], layers: Collection[str]
) -> Structure | None:
    """The structure of the whole model, from what each rank of a pipeline has of it.

    Args:
        order: from the lists of ranks to the names of all.
        layers: that must lie on the stream, of all ranks.
    """
    nodes = order([list(part) for part in parts])
    after = {node: sub for part in parts for node, sub in part.items()}
    found = [after[node] for node in nodes]
    if not found or found[-1] is not None or any(sub is None for sub in found[:-1]):
        return None
    sublayers = tuple(sub for sub in found if sub is not None)
    if sorted(name for sub in sublayers for name in (*sub.entries, sub.exit)) != sorted(layers):
        return None
    return Structure(tuple(nodes), sublayers)


def _watch(
    model: nn.Module, tracer: _Tracer, forward: Callable[[], object], *, in_stages: bool = False
) -> None:
    with contextlib.ExitStack() as stack:
        if in_stages:
            stack.callback(model.register_forward_hook(tracer.end_stage).remove)
        for name, module in model.named_modules():
            if name in tracer.linears:
                stack.callback(module.register_forward_hook(tracer.linear(name)).remove)
            elif is_norm(module):
                stack.callback(module.register_forward_pre_hook(tracer.norm(name)).remove)
            elif any(is_grouped(inner) for inner in module.modules()) and name:
                stack.callback(module.register_forward_hook(tracer.around(name)).remove)
        with torch.no_grad():
            forward()


def is_norm(module: nn.Module) -> bool:
    """Whether a module normalises, by the name of its class."""
    return "norm" in type(module).__name__.lower() and not isinstance(module, nn.modules.batchnorm._BatchNorm)


def is_grouped(module: nn.Module) -> bool:
    """Whether it holds the matrices of several experts."""
    return isinstance(module, GroupedLinear)


class _Tracer:
    """Collects nodes and what ran between them."""

    def __init__(self, linears: set[str]) -> None:
        self.linears = linears
        self._nodes: list[str] = []
        self._sublayers: list[SubLayer] = []
        self._since: list[str] = []
        self._stream: Tensor | None = None
        self._last: dict[str, Tensor] = {}
        """What may be added to the stream next: the last linear layer's result under no name, and others' by theirs."""
        self.after: dict[str, SubLayer | None] = {}
        """From each node, of any stage, to the sub-layer after it."""

    def norm(self, name: str) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        """A hook that looks at a norm's input."""

        def hook(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            x = inputs[0].detach() if inputs else None
            if x is None or name in self._nodes:
                return
            if self._stream is None and not self._since:
                self._nodes.append(name)
                self._stream = x.clone()
                return
            for branch, result in self._last.items():
                if self._continues(x, result):
                    self._nodes.append(name)
                    self._sublayers.append(SubLayer(tuple(self._since[:-1]), self._since[-1], branch))
                    self._since, self._stream, self._last = [], x.clone(), {}
                    return

        return hook

    def linear(self, name: str) -> Callable[[nn.Module, object, Tensor], None]:
        """A hook that keeps a linear layer's result."""

        def hook(module: nn.Module, inputs: object, output: Tensor) -> None:
            self._since.append(name)
            self._last = {"": output.detach().clone()}  # the model may add to it in place

        return hook

    def around(self, name: str) -> Callable[[nn.Module, object, Tensor | tuple[Tensor, ...]], None]:
        """A hook that keeps the result of a module that has grouped layers."""

        def hook(module: nn.Module, inputs: object, output: Tensor | tuple[Tensor, ...]) -> None:
            result = output[0] if isinstance(output, tuple) else output
            self._last[name] = result.detach().clone()

        return hook

    def _continues(self, x: Tensor, result: Tensor) -> bool:
        """Whether x is the stream plus what a layer gave."""
        if self._stream is None or x.shape != self._stream.shape or not self._since:
            return False
        if result.numel() != x.numel():
            return False
        branch = result.float().view_as(x)
        rest = torch.linalg.vector_norm(x.float() - self._stream.float() - branch)
        rounding = torch.finfo(x.dtype).eps / 2 * float(x.float().norm())  # of the sum, once
        return float(rest) <= _BRANCH_TOLERANCE * float(branch.norm()) + rounding

    def end_stage(self, module: nn.Module, inputs: object, output: Tensor) -> None:
        """A hook of the model: what it returns is the stream, unless the last node has closed it."""
        if self._since:
            for branch, result in self._last.items():
                if self._continues(output.detach(), result):
                    self._sublayers.append(SubLayer(tuple(self._since[:-1]), self._since[-1], branch))
                    break
        found = dict.fromkeys(self._nodes, None) | dict(zip(self._nodes, self._sublayers, strict=False))
        self.after.update(found)
        self._nodes, self._sublayers, self._since = [], [], []
        self._stream, self._last = None, {}

    def structure(self) -> Structure | None:
        """The stream, if every layer lies on it once."""
        found = [name for sub in self._sublayers for name in (*sub.entries, sub.exit)]
        if not self._sublayers or sorted(found) != sorted(self.linears):
            return None
        return Structure(tuple(self._nodes), tuple(self._sublayers))

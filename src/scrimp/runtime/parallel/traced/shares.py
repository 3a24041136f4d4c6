"""Which axes of a traced model ranks can share, and what follows for each layer.

A leaf (`axes`) is shared where all of this holds:

    nothing blocks it, its size divides by the ranks, and the model neither takes nor returns it;
    every dimension that has it is cut evenly: of a fused dimension, all that lies in it;
    it is added up in linear layers alone, along the inputs of their weights: there the partial sums are added up
    (and in Scrimp's own norms over all heads, whose sums of squares are);
    what comes in without it and needs a gradient is a linear layer's input, or made of parameters alone, which
    are used nowhere else: gradients of both are added up.

These are Redco's two rules, said of axes instead of names: the layers that make it are cut by their outputs, those that
add it up by their inputs, and attention in between keeps heads apart. A layer that two leaves would cut goes to the one
that cuts more numbers for each number that is exchanged.

Words    A linear layer whose outputs no other layer reads (a head) is cut by its outputs, which are gathered. An
         embedding that shares its weight, or that reads the model's inputs, is cut by rows.
Source   Redco, arXiv 2310.16355; Megatron-LM, arXiv 1909.08053
Checked  tests/runtime/parallel/traced/test_share_finding.py
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property

from torch import nn

from scrimp.gemm import has_own_forward, is_linear, is_transposed
from scrimp.models.blocks import RMSNorm
from scrimp.runtime.parallel.traced.axes import Axis
from scrimp.runtime.parallel.traced.tensor_plan import ParameterCut
from scrimp.runtime.parallel.traced.tracing import Record, Trace, Value


@dataclass
class Share:
    """A leaf that ranks share."""

    leaf: Axis
    cuts: dict[str, ParameterCut] = field(default_factory=dict)
    firsts: set[str] = field(default_factory=set)
    """Layers that make it of tensors without it, which need a gradient."""
    lasts: set[str] = field(default_factory=set)
    """Layers that add it up."""
    added: set[str] = field(default_factory=set)
    """Parameters whose gradients are added up."""
    norms: set[str] = field(default_factory=set)
    """Norms over it, whose sums of squares are added up."""
    exchanged: int = 0
    """Numbers that are added up between ranks, forward."""


class TracedModel:
    """A twin, and its pass."""

    def __init__(self, twin: nn.Module, trace: Trace, ranks: int) -> None:
        self.twin, self.trace, self.ranks = twin, trace, ranks
        self.modules = dict(twin.named_modules())
        self.linears = {
            name: module
            for name, module in self.modules.items()
            if is_linear(module) and not has_own_forward(module) and not _has_hooks(module)
        }
        self.embeddings = {
            name: module for name, module in self.modules.items() if _is_plain_embedding(module)
        }
        self.names = {id(parameter): name for name, parameter in twin.named_parameters()}

    @cached_property
    def with_leaf(self) -> dict[Axis, set[int]]:
        """By leaf the values that have it."""
        found: dict[Axis, set[int]] = {}
        for value in self.trace.values:
            for dim in value.dims:
                for leaf in () if dim is None else dim.leaves():
                    found.setdefault(leaf, set()).add(value.number)
        return found

    @cached_property
    def touching(self) -> dict[int, list[Record]]:
        """By value the records that read or make it."""
        found: dict[int, list[Record]] = {}
        for record in self.trace.records:
            for number in {*record.inputs, *record.outputs}:
                found.setdefault(number, []).append(record)
        return found

    def value(self, parameter: str) -> Value:
        """The traced value of a parameter."""
        return self.trace.values[self.trace.parameters[parameter]]

    def weight(self, layer: str) -> str:
        """The name of a layer's weight: of one that several layers share, the first."""
        return self.names[id(self.modules[layer].weight)]

    def bias(self, layer: str) -> str | None:
        """The name of a layer's bias."""
        bias = getattr(self.modules[layer], "bias", None)
        return None if bias is None else self.names[id(bias)]

    def output_dimension(self, layer: str) -> int:
        """Which dimension of a linear layer's weight is of its outputs."""
        return int(is_transposed(self.modules[layer]))

    def leaves(self, layer: str, *, outputs: bool) -> list[Axis]:
        """Leaves of a linear layer's outputs or inputs."""
        number = self.output_dimension(layer) if outputs else 1 - self.output_dimension(layer)
        dim = self.value(self.weight(layer)).dims[number]
        return [] if dim is None else list(dim.leaves())

    def candidates(self) -> Iterator[Axis]:
        """Leaves of the linear layers' outputs, in the order of the model, each once."""
        yield from dict.fromkeys(leaf for layer in self.linears for leaf in self.leaves(layer, outputs=True))

    def share(self, leaf: Axis) -> Share | str:
        """What follows if ranks share a leaf; or why they cannot."""
        found = Share(leaf)
        why = self._obstacle(leaf) or self._cut_parameters(found) or self._follow(found)
        if why:
            return why
        if not found.lasts:
            return "no linear layer adds it up"
        return self._uses_elsewhere(found) or found

    def _obstacle(self, leaf: Axis) -> str | None:
        if leaf.blocked:
            return leaf.blocked
        if leaf.size % self.ranks:
            return f"{leaf.size} of them do not divide by {self.ranks} ranks"
        if self.trace.opaque:
            return f"the model returns a {self.trace.opaque[0]}, which may hold it"
        if any(number in self.with_leaf[leaf] for number in self.trace.outputs):
            return "the model returns it"
        return None

    def _cut_parameters(self, found: Share) -> str | None:
        names = {number: name for name, number in self.trace.parameters.items()}
        for number in self.with_leaf[found.leaf]:
            value = self.trace.values[number]
            having = [n for n, dim in enumerate(value.dims) if dim is not None and found.leaf in dim.leaves()]
            dim = value.dims[having[0]]
            assert dim is not None
            if len(having) > 1 or dim.local_size({found.leaf}, self.ranks) * self.ranks != dim.size:
                return "it is only a part of a dimension"
            if number in names:
                ranges = dim.shared_ranges(found.leaf)
                if ranges is None:
                    return "the shares of a parameter would be scattered"
                found.cuts[names[number]] = ParameterCut(value.shape, having[0], tuple(ranges))
        return None

    def _follow(self, found: Share) -> str | None:
        """Each operator that has to do with it."""
        here = self.with_leaf[found.leaf]
        records = {id(record): record for number in here for record in self.touching.get(number, ())}
        for record in records.values():
            if not record.reads_values or not record.outputs:
                continue
            if self._is_norm(record.module, found.leaf):
                found.norms.add(record.module)
                continue
            if not any(number in here for number in record.outputs):
                why = self._added_up(found, record)
            else:
                why = self._coming_in(found, record, here)
            if why:
                return why
        return None

    def _is_norm(self, module: str, leaf: Axis) -> bool:
        """Whether it divides numbers along the leaf by their root mean square, as `AllHeadsNorm` does for ranks."""
        norm = self.modules[module]
        if type(norm) is not RMSNorm or (norm.offset, norm.scale) != (0.0, 1.0):
            return False
        dim = self.value(self.names[id(norm.weight)]).dims[0]
        return dim is not None and leaf in dim.leaves()

    def _added_up(self, found: Share, record: Record) -> str | None:
        layer = record.module
        if layer not in self.linears or found.leaf not in self.leaves(layer, outputs=False):
            return f"{record.name} adds it up{_in(layer)}"
        found.lasts.add(layer)
        found.exchanged += sum(math.prod(self.trace.values[number].shape) for number in record.outputs)
        return None

    def _coming_in(self, found: Share, record: Record, here: set[int]) -> str | None:
        """What an operator reads beside it."""
        for number in record.inputs:
            value = self.trace.values[number]
            if number in here or not value.is_floating or 0 in value.shape:
                continue
            if record.module in self.linears and found.leaf in self.leaves(record.module, outputs=True):
                found.firsts.add(record.module)
            elif value.is_of_parameters:
                found.added |= value.parameters
            elif value.needs_gradient:
                return f"{record.name} brings it together with what all ranks have{_in(record.module)}"
        return None

    def _uses_elsewhere(self, found: Share) -> str | None:
        """A parameter whose gradients would be added up must be used for this leaf alone, by its own module."""
        here, numbers = self.with_leaf[found.leaf], self.trace.parameters
        for record in self.trace.records if found.added else ():
            read = [self.trace.values[number] for number in record.inputs]
            used = {name for one in read if one.is_of_parameters for name in one.parameters & found.added}
            if not used or not record.reads_values:
                continue
            for name in used:
                if numbers[name] in record.inputs and name.rpartition(".")[0] != record.module:
                    return f"{name} is used by another module"
            made = [self.trace.values[number] for number in record.outputs]
            if any(
                one.needs_gradient and not one.is_of_parameters and one.number not in here for one in made
            ):
                return f"{min(used)} is used outside of it"
        return None

    def users(self, parameter: str) -> set[str]:
        """Modules in which operators read a parameter, or what is made of it alone."""
        return {
            record.module
            for record in self.trace.records
            for number in record.inputs
            if (value := self.trace.values[number]).is_of_parameters and parameter in value.parameters
        } | {record.module for record in self.touching.get(self.trace.parameters[parameter], ())}

    def is_head(self, layer: str) -> bool:
        """Whether no other linear layer reads what this one makes, of which there is more than it reads."""
        outputs = set(self.leaves(layer, outputs=True))
        shape = self.value(self.weight(layer)).shape
        number = self.output_dimension(layer)
        return shape[number] >= shape[1 - number] and not any(
            outputs & set(self.leaves(other, outputs=False)) for other in self.linears if other != layer
        )

    def reads_inputs(self, embedding: str) -> bool:
        """Whether all that is looked up in an embedding is what the model is given."""
        lookups = [
            self.trace.values[record.inputs[-1]].is_input
            for record in self.trace.records
            if record.module == embedding and record.name == "aten.embedding"
        ]
        return bool(lookups) and all(lookups)


def _in(module: str) -> str:
    return f", in {module}" if module else ""


def _has_hooks(module: nn.Module) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks)


def _is_plain_embedding(module: nn.Module) -> bool:
    return (
        isinstance(module, nn.Embedding)
        and type(module).forward is nn.Embedding.forward
        and "forward" not in vars(module)
        and module.max_norm is None
        and not module.scale_grad_by_freq
        and not module.sparse
        and not _has_hooks(module)
    )

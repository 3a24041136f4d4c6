"""Finds the tensor-parallel plan of a module by tracing it.

Method   A pass on tensors without memory gives the axes of every tensor (`tracing`, `axes`, `operator_rules`); the axes
         say which layers ranks can share (`shares`); tracing the cut model proves it (`share_proof`). What is not
         proven right is replicated, with the reason.
Limits   Buffers are not cut: a model that reads a table by heads (ALiBi) has its attention replicated. Attention with
         dropout is replicated: its ranks would draw other masks than one process. Keys and values of one head for
         all queries are replicated, and attention with them. A model that returns its cache returns heads: trace it
         with `use_cache=False`.
Checked  tests/runtime/parallel/traced/
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from scrimp.cpu import operators_alone
from scrimp.errors import ConfigError
from scrimp.runtime.parallel.traced.axes import Axis
from scrimp.runtime.parallel.traced.cutting import Sizes
from scrimp.runtime.parallel.traced.share_proof import Proof, merged
from scrimp.runtime.parallel.traced.shares import Share, TracedModel
from scrimp.runtime.parallel.traced.tensor_plan import (
    Entry,
    LayerShare,
    ParameterCut,
    TensorPlan,
    without_numbers,
)
from scrimp.runtime.parallel.traced.tracing import trace, twin_of


def find(module: nn.Module, arguments: Sequence[Any], keywords: Mapping[str, Any], ranks: int) -> TensorPlan:
    """The plan of a module for so many ranks.

    Args:
        module: on any device, `meta` too; it is left as it is.
        arguments: an example of what it is called with; tensors on any device, of which shapes and types count.
            Sizes of batch and sequence should differ from one another and be more than 1.
        keywords: likewise.

    Raises:
        ModelError: it cannot be copied or traced.
        ConfigError: less than two ranks.
    """
    if ranks < 2:
        raise ConfigError("layers are shared by several ranks", got=f"{ranks} ranks", expected="at least 2")
    with operators_alone():
        twin, mode = twin_of(module)
        traced = TracedModel(twin, trace(twin, mode, arguments, keywords), ranks)
        return _Finding(traced, Proof(traced, mode, arguments, keywords)).plan()


class _Finding:
    def __init__(self, traced: TracedModel, proof: Proof) -> None:
        self._traced, self._proof = traced, proof
        self._reasons: dict[Axis, str] = {}
        self._chosen: list[Share] = []
        self._sizes: list[Sizes] = []

    def plan(self) -> TensorPlan:
        """Choose, prove, and put together."""
        traced = self._traced
        self._choose()
        cuts = {name: cut for share in self._chosen for name, cut in share.cuts.items()}
        heads = self._heads(cuts)
        words = self._words(cuts, heads)
        for layer in heads:
            number = traced.output_dimension(layer)
            cuts[traced.weight(layer)] = _whole(traced.value(traced.weight(layer)).shape, number)
            if bias := traced.bias(layer):
                cuts[bias] = _whole(traced.value(bias).shape, 0)
        for layer in words:
            cuts[traced.weight(layer)] = _whole(traced.value(traced.weight(layer)).shape, 0)
        firsts = {layer for share in self._chosen for layer in share.firsts}
        order = {name: number for number, name in enumerate(traced.trace.parameters)}
        return TensorPlan(
            ranks=traced.ranks,
            layers=tuple(self._layers(heads, words)),
            shapes={name: traced.value(name).shape for name in order},
            cuts=dict(sorted(cuts.items(), key=lambda item: order[item[0]])),
            sizes=merged(self._sizes),
            entries=tuple(_entries(traced, firsts | set(heads))),
            draws=traced.trace.draws,
            norms=tuple(sorted(name for share in self._chosen for name in share.norms)),
            added=tuple(sorted((name for s in self._chosen for name in s.added), key=order.__getitem__)),
        )

    def _choose(self) -> None:
        """Leaves that can be shared, those first that cut most for what they exchange."""
        found: list[tuple[float, int, Share]] = []
        for leaf in self._traced.candidates():
            share = self._traced.share(leaf)
            if isinstance(share, str):
                self._reasons[leaf] = share
            else:
                numbers = sum(math.prod(cut.shape) for cut in share.cuts.values())
                found.append((share.exchanged / numbers, len(found), share))
        taken, added = set[str](), set[str]()
        kept: dict[frozenset[str], list[Share]] = {}
        for _, _, share in sorted(found, key=lambda one: one[:2]):
            if taken & (share.cuts.keys() | share.added) or added & share.cuts.keys():
                self._reasons[share.leaf] = "its layers are cut along another dimension"
                continue
            taken |= share.cuts.keys()
            added |= share.added
            kept.setdefault(frozenset(map(without_numbers, share.cuts)), []).append(share)
        for alike in kept.values():
            sizes = self._proof.sizes(alike)
            if isinstance(sizes, str):
                self._reasons |= {share.leaf: sizes for share in alike}
            else:
                self._chosen += alike
                self._sizes.append(sizes)
        self._prove_together()

    def _prove_together(self) -> None:
        if len(self._sizes) > 1 and (why := self._proof.difference(self._chosen, merged(self._sizes))):
            self._reasons |= {share.leaf: f"its layers do not fit together: {why}" for share in self._chosen}
            self._chosen, self._sizes = [], []

    def _heads(self, cuts: Mapping[str, ParameterCut]) -> list[str]:
        """Linear layers whose outputs are gathered."""
        traced = self._traced
        return [
            layer
            for layer in traced.linears
            if traced.weight(layer) not in cuts
            and traced.is_head(layer)
            and traced.users(traced.weight(layer)) <= {*traced.linears, *traced.embeddings}
            and len(traced.users(traced.weight(layer)) & set(traced.linears)) == 1
            and traced.value(traced.weight(layer)).shape[traced.output_dimension(layer)] >= traced.ranks
            and not (traced.output_dimension(layer) and traced.users(traced.weight(layer)) - {layer})
        ]

    def _words(self, cuts: Mapping[str, ParameterCut], heads: Sequence[str]) -> list[str]:
        """Embeddings that are cut by rows: all that have one weight, or none."""
        traced, shared = self._traced, {self._traced.weight(layer) for layer in heads}
        found = []
        for layer in traced.embeddings:
            weight = traced.weight(layer)
            users = traced.users(weight)
            if weight in cuts or not users <= {*heads, *traced.embeddings}:
                continue
            embeddings = users & set(traced.embeddings)
            if weight in shared or (embeddings and all(map(traced.reads_inputs, embeddings))):
                found.append(layer)
        return found

    def _layers(self, heads: Sequence[str], words: Sequence[str]) -> list[LayerShare]:
        traced, found = self._traced, list[LayerShare]()
        lasts = {layer: share for share in self._chosen for layer in share.lasts}
        for layer in traced.modules:
            if layer in traced.embeddings or layer in traced.linears:
                weight = traced.weight(layer)
                making = next((share for share in self._chosen if weight in share.cuts), None)
                if layer in words:
                    found.append(LayerShare(layer, "words", f"{traced.value(weight).shape[0]:,} rows"))
                elif layer in heads:
                    found.append(LayerShare(layer, "gathered", "no layer reads what it makes"))
                elif layer in lasts:
                    found.append(LayerShare(layer, "inputs", _of(lasts[layer].leaf)))
                elif making is not None:
                    found.append(LayerShare(layer, "outputs", _of(making.leaf) + _fused(making.cuts[weight])))
                else:
                    found.append(LayerShare(layer, "replicated", self._reason(layer)))
        return found

    def _reason(self, layer: str) -> str:
        """Why a layer is not cut."""
        traced = self._traced
        if layer not in traced.trace.calls:
            return "the example does not run it"
        if layer in traced.embeddings:
            return "it looks up something else than the model's inputs"
        leaves = [*traced.leaves(layer, outputs=True), *traced.leaves(layer, outputs=False)]
        return next((self._reasons[leaf] for leaf in leaves if leaf in self._reasons), "it has one output")


def _entries(traced: TracedModel, layers: set[str]) -> list[Entry]:
    """Where gradients are added up: once for all layers that read what one module returns, if nothing else does."""
    found: dict[Entry, None] = {}
    records, parameters = traced.trace.records, set(traced.trace.parameters.values())
    inputs: dict[int, set[str]] = {}
    for layer in layers:
        inside = [record for record in records if record.module == layer]
        made = {number for record in inside for number in record.outputs}
        for number in {number for record in inside for number in record.inputs} - made:
            value = traced.trace.values[number]
            if value.is_floating and number not in parameters:
                inputs.setdefault(number, set()).add(layer)
    modules = {number: name for name, number in reversed(traced.trace.returned)}
    for number, readers in sorted(inputs.items()):
        module = modules.get(number)
        users = {record.module for record in traced.touching[number] if number in record.inputs}
        if module is not None and _returns_only(traced, module, inputs, layers) and users <= layers:
            found[Entry(module, is_output=True)] = None
        else:
            found |= dict.fromkeys(Entry(layer, is_output=False) for layer in sorted(readers))
    return list(found)


def _returns_only(traced: TracedModel, module: str, inputs: Mapping[int, Any], layers: set[str]) -> bool:
    """Whether all that a module returns, at each call, goes into such layers alone."""
    for name, number in traced.trace.returned:
        if name != module:
            continue
        users = {record.module for record in traced.touching.get(number, ()) if number in record.inputs}
        if number not in inputs or not users <= layers or number in traced.trace.outputs:
            return False
    return True


def _whole(shape: tuple[int, ...], dimension: int) -> ParameterCut:
    return ParameterCut(shape, dimension, (range(shape[dimension]),))


def _of(leaf: Axis) -> str:
    return f"{leaf.size} parts"


def _fused(cut: ParameterCut) -> str:
    return f" in each of {len(cut.ranges)} stretches" if len(cut.ranges) > 1 else ""

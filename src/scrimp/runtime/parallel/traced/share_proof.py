"""The proof of a plan: the cut model is traced, and must do what the whole one does, in the sizes of one rank.

Problem  A module's code may read sizes that its weights no longer have: `view(B, T, self.num_heads, -1)` takes whole
         heads apart, and nothing fails.
Method   A twin is cut as the plan says, and traced. Operator by operator it must be the same one, of the same values,
         with the same numbers, and every tensor must have the size that the axes say; a slice must begin where its
         piece does. Every operator keeps the shared axis apart, so such a pass computes each rank's part of the whole.
Sizes    Where it differs, whole numbers that the modules around the cut layers hold (`num_heads`, `split_size`) and
         that are sizes of shared dimensions are tried as those of one rank: none, those of heads (of configurations
         too, of which the module then gets a copy), one, all, two.
Limits   The proof is of the path that the example takes, in training mode.
Checked  tests/runtime/parallel/traced/test_share_finding.py
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import itertools
import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from scrimp.errors import ModelError
from scrimp.runtime.parallel.traced.axes import Axis, cut_at
from scrimp.runtime.parallel.traced.cutting import Sizes, cut_module
from scrimp.runtime.parallel.traced.shares import Share, TracedModel
from scrimp.runtime.parallel.traced.tensor_plan import ParameterCut
from scrimp.runtime.parallel.traced.tracing import Record, Trace, trace

MOST_CHOICES = 24
"""Choices of sizes that are tried."""
_NEW = ("zeros", "ones", "full", "empty")
_SHAPES = {
    "aten.view",
    "aten.expand",
    *(f"aten.{name}" for name in _NEW),
    *(f"aten.new_{name}" for name in _NEW),
}
"""Operators whose first numbers are their result's shape."""


class Proof:
    """Traces a model in the sizes of one rank."""

    def __init__(self, traced: TracedModel, mode: FakeTensorMode, *example: Any) -> None:
        self._traced, self._mode, self._example = traced, mode, example

    def sizes(self, shares: Sequence[Share]) -> Sizes | str:
        """What has to be changed beside the parameters so that ranks can share these leaves, which are alike in equal
        blocks; or why they cannot."""
        first = ""
        for sizes in itertools.islice(self._choices(shares), MOST_CHOICES):
            why = self.difference(shares, sizes)
            if why is None:
                return sizes
            first = first or why
        return first

    def difference(self, shares: Sequence[Share], sizes: Sizes) -> str | None:
        """Where the cut model does something else than its part of the whole; None: nowhere."""
        whole = self._traced.twin
        twin = copy.deepcopy(whole, {id(one): one for one in (*whole.parameters(), *whole.buffers())})
        cuts: dict[str, ParameterCut] = {}
        for share in shares:
            cuts |= share.cuts
        with self._mode:
            cut_module(twin, cuts, sizes, 0, self._traced.ranks)
        try:
            with _without_torchs_report():
                local = trace(twin, self._mode, *self._example)
        except ModelError as error:
            return f"its code cannot run on a share: {error.got}"
        leaves, norms = {share.leaf for share in shares}, {name for share in shares for name in share.norms}
        return compare(self._traced.trace, local, leaves, self._traced.ranks, norms)

    def _choices(self, shares: Sequence[Share]) -> Iterator[Sizes]:
        found: dict[tuple[str, str], list[tuple[str, str, int]]] = {}
        for module, attribute, size in (one for share in shares for one in self._numbers(share)):
            kind = type(self._traced.modules[module]).__name__, attribute
            found.setdefault(kind, []).append((module, attribute, size))
        yield {}
        kinds = [kind for kind in found if "." not in kind[1]]
        heads, inner = ([kind for kind in every if "head" in kind[1]] for every in (kinds, found))
        choices: list[Sequence[tuple[str, str]]] = [heads, inner, *([kind] for kind in kinds), kinds]
        choices += list(itertools.combinations(kinds, 2))
        for chosen in choices:
            if chosen:
                yield _as_sizes([one for kind in chosen for one in found[kind]])

    def _numbers(self, share: Share) -> Iterator[tuple[str, str, int]]:
        """Whole numbers that modules around the cut layers hold, by attribute, and what each is on one rank."""
        ranks = self._traced.ranks
        known = {}
        for number in self._traced.with_leaf[share.leaf]:
            for dim in self._traced.trace.values[number].dims:
                if dim is not None and share.leaf in dim.leaves():
                    known[dim.size] = dim.local_size({share.leaf}, ranks)
        for module in self._around(share):
            for attribute, value in numbers_of(self._traced.modules[module]):
                if value in known:
                    yield module, attribute, known[value]

    def _around(self, share: Share) -> list[str]:
        """The modules that hold the cut layers, and those that hold these, but the model itself."""
        holders = {name.rpartition(".")[0] for name in share.cuts}
        parents = {name.rpartition(".")[0] for name in holders if name}
        grandparents = {name.rpartition(".")[0] for name in parents} - {""}
        around = (holders - self._traced.linears.keys()) | parents | grandparents
        return [name for name in self._traced.modules if name in around]


def numbers_of(module: nn.Module) -> Iterator[tuple[str, int]]:
    """Whole numbers that a module's attributes are, or the fields of dataclasses among them."""
    for name, value in vars(module).items():
        if type(value) is int:
            yield name, value
        elif dataclasses.is_dataclass(value) and not isinstance(value, type):
            for field in dataclasses.fields(value):
                if type(inner := getattr(value, field.name)) is int:
                    yield f"{name}.{field.name}", inner


def _as_sizes(chosen: Sequence[tuple[str, str, int]]) -> Sizes:
    found: dict[str, dict[str, int]] = {}
    for module, attribute, size in chosen:
        found.setdefault(module, {})[attribute] = size
    return found


@contextlib.contextmanager
def _without_torchs_report() -> Iterator[None]:
    """A size that does not fit is an answer here, no error to be logged."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


def compare(
    whole: Trace, local: Trace, shared: Collection[Axis], ranks: int, norms: Collection[str] = ()
) -> str | None:
    """Where a pass in the sizes of one rank is not its part of the whole one; None: nowhere.

    Args:
        norms: modules over shared axes, which are replaced: they may read how many numbers they have.
    """
    for one, other in itertools.zip_longest(whole.records, local.records):
        if one is None or other is None or (one.name, one.module) != (other.name, other.module):
            known = one or other
            return f"its code runs other operators on a share, in {known.module}" if known else None
        if (one.inputs, one.outputs) != (other.inputs, other.outputs):
            return f"its code runs {one.name} on other tensors, in {one.module}"
        for number in {*one.inputs, *one.outputs}:
            expected = [
                1 if dim is None else dim.local_size(shared, ranks) for dim in whole.values[number].dims
            ]
            if 0 not in expected and list(local.values[number].shape) != expected:
                return f"its code makes {list(local.values[number].shape)} of a share {expected}, in {one.module}"
        if one.module not in norms and not _same_arguments(whole, one, other, shared, ranks):
            return f"its code asks {one.name} for something else, in {one.module}"
    return None if len(whole.values) == len(local.values) else "its code makes other tensors on a share"


def _same_arguments(whole: Trace, one: Record, other: Record, shared: Collection[Axis], ranks: int) -> bool:
    if len(one.arguments) != len(other.arguments):
        return False
    differing = {
        number
        for number, (mine, yours) in enumerate(zip(one.arguments, other.arguments, strict=True))
        if type(mine) is not type(yours) or mine != yours
    }
    if one.name == "aten.slice":
        assert one.start is not None
        dimension, first = one.start
        axis = whole.values[one.inputs[0]].dims[dimension]
        expected = cut_at(axis, [first])[0].local_size(shared, ranks) if axis and first else first
        return differing <= {1, 2} and other.start == (dimension, expected)
    if one.name in ("aten.split", "aten.split_with_sizes"):
        return differing <= set(range(len(one.arguments) - 1))
    return not differing or (
        one.name in _SHAPES and differing <= set(range(len(whole.values[one.outputs[0]].shape)))
    )


def merged(every: Sequence[Mapping[str, Mapping[str, int]]]) -> Sizes:
    """The sizes of several shares."""
    found: dict[str, dict[str, int]] = {}
    for sizes in every:
        for module, named in sizes.items():
            found.setdefault(module, {}).update(named)
    return found

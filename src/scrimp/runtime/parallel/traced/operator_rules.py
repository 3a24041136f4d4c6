"""What each operator of torch does to the axes of its tensors.

A rule gets a call and returns the axes of its results. It says three things: which dimensions of arguments and results
are the same (`unify`), which it makes of others (views, splits), and along which it brings numbers together, so that
they must not be shared out (`block`). Sums along an axis need no word: an axis that a result lacks is seen later.
An operator without a rule blocks every axis of its arguments and results.

Values   Constants that are alike everywhere (`zeros`) may have any axis, others (`arange`) none. Random numbers block:
         ranks would draw other ones than one process.
Checked  tests/runtime/parallel/traced/test_operator_rules.py, and every plan by tracing the cut model (`share_proof`)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from scrimp.runtime.parallel.traced.axes import Axis, Dims, cut_at, join, regroup, unify

Rule = Callable[["Call"], list[Dims]]


@dataclass(frozen=True)
class Call:
    """One call of an operator."""

    name: str
    """Such as aten.view, without its overload."""
    function: Any
    arguments: tuple[Any, ...]
    """All of them, in the order of the schema."""
    results: tuple[Tensor, ...]
    dims_of: Callable[[Tensor], Dims]
    """Axes of an argument."""

    def at(self, number: int, otherwise: Any = None) -> Any:
        """An argument."""
        return self.arguments[number] if number < len(self.arguments) else otherwise

    @property
    def tensors(self) -> list[Tensor]:
        """The arguments that are tensors, lists taken apart."""
        return [leaf for leaf in pytree.tree_leaves(self.arguments) if isinstance(leaf, Tensor)]

    def dims(self, number: int = 0) -> Dims:
        """Axes of an argument that is a tensor."""
        return list(self.dims_of(self.arguments[number]))


def axes_after(call: Call) -> list[Dims]:
    """The axes of a call's results."""
    tags, rule = getattr(call.function, "tags", ()), RULES.get(call.name)
    if not all(result.numel() for result in call.results):
        found = [free(result.shape, "it is empty") for result in call.results]
    elif rule is not None:
        found = rule(call)
    elif torch.Tag.nondeterministic_seeded in tags:
        found = _blocking(call, f"{call.name} draws random numbers along it")
    elif torch.Tag.pointwise in tags:
        found = _each(call)
    else:
        found = _blocking(call, f"{call.name} is not known to keep it apart")
    sizes = [[1 if dim is None else dim.size for dim in dims] for dims in found]
    if sizes != [list(result.shape) for result in call.results]:
        return _blocking(call, f"{call.name} gives it another shape than is known")
    return found


def free(shape: Sequence[int], blocked: str | None = None) -> Dims:
    """Axes of which nothing is known yet."""
    return [Axis(size, blocked) if size != 1 else None for size in shape]


def _blocking(call: Call, why: str) -> list[Dims]:
    for tensor in call.tensors:
        _block(call.dims_of(tensor), why)
    return [free(result.shape, why) for result in call.results]


def _block(dims: Sequence[Axis | None], why: str) -> None:
    for dim in dims:
        if dim is not None:
            dim.block(why)


def _each(call: Call) -> list[Dims]:
    """Number by number, of tensors that are broadcast."""
    shape = call.results[0].shape
    found: Dims = [None] * len(shape)
    for tensor in call.tensors:
        dims = call.dims_of(tensor)
        if len(dims) > len(shape):
            return _blocking(call, f"{call.name} in another shape")
        for number, axis in enumerate(dims, len(shape) - len(dims)):
            if axis is None:
                continue
            known = found[number]
            if known is None:
                found[number] = axis
            else:
                unify(known, axis)
    for number, size in enumerate(shape):
        if found[number] is None and size != 1:
            found[number] = Axis(size)
    return [list(found) for _ in call.results]


def _same(call: Call) -> list[Dims]:
    return [call.dims()]


def _uniform(call: Call) -> list[Dims]:
    return [free(result.shape) for result in call.results]


def _view(call: Call) -> list[Dims]:
    found = regroup(call.dims(), call.results[0].shape)
    return _blocking(call, "it is viewed in a shape that mixes it") if found is None else [found]


def _expand(call: Call) -> list[Dims]:
    shape, dims = call.results[0].shape, call.dims()
    dims = [*[None] * (len(shape) - len(dims)), *dims]
    return [[Axis(size) if dim is None and size != 1 else dim for dim, size in zip(dims, shape, strict=True)]]


def _transpose(call: Call) -> list[Dims]:
    dims = call.dims()
    one, other = (call.at(1), call.at(2)) if call.name == "aten.transpose" else (0, len(dims) - 1)
    if dims:
        dims[one], dims[other] = dims[other], dims[one]
    return [dims]


def _permute(call: Call) -> list[Dims]:
    dims = call.dims()
    return [[dims[number] for number in call.at(1)]]


def _unsqueeze(call: Call) -> list[Dims]:
    dims = call.dims()
    dims.insert(call.at(1) % (len(dims) + 1), None)
    return [dims]


def _squeeze(call: Call) -> list[Dims]:
    dims = call.dims()
    asked = call.at(1, range(len(dims)))
    numbers = {number % len(dims) for number in ([asked] if isinstance(asked, int) else asked)}
    return [[dim for number, dim in enumerate(dims) if number not in numbers or dim is not None]]


def _stretches(call: Call, number: int, ends: Sequence[int]) -> list[Dims]:
    """The tensor cut along a dimension at these places."""
    dims = call.dims()
    axis = dims[number]
    if axis is None:
        return [list(dims) for _ in ends]
    if any(result.shape[number] in (0, 1) and axis.size != 1 for result in call.results):
        axis.block("single numbers of it are taken")
    pieces: Sequence[Axis | None] = cut_at(axis, ends)
    return [[*dims[:number], None if p is None or p.size == 1 else p, *dims[number + 1 :]] for p in pieces]


def _slice(call: Call) -> list[Dims]:
    dims, number = call.dims(), call.at(1, 0)
    number %= len(dims)
    size, axis = call.results[0].shape[number], dims[number]
    start, stop, step = slice_of(call)
    if axis is None or size == axis.size:
        return [dims]
    if step != 1:
        axis.block("numbers are taken out of it")
        rest: Dims = [*dims[:number], *free([size], axis.blocked), *dims[number + 1 :]]
        return [rest]
    pieces = _stretches(call, number, [start, stop])
    return [pieces[1 if start else 0]]


def slice_of(call: Call) -> tuple[int, int, int]:
    """Start, stop and step of aten.slice, in numbers of the dimension."""
    size = call.at(0).shape[call.at(1, 0)]
    return slice(call.at(2), call.at(3), call.at(4, 1)).indices(size)


def _split(call: Call) -> list[Dims]:
    number = call.at(2, 0) % len(call.dims())
    ends, end = [], 0
    for result in call.results:
        end += result.shape[number]
        ends.append(end)
    if any(result.shape[number] == 0 for result in call.results):
        return _blocking(call, "it is split in empty pieces")
    return _stretches(call, number, ends)


def _select(call: Call) -> list[Dims]:
    dims = call.dims()
    number = call.at(1) % len(dims)
    axis = dims[number]
    if axis is not None:
        axis.block("single numbers of it are taken")
    return [[dim for place, dim in enumerate(dims) if place != number] for _ in call.results]


def _unbind(call: Call) -> list[Dims]:
    dims = call.dims()
    number = call.at(1, 0) % len(dims)
    axis = dims[number]
    if axis is not None:
        axis.block("single numbers of it are taken")
    return [[dim for place, dim in enumerate(dims) if place != number] for _ in call.results]


def _cat(call: Call) -> list[Dims]:
    tensors = [tensor for tensor in call.at(0) if tensor.numel()]
    if not tensors:
        return _blocking(call, "it is joined of nothing")
    rank = call.results[0].dim()
    number, dims = call.at(1, 0) % rank, [call.dims_of(tensor) for tensor in tensors]
    found = _unified(dims, [place for place in range(rank) if place != number])
    found[number] = join([one[number] or Axis(1, "single numbers are joined") for one in dims])
    return [found]


def _stack(call: Call) -> list[Dims]:
    dims = [call.dims_of(tensor) for tensor in call.at(0)]
    number = call.at(1, 0) % call.results[0].dim()
    found = _unified(dims, range(len(dims[0])))
    found[number:number] = free([len(dims)], "tensors are stacked along it")
    return [found]


def _unified(every: list[Dims], numbers: Sequence[int]) -> Dims:
    found = list(every[0])
    for dims in every[1:]:
        for number in numbers:
            mine, yours = found[number], dims[number]
            if mine is not None and yours is not None:
                unify(mine, yours)
    return found


def _repeat(call: Call) -> list[Dims]:
    shape, dims = call.results[0].shape, call.dims()
    dims = [*[None] * (len(shape) - len(dims)), *dims]
    found: Dims = []
    for dim, size in zip(dims, shape, strict=True):
        if dim is not None and dim.size != size:
            dim.block("it is repeated as a whole")
            found += free([size], dim.blocked)
        else:
            found += [dim] if dim is not None else free([size])
    return [found]


def _pad(call: Call) -> list[Dims]:
    dims, pads = call.dims(), call.at(1)
    for back in range(len(pads) // 2):
        axis = dims[-1 - back]
        if pads[2 * back] or pads[2 * back + 1]:
            if axis is not None:
                axis.block("it is padded")
            dims[-1 - back : len(dims) - back] = free([call.results[0].shape[-1 - back]], "it is padded")
    return [dims]


def _reduce(call: Call) -> list[Dims]:
    """Sums and the like: the dimension is gone, or has one number, which `shares` sees."""
    dims, asked = call.dims(), call.at(2 if call.name == "aten.linalg_vector_norm" else 1)
    if not isinstance(asked, (int, list, tuple)) or isinstance(asked, bool) or asked == []:
        return _blocking(call, f"{call.name} brings it together")
    numbers = {number % len(dims) for number in ([asked] if isinstance(asked, int) else asked)}
    kept = call.results[0].dim() == len(dims)
    found = [None if n in numbers else dim for n, dim in enumerate(dims) if kept or n not in numbers]
    return [list(found) for _ in call.results]


def _mixing(call: Call) -> list[Dims]:
    """Softmax and the like: every number along a dimension depends on all of them."""
    dims = call.dims()
    axis = dims[call.at(1)] if dims else None
    if axis is not None:
        axis.block(f"{call.name} brings its numbers together")
    return [list(dims) for _ in call.results]


def _layer_norm(call: Call) -> list[Dims]:
    dims, count = call.dims(), len(call.at(1))
    for weight in call.arguments[2:4]:
        if isinstance(weight, Tensor):
            for mine, yours in zip(call.dims_of(weight), dims[-count:], strict=True):
                if mine is not None and yours is not None:
                    unify(mine, yours)
    _block(dims[-count:], "it is normalised")
    statistics: Dims = [*dims[:-count], *[None] * count]
    return [dims, list(statistics), list(statistics)][: len(call.results)]


def _embedding(call: Call) -> list[Dims]:
    rows, columns = call.dims(0)
    if rows is not None:
        rows.block("words are looked up in it")
    return [[*call.dims(1), columns]]


def _matrices(*letters: str, first: int = 0) -> Rule:
    """Products, in the letters of einsum: those of the arguments, then of the result."""

    def rule(call: Call) -> list[Dims]:
        known: dict[str, Axis | None] = {}
        for word, number in zip(letters[:-1], range(first, first + len(letters)), strict=False):
            _learn(known, word, call.dims(number))
        if first:  # what is added to the product, broadcast
            bias = call.dims(0)
            _learn(known, letters[-1][len(letters[-1]) - len(bias) :], bias)
        return [[known[letter] for letter in letters[-1]]]

    return rule


def _learn(known: dict[str, Axis | None], word: str, dims: Dims) -> None:
    for letter, axis in zip(word, dims, strict=True):
        mine = known.get(letter)
        if mine is None:
            known[letter] = axis
        elif axis is not None:
            unify(mine, axis)


def _attention(call: Call) -> list[Dims]:
    """Rows, heads, tokens, numbers of a head; fewer heads of keys serve groups of queries."""
    (rows, heads, tokens, inner), key, value = call.dims(0), call.dims(1), call.dims(2)
    mask = next((one for one in call.arguments[3:] if isinstance(one, Tensor)), None)
    for mine, yours in ((rows, key[0]), (rows, value[0]), (inner, key[3]), (key[2], value[2])):
        if mine is not None and yours is not None:
            unify(mine, yours)
    for other in (key[1], value[1]):
        _group(heads, other)
    if mask is not None:
        _learn_mask(call.dims_of(mask), (rows, heads, tokens, key[2]))
    _block((inner, key[2]), "attention brings it together")
    if any(one is True for one in call.arguments[4:5]):
        _block((tokens,), "attention looks back along it")
    if any(isinstance(one, float) and one > 0 for one in call.arguments[3:4]):
        _block((rows, heads, tokens), "attention draws random numbers")
    found: list[Dims] = [[rows, heads, tokens, value[3]]]
    for result in call.results[1:]:
        is_statistics = list(result.shape) == list(call.results[0].shape[:3])
        found.append([rows, heads, tokens] if is_statistics else free(result.shape, "it is of attention"))
    return found


def _group(heads: Axis | None, kv_heads: Axis | None) -> None:
    """Queries come in groups, one after the other, each of which reads one head of keys."""
    if heads is None or kv_heads is None:
        return
    if heads.size == kv_heads.size:
        unify(heads, kv_heads)
        return
    grouped = regroup([heads], [kv_heads.size, heads.size // kv_heads.size])
    if grouped is None or grouped[0] is None:
        heads.block("its groups are not known")
        kv_heads.block("its groups are not known")
    else:
        unify(grouped[0], kv_heads)


def _learn_mask(mask: Dims, scores: Sequence[Axis | None]) -> None:
    for mine, yours in zip(mask, scores[len(scores) - len(mask) :], strict=True):
        if mine is not None and yours is not None:
            unify(mine, yours)


def _rules() -> dict[str, Rule]:
    """By operator."""
    groups: list[tuple[Rule, str]] = [
        (_same, "_to_copy"),
        (_same, "zeros_like ones_like empty_like full_like"),
        (_uniform, "zeros ones full empty new_zeros new_ones new_full new_empty scalar_tensor"),
        (_each, "copy_ fill_ masked_fill_ masked_fill where"),
        (_view, "view"),
        (_expand, "expand"),
        (_transpose, "t transpose"),
        (_permute, "permute"),
        (_unsqueeze, "unsqueeze"),
        (_squeeze, "squeeze"),
        (_slice, "slice"),
        (_split, "split split_with_sizes"),
        (_select, "select"),
        (_unbind, "unbind"),
        (_cat, "cat"),
        (_stack, "stack"),
        (_repeat, "repeat"),
        (_pad, "constant_pad_nd"),
        (_reduce, "mean sum amax amin linalg_vector_norm"),
        (_mixing, "_softmax _safe_softmax _log_softmax cumsum"),
        (_layer_norm, "native_layer_norm _fused_rms_norm"),
        (_embedding, "embedding"),
        (_matrices("mk", "kn", "mn"), "mm"),
        (_matrices("bmk", "bkn", "bmn"), "bmm"),
        (_matrices("mk", "kn", "mn", first=1), "addmm"),
        (_matrices("bmk", "bkn", "bmn", first=1), "baddbmm"),
    ]
    found = {f"aten.{name}": rule for rule, names in groups for name in names.split()}
    return found | {"aten._scaled_dot_product_flash_attention_for_cpu": _attention}


RULES = _rules()
_OF_SHAPES = {
    "aten.zeros_like",
    "aten.ones_like",
    "aten.empty_like",
    "aten.full_like",
    "aten.new_zeros",
    "aten.new_ones",
    "aten.new_full",
    "aten.new_empty",
}


def values_are_read(call: Call) -> bool:
    """Whether there are results that depend on the numbers of the arguments, not on their shapes alone."""
    return any(result.numel() for result in call.results) and call.name not in _OF_SHAPES

"""Shape, type and strides of what the commonest operators of a step return, without torch's compiler.

Problem  torch's meta device asks functions in Python for the results of `mul`, `mm` or `cat`, and these load sympy and
         torch's compiler at their first call: more than a second, which an account of a model does not have.
Method   A rule for each operator that blocks of decoders, their loss and their norms run. A rule answers where the
         answer is plain: tensors of one type that lie as their axes say. Where it is not, it returns None, and so
         there is none for any other operator: the caller asks torch, which is slower and knows all::

             in place, or into `out`     that tensor
             element by element          the shape that all broadcast to, the tensors' type
             products                    rows of the left, columns of the right
             sums, norms                 the shape without the axes that are summed
             new tensors                 the size that is asked for

Source   torch/_meta_registrations.py, torch/_refs, ATen/TensorIterator.cpp
Checked  tests/profiler/memory_trace/test_meta_mode.py: every answer of whole traces beside torch's
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

_aten = torch.ops.aten
_META = torch.device("meta")
Rule = Callable[..., Any]
"""From an operator's arguments, on the meta device, to its result; None: ask torch."""


def _new(size: Iterable[int], dtype: torch.dtype) -> Tensor:
    return torch.empty(tuple(size), dtype=dtype, device=_META)


def _order(x: Tensor) -> list[int] | None:
    """Axes from the longest stride to the shortest; None where elements share memory or strides do not tell."""
    strides = x.stride()
    order = sorted(range(x.dim()), key=lambda axis: -strides[axis])
    longer = [strides[axis] for axis in order if x.shape[axis] > 1]
    return order if all(one > other for one, other in pairwise([*longer, 0])) else None


def _is_in_order(x: Tensor) -> bool:
    """Whether strides fall from axis to axis, so that what is made of it element by element is contiguous."""
    return x.is_contiguous() or _order(x) == list(range(x.dim()))


def _broadcast(shapes: Sequence[Sequence[int]]) -> list[int]:
    """The shape of tensors that are combined element by element."""
    longest = max(map(len, shapes))
    padded = [(1,) * (longest - len(shape)) + tuple(shape) for shape in shapes]
    return [next((size for size in sizes if size != 1), 1) for sizes in zip(*padded, strict=True)]


def _elements(*values: Any, dtype: torch.dtype | None = None) -> Tensor | None:
    """Elementwise result of tensors that lie alike, and of numbers, in `dtype` or the first tensor's type."""
    tensors = [value for value in values if isinstance(value, Tensor)]
    first = tensors[0]
    dtype = dtype or first.dtype
    if all(map(_is_in_order, tensors)):
        return _new(_broadcast([x.shape for x in tensors]), dtype)
    order = _order(first)
    if order is None or any(x.shape != first.shape or _order(x) != order for x in tensors):
        return None
    strides, stride = [0] * len(order), 1
    for axis in reversed(order):
        strides[axis], stride = stride, stride * first.shape[axis]
    return torch.empty_strided(first.shape, strides, dtype=dtype, device=_META)


def _arithmetic(*values: Any, alpha: float = 1) -> Tensor | None:
    """Floats, or whole numbers with whole ones."""
    dtype = _type_of(values)
    numbers = [value for value in (*values, alpha) if not isinstance(value, Tensor)]
    is_whole = dtype != torch.bool and all(type(number) is int for number in numbers)
    return _elements(*values, dtype=dtype) if dtype.is_floating_point or is_whole else None


def _function(*values: Any, approximate: str = "none") -> Tensor | None:
    """Functions of floats."""
    dtype = _type_of(values)
    return _elements(*values, dtype=dtype) if dtype.is_floating_point else None


def _type_of(values: Sequence[Any]) -> torch.dtype:
    """The type that one or two tensors are brought to; a number does not make it wider."""
    tensors = [value for value in values if isinstance(value, Tensor)]
    return torch.result_type(tensors[0], tensors[-1])


def _comparison(x: Tensor, other: Tensor | float) -> Tensor | None:
    return _elements(x, other, dtype=torch.bool)


def _where(condition: Tensor, one: Tensor, other: Tensor) -> Tensor | None:
    return _elements(condition, one, other, dtype=one.dtype) if one.dtype == other.dtype else None


def _first(first: Tensor, *others: Any, **named: Any) -> Tensor:
    """In place."""
    return first


def _out(
    *values: Any, out: Tensor | None = None, grad_input: Tensor | None = None, **named: Any
) -> Tensor | None:
    """Into a tensor of the right size."""
    found = grad_input if out is None else out
    shapes = [value.shape for value in values if isinstance(value, Tensor)]
    return found if found is not None and list(found.shape) == _broadcast(shapes) else None


def _product(left: Tensor, right: Tensor) -> Tensor | None:
    """Product of two matrices, or of a matrix and a vector."""
    return _new((*left.shape[:-1], *right.shape[left.dim() - 1 :]), left.dtype)


def _sum_and_product(
    added: Tensor, left: Tensor, right: Tensor, *, beta: float = 1, alpha: float = 1
) -> Tensor | None:
    return _product(left, right)


def _cat(tensors: Sequence[Tensor], dim: int = 0) -> Tensor | None:
    first = tensors[0]
    is_plain = all(x.dim() == first.dim() and x.dtype == first.dtype and _is_in_order(x) for x in tensors)
    size = list(first.shape)
    if not size or not is_plain:
        return None
    size[dim] = sum(x.shape[dim] for x in tensors)
    return _new(size, first.dtype)


def _stack(tensors: Sequence[Tensor], dim: int = 0) -> Tensor | None:
    if len({x.dtype for x in tensors}) > 1 or not all(map(_is_in_order, tensors)):
        return None
    size = list(tensors[0].shape)
    size.insert(dim % (len(size) + 1), len(tensors))
    return _new(size, tensors[0].dtype)


def _sum(
    x: Tensor, dim: Sequence[int] | None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Any:
    if not _is_in_order(x) or not x.dtype.is_floating_point:
        return None
    gone = {axis % x.dim() for axis in dim or range(x.dim())} if x.dim() else set()
    size = [1 if axis in gone else size for axis, size in enumerate(x.shape) if keepdim or axis not in gone]
    return _new(size, dtype or x.dtype)


def _norm(
    x: Tensor, order: float = 2, dim: Sequence[int] | None = None, keepdim: bool = False, *, dtype: Any = None
) -> Any:
    return _sum(x, dim, keepdim, dtype=dtype)


def _norms(tensors: Sequence[Tensor], order: float = 2, dtype: torch.dtype | None = None) -> list[Tensor]:
    return [_new((), dtype or x.dtype) for x in tensors]


def _log_softmax(x: Tensor, dim: int, half_to_float: bool) -> Tensor | None:
    return None if half_to_float else _new(x.shape, x.dtype)


def _gather(x: Tensor, dim: int, index: Tensor, *, sparse_grad: bool = False) -> Tensor:
    return _new(index.shape, x.dtype)


def _index_select(x: Tensor, dim: int, index: Tensor) -> Tensor:
    size = list(x.shape)
    size[dim] = index.numel()
    return _new(size, x.dtype)


def _repeated(counts: Tensor, *, output_size: int | None = None) -> Tensor | None:
    return None if output_size is None else _new((output_size,), counts.dtype)


def _embedding(weight: Tensor, tokens: Tensor, *options: Any) -> Tensor:
    return _new((*tokens.shape, weight.shape[1]), weight.dtype)


def _embedding_backward(gradient: Tensor, tokens: Tensor, rows: int, *options: Any) -> Tensor:
    return _new((rows, gradient.shape[-1]), gradient.dtype)


def _attention(q: Tensor, k: Tensor, v: Tensor, *options: Any, **named: Any) -> tuple[Tensor, Tensor] | None:
    """What the CPU's flash attention gives, and for each query the logarithm of the sum of its scores."""
    result = _elements(q)
    rows, heads, length = q.shape[:3]
    sums = _new((rows, length, heads), torch.float32 if q.dtype.itemsize < 4 else q.dtype)
    return None if result is None else (result, sums.transpose(1, 2))


def _attention_backward(gradient: Tensor, *inputs: Any, **named: Any) -> tuple[Tensor, ...]:
    rows = ((x.shape, x.dtype) for x in inputs[:3])
    return tuple(_new((b, t, h, k), dtype).transpose(1, 2) for (b, h, t, k), dtype in rows)


def _like(
    x: Tensor, *, dtype: torch.dtype | None = None, memory_format: Any = None, **named: Any
) -> Tensor | None:
    if memory_format is torch.contiguous_format:
        return _new(x.shape, dtype or x.dtype)
    return _elements(x, dtype=dtype) if memory_format in (None, torch.preserve_format) else None


def _of_type(
    x: Tensor, size: Sequence[int], value: Any = 0, *, dtype: torch.dtype | None = None, **named: Any
) -> Tensor:
    return _new(size, dtype or x.dtype)


def _filled(size: Sequence[int], *, dtype: torch.dtype | None = None, **named: Any) -> Tensor:
    return _new(size, dtype or torch.get_default_dtype())


def _range(*ends: Any, dtype: torch.dtype | None = None, **named: Any) -> Tensor | None:
    if not all(type(end) is int for end in ends):
        return None
    start, stop, step = (0, *ends, 1) if len(ends) == 1 else (*ends, 1)[:3]
    return _new((len(range(start, stop, step)),), dtype or torch.int64)


def _view(x: Tensor, size: Sequence[int]) -> Tensor:
    return x.view(size)


_RULES: tuple[tuple[Rule, tuple[Any, ...]], ...] = (
    (
        _arithmetic,
        (_aten.add.Tensor, _aten.sub.Tensor, _aten.rsub.Scalar, _aten.mul.Tensor, _aten.neg.default),
    ),
    (_arithmetic, (_aten.clamp_min.default, _aten.clamp.default)),
    (_function, (_aten.div.Tensor, _aten.reciprocal.default, _aten.pow.Tensor_Scalar, _aten.pow.Scalar)),
    (_function, (_aten.cos.default, _aten.sin.default, _aten.silu.default)),
    (_function, (_aten.gelu.default, _aten.gelu_backward.default)),
    (_comparison, (_aten.ne.Scalar, _aten.le.Scalar, _aten.ge.Scalar, _aten.ge.Tensor, _aten.eq.Tensor)),
    (_elements, (_aten.bitwise_not.default, _aten.bitwise_and.Tensor)),
    (_where, (_aten.where.self,)),
    (
        _first,
        (
            _aten.add_.Tensor,
            _aten.mul_.Tensor,
            _aten.pow_.Scalar,
            _aten.rsqrt_.default,
            _aten.addcmul_.default,
        ),
    ),
    (
        _first,
        (
            _aten.logical_not_.default,
            _aten.masked_fill_.Scalar,
            _aten.scatter_add_.default,
            _aten.addmm_.default,
        ),
    ),
    (_out, (_aten.exp.out, _aten.mul.out, _aten.silu_backward.grad_input, _aten.gelu_backward.grad_input)),
    (_product, (_aten.mm.default, _aten.mv.default)),
    (_sum_and_product, (_aten.addmm.default,)),
    (_cat, (_aten.cat.default,)),
    (_stack, (_aten.stack.default,)),
    (_sum, (_aten.sum.dim_IntList,)),
    (_norm, (_aten.linalg_vector_norm.default,)),
    (_norms, (_aten._foreach_norm.Scalar,)),
    (_log_softmax, (_aten._log_softmax.default,)),
    (_gather, (_aten.gather.default,)),
    (_index_select, (_aten.index_select.default,)),
    (_repeated, (_aten.repeat_interleave.Tensor,)),
    (_embedding, (_aten.embedding.default,)),
    (_embedding_backward, (_aten.embedding_dense_backward.default,)),
    (_attention, (_aten._scaled_dot_product_flash_attention_for_cpu.default,)),
    (_attention_backward, (_aten._scaled_dot_product_flash_attention_for_cpu_backward.default,)),
    (_like, (_aten.empty_like.default, _aten.zeros_like.default, _aten.ones_like.default)),
    (_of_type, (_aten.new_empty.default, _aten.new_zeros.default, _aten.new_full.default)),
    (_filled, (_aten.zeros.default,)),
    (_range, (_aten.arange.default, _aten.arange.start, _aten.arange.start_step)),
    (_view, (_aten._unsafe_view.default,)),
)
RULES: dict[Any, Rule] = {operator: rule for rule, operators in _RULES for operator in operators}


def result_of(operator: Any, args: Sequence[Any], named: dict[str, Any]) -> Any:
    """What the operator returns for these meta tensors; None where no rule says."""
    rule = RULES.get(operator)
    return None if rule is None else rule(*args, **named)

"""A frozen weight that lies in memory as codes and scales, and linear layers that read it.

Problem  Beside adapters the weights of the base are read and never changed. In bf16 they are most of the memory: 13 GB
         of a model of 7B.
Method   A weight is quantized once, as the fprop of a recipe quantizes it, and kept so (QLoRA keeps NF4): 0.5 bytes a
         number and its scales in nvfp4 and mxfp4, 1 in fp8 and mxfp8. Whoever multiplies by it makes its values anew::

             fprop   Y  = X dequantize(W)^T         dgrad   dX = G dequantize(W)

         in the type that the weight stands for, one layer at a time, and lets go of them. So results are, bit for bit,
         those of a base whose weights are these values.
Type     `StoredWeight` is a tensor with the shape, type and device of the weight, so that models, loaders, and
         checks find a parameter as ever. Copying into it quantizes; other changes in place are refused. Any operator
         that does not know it gets its values.
Planned  A plan's products quantize the values as they would any weight. In the recipe that it is stored in
         these are the same codes and scales again (float32 values; `tests/gemm/test_stored_weight.py`).
Limits   A matrix that nobody trains. Values are made by torch's operators, in pieces: about 40 bytes are moved for
         each number, forward and backward.
Source   Dettmers et al. 2023, QLoRA, arXiv 2305.14314
Checked  tests/gemm/test_stored_weight.py
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils._pytree import tree_map_only

from scrimp.errors import ModelError
from scrimp.formats import QuantizedTensor, quantize
from scrimp.formats.grouping import ends_alone
from scrimp.gemm.problem import COLUMNS, compute_dtype
from scrimp.precision import Operand, recipe

_PARTS = ("payload", "scales", "tensor_scale")


class StoredWeight(Tensor):
    """A weight [O, I] by its codes."""

    codes: QuantizedTensor
    """Scaled along the columns."""

    @staticmethod
    def __new__(cls, codes: QuantizedTensor, dtype: torch.dtype) -> StoredWeight:
        """Without storage of its own.

        Args:
            codes: of a matrix, scaled along its columns.
            dtype: the type of the values that it stands for.
        """
        made = torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=dtype, device=codes.payload.device)
        made.codes = codes
        return made

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """Format and shape."""
        return f"StoredWeight({tuple(self.shape)}, {self.dtype}, {self.codes.operand})"

    @property
    def nbytes(self) -> int:  # type: ignore[override]
        """Bytes of codes and scales."""
        return self.codes.nbytes

    def values(self, dtype: torch.dtype | None = None) -> Tensor:
        """What it stands for, rounded to its own type; then cast, where another is asked for."""
        return self.codes.dequantize(self.dtype).to(dtype or self.dtype)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Detaching, new memory and copying into it; all else acts on its values."""
        kwargs, aten = kwargs or {}, torch.ops.aten
        if func is aten.detach.default:
            return StoredWeight(args[0].codes, args[0].dtype)
        if func is aten.empty_like.default:
            return args[0]._with(lambda part: torch.empty_like(part, device=kwargs.get("device")))
        if func is aten.clone.default:
            return args[0]._with(torch.clone)
        if func is aten.copy_.default and isinstance(args[0], StoredWeight):
            args[0]._quantize(args[1])
            return args[0]
        if func is aten.slice.Tensor and len(args) == 4 and args[1] == 0:
            rows = range(len(args[0]))[slice(*args[2:4])]
            if rows.start % 128 == 0:  # groups begin there, whatever the format
                return args[0].codes.of_rows(slice(rows.start, rows.stop)).dequantize(args[0].dtype)
        if func._schema.is_mutable and isinstance(args[0], StoredWeight):
            raise ModelError("a stored weight changes by a copy into it alone", got=str(func))
        args, kwargs = tree_map_only(StoredWeight, StoredWeight.values, (args, kwargs))
        return func(*args, **kwargs)

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        """For torch: which tensors it is made of."""
        names = [name for name in _PARTS if getattr(self.codes, name) is not None]
        return names, (self.codes.without_tensors(), self.dtype)

    def _with(self, make: Callable[[Tensor], Tensor]) -> StoredWeight:
        """The same of other tensors, each made of one of its own."""
        parts = (getattr(self.codes, name) for name in _PARTS)
        made = [None if one is None else make(one) for one in parts]
        return StoredWeight(self.codes.with_tensors(*cast(Any, made)), self.dtype)

    def _quantize(self, source: Tensor) -> None:
        """Take the values of another tensor."""
        given = source.to(self.device, self.dtype)
        operand = self.codes.operand
        made = quantize(given, operand.element, operand.scaling, COLUMNS, four_over_six=operand.four_over_six)
        for name in _PARTS:
            own = getattr(self.codes, name)
            if own is not None:
                own.copy_(getattr(made, name))


class StoredLinear(nn.Linear):
    """A frozen linear layer whose weight is stored. `store` makes one of a linear layer."""

    def forward(self, x: Tensor) -> Tensor:
        """x W^T + bias, x of any leading shape."""
        return plain_linear(x, self.weight, self.bias)


def plain_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """torch's linear; of a stored weight the same of its values, which do not outlive the product."""
    if not isinstance(weight, StoredWeight):
        return F.linear(x, weight, bias)
    return cast(Tensor, _Product.apply(x, weight, bias, compute_dtype(x)))  # type: ignore[no-untyped-call]


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: StoredWeight, bias: Tensor | None, compute: torch.dtype
    ) -> Tensor:
        ctx.weight, ctx.compute, ctx.dtype = weight, compute, x.dtype
        return F.linear(x.to(compute), weight.values(compute), None if bias is None else bias.to(compute))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        with torch.autocast(g.device.type, enabled=False):
            grad_x = (g.to(ctx.compute) @ ctx.weight.values(ctx.compute)).to(ctx.dtype)
        return grad_x, None, None, None


def store(layer: nn.Linear, name: str) -> None:
    """Keep a linear layer's weight as a recipe quantizes it; its values are to be copied into it then.

    Args:
        layer: of no class that has a forward of its own; stays the same object.
        name: a recipe that quantizes weights.
    """
    layer.weight = nn.Parameter(empty_weight(layer.weight, name), requires_grad=False)
    layer.__class__ = StoredLinear


def empty_weight(like: Tensor, name: str) -> StoredWeight:
    """A stored weight of the shape, type and device of a matrix, its codes uninitialised."""
    operand = stored_operand(name)
    assert operand is not None, f"{name} stores no weights"
    with ends_alone():
        shapes = quantize(torch.empty_like(like, device="meta"), operand.element, operand.scaling, COLUMNS)
    stored = StoredWeight(replace(shapes, operand=operand), like.dtype)
    return cast(StoredWeight, torch.empty_like(stored, device=like.device))


def stored_values(weight: Tensor, name: str) -> Tensor:
    """What a weight is once it was stored, in its own type."""
    stored = empty_weight(weight, name)
    stored.copy_(weight)
    return stored.values()


def stored_operand(name: str) -> Operand | None:
    """How a recipe stores weights: as its fprop reads them; None: it does not quantize them."""
    fprop = recipe(name).fprop
    return None if fprop is None else fprop.b

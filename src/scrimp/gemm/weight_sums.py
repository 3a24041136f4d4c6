"""Gradients of weights that are added to their sums by the products that make them.

Problem  In a step of several micro-batches a product writes dW, and another kernel reads it, reads the sum, adds and
         writes: 8 bytes for each number of a weight where sums are in bf16, 12 where they are in float32. The sum alone
         need be read and written.
Method   An optimizer leaves a `WeightSum` with each matrix that it trains (`set_sum`). Inside `adding`, which a step of
         several micro-batches enters, the linear layer of such a weight takes the sum along; its backward function adds
         to it, and hands autograd nothing for the weight::

             first micro-batch   sum = G^T X                 in the type of the sum
             others              sum = round(sum + G^T X)    by the product itself, where one can

         autograd (of torch 2.13) calls a parameter's post-accumulate hooks all the same, when it would have had the
         gradient: whoever waits for it (sums over whole copies) finds it in the sum.
Who can  torch's product (beta = 1): float32 to float32, bf16 to bf16, and on a GPU bf16 to float32. Triton's of tiles
         (fp8, fp4): to float32 and bf16. Each is tried on its device before it is used. Where none can, a planned
         layer's gradient is added as autograd's would be, bit for bit, and a plain layer is torch's own.
Meaning  A product that adds is not rounded to bf16 before it is added, as it is on its way through autograd. bf16 sums
         are rounded by the noise that they have there where Triton adds, and to nearest where torch does: that is as
         good while a gradient is not small beside the sum, so the first `MOST_TO_NEAREST` micro-batches of a step are
         added so, and others by `kernels.rounded_sums`. Root mean square error of a sum of k gradients, and how much
         of it is missing on average, rounded stochastically and to nearest (emulated; noise: the standard deviation
         from one micro-batch to the next over that of the mean)::

             noise      k      stochastic            to nearest
             0         16      0.6 %    0.00 %       0.7 %    0.00 %
             0        128      1.6 %    0.00 %       6.3 %    1.04 %      equal micro-batches
             1        128      1.5 %    0.01 %       1.1 %    0.02 %
             1        512      3.2 %    0.01 %       7.4 %    5.14 %
             10       128      1.7 %    0.00 %       1.2 %    0.02 %
             10       512      3.2 %    0.03 %       2.3 %    0.08 %
Plain    Gradients come through autograd of DTensors (FSDP2 reduces them first), grouped layers, embeddings, the head,
         transposed weights, in pipelines (whose gradients may wait, `weight_gradients`), in steps of one micro-batch,
         and in all that is no training step: proofs before training, statistics, memory traces, loops of the user's.
Watched  What proves a GEMM is given a product apart, beside the one that adds.
Limits   Not run on a GPU yet. On one core of a CPU, in float32, product and addition take 0.84 to 0.93 of their time
         apart; in bf16, on one without AMX, 0.98 to 1.00.
Checked  tests/gemm/test_weight_sums.py, tests/optim/test_summed_products.py
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from scrimp.formats import Noise
from scrimp.gemm.kernels.launch import may_run
from scrimp.gemm.problem import DTYPES
from scrimp.precision import MOST_TO_NEAREST
from scrimp.tracing import has_memory

_is_adding = False
_numbers = itertools.count()


class Product(ABC):
    """The gradient of a weight, which is still to be multiplied."""

    def adds(self, dtype: torch.dtype, added: int = 1) -> bool:
        """Whether it adds itself to a sum of this type, of so many gradients."""
        return False

    def add(self, total: Tensor, noise: Noise | None) -> None:
        """Do so, in place, where `adds` says that it can.

        Args:
            noise: how to round, where the product rounds stochastically; None: a sum in float32.
        """
        raise NotImplementedError

    @abstractmethod
    def made(self, dtype: torch.dtype | None = None) -> Tensor:
        """The gradient apart, in this type; None: in the weight's."""


@dataclass(frozen=True)
class PlainProduct(Product):
    """G^T X of matrices in high precision, by torch."""

    g: Tensor
    x: Tensor
    weight_dtype: torch.dtype

    def adds(self, dtype: torch.dtype, added: int = 1) -> bool:
        """As `adds_plain`; to a sum in bf16 of few gradients."""
        if dtype == torch.bfloat16 and added >= MOST_TO_NEAREST:
            return False
        is_tried = dtype == torch.bfloat16 or dtype != self.g.dtype
        return (has_memory(self.g) or not is_tried) and adds_plain(self.g.device, self.g.dtype, dtype)

    def add(self, total: Tensor, noise: Noise | None) -> None:
        """One product with beta = 1, rounded to nearest."""
        add_product(total, self.g.t(), self.x)

    def made(self, dtype: torch.dtype | None = None) -> Tensor:
        """Without a rounding to bf16 where a sum in float32 begins with it, and others are added so."""
        if dtype is not None and dtype != self.g.dtype and self.adds(dtype):
            return torch.mm(self.g.t(), self.x, out_dtype=dtype)
        return (self.g.t() @ self.x).to(dtype or self.weight_dtype)


class WeightSum(ABC):
    """Where the gradients of one weight add up.

    Args:
        like: a tensor of the sum's device and type.
    """

    def __init__(self, like: Tensor) -> None:
        number = next(_numbers)
        _sums[number] = self
        self.handle = torch.tensor(number, dtype=torch.int64, device="cpu")
        """Stands for it in compiled graphs."""
        self.dtype = like.dtype
        types = DTYPES.values() if has_memory(like) else ()
        self.plain = tuple(one for one in types if adds_plain(like.device, one, like.dtype))
        """Types of torch's products that add to it."""

    def __reduce__(self) -> tuple[Callable[[], None], tuple[()]]:
        """A copy of a parameter, or one in a file, has no sum."""
        return _no_sum, ()

    @abstractmethod
    def add(self, product: Product, made: Tensor | None = None) -> None:
        """The gradient of another micro-batch, by the product itself where it can.

        Args:
            made: the gradient apart, where somebody has asked for it.
        """

    @abstractmethod
    def add_made(self, gradient: Tensor) -> None:
        """One that is there."""


def _no_sum() -> None:
    """What a sum is in a copy."""


_sums: weakref.WeakValueDictionary[int, WeightSum] = weakref.WeakValueDictionary()


def set_sum(parameter: Tensor, total: WeightSum) -> None:
    """Note on a parameter where its gradients add up."""
    parameter.scrimp_sum = total  # type: ignore[attr-defined]


def sum_for(weight: Tensor, x: Tensor) -> WeightSum | None:
    """What a layer's backward function is to add to; None: autograd takes the gradient.

    Args:
        x: the layer's input. Of one without a gradient compiled blocks would use no result of an operator that adds,
            and leave it out.
    """
    if not _is_adding or not torch.is_grad_enabled():
        return None
    if torch.compiler.is_compiling() and not x.requires_grad:
        return None
    return getattr(weight, "scrimp_sum", None)


def sum_of(handle: Tensor) -> WeightSum:
    """The sum that a handle stands for."""
    return _sums[int(handle)]


@contextlib.contextmanager
def adding(wanted: bool = True) -> Iterator[None]:
    """Inside, forward passes take the sums of their weights along; their backward passes come inside too."""
    global _is_adding
    before, _is_adding = _is_adding, wanted
    try:
        yield
    finally:
        _is_adding = before


@functools.cache
def adds_plain(device: torch.device, product: torch.dtype, total: torch.dtype) -> bool:
    """Whether torch's product in one type adds to a sum in another: to its own, and on a GPU bf16 to float32. One of
    bf16 does where it gave right numbers when it was tried."""
    if product == total != torch.bfloat16:
        return True
    if product != torch.bfloat16 or (total != product and device.type != "cuda"):
        return False
    return may_run(f"bf16 product with a sum in {total}", lambda: _is_right(device, total))


def add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total += left right, in place and in one product, of types that `adds_plain` knows."""
    if left.dtype == total.dtype:
        total.addmm_(left, right)
    else:
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)


def _is_right(device: torch.device, dtype: torch.dtype) -> bool:
    """By integers, of which every sum is exact in float32, and few in bf16, in the layout of wgrad."""
    tokens, outputs, inputs = 8192, 40, 24  # so deep that a library may share the depth out
    numbers = torch.arange(tokens * outputs, device=device)
    g, x = (
        numbers.remainder(7).view(tokens, outputs),
        numbers.remainder(11)[: tokens * inputs].view(tokens, inputs),
    )
    total = torch.full((outputs, inputs), 1.0 + 2.0**-7, device=device, dtype=dtype)
    expected = (total.float() + g.float().t() @ x.float()).to(dtype)
    add_product(total, g.to(torch.bfloat16).t(), x.to(torch.bfloat16))
    return torch.equal(total, expected)

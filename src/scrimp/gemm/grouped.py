"""Linear layers of which each run of tokens has a weight of its own: what routed experts are made of.

Problem  Each of E experts multiplies the few tokens that were sent to it. E small layers, one after the other, would
         start a kernel for each product, and would let shapes depend on the data.
Method   Tokens are sorted by expert; run e ends at row ends[e]. One grouped product then does what E would::

             fprop   Y[run e]  = X[run e] W_e^T
             dgrad   dX[run e] = G[run e] W_e
             wgrad   dW_e      = G[run e]^T X[run e]         0 where nobody chose e

         All E weights are one matrix, one below the other: [E O, I]. So everything that knows matrices (files,
         optimizers, shards) knows this one.
Kernels  `torch._grouped_mm` where a probe shows that it works (bf16 on CUDA): run lengths stay on the device. Else one
         product for each run. Whichever it is, it is one operator: a compiled graph, or a trace without data, sees
         shapes that do not depend on the tokens' choices.
Types    As of `scrimp.gemm.linear`: the result has the compute type, the weight is cast for each product.
Limits   Rows after the last run come out as 0 on the CPU, and as anything on CUDA: the caller masks them.
Checked  tests/gemm/test_grouped.py: a loop over torch's linear layers in float64

Letters: A tokens of all runs, E experts, O outputs and I inputs of each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from scrimp.errors import ModelError
from scrimp.gemm.problem import compute_dtype
from scrimp.gemm.recompute import only_saves, run_again
from scrimp.gemm.storage import CODES, RECOMPUTED
from scrimp.gemm.weight_gradients import make_later

FPROP, DGRAD, WGRAD = "fprop", "dgrad", "wgrad"


class GroupedLinear(nn.Module):
    """E linear layers without bias, each for its own run of tokens. Its memory is uninitialised.

    Args:
        experts: how many.
        outputs: of each; inputs: of each.
    """

    def __init__(
        self,
        experts: int,
        inputs: int,
        outputs: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.experts, self.in_features, self.out_features = experts, inputs, outputs
        self.splits = False
        """Whether the gradient of its weight may wait (`scrimp.gemm.weight_gradients`); the tokens must need one."""
        self.weight = nn.Parameter(torch.empty(experts * outputs, inputs, device=device, dtype=dtype))

    def forward(self, x_AI: Tensor, ends_E: Tensor) -> Tensor:
        """y_AO: each run of rows by its expert.

        Args:
            x_AI: tokens, sorted by expert.
            ends_E: int32, the row after each expert's last.

        Raises:
            ModelError: shapes that do not belong together.
        """
        self.check(x_AI, ends_E)
        compute = compute_dtype(x_AI)
        owner = getattr(self, "planned", self)
        is_skipped = not torch.compiler.is_compiling() and only_saves(owner)
        # In a tuple: of an input without a gradient autograd would call the weight's hooks all the same.
        weight = (self.weight,) if self.splits else self.weight
        found = _Grouped.apply(x_AI, weight, ends_E, compute, is_skipped)  # type: ignore[no-untyped-call]
        return cast(Tensor, found)

    def check(self, x_AI: Tensor, ends_E: Tensor) -> None:
        """Refuse what does not fit.

        Raises:
            ModelError: by what.
        """
        if x_AI.dim() != 2 or x_AI.shape[1] != self.in_features or ends_E.shape != (self.experts,):
            raise ModelError(
                "the tokens of a grouped layer do not fit it",
                got=f"tokens {tuple(x_AI.shape)}, ends of {tuple(ends_E.shape)} runs",
                expected=f"(..., {self.in_features}) and ({self.experts},)",
            )

    def extra_repr(self) -> str:
        """Its sizes."""
        return f"experts={self.experts}, in_features={self.in_features}, out_features={self.out_features}"


def grouped_modules(model: nn.Module) -> dict[str, GroupedLinear]:
    """The grouped layers of a model by name, in the model's order."""
    return {name: module for name, module in model.named_modules() if isinstance(module, GroupedLinear)}


def regrouped(
    linear: GroupedLinear,
    make: Callable[..., Tensor],
    *inputs: Tensor,
    ends_E: Tensor,
    again: bool | None = None,
) -> Tensor:
    """linear(make(*inputs)), of which backward may make the layer's input again.

    Args:
        make: cheap and without randomness: a copy of tokens in another order, a gate.
        again: keep `inputs` instead of what is made of them; None: unless the layer's plan keeps codes of it.
    """
    kind = "" if (planned := getattr(linear, "planned", None)) is None else planned.saved_class
    again = again if again is not None else kind != CODES

    def body(*inputs: Tensor) -> Tensor:
        return cast(Tensor, linear(make(*inputs), ends_E))

    return run_again(body, *inputs, last=linear) if again or kind == RECOMPUTED else body(*inputs)


class _Grouped(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        given: Tensor | tuple[Tensor],
        ends: Tensor,
        compute: torch.dtype,
        is_skipped: bool,
    ) -> Tensor:
        ctx.input_dtype, ctx.compute = x.dtype, compute
        x, weight = x.to(compute), given[0] if isinstance(given, tuple) else given
        # The parameter itself, which what is saved and made again is not.
        ctx.split_weight = weight if isinstance(given, tuple) else None
        ctx.save_for_backward(x, None if isinstance(given, tuple) else weight, ends)
        if is_skipped:
            return x.new_empty(len(x), len(weight) // len(ends))
        return cast(Tensor, grouped_product(FPROP, x, _matrices(weight, ends, compute), ends))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, ends = ctx.saved_tensors
        weight = weight if ctx.split_weight is None else ctx.split_weight
        g = g.to(ctx.compute).contiguous()
        grad_x = grad_weight = None
        if ctx.needs_input_grad[0]:
            grad_x = grouped_product(DGRAD, g, _matrices(weight, ends, ctx.compute), ends)
            grad_x = grad_x.to(ctx.input_dtype)
        if ctx.split_weight is not None:
            make_later(weight, lambda: _of_weight(g, x, weight, ends))
        elif ctx.needs_input_grad[1]:
            grad_weight = _of_weight(g, x, weight, ends)
        return grad_x, grad_weight, None, None, None


def _of_weight(g: Tensor, x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    return cast(Tensor, grouped_product(WGRAD, g, x, ends).flatten(0, 1).to(weight.dtype))


def _matrices(weight: Tensor, ends: Tensor, compute: torch.dtype) -> Tensor:
    """w_EOI."""
    return weight.to(compute).view(len(ends), -1, weight.shape[1])


@torch.library.custom_op("scrimp::grouped_product", mutates_args=())
def grouped_product(gemm: str, a: Tensor, b: Tensor, ends_E: Tensor) -> Tensor:
    """One of the three products.

    Args:
        gemm: fprop of x_AI and w_EOI, dgrad of g_AO and w_EOI, or wgrad of g_AO and x_AI.

    Returns:
        y_AO, dx_AI or dw_EOI.
    """
    with torch.autocast(a.device.type, enabled=False):
        if a.dtype == torch.bfloat16 and _has_kernel(a.device):
            if gemm == WGRAD:
                return torch._grouped_mm(a.t(), b, offs=ends_E)
            return torch._grouped_mm(a, b.mT if gemm == FPROP else b, offs=ends_E)
        return _by_runs(gemm, a, b, ends_E)


@grouped_product.register_fake
def _(gemm: str, a: Tensor, b: Tensor, ends_E: Tensor) -> Tensor:
    if gemm == WGRAD:
        return a.new_empty(ends_E.shape[0], a.shape[1], b.shape[1])
    return a.new_empty(a.shape[0], b.shape[1] if gemm == FPROP else b.shape[2])


def _by_runs(gemm: str, a: Tensor, b: Tensor, ends_E: Tensor) -> Tensor:
    """A product for each run."""
    if gemm == WGRAD:
        found = a.new_zeros(len(ends_E), a.shape[1], b.shape[1])
        for expert, rows in runs(ends_E):
            torch.mm(a[rows].t(), b[rows], out=found[expert])
        return found
    found = a.new_empty(len(a), b.shape[1] if gemm == FPROP else b.shape[2])
    last = 0
    for expert, rows in runs(ends_E):
        torch.mm(a[rows], b[expert].t() if gemm == FPROP else b[expert], out=found[rows])
        last = rows.stop
    found[last:] = 0
    return found


def runs(ends_E: Tensor, tokens: int | None = None) -> Iterator[tuple[int, slice]]:
    """Each expert that has tokens, and their rows; waits for the device.

    Args:
        tokens: of all runs, which the first expert gets where tensors have no data.
    """
    if tokens is not None and type(ends_E) is not Tensor:
        yield 0, slice(0, tokens)
        return
    start = 0
    for expert, end in enumerate(ends_E.tolist()):
        if end > start:
            yield expert, slice(start, end)
        start = end


@cache
def _has_kernel(device: torch.device) -> bool:
    """Whether torch's grouped product gives right numbers here, an empty run among them."""
    if device.type != "cuda" or not hasattr(torch, "_grouped_mm"):
        return False
    ends = torch.tensor([16, 16, 48], dtype=torch.int32, device=device)
    x = torch.arange(48 * 32, device=device).remainder(7).to(torch.bfloat16).view(48, 32)
    w = torch.arange(3 * 64 * 32, device=device).remainder(5).to(torch.bfloat16).view(3, 64, 32)
    g = torch.arange(48 * 64, device=device).remainder(3).to(torch.bfloat16).view(48, 64)
    try:
        found = (
            torch._grouped_mm(x, w.mT, offs=ends),
            torch._grouped_mm(g, w, offs=ends),
            torch._grouped_mm(g.t(), x, offs=ends),
        )
    except RuntimeError:
        return False
    expected = (_by_runs(FPROP, x, w, ends), _by_runs(DGRAD, g, w, ends), _by_runs(WGRAD, g, x, ends))
    return all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))

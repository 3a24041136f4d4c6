"""RMSNorm and gates (SwiGLU, GeGLU), each with few passes over memory and little saved for the backward pass.

Problem  Between the GEMMs every operation reads and writes whole activations. Written with
         plain tensor operations, autograd also saves each intermediate result: RMSNorm keeps
         three tensors of the size of its input, SwiGLU keeps two more than it needs.
Method   On CUDA and under torch.compile both are plain operations, which there are fused.
         On the CPU each is one autograd function that saves its inputs alone (plus one number per
         token). Where Numba is installed, one kernel each way reads and writes every number once
         (`cpu_passes`); else, and in other types than theirs, operators work in place.

         RMSNorm, with r = 1 / sqrt(mean(x^2) + eps), y = x r w, and dy the incoming gradient:

             dx = r (dy w) - x r^3 sum(dy w x) / D        (sum over the width)
             dw = sum over tokens of dy x r

         Operators take both sums from one product P = dy x: sum(dy w x) = P w and dw = r^T P.

         SwiGLU, with s = sigmoid(gate), y = gate s up:

             d up   = dy gate s
             d gate = dy up s (1 + gate (1 - s))

Types    Norms compute in float32 whatever the type of x. Under autocast the result is cast
         to autocast's type at once, because only GEMMs read it.
Limits   No second derivatives on the CPU path.
Checked  tests/models/test_functions.py: all paths against float64.

Shapes: ... any leading dimensions, S tokens (all leading dimensions as one), D width, F ffn width.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from scrimp.cpu import TYPES
from scrimp.gemm import Gate, compute_dtype
from scrimp.models import cpu_passes

FusedNorm = Callable[[Tensor, Tensor, float], Tensor]
"""A function of x, weight and eps that stands for CUDA's kernel."""
_fused_norm: ContextVar[FusedNorm | None] = ContextVar("fused_norm", default=None)
_is_compiled: ContextVar[bool] = ContextVar("is_compiled", default=False)


@contextlib.contextmanager
def plain_operations(fused_norm: FusedNorm, *, compiled: bool = False) -> Iterator[None]:
    """Inside, a CPU takes the plain operations that run on CUDA: to trace there what another device will do.

    Args:
        fused_norm: RMSNorm as one kernel, which torch has on CUDA alone.
        compiled: of blocks that a compiler fuses. For its gates stand the CPU's own, which save their inputs alone.
    """
    tokens = _fused_norm.set(fused_norm), _is_compiled.set(compiled)
    try:
        yield
    finally:
        _fused_norm.reset(tokens[0])
        _is_compiled.reset(tokens[1])


def uses_cpu_functions(x: Tensor) -> bool:
    """Whether the hand-written CPU functions apply: not where a compiler fuses plain operations."""
    return x.device.type == "cpu" and runs_cpu_functions()


def runs_cpu_functions() -> bool:
    """The same of any tensor on a CPU."""
    return not torch.compiler.is_compiling() and _fused_norm.get() is None


def float32_or_wider(dtype: torch.dtype) -> torch.dtype:
    """The type of sums and norms over numbers of this type."""
    return torch.promote_types(dtype, torch.float32)


def at_least_float32(x: Tensor) -> Tensor:
    """x itself, or widened to float32."""
    return x.to(float32_or_wider(x.dtype))


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension, in the compute type."""
    dtype = compute_dtype(x)
    if uses_cpu_functions(x):
        return cast(Tensor, _RMSNorm.apply(x, weight, eps, dtype))  # type: ignore[no-untyped-call]
    if x.dtype != weight.dtype:
        # The fused kernel, which computes in float32 inside, takes one type only.
        x, weight = at_least_float32(x), at_least_float32(weight)
    if x.device.type == "cpu" and not torch.compiler.is_compiling() and (fused := _fused_norm.get()):
        return fused(x, weight, eps).to(dtype)
    return F.rms_norm(x, (x.shape[-1],), weight, eps).to(dtype)


def _saves_inputs_alone(gate_up: Tensor) -> bool:
    """Whether a gate is one function here: on a CPU, and where a CPU stands for what is compiled."""
    # A compiler cannot read the second one's variable: it would end its graph there.
    return not torch.compiler.is_compiling() and (uses_cpu_functions(gate_up) or _is_compiled.get())


def swiglu(gate_up: Tensor) -> Tensor:
    """silu(gate) * up for gate and up side by side in the last dimension."""
    if _saves_inputs_alone(gate_up):
        return cast(Tensor, _SwiGLU.apply(gate_up))  # type: ignore[no-untyped-call]
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def geglu(gate_up: Tensor) -> Tensor:
    """gelu(gate) * up, GELU by its approximation with tanh, likewise."""
    if _saves_inputs_alone(gate_up):
        return cast(Tensor, _GeGLU.apply(gate_up))  # type: ignore[no-untyped-call]
    gate, up = gate_up.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh") * up


GATES: dict[Gate, Callable[[Tensor], Tensor]] = {"silu": swiglu, "gelu": geglu}
"""From gate and up side by side, each by the function of the gate."""


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
        if _kernels_take(x, weight) and dtype in TYPES:
            y_SD, r_S = cpu_passes.norm(_rows(x), weight.contiguous(), eps, dtype)
            ctx.save_for_backward(x, weight, r_S)
            return y_SD.view(x.shape)
        x_SD = at_least_float32(x).reshape(-1, x.shape[-1])
        norm_S1: Tensor = torch.linalg.vector_norm(x_SD, dim=-1, keepdim=True)
        r_S1 = norm_S1.square_().mul_(1 / x.shape[-1]).add_(eps).rsqrt_()
        y_SD = (x_SD * r_S1).mul_(weight)
        ctx.save_for_backward(x, weight, r_S1[:, 0])
        return y_SD.view(x.shape).to(dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, r_S = ctx.saved_tensors
        if _kernels_take(x, weight, grad_y):
            dx_SD, dw_BD = cpu_passes.norm_gradients(_rows(x), weight.contiguous(), _rows(grad_y), r_S)
            dw_D = dw_BD.sum(0).to(weight.dtype) if ctx.needs_input_grad[1] else None
            return dx_SD.view(x.shape), dw_D, None, None
        x_SD, r_S1 = at_least_float32(x).reshape(-1, x.shape[-1]), r_S[:, None]
        w_D = at_least_float32(weight)
        dy_SD = grad_y.reshape(x_SD.shape).to(x_SD.dtype)
        product_SD = dy_SD * x_SD
        dot_S = torch.mv(product_SD, w_D)
        grad_weight = torch.mv(product_SD.T, r_S) if ctx.needs_input_grad[1] else None
        factor_S1 = r_S1.pow(3).mul_(dot_S[:, None]).mul_(-1 / x.shape[-1])
        grad_x = torch.mul(dy_SD, w_D, out=product_SD).mul_(r_S1).addcmul_(x_SD, factor_S1)
        grad_weight = None if grad_weight is None else grad_weight.to(weight.dtype)
        return grad_x.view(x.shape).to(x.dtype), grad_weight, None, None


def _kernels_take(*tensors: Tensor) -> bool:
    """Whether kernels run on these tensors: not where a CPU stands for another device, whose operators are counted."""
    return runs_cpu_functions() and cpu_passes.can_take(*tensors)


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1]).contiguous()


class _Gated(torch.autograd.Function):
    """act(gate) * up."""

    is_gelu: bool

    @staticmethod
    def act(gate: Tensor) -> Tensor:
        raise NotImplementedError

    @staticmethod
    def act_backward(grad: Tensor, gate: Tensor, out: Tensor) -> None:
        raise NotImplementedError

    @classmethod
    def forward(cls, ctx: Any, gate_up: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up)
        if _kernels_take(gate_up):
            y_SF = cpu_passes.gated(_rows(gate_up), is_gelu=cls.is_gelu)
            return y_SF.view(*gate_up.shape[:-1], y_SF.shape[1])
        gate, up = gate_up.chunk(2, dim=-1)
        return cls.act(gate).mul_(up)

    @classmethod
    @once_differentiable
    def backward(cls, ctx: Any, grad_y: Tensor) -> Tensor:
        (gate_up,) = ctx.saved_tensors
        if _kernels_take(gate_up, grad_y):
            grad_SG = cpu_passes.gated_gradient(_rows(gate_up), _rows(grad_y), is_gelu=cls.is_gelu)
            return grad_SG.view(gate_up.shape)
        gate, up = gate_up.chunk(2, dim=-1)
        grad = torch.empty_like(gate_up)
        grad_gate, grad_up = grad.chunk(2, dim=-1)
        buffer = cls.act(gate)
        torch.mul(grad_y, buffer, out=grad_up)
        torch.mul(grad_y, up, out=buffer)
        cls.act_backward(buffer, gate, grad_gate)
        return grad


class _SwiGLU(_Gated):
    is_gelu = False

    @staticmethod
    def act(gate: Tensor) -> Tensor:
        return F.silu(gate)

    @staticmethod
    def act_backward(grad: Tensor, gate: Tensor, out: Tensor) -> None:
        torch.ops.aten.silu_backward.grad_input(grad, gate, grad_input=out)


class _GeGLU(_Gated):
    is_gelu = True

    @staticmethod
    def act(gate: Tensor) -> Tensor:
        return F.gelu(gate, approximate="tanh")

    @staticmethod
    def act_backward(grad: Tensor, gate: Tensor, out: Tensor) -> None:
        torch.ops.aten.gelu_backward.grad_input(grad, gate, approximate="tanh", grad_input=out)

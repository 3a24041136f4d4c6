"""What a plan's device would run, traced on this one.

A plan for CUDA is often made where there is no GPU, and torch's CPU wheel refuses a backward pass of fake CUDA tensors.
So fake CPU tensors take CUDA's path through the model (`scrimp.model.functions.plain_operations`): plain operations
instead of the CPU's own functions, pieces as large as on CUDA. For the two kernels that CUDA fuses stands what saves
the same: for RMSNorm a function without numbers, for flash attention the CPU's operator.

Attention in fp32 over shared keys has no fused kernel on CUDA: there the plain product of scores is traced, as it runs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, Literal, cast

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from scrimp.config import Architecture
from scrimp.formats import blocks
from scrimp.model import flash, functions, loss
from scrimp.profiler.memory_trace.workspace import WorkspaceRule, cpu_workspace, cuda_workspace

DeviceFunctions = Literal["cpu", "cuda"]
GRANULES: dict[str, int] = {"cpu": 1, "cuda": 512}
"""Bytes of which an allocation is a multiple."""
WORKSPACES: dict[str, WorkspaceRule] = {"cpu": cpu_workspace, "cuda": cuda_workspace}


@contextlib.contextmanager
def standing_for(device: DeviceFunctions, *, fuses_attention: bool = True) -> Iterator[None]:
    """Inside, CPU tensors take the path of another device through the model.

    Args:
        fuses_attention: the device has a kernel for this attention (`fuses_attention`).
    """
    with contextlib.ExitStack() as stack:
        if device == "cuda":
            stack.enter_context(functions.plain_operations(fused_norm))
            for sizes in (loss.BLOCK_ELEMENTS, blocks.PIECE_ELEMENTS, flash.WORKSPACE_BYTES):
                stack.enter_context(_size_of_cuda(sizes))
            if not fuses_attention:
                stack.enter_context(sdpa_kernel(SDPBackend.MATH))
        yield


def fuses_attention(architecture: Architecture, precision: str) -> bool:
    """Whether CUDA's attention is one kernel: in fp32 it has none for key heads that query heads share."""
    return precision != "fp32" or architecture.num_heads == architecture.num_kv_heads


@contextlib.contextmanager
def _size_of_cuda(sizes: dict[str, int]) -> Iterator[None]:
    """Work of a CPU in pieces as large as CUDA's: they only decide how much exists at once."""
    before = dict(sizes)
    sizes["cpu"] = sizes["cuda"]
    try:
        yield
    finally:
        sizes.clear()
        sizes.update(before)


def fused_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """CUDA's RMSNorm, of fake tensors."""
    return cast(Tensor, _FusedNorm.apply(x, weight))  # type: ignore[no-untyped-call]


class _FusedNorm(torch.autograd.Function):
    """Saves and returns what the fused RMSNorm does, for fake tensors: its numbers mean nothing."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, x.new_empty(x.shape[:-1], dtype=torch.float32))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, _ = ctx.saved_tensors
        return torch.empty_like(x), torch.empty_like(weight)

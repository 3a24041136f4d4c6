"""What a plan's device would run, traced on this one.

A plan for CUDA is often made where there is no GPU, and torch's CPU wheel refuses a backward pass of fake CUDA tensors.
So fake CPU tensors take CUDA's path through the model (`scrimp.models.functions.plain_operations`): plain operations
instead of the CPU's own functions, pieces as large as on CUDA. For the two kernels that CUDA fuses stands what saves
the same: for RMSNorm a function without numbers, for flash attention the CPU's operator.

Where a run uses no fused attention on CUDA (fp32, compute capability below 8.0), the plain product of scores is
traced, as it runs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, Literal, TypeVar, cast

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from scrimp.formats import grouping
from scrimp.models import flash, functions
from scrimp.objectives import cross_entropy
from scrimp.profiler.memory_trace.workspace import WorkspaceRule, cpu_workspace, cuda_workspace

DeviceFunctions = Literal["cpu", "cuda"]
Entry = TypeVar("Entry")
GRANULES: dict[str, int] = {"cpu": 1, "cuda": 512}
"""Bytes of which an allocation is a multiple."""


def workspace_rule(device: DeviceFunctions, gpu: flash.Gpu) -> WorkspaceRule:
    """What kernels take beside their results."""
    return cuda_workspace(gpu) if device == "cuda" else cpu_workspace


@contextlib.contextmanager
def standing_for(
    device: DeviceFunctions,
    *,
    fuses_attention: bool = True,
    gpu: flash.Gpu | None = None,
    compiled: bool = False,
) -> Iterator[None]:
    """Inside, CPU tensors take the path of another device through the model.

    Args:
        fuses_attention: the device has a kernel for this attention (`scrimp.models.attention.fuses_attention`).
        gpu: that is stood for.
        compiled: blocks are, whose kernels save less.
    """
    with contextlib.ExitStack() as stack:
        if device == "cuda":
            stack.enter_context(functions.plain_operations(fused_norm, compiled=compiled))
            for sizes in (cross_entropy.BLOCK_ELEMENTS, grouping.PIECE_ELEMENTS, flash.WORKSPACE_BYTES):
                stack.enter_context(with_entry(sizes, sizes["cuda"]))
            stack.enter_context(with_entry(flash.STAND_IN, gpu or flash.Gpu()))
            if not fuses_attention:
                stack.enter_context(sdpa_kernel(SDPBackend.MATH))
        yield


@contextlib.contextmanager
def with_entry(sizes: dict[str, Entry], of_cpu: Entry) -> Iterator[None]:
    """A CPU's entry is a GPU's."""
    before = dict(sizes)
    sizes["cpu"] = of_cpu
    try:
        yield
    finally:
        sizes.clear()
        sizes.update(before)


def fused_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """CUDA's RMSNorm, of tensors without memory."""
    return cast(Tensor, _FusedNorm.apply(x, weight))  # type: ignore[no-untyped-call]


class _FusedNorm(torch.autograd.Function):
    """Saves and returns what the fused RMSNorm does, for tensors without memory: its numbers mean nothing."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, x.new_empty(x.shape[:-1], dtype=torch.float32))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, _ = ctx.saved_tensors
        return torch.empty_like(x), torch.empty_like(weight)

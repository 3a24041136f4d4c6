"""From a plan to a model that runs by it: formats, placement, compilation.

The model is described on the meta device, allocated once on its device in the format of its
parameters, then initialised or loaded: no second copy ever exists. GEMMs in bf16 over fp32
parameters run under autocast; over bf16 parameters they need nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from scrimp.config import Architecture
from scrimp.model import Decoder, LossSums
from scrimp.plan import Plan

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Executable:
    """A model with the precision that the plan gives it."""

    model: Decoder
    device: torch.device
    precision: str
    """Format of the GEMMs."""
    loss_chunk: int = 0
    """Tokens whose logits exist at once; 0 for all."""
    z_loss: float = 0.0
    """Weight of the squared log-partition penalty."""

    def autocast(self) -> contextlib.AbstractContextManager[object]:
        """Casts GEMM inputs to bf16 where the parameters are fp32."""
        parameter_dtype = self.model.head_weight.dtype
        if parameter_dtype == DTYPES[self.precision]:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, DTYPES[self.precision])

    def loss(self, tokens_BT: Tensor, targets_BT: Tensor, document_starts: Tensor | None) -> LossSums:
        """Summed loss of one micro-batch; the tensors may still be on the host."""
        tokens_BT = tokens_BT.to(self.device, non_blocking=True)
        targets_BT = targets_BT.to(self.device, non_blocking=True)
        with self.autocast():
            return self.model.loss(
                tokens_BT, targets_BT, document_starts, chunk=self.loss_chunk, z_loss=self.z_loss
            )


def realise(
    plan: Plan,
    architecture: Architecture,
    fill: Callable[[Decoder], None],
    *,
    device: torch.device,
    parameters: str,
    loss_chunk: int = 0,
    z_loss: float = 0.0,
) -> Executable:
    """Allocate the model of a plan and fill its parameters.

    Args:
        fill: initialises the parameters, or loads them.
        parameters: their format, fp32 or bf16.
    """
    with torch.device("meta"):
        model = Decoder(architecture, dtype=DTYPES[parameters])
    model.to_empty(device=device)
    fill(model)
    precision = plan.gemms["head"].fprop
    return Executable(model, device, precision, loss_chunk, z_loss)


def compile_blocks(model: Decoder) -> None:
    """torch.compile every block in place: equal blocks share one compiled graph."""
    for block in model.blocks:
        block.compile()

"""Leave a model as it was: what measuring changes for a while, and puts back.

Gradients, buffers, random states, training mode, the clock of the rounding noise and the precision of every planned
layer are as before when the context ends, whatever happened inside. Weights and the optimizer's state are
never written.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import nn

from scrimp.gemm import PlannedModel


@contextlib.contextmanager
def untouched(model: nn.Module, planned: PlannedModel) -> Iterator[None]:
    """Restore everything that a forward and a backward pass can change."""
    gradients = {name: p.grad for name, p in model.named_parameters()}
    buffers = {name: buffer.detach().clone() for name, buffer in model.named_buffers()}
    modes = {name: module.training for name, module in model.named_modules()}
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_available() else []
    clock, precisions = planned.clock, {name: layer.precision for name, layer in planned.layers.items()}
    reading, is_set = clock.reading, clock.is_set
    for parameter in model.parameters():
        parameter.grad = None
    try:
        with torch.random.fork_rng(devices), torch.compiler.set_stance("force_eager"):
            yield
    finally:
        planned.replan(precisions)
        clock.reading, clock.is_set = reading, is_set
        for name, module in model.named_modules():
            module.training = modes[name]
        with torch.no_grad():
            for name, buffer in model.named_buffers():
                buffer.copy_(buffers[name])
        for name, parameter in model.named_parameters():
            parameter.grad = gradients[name]

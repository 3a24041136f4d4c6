"""Gradients that depend on the step and the parameter's number alone, and steps with them."""

from __future__ import annotations

import torch

from scrimp.models.model import Model
from scrimp.optim import AdamW


def give_gradients(model: Model, step: int) -> None:
    """Give each parameter the gradient of a step."""
    for number, parameter in enumerate(model.parameters()):
        generator = torch.Generator().manual_seed(100 * step + number)
        noise = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
        (parameter * noise).sum().backward()


def take_steps(model: Model, optimizer: AdamW, steps: range, lr: float) -> None:
    """Move a model by these steps' gradients."""
    for step in steps:
        give_gradients(model, step)
        optimizer.step(lr)
        optimizer.zero_grad()

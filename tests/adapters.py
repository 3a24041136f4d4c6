"""Models with adapters for tests: the weights of a base, and adapters that add something."""

from __future__ import annotations

import torch

from scrimp.config import Architecture
from scrimp.models.initialise import initialise
from scrimp.models.model import Model, build_model


@torch.no_grad()
def adapted_model(
    architecture: Architecture, *, dtype: torch.dtype = torch.float32, seed: int = 0, b: float = 0.02
) -> Model:
    """A model of an architecture with adapters, on the weights that its base has by the seed.

    Args:
        b: standard deviation of B, which begins with zeros in a run.
    """
    model, base = build_model(architecture, dtype=dtype), build_model(architecture.base, dtype=dtype)
    initialise(base, seed)
    initialise(model, seed)
    parameters = dict(model.named_parameters())
    for name, weight in base.named_parameters():
        parameters[name].copy_(weight)
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.trained().items():
        if name.endswith(".lora_b"):
            parameter.normal_(0.0, b, generator=generator)
    return model

"""Whatever the optimizer, clipped gradients move weights as gradients that were smaller from the beginning."""

from __future__ import annotations

import importlib

import pytest
import torch
from torch import Tensor

from scrimp.config import Architecture, OptimizerConfig
from scrimp.config.optimizers import OPTIMIZERS
from scrimp.models.initialise import initialise
from scrimp.models.model import build_model
from scrimp.runtime import Executable

SMALL = Architecture(
    family="llama",
    vocab_size=64,
    num_layers=1,
    width=32,
    num_heads=2,
    num_kv_heads=2,
    head_size=16,
    ffn_width=48,
    context=32,
)
LIMIT = 0.25


def weights_after(name: str, *, clips: bool) -> dict[str, Tensor]:
    """Weights after two steps whose gradients are clipped, or are as small as clipped ones."""
    model = build_model(SMALL)
    initialise(model, 0)
    settings = OptimizerConfig(name=name, master_weights=False, moments="fp32", rank=8, refresh_every=2)
    build = importlib.import_module(OPTIMIZERS[name].module).build
    optimizer = build(Executable(model, torch.device("cpu"), "fp32"), settings, seed=0)
    generator = torch.Generator().manual_seed(1)
    for _ in range(2):
        for parameter in model.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        norm = optimizer.gradient_norm()
        assert norm > 10 * LIMIT
        if clips:
            optimizer.clip(norm, LIMIT)
        else:
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter.grad.mul_(LIMIT / norm)
        optimizer.step(0.01)
        optimizer.zero_grad()
    return {key: parameter.detach().clone() for key, parameter in model.named_parameters()}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_clipped_gradients_move_as_small_ones(name: str) -> None:
    clipped, small = (weights_after(name, clips=clips) for clips in (True, False))
    for key, weight in clipped.items():
        torch.testing.assert_close(weight, small[key], rtol=0, atol=0)

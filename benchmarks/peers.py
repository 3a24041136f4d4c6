"""Other FP8 linear layers, for `gemm.py`: torchao's float8 training and Transformer Engine, where they run.

Each peer is a function from a weight to a module, or the reason why it cannot run here. All take bf16 input and
a bf16 weight, and quantize the weight again at every forward pass, as a training step does.

Method  torchao: `convert_to_float8_training` by the recipes tensorwise and rowwise, compiled for every shape, as its
        documents ask.
        Transformer Engine: `te.Linear` under `fp8_autocast` with current scaling (per tensor) and block scaling
        (1x128 tiles and 128x128 blocks), eager, for its kernels are fused already.
Limits  Not run here: Transformer Engine, written after its documented interface; torchao's on a GPU.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

Maker = Callable[[Tensor], nn.Module]
"""From a weight [O, I] to a module that computes x W^T."""

_TORCHAO_RECIPES = ("tensorwise", "rowwise")
_TE_RECIPES = {"current": "Float8CurrentScaling", "block": "Float8BlockScaling"}


def peers(device: torch.device) -> dict[str, Maker | str]:
    """Every peer by name: how to make it, or why it cannot run here."""
    found: dict[str, Maker | str] = {}
    for recipe in _TORCHAO_RECIPES:
        found[f"torchao {recipe}"] = _refusal("torchao", device) or _torchao(recipe)
    for label, recipe in _TE_RECIPES.items():
        found[f"TE {label}"] = _refusal("transformer_engine", device) or _transformer_engine(recipe)
    return found


def plain_linear(weight: Tensor) -> nn.Linear:
    """An ordinary linear layer without bias around a weight."""
    outputs, inputs = weight.shape
    layer = nn.Linear(inputs, outputs, bias=False, device="meta", dtype=weight.dtype)
    layer.weight = nn.Parameter(weight)
    return layer


def _refusal(package: str, device: torch.device) -> str | None:
    if importlib.util.find_spec(package) is None:
        return f"{package} is not installed"
    if device.type != "cuda":
        return "its FP8 products need a GPU: torch's kernel for CPUs is thousands of times slower than bf16"
    return None


def _torchao(recipe: str) -> Maker:
    def make(weight: Tensor) -> nn.Module:
        float8 = importlib.import_module("torchao.float8")
        model = nn.Sequential(plain_linear(weight))
        config = float8.Float8LinearConfig.from_recipe_name(recipe)
        converted: nn.Module = float8.convert_to_float8_training(model, config=config)
        if type(converted[0]) is nn.Linear:  # type: ignore[index]
            raise RuntimeError("torchao left the layer as it was")
        # Every shape its own graph: neither dynamic shapes nor a limit of recompilations may slow it.
        torch._dynamo.reset()
        converted.compile(dynamic=False)
        return converted

    return make


def _transformer_engine(recipe: str) -> Maker:
    def make(weight: Tensor) -> nn.Module:
        engine = importlib.import_module("transformer_engine.pytorch")
        chosen = getattr(importlib.import_module("transformer_engine.common.recipe"), recipe)()
        outputs, inputs = weight.shape
        layer = engine.Linear(inputs, outputs, bias=False, params_dtype=weight.dtype, device="cuda")
        with torch.no_grad():
            layer.weight.copy_(weight)
        return _Fp8(engine, layer, chosen)

    return make


class _Fp8(nn.Module):
    """A layer of Transformer Engine under its FP8 context."""

    def __init__(self, engine: Any, layer: nn.Module, recipe: Any) -> None:
        super().__init__()
        self.engine, self.layer, self.recipe = engine, layer, recipe

    def forward(self, x: Tensor) -> Tensor:
        """x W^T."""
        with self.engine.fp8_autocast(enabled=True, fp8_recipe=self.recipe):
            y: Tensor = self.layer(x)
        return y

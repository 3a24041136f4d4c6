"""Carries a torchao export out on a model: configuration objects, checks, conversion.

Everything is checked before the first layer changes: torchao's conversions stop halfway where a layer does not
fit, and replace layers of other libraries unseen.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import nn

from scrimp.errors import DeviceError, ModelError
from scrimp.export.torchao_groups import (
    BLOCKWISE,
    FLOAT8,
    MULTIPLE,
    MXFP8,
    NVFP4,
    TorchaoGroup,
    torchao_module,
)


def convert(model: nn.Module, groups: Sequence[TorchaoGroup]) -> nn.Module:
    """Make the groups' layers torchao's; see `TorchaoExport.apply`."""
    modules = dict(model.named_modules())
    for group in groups:
        for name in group.layers:
            _check_layer(name, modules.get(name), group)
        if group.kind == BLOCKWISE and not torchao_module("utils").is_sm_at_least_90():
            raise DeviceError("torchao makes fp8 layers only where a GPU from SM90 on is", got="no such GPU")
    configs = [group.config for group in groups]
    for group, config in zip(groups, configs, strict=True):
        model = _convert_group(model, group, config)
    return model


def _convert_group(model: nn.Module, group: TorchaoGroup, config: Any) -> nn.Module:
    is_mine = group.module_filter_fn
    if group.kind == FLOAT8:
        changed = torchao_module("float8").convert_to_float8_training(
            model, module_filter_fn=is_mine, config=config
        )
    elif group.kind == MXFP8:
        swap = torchao_module("float8.float8_linear_utils").swap_linear_layers
        changed = swap(model, lambda layer: _mxfp8_linear(layer, config), module_filter_fn=is_mine)
    else:
        torchao_module("quantization").quantize_(model, config, is_mine)
        changed = model
    return cast(nn.Module, changed)


def _mxfp8_linear(layer: nn.Linear, config: Any) -> nn.Module:
    """The layer with the same parameters; `quantize_` with the same configuration would drop the bias."""
    with torch.device("meta"):
        new = torchao_module("prototype.moe_training.mxfp8_linear").MXFP8Linear(
            layer.in_features,
            layer.out_features,
            bias=layer.bias is not None,
            kernel_preference=config.kernel_preference,
            scale_calculation_mode=config.scale_calculation_mode,
            wgrad_with_hp=config.wgrad_with_hp,
        )
    new.weight, new.bias = layer.weight, layer.bias
    return cast(nn.Module, new)


def _check_layer(name: str, layer: nn.Module | None, group: TorchaoGroup) -> None:
    if not isinstance(layer, nn.Linear):
        raise ModelError(
            f"the plan names {name}, which is no linear layer of the model",
            got="nothing of that name" if layer is None else type(layer).__name__,
            do="export the plan with the names of this model",
        )
    problem = _problem(layer, group)
    if problem:
        raise ModelError(f"torchao cannot convert {name} to its {group.kind} layer", got=problem)


def _problem(layer: nn.Linear, group: TorchaoGroup) -> str | None:
    """What a conversion would break, or stop at."""
    kind = group.kind
    widths, multiple = (layer.out_features, layer.in_features), MULTIPLE[kind]
    if hasattr(layer, "planned"):
        return "a layer that Scrimp has planned: swap_out first"
    if type(layer).forward is not nn.Linear.forward:
        return f"{type(layer).__name__}, which has a forward of its own"
    if group.emulate and kind in (BLOCKWISE, NVFP4):
        return "a request to emulate, which it cannot"
    if kind == BLOCKWISE and layer.bias is not None:
        return "a bias, which it does not take"
    if any(width % multiple for width in widths) and not group.takes_any_width:
        return f"widths {widths[0]} and {widths[1]}, which are not multiples of {multiple}"
    return None

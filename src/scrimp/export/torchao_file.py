"""A torchao export as a Python file that needs nothing of Scrimp: `convert(model)`.

The file is what clusters can keep beside their training script. It selects layers by globs, so that it stays
short and can be read; everything else is the configuration of `torchao_model`, written out.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from scrimp.export.fit import summarise
from scrimp.export.torchao_groups import (
    BLOCKWISE,
    FLOAT8,
    MULTIPLE,
    MXFP8,
    NVFP4,
    TorchaoGroup,
    float8_casts,
)
from scrimp.precision import HIGH_PRECISION

if TYPE_CHECKING:
    from scrimp.export.torchao import TorchaoExport

_IMPORTS = {
    FLOAT8: (
        "from torchao.float8 import convert_to_float8_training",
        "from torchao.float8.config import (",
        "    CastConfig,",
        "    Float8LinearConfig,",
        "    ScalingGranularity,",
        "    ScalingType,",
        "    e4m3_dtype,",
        "    e5m2_dtype,",
        ")",
    ),
    MXFP8: (
        "from torchao.float8.float8_linear_utils import swap_linear_layers",
        "from torchao.prototype.moe_training.mxfp8_linear import MXFP8Linear",
        "from torchao.prototype.mx_formats.config import ScaleCalculationMode",
        "from torchao.quantization.quantize_.common import KernelPreference",
    ),
    BLOCKWISE: (
        "from torchao.prototype.blockwise_fp8_training.linear import Float8BlockwiseLinearConfig",
        "from torchao.quantization import quantize_",
    ),
    NVFP4: (
        "from torchao.prototype.moe_training.nvfp4_training.nvfp4_training import NVFP4TrainingConfig",
        "from torchao.quantization import quantize_",
    ),
}
_FILTER = '''
def among(*patterns):
    """A filter for torchao's conversions: linear layers whose name matches one of the globs."""
    return lambda module, fqn: isinstance(module, nn.Linear) and any(fnmatchcase(fqn, p) for p in patterns)
'''
_CHECK_FUNCTION = '''
def check(model, layers, count, multiple):
    """Refuse what torchao would pass over, or stop at halfway, before the first layer changes."""
    found = {name: module for name, module in model.named_modules() if layers(module, name)}
    if len(found) != count:
        what = "torchao converts torch.nn.Linear, by the names that the plan has"
        raise ValueError(f"{len(found)} linear layers of this model where the plan has {count}: {what}")
    for name, module in found.items():
        if module.in_features % multiple or module.out_features % multiple:
            widths = f"{module.in_features} inputs and {module.out_features} outputs"
            raise ValueError(f"{name} has {widths}: torchao needs multiples of {multiple}")
'''
_MXFP8_FUNCTION = '''
def mxfp8(wgrad_with_hp, kernel_preference):
    """A linear layer to an MXFP8 one with the same parameters; quantize_ would drop its bias."""

    def convert_layer(layer):
        with torch.device("meta"):
            new = MXFP8Linear(
                layer.in_features,
                layer.out_features,
                bias=layer.bias is not None,
                kernel_preference=kernel_preference,
                scale_calculation_mode=ScaleCalculationMode.FLOOR,
                wgrad_with_hp=wgrad_with_hp,
            )
        new.weight, new.bias = layer.weight, layer.bias
        return new

    return convert_layer
'''


def write_file(export: TorchaoExport) -> str:
    """The file's content."""
    kinds = [kind for kind in _IMPORTS if any(group.kind == kind for group in export.groups)]
    imports = dict.fromkeys(line for kind in kinds for line in _IMPORTS[kind])
    lines = [*_heading(export), "", "from fnmatch import fnmatchcase", ""]
    lines += ["import torch", "from torch import nn"] if MXFP8 in kinds else ["from torch import nn"]
    lines += [*imports, "", _FILTER, *([_CHECK_FUNCTION] if kinds else [])]
    lines += [_MXFP8_FUNCTION] if MXFP8 in kinds else []
    lines += ["", "def convert(model):"]
    lines += [
        '    """Convert in place; the result is another module only where the model is one linear layer."""'
    ]
    numbered = [(group, f"layers_{number}") for number, group in enumerate(export.groups)]
    for group, layers in numbered:
        lines += _layers(group, layers)
    for group, layers in numbered:
        lines += _call(group, layers)
    return "\n".join([*lines, "    return model", ""])


def _heading(export: TorchaoExport) -> list[str]:
    lines = [
        "# Precision of each linear layer for torchao 0.18, written by Scrimp from a plan.",
        "# Call convert(model) before torch.compile and before sharding.",
    ]
    if export.plain:
        lines.append(f"# {len(export.plain)} planned layers stay as they are.")
    lines += [f"# Not as planned: {line}." for line in summarise(export.inexpressible, export.layers)]
    return lines + [f"# Note: {note}." for note in export.notes]


def _layers(group: TorchaoGroup, layers: str) -> list[str]:
    """The lines that select and check one group."""
    lines = ["    # fprop, dgrad, wgrad: " + ", ".join(group.recipes), f"    {layers} = among("]
    lines += [f"        {json.dumps(pattern)}," for pattern in group.patterns] + ["    )"]
    multiple = 1 if group.takes_any_width else MULTIPLE[group.kind]
    return [*lines, f"    check(model, {layers}, {len(group.layers)}, {multiple})"]


def _call(group: TorchaoGroup, layers: str) -> list[str]:
    """The lines that convert one group."""
    lines: list[str] = []
    if group.kind == FLOAT8:
        lines += ["    config = Float8LinearConfig("]
        for name, cast in float8_casts(group.recipes).items():
            kind, granularity = cast.scaling_type, cast.scaling_granularity
            value = f"CastConfig(ScalingType.{kind}, ScalingGranularity.{granularity}, {cast.element}_dtype)"
            lines += [f"        {name}={value},"]
        lines += [f"        emulate={group.emulate},", "    )"]
        return [
            *lines,
            f"    model = convert_to_float8_training(model, module_filter_fn={layers}, config=config)",
        ]
    if group.kind == MXFP8:
        arguments = f"wgrad_with_hp={group.recipes[2] in HIGH_PRECISION}, "
        arguments += f"kernel_preference=KernelPreference.{'EMULATED' if group.emulate else 'AUTO'}"
        return [
            *lines,
            f"    model = swap_linear_layers(model, mxfp8({arguments}), module_filter_fn={layers})",
        ]
    config = "Float8BlockwiseLinearConfig" if group.kind == BLOCKWISE else "NVFP4TrainingConfig"
    return [*lines, f"    quantize_(model, {config}(), {layers})"]

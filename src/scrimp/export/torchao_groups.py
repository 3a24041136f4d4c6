"""What torchao converts together: layers that share a configuration, and the configuration itself.

Checked  tests/export/test_torchao.py, test_torchao_model.py
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from scrimp.errors import DeviceError
from scrimp.export.fit import Triple
from scrimp.precision import GEMMS, HIGH_PRECISION, OPERANDS, recipe

if TYPE_CHECKING:
    from torch import nn

FLOAT8, MXFP8, BLOCKWISE, NVFP4 = "float8", "mxfp8", "blockwise", "nvfp4"
MULTIPLE = {FLOAT8: 16, MXFP8: 32, BLOCKWISE: 128, NVFP4: 128}
"""What a layer's widths, and the tokens of a micro-batch, must be multiples of."""
WHOLE = {"fp8": BLOCKWISE, "nvfp4": NVFP4}
"""Recipes that a layer runs in all three GEMMs or in none."""
GRANULARITY = {"tensor": "TENSORWISE", "row": "AXISWISE"}
_CASTS = {
    "cast_config_input": ("fprop", "x"),
    "cast_config_weight": ("fprop", "w"),
    "cast_config_grad_output": ("dgrad", "g"),
    "cast_config_weight_for_grad_input": ("dgrad", "w"),
    "cast_config_grad_output_for_grad_weight": ("wgrad", "g"),
    "cast_config_input_for_grad_weight": ("wgrad", "x"),
}
"""Field of Float8LinearConfig to the GEMM and the operand that it casts."""
_USUAL_ELEMENTS = {"x": "e4m3", "w": "e4m3", "g": "e5m2"}
"""torchao's, for an operand that is cast in no GEMM."""


@dataclass(frozen=True)
class Cast:
    """How Float8LinearConfig casts one operand for one GEMM, in torchao's words."""

    scaling_type: str
    scaling_granularity: str
    element: str


@dataclass(frozen=True)
class TorchaoGroup:
    """Layers that share a configuration."""

    recipes: Triple
    """fprop, dgrad, wgrad."""
    layers: tuple[str, ...]
    patterns: tuple[str, ...]
    """Globs that match these layers and no other layer of the plan."""
    emulate: bool = False

    @property
    def kind(self) -> str:
        """float8, mxfp8, blockwise or nvfp4: which of torchao's conversions it is."""
        if self.recipes[0] in WHOLE:
            return WHOLE[self.recipes[0]]
        return MXFP8 if self.recipes[0] == "mxfp8" else FLOAT8

    @property
    def takes_any_width(self) -> bool:
        """Whether the layers' widths need not be multiples of anything."""
        return self.emulate and self.kind == FLOAT8

    @property
    def config(self) -> Any:
        """torchao's configuration object.

        Raises:
            DeviceError: torchao is not installed.
        """
        return build_config(self)

    def module_filter_fn(self, module: nn.Module, fqn: str) -> bool:
        """Whether a module is a linear layer of this group: what torchao's conversions take as filter.

        Args:
            fqn: the module's name in the model.
        """
        from torch import nn

        return isinstance(module, nn.Linear) and fqn in self.layers


def float8_casts(recipes: Triple) -> dict[str, Cast]:
    """The six casts of a Float8LinearConfig: each operand of each GEMM as its recipe has it, or not at all."""
    by_gemm: dict[str, str] = dict(zip(GEMMS, recipes, strict=True))
    elements = dict(_USUAL_ELEMENTS)
    chosen: dict[str, tuple[str, str]] = {}
    for name, (gemm, tensor) in _CASTS.items():
        entry = recipe(by_gemm[gemm]).gemm(gemm)
        if entry is None:
            chosen[name] = ("DISABLED", "TENSORWISE")
            continue
        operand = (entry.a, entry.b)[OPERANDS[gemm].index(tensor)]
        elements[tensor] = operand.element
        chosen[name] = ("DYNAMIC", GRANULARITY[operand.scaling])
    return {name: Cast(*chosen[name], elements[tensor]) for name, (_, tensor) in _CASTS.items()}


def build_config(group: TorchaoGroup) -> Any:
    """torchao's configuration object of a group.

    Raises:
        DeviceError: torchao is not installed.
    """
    if group.kind == FLOAT8:
        config = torchao_module("float8.config")
        casts = {
            name: config.CastConfig(
                config.ScalingType[cast.scaling_type],
                config.ScalingGranularity[cast.scaling_granularity],
                getattr(config, f"{cast.element}_dtype"),
            )
            for name, cast in float8_casts(group.recipes).items()
        }
        return config.Float8LinearConfig(**casts, emulate=group.emulate)
    if group.kind == MXFP8:
        preference = torchao_module("quantization.quantize_.common").KernelPreference
        return torchao_module("prototype.moe_training.config").MXFP8TrainingOpConfig(
            kernel_preference=preference.EMULATED if group.emulate else preference.AUTO,
            wgrad_with_hp=group.recipes[2] in HIGH_PRECISION,
            scale_calculation_mode=torchao_module("prototype.mx_formats.config").ScaleCalculationMode.FLOOR,
        )
    if group.kind == BLOCKWISE:
        return torchao_module("prototype.blockwise_fp8_training.linear").Float8BlockwiseLinearConfig()
    return torchao_module("prototype.moe_training.nvfp4_training.nvfp4_training").NVFP4TrainingConfig()


def torchao_module(module: str) -> Any:
    """A module of torchao; DeviceError where it is not installed."""
    try:
        return importlib.import_module(f"torchao.{module}")
    except ImportError as error:
        raise DeviceError(
            "torchao 0.18 is not installed", got=str(error), do='pip install "torchao>=0.18,<0.19"'
        ) from error

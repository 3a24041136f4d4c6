"""A precision plan as torchao's low-precision training: one configuration per group of layers.

Which of Scrimp's recipes torchao 0.18 trains linear layers in, and by what:

==============================  ==========================================================================
fp8_tensor, fp8_row, bf16       `Float8LinearConfig`: each GEMM on its own (a cast per operand and GEMM)
mxfp8; mxfp8/mxfp8/bf16         `MXFP8Linear`, scales by the floor rule of OCP MX, as Scrimp's [prototype]
fp8                             `Float8BlockwiseLinearConfig`: 1x128 tiles, W 128x128, fp32 scales [prototype]
nvfp4                           `NVFP4TrainingConfig` [prototype]
int8 and its kin, fp4, mxfp4    nothing
==============================  ==========================================================================

Exact    fp8_row is not torchao's recipe "rowwise", which rounds scales to powers of two: it is the same
         casts without that. A GEMM in bf16 has both its casts DISABLED. The output's gradient has one
         element type in dgrad and wgrad, so fp8_tensor (E5M2) and fp8_row (E4M3) do not mix there.
Bias     torchao's own conversion for MXFP8 (`quantize_` with `MXFP8TrainingOpConfig`) drops a layer's bias
         without a word; `MXFP8Linear` keeps it, and is what is put in. FP8 tiles take no bias.
Kinds    torchao converts torch.nn.Linear. What else a plan may hold (transformers' Conv1D) is refused, by `apply`
         and by the file alike, before the first layer changes.
Limits   dgrad in bf16 needs weights of the compute type: torchao does not cast them in backward under
         autocast. Tokens per device must be a multiple of 16 (float8), 32 (mxfp8) or 128 (fp8, nvfp4).
         fp8 needs a GPU from SM90 on, mxfp8 and nvfp4 from SM100 on; float8 and mxfp8 can be emulated.
Source   torchao 0.18: float8/config.py, float8/float8_linear.py, prototype/moe_training/mxfp8_linear.py,
         prototype/moe_training/nvfp4_training/, prototype/blockwise_fp8_training/linear.py.
Checked  tests/export/test_torchao.py: what runs and what is named; tests/export/test_torchao_model.py:
         converted layers give the numbers of Scrimp's reference in both passes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING

from scrimp.export.fit import Host, Inexpressible, Triple, compute_of, fit
from scrimp.export.globs import collapse
from scrimp.export.torchao_groups import FLOAT8, GRANULARITY, MULTIPLE, NVFP4, WHOLE, TorchaoGroup
from scrimp.precision import GEMMS, HIGH_PRECISION, LinearPrecision, recipe

if TYPE_CHECKING:
    from torch import nn

_NVFP4_NOTE = (
    "nvfp4: torchao raises block scales below 2^-6 to 2^-6, and rounds wgrad's rotated operands to bf16"
)


@dataclass(frozen=True)
class TorchaoExport:
    """A plan in torchao's terms."""

    groups: tuple[TorchaoGroup, ...]
    plain: tuple[str, ...]
    """Layers that stay as they are."""
    inexpressible: tuple[Inexpressible, ...] = ()
    notes: tuple[str, ...] = ()
    """What torchao computes otherwise within a recipe that it has."""

    @property
    def layers(self) -> tuple[str, ...]:
        """All layers that were exported."""
        return (*self.plain, *(layer for group in self.groups for layer in group.layers))

    @property
    def text(self) -> str:
        """A Python file whose `convert(model)` needs torchao and nothing of Scrimp."""
        from scrimp.export.torchao_file import write_file

        return write_file(self)

    def apply(self, model: nn.Module) -> nn.Module:
        """Convert the planned layers, before compiling and sharding; parameters keep their names and memory.

        Returns:
            The model; another module only where the model itself is one linear layer.

        Raises:
            ModelError: a layer that the model does not have, or that torchao cannot convert; nothing has changed.
            DeviceError: torchao is not installed.
        """
        from scrimp.export.torchao_model import convert

        return convert(model, self.groups)


def to_torchao(
    precisions: Mapping[str, LinearPrecision], *, approximate: bool = False, emulate: bool = False
) -> TorchaoExport:
    """A plan's precisions as torchao's configurations.

    Args:
        precisions: by the layers' names in the model that will be converted.
        approximate: layers that torchao cannot run as planned take the nearest that it can, with no fewer bits.
        emulate: float8 and mxfp8 by torchao's emulation, which needs no GPU.

    Raises:
        PlanError: no layers, or an unknown recipe.
    """
    compute = compute_of(precisions)
    runs, left_out = fit(precisions, torchao_host(compute), compute=compute, approximate=approximate)
    patterns: dict[Triple, list[str]] = {}
    for pattern, recipes in collapse(runs):
        patterns.setdefault(recipes, []).append(pattern)
    layers = {recipes: tuple(name for name in runs if runs[name] == recipes) for recipes in patterns}
    plain: Triple = (compute, compute, compute)
    groups = tuple(
        TorchaoGroup(recipes, layers[recipes], tuple(globs), emulate)
        for recipes, globs in patterns.items()
        if recipes != plain
    )
    by_kind = {group.kind: group for group in groups}
    notes = [_NVFP4_NOTE] if NVFP4 in by_kind else []
    notes += [_multiples_note(group) for group in by_kind.values() if not group.takes_any_width]
    return TorchaoExport(groups, layers.get(plain, ()), left_out, tuple(notes))


def _multiples_note(group: TorchaoGroup) -> str:
    names = dict.fromkeys(name for name in group.recipes if name not in HIGH_PRECISION)
    what = "float8" if group.kind == FLOAT8 else next(iter(names))
    return f"{what}: both widths of a layer, and the tokens on a device, must be multiples of {MULTIPLE[group.kind]}"


def torchao_host(compute: str) -> Host:
    """All that torchao runs, with GEMMs that are not quantized in `compute` (bf16 or fp32)."""
    float8 = [name for name in ("fp8_row", "fp8_tensor") if _is_float8(name)]
    mixes: list[Triple] = [
        (fprop, dgrad, wgrad)
        for fprop, dgrad, wgrad in product((compute, *float8), repeat=3)
        if _gradient_elements(dgrad, wgrad) <= 1
    ]
    whole: list[Triple] = [("mxfp8", "mxfp8", "mxfp8"), ("mxfp8", "mxfp8", compute)]
    if compute == "bf16":  # their layers give bf16 whatever the input's type
        whole += [(name, name, name) for name in WHOLE]
    return Host("torchao", [*mixes, *whole], _explain)


def _is_float8(name: str) -> bool:
    """Whether every operand of a recipe is one that a CastConfig can say."""
    gemms = [recipe(name).gemm(gemm) for gemm in GEMMS]
    operands = [operand for entry in gemms if entry is not None for operand in (entry.a, entry.b)]
    return bool(operands) and all(
        operand.element in ("e4m3", "e5m2")
        and operand.scaling in GRANULARITY
        and operand.rounding == "nearest"
        and not operand.hadamard
        for operand in operands
    )


def _gradient_elements(dgrad: str, wgrad: str) -> int:
    """In how many element types the output's gradient is read."""
    entries = recipe(dgrad).dgrad, recipe(wgrad).wgrad
    return len({entry.a.element for entry in entries if entry is not None})


def _explain(recipes: Triple) -> str:
    names = [name for name in dict.fromkeys(recipes) if name not in HIGH_PRECISION]
    for name in names:
        if name not in (*WHOLE, "mxfp8") and not _is_float8(name):
            return f"torchao trains no linear layer in {name}"
    for name in names:
        if name in WHOLE:
            if len(set(recipes)) == 1:
                return f"torchao's {name} layer gives bf16, and the plan computes in fp32"
            return f"torchao's {name} layer runs all three GEMMs in it"
    if "mxfp8" in names:
        return "torchao's mxfp8 layer leaves only wgrad unquantized, and mixes with no other recipe"
    return "torchao reads the output's gradient in one element type, E4M3 or E5M2, in dgrad and wgrad"

"""A precision plan as Transformer Engine recipes per layer: the file that Megatron-Core reads.

Problem  Transformer Engine runs a whole linear layer, all three GEMMs, by one recipe. Megatron-Core lets a file
         choose the recipe of each layer by its path in the model: ``--te-precision-config-file``.
Schema   ::

             configs:
               <key>:
                 transformer_engine_config_type: "TEQuantizationParams"
                 training_recipe: {}                                 unquantized
                 training_recipe:
                   fp8_quantization_recipe: tensorwise | blockwise | mxfp8
                   fp4_quantization_recipe: nvfp4                    instead of the line before
                   fp8_format: e4m3 | hybrid                         hybrid: gradients in E5M2
                   override_nonquantized_autocast: true              also where the run itself has no recipe
             matchers:
               <any name>: {config: <key>, type: "glob", pattern: <fnmatch>, enabled: true}

         The first matcher whose pattern fits a module's path decides. Without an evaluation_recipe a layer
         evaluates as it trains.
Recipes  fp8 is blockwise (Float8BlockScaling: X and G 1x128, W 128x128, E4M3), fp8_tensor is tensorwise hybrid
         (Float8CurrentScaling), mxfp8 is mxfp8 (MXFP8BlockScaling), nvfp4 is nvfp4 (NVFP4BlockScaling: W
         16x16, gradients stochastic, Hadamard on wgrad's operands only). No other recipe is there.
Limits   No mix within a layer can be written in this file. (Newer Transformer Engines compose one in Python, a
         CustomRecipe of HybridQuantizers, and its debug feature DisableQuantizationGEMM takes single GEMMs
         back to high precision; neither is a file of Megatron's.) The output layer is not Transformer Engine's.
         Layers are counted within a pipeline stage. fp8 widths and tokens are multiples of 128.
         Variables NVTE_* other than those in `environment` must be unset: they change recipes.
Source   Megatron-LM (core 0.16 on; read at d98e8a64): megatron/core/quantization/quant_config.py,
         megatron/core/extensions/transformer_engine.py (TEQuantizationRecipe) and
         TransformerEngineMixedPrecision.md beside it. Transformer Engine (read at d0067d0d):
         transformer_engine/common/recipe/__init__.py.
Checked  tests/export/test_transformer_engine.py: an independent reading of the file gives the plan back.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field

from scrimp.export.fit import Host, Inexpressible, Triple, compute_of, fit, summarise
from scrimp.export.globs import collapse
from scrimp.export.layer_names import MEGATRON_HEAD
from scrimp.precision import HIGH_PRECISION, LinearPrecision

_RECIPES = {
    "fp8": {"fp8_quantization_recipe": "blockwise", "fp8_format": "e4m3"},
    "mxfp8": {"fp8_quantization_recipe": "mxfp8", "fp8_format": "e4m3"},
    "fp8_tensor": {"fp8_quantization_recipe": "tensorwise", "fp8_format": "hybrid"},
    "nvfp4": {"fp4_quantization_recipe": "nvfp4"},
}
"""Recipe to the fields of training_recipe; the first of several near ones is preferred."""
_ENVIRONMENT = {"fp8": {"NVTE_FP8_BLOCK_SCALING_FP32_SCALES": "1"}}
"""What a recipe needs to have Scrimp's scales."""
_NOTES = {
    "fp8": "fp8: its scales are rounded to powers of two on Blackwell, and where the variable is not set",
    "mxfp8": "mxfp8: Transformer Engine rounds scales up to a power of two, Scrimp down (OCP MX's floor rule)",
}
_HEAD = {MEGATRON_HEAD: "Megatron's output layer does not run by this file"}


@dataclass(frozen=True)
class TransformerEngineExport:
    """A plan in Transformer Engine's terms."""

    configs: tuple[str, ...]
    """Keys of the file's configs: names of recipes."""
    matchers: tuple[tuple[str, str], ...]
    """(glob, key); every glob that matches a layer gives the same key."""
    layers: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables that the training processes need for these recipes."""
    inexpressible: tuple[Inexpressible, ...] = ()
    notes: tuple[str, ...] = ()
    """What Transformer Engine computes otherwise within a recipe that it has."""

    @property
    def text(self) -> str:
        """The YAML file for --te-precision-config-file."""
        lines = ["# Precision of each linear layer, written by Scrimp from a plan."]
        lines += ["# Megatron-Core reads it with --te-precision-config-file."]
        lines += [f"# Environment: {name}={value}" for name, value in self.environment.items()]
        lines += [f"# Not as planned: {line}." for line in summarise(self.inexpressible, self.layers)]
        lines += [f"# Note: {note}." for note in self.notes]
        lines.append("configs:")
        for key in self.configs:
            lines += [f"  {key}:", '    transformer_engine_config_type: "TEQuantizationParams"']
            fields = _training_recipe(key)
            lines.append("    training_recipe:" + ("" if fields else " {}"))
            lines += [f"      {name}: {json.dumps(value)}" for name, value in fields.items()]
        lines.append("matchers:")
        for number, (pattern, key) in enumerate(self.matchers):
            choice = f"config: {key}, type: glob, pattern: {json.dumps(pattern)}, enabled: true"
            lines.append(f"  m{number}: {{{choice}}}")
        return "\n".join([*lines, ""])


def to_transformer_engine(
    precisions: Mapping[str, LinearPrecision], *, approximate: bool = False
) -> TransformerEngineExport:
    """A plan's precisions as recipes of Transformer Engine.

    Args:
        precisions: by the layers' paths in the model, such as those of `megatron_names`.
        approximate: layers that cannot run as planned take the nearest recipe with no fewer bits in any GEMM.

    Raises:
        PlanError: no layers, or an unknown recipe.
    """
    compute = compute_of(precisions)
    runs, left_out = fit(
        precisions, transformer_engine_host(compute), compute=compute, approximate=approximate
    )
    matchers = [(pattern, recipes[0]) for pattern, recipes in collapse(runs)]
    configs = tuple(dict.fromkeys(key for _, key in matchers))
    environment = {name: value for key in configs for name, value in _ENVIRONMENT.get(key, {}).items()}
    notes = tuple(_NOTES[key] for key in configs if key in _NOTES)
    return TransformerEngineExport(configs, tuple(matchers), tuple(runs), environment, left_out, notes)


def transformer_engine_host(compute: str) -> Host:
    """All that Transformer Engine runs by Megatron's file, with unquantized layers in `compute`."""
    runs: list[Triple] = [(name, name, name) for name in (compute, *_RECIPES)]
    return Host("Transformer Engine", runs, _explain, _HEAD)


def _training_recipe(key: str) -> dict[str, str | bool]:
    return {} if key in HIGH_PRECISION else {**_RECIPES[key], "override_nonquantized_autocast": True}


def _explain(recipes: Triple) -> str:
    for name in dict.fromkeys(recipes):
        if name not in HIGH_PRECISION and name not in _RECIPES:
            return f"Transformer Engine has no recipe like {name}"
    return (
        f"Transformer Engine runs a layer's three GEMMs by one recipe, and this one has {'/'.join(recipes)}"
    )

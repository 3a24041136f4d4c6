"""Megatron's file, read as Megatron reads it, gives back what the plan says or what was named."""

from __future__ import annotations

import fnmatch
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from property_tests import examples

from scrimp.export import rename, to_transformer_engine
from scrimp.export.fit import Triple
from scrimp.precision import GEMMS, RECIPES, LinearPrecision

LAYERS = ("attention.qkv", "attention.out", "mlp.gate_up", "mlp.down")
NAMES = st.sampled_from([name for name in RECIPES if name != "fp32"])
TRIPLES = st.one_of(NAMES.map(lambda name: (name,) * 3), st.tuples(NAMES, NAMES, NAMES))
# Fields of training_recipe, from Megatron-LM's TEQuantizationRecipe and its tests; classes of Transformer Engine.
FIELDS = {
    "fp8_quantization_recipe",
    "fp4_quantization_recipe",
    "custom_recipe_factory",
    "fp8_format",
    "override_quantized_autocast",
    "override_nonquantized_autocast",
    "tp_only_amax_red",
    "fp8_param",
    "fp4_param",
}
CLASSES = {
    ("tensorwise", "hybrid"): "fp8_tensor",
    ("blockwise", "e4m3"): "fp8",
    ("mxfp8", "e4m3"): "mxfp8",
}


def read_as_megatron(file: dict[str, Any], path: str) -> str | None:
    """The recipe of a module: the first enabled matcher whose glob fits, its config checked and understood."""
    for matcher in file["matchers"].values():
        assert matcher["type"] == "glob"
        if matcher.get("enabled", False) and fnmatch.fnmatch(path, matcher["pattern"]):
            return understand(file["configs"][matcher["config"]])
    return None


def understand(config: dict[str, Any]) -> str:
    assert set(config) == {"transformer_engine_config_type", "training_recipe"}
    assert config["transformer_engine_config_type"] == "TEQuantizationParams"
    recipe = config["training_recipe"]
    assert set(recipe) <= FIELDS
    fp8, fp4 = recipe.get("fp8_quantization_recipe"), recipe.get("fp4_quantization_recipe")
    if fp8 is None and fp4 is None:
        assert recipe.get("override_quantized_autocast", True) is True
        return "bf16"
    assert fp8 is None or fp4 is None
    assert recipe["override_nonquantized_autocast"] is True
    return CLASSES[fp8, recipe.get("fp8_format", "e4m3")] if fp8 else {"nvfp4": "nvfp4"}[fp4]


@st.composite
def plans(draw: st.DrawFn) -> dict[str, LinearPrecision]:
    """Some families of layers with one choice, some mixed, as planners make them."""
    depth = draw(st.integers(1, 5))
    plan = {}
    for layer in LAYERS:
        shared = draw(st.one_of(st.none(), TRIPLES))
        for block in range(depth):
            plan[f"blocks.{block}.{layer}"] = LinearPrecision(*(shared or draw(TRIPLES)), "bf16")
    return plan | {"head": LinearPrecision(*draw(TRIPLES), "bf16")}


@examples(100)
@given(plan=plans(), approximate=st.booleans(), names=st.sampled_from(["megatron", "scrimp", "huggingface"]))
def test_the_file_reads_back_as_the_plan_but_for_what_is_named(
    plan: dict[str, LinearPrecision], approximate: bool, names: Any
) -> None:
    renamed = rename(plan, names)
    export = to_transformer_engine(renamed, approximate=approximate)
    file = yaml.safe_load(export.text)
    named = {(entry.layer, entry.gemm): entry for entry in export.inexpressible}
    for layer, precision in renamed.items():
        runs = read_as_megatron(file, layer)
        for gemm in GEMMS:
            entry = named.pop((layer, gemm), None)
            assert (entry.recipe if entry else runs) == precision.gemm(gemm)
            assert entry is None or (entry.instead == runs != entry.recipe)
        if not approximate:
            one = {precision.gemm(gemm) for gemm in GEMMS}
            can = one <= {"fp8", "fp8_tensor", "mxfp8", "nvfp4"} and len(one) == 1 and layer != "output_layer"
            assert runs == (precision.fprop if can else "bf16")
    assert not named


@pytest.mark.parametrize(
    ("planned", "runs"),
    [
        (("fp8_row", "fp8_row", "fp8_row"), "fp8"),
        (("fp4", "fp4", "fp4"), "nvfp4"),
        (("mxfp4", "nvfp4", "nvfp4"), "nvfp4"),
        (("nvfp4", "nvfp4", "mxfp8"), "mxfp8"),
        (("fp8", "fp8_tensor", "fp8"), "fp8"),
        (("fp8", "fp8", "bf16"), "bf16"),
    ],
)
def test_approximate_takes_one_recipe_with_no_fewer_bits(planned: Triple, runs: str) -> None:
    export = to_transformer_engine({"a": LinearPrecision(*planned, "bf16")}, approximate=True)
    assert read_as_megatron(yaml.safe_load(export.text), "a") == runs
    assert {(e.gemm, e.recipe, e.instead) for e in export.inexpressible} == {
        (gemm, want, runs) for gemm, want in zip(GEMMS, planned, strict=True) if want != runs
    }


def test_reasons_tell_a_mix_from_a_missing_recipe() -> None:
    plan = {
        "a": LinearPrecision("fp8", "fp8", "nvfp4", "bf16"),
        "b": LinearPrecision("fp4", "fp4", "fp4", "bf16"),
        "output_layer": LinearPrecision("fp8", "fp8", "fp8", "bf16"),
    }
    why = {entry.layer: entry.why for entry in to_transformer_engine(plan).inexpressible}
    assert "one recipe" in why["a"]
    assert "fp8/fp8/nvfp4" in why["a"]
    assert "no recipe like fp4" in why["b"]
    assert "output layer" in why["output_layer"]


def test_a_deep_uniform_plan_is_a_file_of_five_globs() -> None:
    plan = {f"blocks.{i}.{layer}": LinearPrecision.of("nvfp4") for i in range(80) for layer in LAYERS}
    plan["head"] = LinearPrecision.of("bf16")
    export = to_transformer_engine(rename(plan, "megatron"))
    assert [pattern for pattern, _ in export.matchers] == [
        "decoder.layers.*.self_attention.linear_qkv",
        "decoder.layers.*.self_attention.linear_proj",
        "decoder.layers.*.mlp.linear_fc1",
        "decoder.layers.*.mlp.linear_fc2",
        "output_layer",
    ]
    assert not export.inexpressible


def test_scales_that_need_a_variable_or_differ_are_said_in_the_file() -> None:
    export = to_transformer_engine({"a": LinearPrecision.of("fp8"), "b": LinearPrecision.of("mxfp8")})
    assert export.environment == {"NVTE_FP8_BLOCK_SCALING_FP32_SCALES": "1"}
    assert "# Environment: NVTE_FP8_BLOCK_SCALING_FP32_SCALES=1" in export.text
    assert "rounds scales up" in export.text
    assert not to_transformer_engine({"a": LinearPrecision.of("fp8_tensor")}).notes

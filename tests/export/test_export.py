"""A plan of Scrimp as a file for another trainer."""

from __future__ import annotations

import fnmatch

import pytest
import yaml

from scrimp.config import Config, base_architecture, resolve
from scrimp.errors import PlanError
from scrimp.export import export_precision
from scrimp.planner import Figures, Plan, build_plan
from scrimp.planner.memory.placement import Placement
from scrimp.planner.precision.analysed import PlannedGemm, PlannedLinearLayer, PrecisionPlan
from scrimp.precision import GEMMS

MIXED = "nvfp4,*.mlp.down=fp8_row/fp8_row/bf16,blocks.0.*=bf16,*.attention.out=fp4"


def make_plan(precision: str) -> Plan:
    config = Config(precision=precision)
    resolution = resolve(config, base_architecture(config, None), device_type="cpu")
    return build_plan(
        resolution.config,
        resolution.architecture,
        device_name="test CPU",
        device_is_host=True,
        torch_version="2.13.0",
        reasons=resolution.reasons,
        placement=Placement.resident(resolution.architecture.num_layers),
        why="everything resident",
        predicted=Figures(),
    )


def test_a_plan_goes_to_megatron_with_what_it_cannot_say_named() -> None:
    plan = make_plan(MIXED)
    export = export_precision(plan, "transformer-engine", "megatron")
    depth = len(plan.blocks)
    file = yaml.safe_load(export.text)
    patterns = {matcher["pattern"]: matcher["config"] for matcher in file["matchers"].values()}
    assert patterns["decoder.layers.1.mlp.linear_fc1"] == "nvfp4"
    assert patterns["decoder.layers.0.mlp.linear_fc1"] == "bf16"
    assert patterns["decoder.layers.*.mlp.linear_fc2"] == "bf16"
    assert export.file_name.endswith(".yaml")
    lost = {(entry.layer.rpartition(".")[2], entry.gemm): entry.recipe for entry in export.inexpressible}
    assert lost == {
        ("linear_fc2", "fprop"): "fp8_row",
        ("linear_fc2", "dgrad"): "fp8_row",
        **{("linear_proj", gemm): "fp4" for gemm in ("fprop", "dgrad", "wgrad")},
    }
    assert len(export.inexpressible) == 3 * depth + 2 * (depth - 1)
    assert any("pipeline stage" in note for note in export.notes)
    assert "pipeline stage" in export.text


def test_a_stage_of_a_pipeline_is_a_file_of_its_own() -> None:
    plan = make_plan(MIXED)
    export = export_precision(plan, "transformer-engine", "megatron", stage=(1, len(plan.blocks) - 1))
    patterns = {matcher["pattern"] for matcher in yaml.safe_load(export.text)["matchers"].values()}
    assert "decoder.layers.*.mlp.linear_fc1" in patterns
    assert not any("pipeline stage" in note for note in export.notes)


@pytest.mark.parametrize(
    ("names", "down"),
    [("scrimp", "blocks.1.mlp.down"), ("huggingface", "model.layers.1.mlp.down_proj")],
)
def test_a_plan_goes_to_torchao_as_a_python_file(names: str, down: str) -> None:
    export = export_precision(make_plan("fp8_row"), "torchao", names)  # type: ignore[arg-type]
    compile(export.text, export.file_name, "exec")
    globs = [line.strip().strip('",') for line in export.text.splitlines() if line.startswith('        "')]
    assert any(fnmatch.fnmatch(down, glob) for glob in globs)
    assert not any(fnmatch.fnmatch(head, glob) for glob in globs for head in ("head", "lm_head"))
    assert not export.inexpressible
    assert any("layers of their own" in note for note in export.notes) == (names == "huggingface")


def foreign(*names: str) -> PrecisionPlan:
    """A plan of a model that has other names than Scrimp's decoder, as `scrimp.plan` makes it."""
    gemms = {gemm: PlannedGemm("fp4", {}, {}, {}) for gemm in GEMMS}
    layers = {name: PlannedLinearLayer(1 / len(names), 0, gemms) for name in names}
    return PrecisionPlan("0123", "cpu", "snip", ("fp4",), {"fp4_flops": 1.0}, layers, {})


@pytest.mark.parametrize("target", ["torchao", "transformer-engine"])
def test_a_plan_of_another_model_keeps_its_names_and_says_so(target: str) -> None:
    names = [f"model.layers.{i}.self_attn.q_proj" for i in range(3)]
    export = export_precision(foreign(*names), target, "huggingface")  # type: ignore[arg-type]
    assert export.layers == tuple(names)
    assert any("names stay as they are" in note for note in export.notes)
    assert "# Note: the plan is of another model" in export.text
    (line,) = export.not_as_planned()
    assert line.startswith("model.layers.*.self_attn.q_proj: fprop fp4, dgrad fp4, wgrad fp4 planned")


def test_names_that_megatron_does_not_have_are_not_exported_to_it() -> None:
    """Its file would match nothing, and the run would be unquantized."""
    with pytest.raises(PlanError, match="--names scrimp"):
        export_precision(foreign("model.layers.0.mlp.up_proj"), "transformer-engine", "megatron")
    own = export_precision(foreign("decoder.layers.0.mlp.linear_fc1"), "transformer-engine", "megatron")
    assert own.layers == ("decoder.layers.0.mlp.linear_fc1",)


def test_choices_are_taken_from_the_plan_as_they_are() -> None:
    plan = make_plan(MIXED)
    precisions = plan.gemms
    assert precisions["blocks.1.mlp.down"].wgrad == plan.gemms["blocks.1.mlp.down"].wgrad == "bf16"
    assert precisions["blocks.1.mlp.gate_up"].saved == plan.gemms["blocks.1.mlp.gate_up"].saved
    assert list(precisions) == list(plan.gemms)


@pytest.mark.parametrize(("target", "names"), [("nemo", "scrimp"), ("torchao", "nemo")])
def test_an_unknown_target_or_names_are_refused(target: str, names: str) -> None:
    with pytest.raises(PlanError, match="no such"):
        export_precision(make_plan("bf16"), target, names)  # type: ignore[arg-type]

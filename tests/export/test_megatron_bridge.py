"""Plans as flags of Megatron-Bridge: read back by its options, and what it cannot be told."""

from __future__ import annotations

import re
from typing import Any

import pytest
from layout_plans import plan
from megatron_bridge_options import parsed

from scrimp.errors import PlanError
from scrimp.export.layout_file import export_layout
from scrimp.planner.layout.setting import BlockPlan, Offload, Setting
from scrimp.planner.layout.stages import blocks_of_stages

LLAMA, ROUTED = "llama-3-8b", "qwen3-30b-a3b"
STATES = Offload(optimizer=True, master=True)
PLANS: dict[str, tuple[str, int, dict[str, Any], dict[str, Any]]] = {
    "optimizer": (LLAMA, 8, {"fsdp": 8, "zero": 1}, {}),
    "fsdp": (LLAMA, 8, {"fsdp": 8}, {"recompute": "full", "micro_batch": 2}),
    "copies": (LLAMA, 16, {"dp": 2, "fsdp": 8}, {}),
    "copies of states": (LLAMA, 16, {"dp": 2, "fsdp": 8, "zero": 1}, {}),
    "tp": (LLAMA, 16, {"fsdp": 2, "tp": 8, "zero": 1}, {"precision": "fp8_tensor"}),
    "rows": (LLAMA, 8, {"fsdp": 4, "cp": 2, "zero": 1}, {"offload": Offload(activation_layers=3)}),
    "stages": (LLAMA, 16, {"pp": 4, "fsdp": 4, "zero": 1}, {"recompute": 3}),
    "states": (LLAMA, 8, {"fsdp": 8, "zero": 1}, {"offload": STATES}),
    "uneven": (LLAMA, 8, {"pp": 4, "fsdp": 2, "zero": 1, "stages": "5,9,9,9"}, {}),
    "interleaved": (
        LLAMA,
        8,
        {"pp": 4, "fsdp": 2, "zero": 1, "virtual": 2, "schedule": "interleaved"},
        {"precision": "mxfp8"},
    ),
    "experts": (ROUTED, 16, {"fsdp": 16, "ep": 8, "zero": 1}, {}),
}


def made(name: str) -> tuple[Setting, str]:
    model, ranks, layout, others = PLANS[name]
    return plan(model, ranks, layout, **others), model


@pytest.mark.parametrize("name", PLANS)
def test_the_flags_say_the_plan(name: str) -> None:
    setting, model = made(name)
    found = export_layout(setting, model, "megatron-bridge")
    assert not found.not_as_planned
    flags, overrides = parsed(found.text)
    layout = setting.layout
    assert flags["num_gpus"] == layout.ranks
    assert (flags["global_batch_size"], flags["micro_batch_size"]) == (64, setting.micro_batch)
    degrees = [flags[f"{axis}_parallel_size"] for axis in ("tensor_model", "pipeline_model", "context")]
    assert degrees == [layout.tp, layout.pp, layout.cp]
    assert flags["expert_model_parallel_size"] == layout.ep
    assert flags["virtual_pipeline_model_parallel_size"] == (layout.virtual if layout.virtual != 1 else None)
    assert flags["use_megatron_fsdp"] == (True if layout.zero == 3 else None)
    shares = overrides.get("ddp.use_distributed_optimizer")
    assert shares == (None if layout.zero == 3 else "true")
    instances = overrides.get("ddp.num_distributed_optimizer_instances", "1")
    assert int(instances) == layout.dp
    names = {"bf16": "bf16", "fp8_tensor": "fp8_cs", "mxfp8": "fp8_mx"}
    assert flags["compute_dtype"] == names[setting.precision]
    again = {"none": None, "full": 32}.get(str(setting.recompute), setting.recompute)
    assert flags["recompute_num_layers"] == again
    assert (overrides.get("model.recompute_granularity") == "null") == (again is None)
    assert flags["activation_offload_layers"] == (setting.offload.activation_layers or None)
    assert (overrides["optimizer.optimizer_cpu_offload"] == "true") == setting.offload.optimizer


def test_a_letter_stands_for_each_layer() -> None:
    setting, model = made("uneven")
    flags, _ = parsed(export_layout(setting, model, "megatron-bridge").text)
    stages = flags["pipeline_model_parallel_layout"].split("|")
    assert [stage.count("t") for stage in stages] == [len(blocks) for blocks in blocks_of_stages(setting)]
    assert re.fullmatch(r"Et+(\|t+)*\|t+L", flags["pipeline_model_parallel_layout"])
    even, model = made("stages")
    flags, overrides = parsed(export_layout(even, model, "megatron-bridge").text)
    assert flags["pipeline_model_parallel_layout"] is None
    assert overrides["model.pipeline_model_parallel_layout"] == "null"


MIXED = (*(BlockPlan(recompute="full"),) * 2, *(BlockPlan(),) * 30)
FORMATS = (BlockPlan(formats=(("mlp.down.wgrad", "fp8"),)),) * 32
KEPT = (*(BlockPlan(gathered=True),) * 2, *(BlockPlan(),) * 30)
CANNOT: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "stage 2": ({"fsdp": 8, "zero": 2}, {}, "weights that stay gathered"),
    "some kept": ({"fsdp": 8}, {"blocks": KEPT}, "weights of some blocks"),
    "gpipe": ({"fsdp": 2, "pp": 4, "zero": 1, "schedule": "gpipe"}, {}, "gpipe"),
    "selective": ({"fsdp": 8, "zero": 1}, {"recompute": "selective"}, "norms alone"),
    "stages": ({"fsdp": 2, "pp": 4, "zero": 1}, {"blocks": MIXED}, "differs between stages"),
    "weights": ({"fsdp": 8, "zero": 1}, {"offload": Offload(weights=True)}, "weights on the host"),
    "both": (
        {"fsdp": 8, "zero": 1},
        {"recompute": "full", "offload": Offload(activation_layers=2)},
        "activations of 2 blocks",
    ),
    "fp16": ({"fsdp": 8, "zero": 1}, {"precision": "fp16"}, "precision fp16"),
    "formats": ({"fsdp": 8, "zero": 1}, {"blocks": FORMATS}, "formats of single products"),
}


@pytest.mark.parametrize("name", CANNOT)
def test_what_cannot_be_said_is_refused_or_named(name: str) -> None:
    layout, others, says = CANNOT[name]
    setting = plan(LLAMA, 8, layout, **others)
    with pytest.raises(PlanError, match=says):
        export_layout(setting, LLAMA, "megatron-bridge")
    found = export_layout(setting, LLAMA, "megatron-bridge", approximate=True)
    assert len(found.not_as_planned) == 1
    assert f"# Not as planned: {found.not_as_planned[0]}." in found.text
    parsed(found.text)


def test_models_and_devices_without_a_recipe_are_refused() -> None:
    with pytest.raises(PlanError, match=r"llama-3\.1-8b"):
        export_layout(plan("llama-3.1-8b", 8, {"fsdp": 8}), "llama-3.1-8b", "megatron-bridge")
    older = plan(LLAMA, 8, {"fsdp": 8}, hardware="8xa100-80")
    with pytest.raises(PlanError, match="a100"):
        export_layout(older, LLAMA, "megatron-bridge")

"""Plans as TorchTitan's configuration: its fields, its own parser where it is installed, and what it cannot be told."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from layout_plans import plan
from torchtitan_fields import configured

from scrimp.errors import PlanError
from scrimp.export.layout_file import export_layout
from scrimp.models.shapes import ModelShape
from scrimp.planner.layout.setting import BlockPlan, Offload, Setting
from scrimp.planner.layout.stages import blocks_of_stages

LLAMA = "llama-3.1-8b"
PLANS: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "fsdp": (8, {"fsdp": 8}, {}),
    "kept": (8, {"fsdp": 8, "zero": 2}, {"recompute": "full"}),
    "one pass": (8, {"fsdp": 8, "zero": 1}, {"micro_batch": 8}),
    "copies": (16, {"dp": 2, "fsdp": 4, "tp": 2}, {}),
    "rows": (8, {"fsdp": 4, "cp": 2}, {}),
    "stages": (16, {"pp": 4, "fsdp": 2, "tp": 2, "zero": 1}, {"micro_batch": 2}),
    "uneven": (8, {"pp": 4, "fsdp": 2, "zero": 1, "stages": "5,9,9,9"}, {}),
    "interleaved": (8, {"pp": 4, "fsdp": 2, "zero": 1, "virtual": 3, "schedule": "interleaved"}, {}),
    "host": (
        8,
        {"fsdp": 8},
        {"offload": {"optimizer": True, "master": True, "gradients": True, "weights": True}},
    ),
    "mxfp8": (8, {"fsdp": 8}, {"precision": "mxfp8"}),
}


def made(name: str) -> Setting:
    ranks, layout, others = PLANS[name]
    return as_plan(ranks, layout, others)


def as_plan(ranks: int, layout: dict[str, Any], others: dict[str, Any], model: str = LLAMA) -> Setting:
    offload = Offload(**others["offload"]) if "offload" in others else Offload()
    return plan(model, ranks, layout, **{**others, "offload": offload})


@pytest.mark.parametrize("name", PLANS)
def test_the_configuration_says_the_plan(name: str) -> None:
    setting = made(name)
    found = export_layout(setting, LLAMA, "torchtitan")
    assert not found.not_as_planned
    config = configured(found.text)
    layout, training, degrees = setting.layout, config.training, config.parallelism
    readers = degrees.data_parallel_replicate_degree * degrees.data_parallel_shard_degree
    product = readers * degrees.tensor_parallel_degree * degrees.context_parallel_degree
    assert product * degrees.pipeline_parallel_degree == layout.ranks
    assert (readers, degrees.tensor_parallel_degree) == (layout.data_ranks, layout.tp)
    assert (training.seq_len, training.global_batch_size) == (setting.sequence, setting.global_batch)
    assert training.local_batch_size * readers * accumulated(setting) == setting.global_batch
    micro_batch = degrees.pipeline_parallel_microbatch_size if layout.pp > 1 else training.local_batch_size
    assert micro_batch == setting.micro_batch
    policy = config.activation_checkpoint
    assert (policy and policy.name) == {"none": None, "full": "FullAC"}[setting.recompute]
    assert training.enable_cpu_offload == setting.offload.weights
    assert (config.model_spec is not None) == (setting.precision != "bf16")
    keeps = degrees.fsdp_reshard_after_forward == "never"
    assert keeps == (layout.pp > 1 or layout.zero < 3)


def accumulated(setting: Setting) -> int:
    """Passes of a pipeline, or micro-batches, of a step."""
    return 1 if setting.layout.pp > 1 else setting.micro_batches


@pytest.mark.parametrize("name", ["stages", "uneven", "interleaved"])
def test_every_module_is_on_one_stage(name: str) -> None:
    setting = made(name)
    parts = configured(
        export_layout(setting, LLAMA, "torchtitan").text
    ).parallelism.module_fqns_per_model_part
    assert parts is not None
    layers = [[int(one.split(".")[1]) for one in part if one.startswith("layers.")] for part in parts]
    assert layers == [list(blocks) for blocks in blocks_of_stages(setting)]
    assert (parts[0][0], parts[-1][-2:]) == ("tok_embeddings", ["norm", "lm_head"])
    assert sum(map(len, parts)) == 32 + 3
    assert len(parts) == setting.layout.pp * math.prod([setting.layout.virtual or 1])


KEPT = (*(BlockPlan(),) * 31, BlockPlan(gathered=True))
CANNOT: dict[str, tuple[int, dict[str, Any], dict[str, Any], str]] = {
    "stage 1": (8, {"fsdp": 8, "zero": 1}, {}, "ZeRO stage 1"),
    "stage 3": (8, {"pp": 2, "fsdp": 4}, {}, "ZeRO stage 3 in a pipeline"),
    "selective": (8, {"fsdp": 8}, {"recompute": "selective"}, "norms and gates"),
    "some": (8, {"fsdp": 8}, {"recompute": 5}, "5 blocks of each stage"),
    "states": (8, {"fsdp": 8}, {"offload": {"optimizer": True}}, "optimizer on the host"),
    "kept": (8, {"fsdp": 8}, {"blocks": KEPT}, "weights of some blocks"),
    "format": (8, {"fsdp": 8}, {"precision": "fp8_tensor"}, "precision fp8_tensor"),
}


@pytest.mark.parametrize("name", CANNOT)
def test_what_cannot_be_said_is_refused_or_named(name: str) -> None:
    ranks, layout, others, says = CANNOT[name]
    setting = as_plan(ranks, layout, others)
    with pytest.raises(PlanError, match=says):
        export_layout(setting, LLAMA, "torchtitan")
    found = export_layout(setting, LLAMA, "torchtitan", approximate=True)
    assert len(found.not_as_planned) == 1
    assert f"# Not as planned: {found.not_as_planned[0]}." in found.text
    configured(found.text)


def test_what_it_has_not_is_refused_whatever_is_asked() -> None:
    routed = "qwen3-30b-a3b"
    assert configured(export_layout(as_plan(8, {"fsdp": 8, "ep": 4}, {}, routed), routed, "torchtitan").text)
    with pytest.raises(PlanError, match="share an expert"):
        export_layout(as_plan(8, {"fsdp": 8, "etp": 2}, {}, routed), routed, "torchtitan", approximate=True)
    with pytest.raises(PlanError, match="no configuration of llama-3m"):
        export_layout(as_plan(8, {"fsdp": 8}, {}, "llama-3m"), "llama-3m", "torchtitan")
    shape = ModelShape(layers=2, width=64, heads=2, kv_heads=2, head_size=32, ffn_width=128, vocab_size=256)
    with pytest.raises(PlanError, match="a shape cannot be exported"):
        export_layout(plan(LLAMA, 8, {"fsdp": 8}), shape, "torchtitan")
    with pytest.raises(PlanError, match="no such target"):
        export_layout(plan(LLAMA, 8, {"fsdp": 8}), LLAMA, "nemo")  # type: ignore[arg-type]


PARSE = """
import dataclasses, json
from torchtitan.config.manager import ConfigManager
config = ConfigManager().parse_args(["--module", "exported_plan", "--config", "scrimp_plan"])
print(json.dumps([dataclasses.asdict(config.training), dataclasses.asdict(config.parallelism)]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in PLANS if name != "mxfp8"])
def test_its_own_parser_takes_it(name: str, tmp_path: Path) -> None:
    if importlib.util.find_spec("torchtitan") is None:
        pytest.skip("TorchTitan is not installed")
    text = export_layout(made(name), LLAMA, "torchtitan").text
    (tmp_path / "exported_plan.py").write_text(text, encoding="utf-8")
    # In a process of its own: importing it changes what torch does.
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    done = subprocess.run(
        [sys.executable, "-c", PARSE], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    training, parallelism = json.loads(done.stdout.splitlines()[-1])
    config = configured(text)
    assert training == dataclasses.asdict(config.training) | {"steps": training["steps"]}
    assert parallelism == dataclasses.asdict(config.parallelism)

"""Plans of the search as runs: what they decide is what is carried out, and other hardware is refused by name."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from runs_on_ranks import on_ranks
from tiny_run import records, scrimp, write_corpus

import scrimp.planner.hardware.schema as schema
from scrimp.config import Config, preset, replace_values, resolve
from scrimp.config.activations import assign_activations
from scrimp.config.gathered import gathered_blocks
from scrimp.errors import ConfigError, PlanError, ScrimpError
from scrimp.models import spec_of
from scrimp.planner.hardware import load_hardware
from scrimp.planner.layout.lines import LayoutLine, Line, line_text
from scrimp.planner.layout.setting import BlockPlan, Offload
from scrimp.planner.layout.state_formats import StateFormats
from scrimp.profiler import Device, resolve_device
from scrimp.training.searched_plan import is_same_name, refuse_other_hardware, with_plan
from scrimp.world import World

FILE = Path("plan.json")
FP4 = (("mlp.down.wgrad", "nvfp4"),)
BLOCKS = (
    BlockPlan(recompute="full", formats=FP4),
    BlockPlan(recompute="selective", formats=(("mlp.down.wgrad", "nvfp4"), ("mlp.gate_up.fprop", "mxfp8"))),
    *[BlockPlan(gathered=True, formats=FP4) for _ in range(3)],
)
LINE = Line(
    model="llama-3m",
    hardware="2xh100",
    sequence=256,
    global_batch=8,
    micro_batch=2,
    layout=LayoutLine(fsdp=2),
    precision="fp8",
    blocks=BLOCKS,
)


def test_the_settings_of_a_plan_say_the_same_block_by_block() -> None:
    config, given = with_plan(Config(), LINE, frozenset(), FILE)
    found = resolve(config, preset("llama-3m"), device_type="cpu", ranks=2).config
    assert "layout.fsdp" in given
    assert (found.train.sequence, found.train.sequences_per_step, found.train.micro_batch) == (256, 8, 2)
    assert (found.layout.fsdp, found.layout.zero) == (2, 3)
    assert gathered_blocks(found.layout, 6) == {2, 3, 4}
    assert list(map(str, assign_activations(found.memory.activations, 5))) == [
        "block",
        "norms",
        *["keep"] * 3,
    ]
    gemms = found.precision_rules.assign(spec_of(preset("llama-3m")).origins)
    for name, choice in gemms.items():
        if name == "head":
            continue
        _, number, product = name.split(".", 2)
        planned = dict(BLOCKS[int(number)].formats)
        for gemm, recipe in zip(("fprop", "dgrad", "wgrad"), choice.recipes, strict=True):
            assert recipe == planned.get(f"{product}.{gemm}", "fp8"), (name, gemm)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"software": "megatron"}, "the step of megatron"),
        ({"precision": "fp16", "blocks": ()}, "precision fp16"),
        ({"offload": Offload(optimizer=True)}, "offload.optimizer without offload.master"),
        (
            {"layout": LayoutLine(pp=2), "offload": Offload(optimizer=True, master=True), "blocks": ()},
            "ranks of a pipeline keep all on their devices",
        ),
        (
            {"model": "llama-60m", "layout": LayoutLine(tp=2, sequence_parallel=False), "blocks": ()},
            "tp without sequence parallelism",
        ),
    ],
)
def test_what_has_no_setting_is_refused_by_name(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ScrimpError, match=named):
        with_plan(Config(), dataclasses.replace(LINE, **changes), frozenset(), FILE)


def test_formats_of_states_are_those_of_the_run() -> None:
    states = StateFormats(masters=False, moments="8bit")
    offload = Offload(optimizer=True)
    line = dataclasses.replace(LINE, states=states, offload=offload, hardware="h100", layout=LayoutLine())
    config, _ = with_plan(Config(), line, frozenset(), FILE)
    assert (config.train.parameters, config.optimizer.master_weights) == ("bf16", False)
    assert (config.optimizer.moments, config.memory.optimizer) == ("8bit", "host")
    usual, _ = with_plan(Config(), LINE, frozenset(), FILE)
    assert usual.optimizer == Config().optimizer


def test_a_plan_by_torchs_kernel_of_attention_allows_it() -> None:
    line = dataclasses.replace(LINE, attention_kernel="torch")
    config, given = with_plan(Config(), line, frozenset(), FILE)
    assert not config.train.deterministic
    assert not config.data.mask_documents
    with pytest.raises(ConfigError, match=r"train\.deterministic is given"):
        with_plan(Config(), line, frozenset({"train.deterministic"}), FILE)
    usual, given = with_plan(Config(), LINE, frozenset(), FILE)
    assert usual.train.deterministic
    assert "data.mask_documents" not in given


def test_two_wills_are_refused_and_one_will_twice_is_not() -> None:
    config = replace_values(Config(), {"train.micro_batch": 1})
    with pytest.raises(ConfigError, match=r"train\.micro_batch is given"):
        with_plan(config, LINE, frozenset({"train.micro_batch"}), FILE)
    same = replace_values(Config(), {"train.micro_batch": 2})
    assert with_plan(same, LINE, frozenset({"train.micro_batch"}), FILE)[0].train.micro_batch == 2


@pytest.mark.parametrize(
    ("planned", "here", "expected"),
    [
        ("h100", "NVIDIA H100 80GB HBM3", True),
        ("h100-96", "NVIDIA H100 NVL", True),
        ("a100-40", "NVIDIA A100-SXM4-40GB", True),
        ("rtx4060ti", "NVIDIA GeForce RTX 4060 Ti", True),
        ("rtx4060", "NVIDIA GeForce RTX 4060 Ti", False),
        ("rtxpro6000", "NVIDIA RTX PRO 6000 Blackwell Server Edition", True),
        ("dgxspark", "NVIDIA GB10", True),
        ("h100", "NVIDIA H200", False),
        ("AMD EPYC", "AMD EPYC, 2 cores", True),
        ("h100", "AMD EPYC, 2 cores", False),
    ],
)
def test_a_device_is_known_by_the_words_of_its_name(planned: str, here: str, expected: bool) -> None:
    assert is_same_name(planned, here) is expected


def own_hardware(folder: Path, name: str, *, devices: int = 2, memory: int = 2**28) -> Path:
    """Files of a user's own that describe so many devices of this name."""
    text, _, _ = (Path(schema.__file__).parent / "devices" / "h100.toml").read_text().partition("[sources]")
    lines = {"name": json.dumps(name), "memory_bytes": str(memory)}
    rows = [
        f"{key} = {lines[key]}" if (key := row.partition(" = ")[0]) in lines else row
        for row in text.splitlines()
    ]
    (folder / "device.toml").write_text("\n".join(rows))
    file = folder / "here.toml"
    file.write_text(
        f"""name = "this machine"
[[nodes]]
count = 1
[nodes.node]
name = "here"
device = "device.toml"
devices = {devices}
host_memory_bytes = {memory * devices}
cpu_cores = 2
host_op_seconds = 1e-5
link.inside = {{ name = "memory", bytes_per_second = 1e9, latency_seconds = 1e-4, achieved = 0.8 }}
link.outside = {{ name = "none", bytes_per_second = 1e9, latency_seconds = 1e-4, achieved = 0.8 }}
"""
    )
    return file


def device(ranks: int) -> Device:
    found = resolve_device("cpu")
    return dataclasses.replace(found, world=World(0, ranks), ranks_here=ranks)


@pytest.mark.parametrize(
    ("name", "changes", "ranks", "got", "expected"),
    [
        (None, {}, 4, "this machine: 2 devices", "4, as many as ranks were started"),
        ("h100", {}, 2, "this machine: h100", None),
        (None, {"memory": 2**43}, 2, "this machine: 8.00 TiB of memory", None),
    ],
)
def test_hardware_that_is_not_this_machine_is_refused_with_what_is_here(
    tmp_path: Path, name: str | None, changes: dict[str, int], ranks: int, got: str, expected: str | None
) -> None:
    here = device(ranks)
    cluster = load_hardware(own_hardware(tmp_path, name or here.name, **changes))
    with pytest.raises(PlanError, match="is a plan for other hardware than this") as refused:
        refuse_other_hardware(cluster, here, FILE)
    assert got in str(refused.value.got)
    assert (expected or "") in str(refused.value.expected)


def test_as_many_devices_on_other_nodes_are_refused(tmp_path: Path) -> None:
    here = device(2)
    cluster = load_hardware(own_hardware(tmp_path, here.name))
    with pytest.raises(PlanError, match="other hardware") as refused:
        refuse_other_hardware(cluster, dataclasses.replace(here, ranks_here=1), FILE)
    assert "devices of each node" in str(refused.value.got)


def test_hardware_that_is_this_machine_is_not_refused(tmp_path: Path) -> None:
    here = device(2)
    cluster = load_hardware(own_hardware(tmp_path, here.name))
    refuse_other_hardware(cluster, here, FILE)
    with pytest.raises(PlanError, match="other hardware"):
        refuse_other_hardware(cluster, device(4), FILE)


@pytest.mark.slow
def test_a_saved_plan_trains_as_it_says(tmp_path: Path) -> None:
    here = resolve_device("cpu").name
    hardware, plan, run = own_hardware(tmp_path, here), tmp_path / "plan.json", tmp_path / "run"
    asked = ["--model.preset=llama-3m", "--train.sequence=64", "--train.batch-tokens=512", "--precision=fp8"]
    found = scrimp(
        "plan", f"--hardware={hardware}", *asked, "--layout.fsdp=2", "--layout.zero=3", f"--save={plan}"
    )
    assert found.returncode == 0, found.stderr
    line = json.loads(plan.read_text())
    assert line["layout"]["fsdp"] == 2
    line["blocks"] = json.loads(line_text(LINE))["blocks"]  # some of everything, whatever is fastest
    plan.write_text(json.dumps(line))
    corpus = write_corpus(tmp_path)
    data = ["--device=cpu", "--data.tokenizer=bytes", f"--data.source={corpus}", "--evaluation.tokens=512"]
    data += [f"--data.cache={tmp_path / 'cache'}", "--train.steps=3", f"--run.dir={run}"]
    on_ranks(2, tmp_path / "ranks", ["train", f"--plan={plan}", *data])
    kept = json.loads((run / "plan.json").read_text())
    assert [row["activations"] for row in kept["blocks"].values()] == ["block", "norms", *["keep"] * 3]
    assert kept["layout"]["gathered"] == "2-4"
    assert {row["wgrad"] for name, row in kept["gemms"].items() if name.endswith("mlp.down")} == {"nvfp4"}
    (proof,) = [one for one in records(run, "events.jsonl") if one["kind"] == "layout-proof"]
    calls, counted = proof["figures"]["fsdp/cp all-gather and reduce-scatter: collectives"]
    assert calls == counted
    assert proof["figures"]["seconds of a step"][0] > 0
    alone = scrimp("train", f"--plan={plan}", *data[:-1], f"--run.dir={tmp_path / 'alone'}")
    assert alone.returncode == 2
    assert "is a plan for other hardware than this" in alone.stderr
    assert not (tmp_path / "alone").exists()

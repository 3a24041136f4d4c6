"""The plan file: what is written is read back, and what does not fit is named."""

import contextlib
import dataclasses
import json

import pytest

from scrimp.config import BudgetConfig, Config, base_architecture, replace_values, resolve
from scrimp.errors import ConfigError, PlanError
from scrimp.models import spec_of
from scrimp.planner import BackendChoice, Figures, Plan, build_plan
from scrimp.planner.memory.placement import Placement
from scrimp.precision import RECIPES


def make_plan(precision: str = "auto", **budget: str) -> Plan:
    config = Config(precision=precision, budget=BudgetConfig(**budget))
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


@pytest.mark.parametrize(
    ("preset", "layout", "precision", "said"),
    [
        ("llama-3m", {"tp": 2}, "fp8", r"attention.qkv.fprop cannot run in fp8 .* begins at \d+ of its"),
        ("llama-3m", {"tp": 2}, "fp8_row,*.qkv=nvfp4,head=fp8_tensor", ""),
        ("llama-3m", {"tp": 2}, "snip", r"attention.qkv.fprop cannot run in fp8 .* begins at \d+ of its"),
        ("llama-3m", {"tp": 2}, "snip,*.fprop=fp8_row,*.dgrad=nvfp4,*.wgrad=nvfp4", ""),
        (
            "mixtral-8m",
            {"tp": 2},
            "bf16,*.router=fp8_row",
            r"mlp.router cannot be quantized .* own tokens",
        ),
        ("mixtral-8m", {"ep": 2}, "fp8,*.mlp.router=fp8_row", ""),
        ("mixtral-8m", {"ep": 2, "etp": 2}, "*.experts.*=nvfp4", ""),
        ("mixtral-8m", {"etp": 4}, "bf16,*.experts.down=fp8", r"experts.down.fprop cannot run in fp8"),
    ],
)
def test_formats_whose_groups_lie_on_two_ranks_are_refused_by_name(
    preset: str, layout: dict[str, int], precision: str, said: str
) -> None:
    asked = {"model.preset": preset, "precision": precision, "train.sequence": 64}
    config = replace_values(Config(), asked | {f"layout.{axis}": degree for axis, degree in layout.items()})
    found = resolve(config, base_architecture(config, None), device_type="cpu", ranks=4)
    with pytest.raises(PlanError, match=said) if said else contextlib.nullcontext():
        build_plan(
            found.config,
            found.architecture,
            device_name="test CPU",
            device_is_host=True,
            torch_version="2.13.0",
            reasons=found.reasons,
            placement=Placement.resident(found.architecture.num_layers),
            why="everything resident",
            predicted=Figures(),
        )


LAYERS = spec_of(base_architecture(Config(), None)).origins
RESOLUTION = resolve(Config(), base_architecture(Config(), None), device_type="cpu")


def test_a_plan_reads_back_as_it_was_written() -> None:
    plan = make_plan(device_memory="16GB")
    assert Plan.from_json(plan.to_json()) == plan


def test_recorded_back_ends_read_back_and_earlier_plans_have_none() -> None:
    rows = {"fp8 mlp.down": BackendChoice("torch", "triton"), "fp4 head": BackendChoice(wgrad="reference")}
    plan = dataclasses.replace(make_plan(), backends=rows)
    assert Plan.from_json(plan.to_json()).backends == rows
    assert '    "fp8 mlp.down": {"fprop": "torch", "dgrad": "triton", "wgrad": null}' in plan.to_json()
    raw = json.loads(plan.to_json())
    raw["backends"]["fp4 head"]["fprop"] = 3
    with pytest.raises(PlanError, match="fp4 head"):
        Plan.from_json(json.dumps(raw))
    del raw["backends"]
    assert Plan.from_json(json.dumps(raw)).backends == {}


def test_every_gemm_and_every_block_has_a_line_of_its_own() -> None:
    lines = make_plan().to_json().splitlines()
    num_layers = RESOLUTION.architecture.num_layers
    assert sum('"fprop"' in line for line in lines) == 4 * num_layers + 1
    assert sum('"activations"' in line for line in lines) == num_layers
    assert any(line.strip().startswith('"blocks.0.mlp.down"') for line in lines)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"scrimp_plan": 2}, "version"),
        ({"extra": 1}, "unknown extra"),
        ({"gemms": None}, "gemms"),
        ({"layout": {"stages": [[0, 1]], "tp": "two"}}, "layout.tp"),
        ({"fingerprint": {"model": "m", "device": "d", "torch": "t"}}, "missing world_size"),
        ({"predicted": {"peak_device_bytes": "much"}}, "predicted.peak_device_bytes"),
    ],
)
def test_a_plan_that_does_not_fit_the_schema_is_refused_by_its_place(change: dict, named: str) -> None:
    raw = json.loads(make_plan().to_json()) | change
    with pytest.raises(PlanError, match=named):
        Plan.from_json(json.dumps(raw))


def test_a_format_that_cannot_run_is_refused_by_layer_and_gemm() -> None:
    raw = json.loads(make_plan().to_json())
    raw["gemms"]["blocks.1.mlp.down"]["wgrad"] = "nvpf4"
    with pytest.raises(PlanError, match=r"blocks\.1\.mlp\.down\.wgrad.*'nvpf4'.*mxfp8.*did you mean nvfp4\?"):
        Plan.from_json(json.dumps(raw))


@pytest.mark.parametrize(
    ("layer", "saved", "named"),
    [
        ("blocks.1.mlp.down", "fp88", r"blocks\.1\.mlp\.down\.saved cannot be fp88.*did you mean fp8\?"),
        ("blocks.1.mlp.down", "offload", r"blocks\.1\.mlp\.down\.saved cannot be offload"),
    ],
)
def test_an_input_that_cannot_be_kept_that_way_is_refused_by_layer(
    layer: str, saved: str, named: str
) -> None:
    raw = json.loads(make_plan().to_json())
    raw["gemms"][layer]["saved"] = saved
    with pytest.raises(PlanError, match=named):
        Plan.from_json(json.dumps(raw))


@pytest.mark.parametrize("layer", ["blocks.1.attention.out", "head"])
def test_an_input_that_nothing_makes_again_is_refused_by_layer(layer: str) -> None:
    plan = make_plan()
    row = dataclasses.replace(plan.gemms[layer], saved="recompute")
    edited = dataclasses.replace(plan, gemms=plan.gemms | {layer: row})
    with pytest.raises(PlanError, match=rf"input of {layer} cannot be recomputed"):
        edited.check_runnable(plan, "plan.json", LAYERS)


@pytest.mark.parametrize("precision", [*RECIPES, "fp8/fp4/bf16,*.mlp.down.saved=recompute,head=fp8_row"])
def test_a_plan_of_every_recipe_reads_back(precision: str) -> None:
    plan = make_plan(precision=precision)
    assert Plan.from_json(plan.to_json()) == plan


def test_rows_of_gemms_are_those_of_the_rules() -> None:
    gemms = make_plan(precision="fp8,*.wgrad=bf16,blocks.0.*=bf16").gemms
    by_rule = "precision fp8; rule `*.wgrad=bf16`"
    found = {layer: (*gemms[layer].recipes, gemms[layer].saved, gemms[layer].reason) for layer in gemms}
    assert found["blocks.1.mlp.down"] == ("fp8", "fp8", "bf16", "bf16", by_rule)
    assert found["blocks.0.mlp.down"] == ("bf16",) * 4 + ("rule `blocks.0.*=bf16`",)
    assert found["head"] == ("bf16",) * 4 + ("the head stays in bf16",)


@pytest.mark.parametrize(
    ("precision", "name", "reason"),
    [
        ("auto", "fp32", "fast on every CPU; on one with AMX units --precision bf16 is faster still"),
        ("fp32", "fp32", "set by the user"),
        ("bf16", "bf16", "set by the user"),
    ],
)
def test_plans_of_one_high_precision_are_as_they_always_were(precision: str, name: str, reason: str) -> None:
    lines = make_plan(precision=precision).to_json().splitlines()
    row = f'"fprop": "{name}", "dgrad": "{name}", "wgrad": "{name}", "saved": "{name}", "reason": "{reason}"'
    assert sum(f"{{{row}}}" in line for line in lines) == 4 * RESOLUTION.architecture.num_layers + 1
    assert sum('"fprop"' in line for line in lines) == 4 * RESOLUTION.architecture.num_layers + 1


def test_a_rule_for_layers_that_the_model_lacks_is_refused_with_its_layers() -> None:
    with pytest.raises(
        ConfigError, match=r"blocks\.99\.\*.*matches no layer.*blocks\.0-4\.attention\.qkv.*head"
    ):
        make_plan(precision="fp8,blocks.99.*=bf16")


def test_text_that_is_not_json_is_refused() -> None:
    with pytest.raises(PlanError, match="not JSON"):
        Plan.from_json("{")


def test_an_edited_plan_is_refused_where_it_cannot_be_carried_out() -> None:
    plan = make_plan()
    plan.check_runnable(plan, "plan.json", LAYERS)
    block = dataclasses.replace(plan.blocks["1"], activations="recompute")
    state = dataclasses.replace(plan.states["head"], optimizer="host")
    for section, name, row in (("blocks", "1", block), ("states", "head", state)):
        edited = dataclasses.replace(plan, **{section: getattr(plan, section) | {name: row}})
        with pytest.raises(PlanError, match=rf"{section}\.{name}.* cannot be"):
            edited.check_runnable(plan, "plan.json", LAYERS)
    again = dataclasses.replace(plan.blocks["1"], activations="mlp")
    dataclasses.replace(plan, blocks=plan.blocks | {"1": again}).check_runnable(plan, "plan.json", LAYERS)
    reworded = dataclasses.replace(plan.blocks["1"], reason="because")
    dataclasses.replace(plan, blocks=plan.blocks | {"1": reworded}).check_runnable(plan, "plan.json", LAYERS)


def test_who_updates_a_block_can_be_edited() -> None:
    plan = make_plan()
    on_cpu = dataclasses.replace(plan.states["1"], optimizer="cpu", gradients="host")
    dataclasses.replace(plan, states=plan.states | {"1": on_cpu}).check_runnable(plan, "plan.json", LAYERS)
    without_gradients = dataclasses.replace(on_cpu, gradients="device")
    with pytest.raises(PlanError, match=r"states\.1 cannot be .*optimizer cpu needs gradients host"):
        dataclasses.replace(plan, states=plan.states | {"1": without_gradients}).check_runnable(
            plan, "p", LAYERS
        )
    visits = dataclasses.replace(plan.states["0"], optimizer="host")
    with pytest.raises(PlanError, match="host in block 0, cpu in block 1"):
        dataclasses.replace(plan, states=plan.states | {"0": visits, "1": on_cpu}).check_runnable(
            plan, "p", LAYERS
        )
    weights = dataclasses.replace(plan.states["1"], weights="cpu")
    with pytest.raises(PlanError, match=r"states\.1"):
        dataclasses.replace(plan, states=plan.states | {"1": weights}).check_runnable(plan, "p", LAYERS)


def test_another_known_recipe_can_be_carried_out_in_an_edited_plan() -> None:
    plan = make_plan()
    row = dataclasses.replace(plan.gemms["blocks.1.mlp.down"], dgrad="bf16", wgrad="mxfp4", saved="recompute")
    dataclasses.replace(plan, gemms=plan.gemms | {"blocks.1.mlp.down": row}).check_runnable(
        plan, "plan.json", LAYERS
    )
    unknown = dataclasses.replace(row, dgrad="int4")
    with pytest.raises(PlanError, match=r"blocks\.1\.mlp\.down\.dgrad cannot run in int4"):
        dataclasses.replace(plan, gemms=plan.gemms | {"blocks.1.mlp.down": unknown}).check_runnable(
            plan, "p", LAYERS
        )
    for gemms in (plan.gemms | {"blocks.9.mlp.down": row}, dict(list(plan.gemms.items())[1:])):
        with pytest.raises(PlanError, match="gemms are not those of the model"):
            dataclasses.replace(plan, gemms=gemms).check_runnable(plan, "plan.json", LAYERS)


def test_what_its_user_changed_is_known_and_reasons_do_not_count() -> None:
    text = make_plan().to_json()
    assert Plan.from_json(text).edited == []
    raw = json.loads(text)
    raw["blocks"]["0"]["reason"] = "because"
    assert Plan.from_json(json.dumps(raw)).edited == []
    raw["states"]["1"]["weights"] = "host"
    edited = Plan.from_json(json.dumps(raw))
    assert edited.edited == ["states"]
    assert Plan.from_json(edited.to_json()).edited == [
        "states"
    ]  # an edit stays one, however often it is written
    del raw["written"]
    assert Plan.from_json(json.dumps(raw)).edited == []  # of a version that wrote none

"""The plan file: what is written is read back, and what does not fit is named."""

import dataclasses
import json

import pytest

from scrimp.config import BudgetConfig, Config, base_architecture, resolve
from scrimp.errors import PlanError
from scrimp.plan import Plan, account_of, build_plan, refuse_misfit


def make_plan(available_bytes: int = 2**40, **budget: str) -> Plan:
    config = Config(budget=BudgetConfig(**budget))
    resolution = resolve(config, base_architecture(config, None), device_type="cpu")
    plan = build_plan(
        resolution.config,
        resolution.architecture,
        device_name="test CPU",
        device_is_host=True,
        torch_version="2.13.0",
        reasons=resolution.reasons,
    )
    refuse_misfit(
        resolution.config,
        resolution.architecture,
        plan,
        available_bytes=available_bytes,
        device_is_host=True,
    )
    return plan


RESOLUTION = resolve(Config(), base_architecture(Config(), None), device_type="cpu")
PEAK = account_of(RESOLUTION.config, RESOLUTION.architecture).peak


def test_a_plan_reads_back_as_it_was_written() -> None:
    plan = make_plan(device_memory="16GB")
    assert Plan.from_json(plan.to_json()) == plan


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
    raw["gemms"]["blocks.1.mlp.down"]["wgrad"] = "fp4"
    with pytest.raises(PlanError, match=r"blocks\.1\.mlp\.down\.wgrad"):
        Plan.from_json(json.dumps(raw))


def test_text_that_is_not_json_is_refused() -> None:
    with pytest.raises(PlanError, match="not JSON"):
        Plan.from_json("{")


def test_a_run_that_cannot_fit_is_refused_before_it_starts() -> None:
    with pytest.raises(PlanError, match="does not fit"):
        make_plan(device_memory="10MB")
    with pytest.raises(PlanError, match="micro-batch"):
        make_plan(available_bytes=PEAK - 1)
    assert make_plan(available_bytes=PEAK).predicted.peak_device_bytes >= PEAK


def test_a_budget_covers_the_copy_that_a_checkpoint_is_written_from() -> None:
    predicted = make_plan().predicted.peak_device_bytes
    assert make_plan(device_memory=f"{predicted}B")
    with pytest.raises(PlanError, match="copy"):
        make_plan(device_memory=f"{predicted - 1}B")


def test_an_edited_plan_is_refused_where_it_cannot_be_carried_out() -> None:
    plan = make_plan()
    plan.check_runnable(plan, "plan.json")
    block = dataclasses.replace(plan.blocks["1"], activations="recompute")
    state = dataclasses.replace(plan.states["head"], optimizer="host")
    gemm = dataclasses.replace(plan.gemms["head"], fprop="bf16")
    for section, name, row in (("blocks", "1", block), ("states", "head", state), ("gemms", "head", gemm)):
        edited = dataclasses.replace(plan, **{section: getattr(plan, section) | {name: row}})
        with pytest.raises(PlanError, match=rf"{section}\.{name} cannot be carried out"):
            edited.check_runnable(plan, "plan.json")
    reworded = dataclasses.replace(plan.blocks["1"], reason="because")
    dataclasses.replace(plan, blocks=plan.blocks | {"1": reworded}).check_runnable(plan, "plan.json")

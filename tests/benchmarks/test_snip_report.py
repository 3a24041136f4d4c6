"""What the SNIP study reports: churn of plans, costs of re-planning, and the page with its plots."""

from __future__ import annotations

import argparse
import json
import math
import shutil
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import snip_study
from snip_cadence import Cadence, Larger, amortised, extra_bytes, extrapolated
from snip_damage import pairs, read_damages
from snip_material import LAYERS, cell, everywhere, profile
from snip_plans import churn, plan_row, read_plans, shares_by_kind, stability
from snip_report import Grid, damage_row, write_report

from scrimp.config import Config, TrainConfig, preset, resolve
from scrimp.planner.precision.profile import PrecisionProfile

# -- plans -------------------------------------------------------------------------------------


def planner(
    policy: str, of: PrecisionProfile, budget: float, high: str, low: str
) -> tuple[dict[str, tuple[str, str, str]], float]:
    return snip_study.plan_of(policy, of, budget, argparse.Namespace(high=high, low=low))


def test_churn_is_the_share_of_flops_in_another_format() -> None:
    flops = {"a": 0.75, "b": 0.25}
    first = {"a": ("fp4", "fp4", "fp8"), "b": ("fp8",) * 3}
    second = {"a": ("fp4", "fp8", "fp8"), "b": ("fp4",) * 3}
    assert churn(first, second, flops) == churn(second, first, flops) == pytest.approx(0.5)
    assert churn(first, first, flops) == 0.0


def test_equal_batches_give_equal_plans_and_others_do_not() -> None:
    one = profile()
    twin = replace(one, batches=(one.batches[0],) * 2)
    same, other = (plan_row(p, "snip", 0.5, planner, "fp8", "fp4") for p in (twin, one))
    assert same["churn_between_batches"] == [0.0]
    assert same["churn_to_batches"] == [0.0, 0.0]
    assert other["churn_between_batches"][0] > 0
    assert sum(other["flops"].values()) == pytest.approx(1.0)
    assert other["fp4_flops"] >= 0.5 - 1e-9


def test_shares_by_kind_add_up_to_the_share_of_the_plan() -> None:
    row = plan_row(profile(), "snip", 0.75, planner, "fp8", "fp4")
    shares = shares_by_kind([row])
    assert set(shares) == {"attention.qkv", "mlp.down"}
    flops = {kind: sum(v for k, v in row["flops"].items() if k.endswith(kind)) for kind in shares}
    total = sum(flops[kind] * sum(gemms.values()) / 3 for kind, gemms in shares.items())
    assert total == pytest.approx(row["fp4_flops"])


def test_seeds_are_compared_at_one_phase_and_phases_at_one_seed() -> None:
    def row(seed: int, step: int, name: str) -> dict[str, Any]:
        common = {"low": "fp4", "high": "fp8", "budget": 0.5, "policy": "snip", "fp4_flops": 0.5}
        parts = {"recipes": {"a": [name] * 3}, "flops": {"a": 1.0}, "churn_between_batches": [0.25]}
        return common | parts | {"seed": seed, "step": step}

    [found] = stability([row(0, 300, "fp4"), row(1, 300, "fp8"), row(0, 600, "fp4")])
    assert (found["seeds"], found["phases"], found["batches"]) == ([1.0], [0.0], [0.25] * 3)


# -- overhead ----------------------------------------------------------------------------------


def costs(scale: float = 1.0) -> dict[str, Any]:
    """A record of overhead: a bf16 step of 2 s, one in the plan of 4 s."""

    def act(*seconds: float, peak: int = 0) -> dict[str, Any]:
        return {"seconds": [scale * s for s in seconds], "peak_bytes": peak, "growth_bytes": 0}

    def measured(formats: list[str], batches: int, seconds: float) -> dict[str, Any]:
        return {"formats": formats, "batches": batches} | act(seconds, peak=2**21)

    record: dict[str, Any] = {"seed": 0, "step_of_trunk": 300, "high": "fp8", "low": "fp4", "device": "here"}
    record |= {"threads": 1, "load_before": 0.0, "parameters": 10**6, "layers": 8, "tokens": 4096}
    record |= {"flops_per_token": 1e7, "high_water_marks_reset": True, "commit": "none"}
    return record | {
        "step": {"bf16": act(2.0, peak=2**20), "plan": act(3.0, 4.0, 50.0, peak=2**20)},
        "collect": [
            measured(["fp8", "fp4"], 1, 7.0),
            measured(["fp4", "fp8"], 2, 10.0),
            measured(["fp8", "fp4", "bf16"], 2, 99.0),
        ],
        "solve": {"choose": act(0.1), "plan with certainty": act(5.0)},
        "switch": act(1.0) | {"before": [4.0], "after": [4.0], "later": [4.0]},
        "probe": act(3.0),
    }


def test_a_period_is_a_measurement_a_switch_and_three_probes() -> None:
    found = amortised(costs(), Cadence(every=2000, probe_every=1000, delay=10, batches=2))
    assert found["stall of a re-plan, s"] == pytest.approx(10 + 1 + 3)
    assert found["share of plan steps"] == pytest.approx((14 + 2 * 3) / (2000 * 4))
    assert found["share of bf16 steps, with solver"] == pytest.approx((14 + 2 * 3 + 5) / (2000 * 2))
    assert extra_bytes(costs(), costs()["collect"][1]) == 2**20


def test_the_default_cadence_is_that_of_a_resolved_configuration() -> None:
    config = Config(precision="snip", train=TrainConfig(steps=1_000_000))
    snip = resolve(config, preset("llama-3m"), device_type="cpu").config.snip
    expected = Cadence(snip.every or 0, snip.probe_every or 0, snip.delay or 0, snip.batches)
    assert Cadence.default() == expected


def test_a_larger_model_is_charged_by_passes_and_not_by_this_machines_speed() -> None:
    cadence, larger = Cadence.default(), Larger()
    slow, fast = (extrapolated(costs(scale), cadence, larger) for scale in (1.0, 0.1))
    assert slow["bf16 passes of a stall"] == pytest.approx(14 / 2)
    share = larger.statistics_tokens / larger.batch_tokens
    assert slow["stall, steps"] == pytest.approx(fast["stall, steps"]) == pytest.approx(7 * share)
    ratio = slow["stall, s at the rate of here"] / fast["stall, s at the rate of here"]
    assert ratio == pytest.approx(10.0)


# -- the page ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small work folder: two seeds, cells at 75 %, damage, profiles, plans, overhead."""
    folder = tmp_path_factory.mktemp("study")
    gaps = {"bf16": 0.0, "bf16-again": 0.01, "fp8": 0.02, "fp4": 0.9, "snip": 0.1, "loss only": 0.3}
    gaps |= {"snip-layer": 0.2, **everywhere(0.4), "random:2": math.nan}
    for seed in (0, 1):
        name = f"seed{seed}-step300"
        one = profile(seed)
        (folder / "profiles").mkdir(exist_ok=True)
        one.write(folder / "profiles" / f"{name}-fp8-fp4.safetensors")
        write_damage(folder / "damage" / f"{name}-fp4.json", one, seed)
        for policy, gap in gaps.items():
            recipes = {layer: ["fp4", "fp8", "fp4"] for layer in LAYERS}
            made = cell(policy, gap * (1 + seed / 10), seed)
            row = {"seed": seed, "step": 300, "low": "fp4", "high": "fp8", "budget": 0.75, "policy": policy}
            row |= {"fp4_flops": 0.75, "losses": made.losses, "seconds": 1.0, "recipes": recipes}
            row |= {"held_out": made.held_out, "held_out_in_plan": made.in_plan}
            file = f"{name}-fp4-0.75-{policy.replace(':', '').replace(' ', '-')}.json"
            snip_study.write(folder / "cells" / file, row)
    snip_study.write(folder / "overhead" / "seed0.json", costs())
    snip_study.plans(argparse.Namespace(work=folder, budgets=[0.75, 0.5]))
    return folder


def write_damage(path: Path, of: PrecisionProfile, seed: int) -> None:
    """Damage as predicted, with noise; no loss from dgrad and wgrad."""
    random, shape = np.random.default_rng(seed), (len(LAYERS), 3)
    zeros = np.zeros(shape)
    predicted = pairs(of, "fp4", zeros, zeros)
    updates = predicted["update, scrimp"][0] * random.lognormal(0.0, 0.1, shape)
    losses = zeros.copy()
    losses[:, 0] = predicted["loss, LD"][0] * random.lognormal(0.0, 0.1, len(LAYERS))
    row = {"seed": seed, "step": 300, "format": "fp4", "layers": list(LAYERS)}
    row |= {"loss": losses.tolist(), "update": updates.tolist()}
    row |= {"spearman": snip_study.correlations(of, "fp4", losses, updates)}
    snip_study.write(path, row)


GRID = Grid((0, 1), (300,), (0.75, 0.5), ("bf16", "snip", "random:1", "layer-type"), "fp4", "fp8")


def strict(path: Path) -> Any:
    """JSON without NaN and infinities."""
    return json.loads(
        path.read_text(encoding="utf-8"), parse_constant=lambda name: pytest.fail(f"{name} in {path}")
    )


@pytest.mark.slow
def test_the_report_has_all_parts_and_every_plot_is_xml(work: Path, tmp_path: Path) -> None:
    page = write_report(work, GRID, tmp_path, "today")
    text, record = page.read_text(encoding="utf-8"), strict(page.with_suffix(".json"))
    for plot in ("damage", "gaps", "plans"):
        name = f"today-snip-study-{plot}.svg"
        assert ElementTree.parse(tmp_path / name).getroot().tag.endswith("svg")
        assert f"({name})" in text
    assert "step 300, snip: at 50% seeds 0, 1" in text
    assert "step 300, layer-type: at 50% seeds 0, 1" in text
    assert "random:2" not in text
    assert "diverged" in text
    expected = {one["what"]: one["answer"] for found in record["expectations"].values() for one in found}
    assert expected["Spearman of the update at least 0.8, fp4 at step 300"] == "yes"
    assert expected["SNIP below every baseline at 75%"] == "yes"
    assert expected["SNIP's gap at 75% at most half of the best simple baseline's"] == "yes"
    assert "| loss only | 2 |" in text.split("## 5. Ablations")[1]
    assert "| loss only | 2 |" not in text.split("## 5. Ablations")[0]


@pytest.mark.slow
def test_the_same_folder_gives_the_same_plots(work: Path, tmp_path: Path) -> None:
    for name in ("one", "two"):
        write_report(work, GRID, tmp_path / name, "today")
    for path in (tmp_path / "one").glob("*.svg"):
        assert path.read_bytes() == (tmp_path / "two" / path.name).read_bytes()


def test_an_empty_folder_is_reported_as_missing(tmp_path: Path) -> None:
    page = write_report(tmp_path / "nothing", GRID, tmp_path, "today")
    text, record = page.read_text(encoding="utf-8"), strict(page.with_suffix(".json"))
    answers = {one["answer"] for found in record["expectations"].values() for one in found}
    assert answers == {"not measured"}
    assert record["plots"] == {}
    assert not list(tmp_path.glob("*.svg"))
    assert "step 300, bf16: seeds 0, 1" in text


@pytest.mark.slow
def test_damage_is_compared_by_the_profile_and_a_change_of_predictions_is_told(work: Path) -> None:
    one = read_damages(work)[0]
    row = damage_row(one)
    assert "note" not in row
    for name, found in row["rows"].items():
        assert found["spearman"] == pytest.approx(one.stored[name], abs=1e-12)
        assert found["interval"][0] <= found["interval"][1]
    moved = damage_row(replace(one, stored=one.stored | {"loss, LD": 0.0}))
    assert "loss, LD" in moved["note"]
    without = damage_row(replace(one, profile=None))
    assert without["rows"]["loss, LD"] == {"spearman": one.stored["loss, LD"], "interval": None}


@pytest.mark.slow
def test_a_profile_of_another_version_is_named_and_its_damage_kept(work: Path, tmp_path: Path) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(work, folder)
    name = "seed1-step300-fp8-fp4.safetensors"
    (folder / "profiles" / name).write_bytes(b"older")
    snip_study.plans(argparse.Namespace(work=folder, budgets=[0.5]))
    assert {row["seed"] for row in read_plans(folder)} == {0}
    record = strict(write_report(folder, GRID, tmp_path, "today").with_suffix(".json"))
    assert any(name in line for line in record["missing"])
    assert [row["rows"]["loss, LD"]["interval"] is None for row in record["damage"]] == [False, True]


def test_plans_are_made_of_every_profile_budget_and_policy(work: Path) -> None:
    rows = read_plans(work)
    assert len(rows) == 2 * 2 * 5
    assert all(row["fp4_flops"] >= row["budget"] - 1e-9 for row in rows)

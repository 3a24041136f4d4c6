"""What the SNIP study concludes from what it finds: gaps, intervals, expectations, churn, costs; and its page."""

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
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from snip_cadence import Cadence, Larger, amortised, extra_bytes, extrapolated
from snip_damage import _weighted, interval, pairs, rank_correlation, read_damages
from snip_gaps import (
    BASELINES,
    Cell,
    Cells,
    Estimate,
    Setting,
    at_most_half,
    below_baselines,
    below_layers,
    t_quantile,
)
from snip_lab import spearman
from snip_plans import churn, plan_row, read_plans, shares_by_kind, stability
from snip_report import Grid, damage_row, write_report

from scrimp.config import Config, TrainConfig, preset, resolve
from scrimp.planner.bits.profile import BatchStatistics, PrecisionProfile

SETTING = Setting(300, "fp4", "fp8")
LAYERS = tuple(f"blocks.{i}.{name}" for i in range(4) for name in ("attention.qkv", "mlp.down"))
FORMATS = ("bf16", "fp8", "fp4")
Array = NDArray[np.float64]


# -- material ----------------------------------------------------------------------------------


def profile(seed: int = 0, num_batches: int = 2) -> PrecisionProfile:
    """Random statistics of eight layers; errors grow from bf16 (none) to fp4."""
    random = np.random.default_rng(seed)
    size, weights = len(LAYERS), len(LAYERS) + 1
    grow = np.array([0.0, 0.03, 1.0])[:, None]

    def positive(*shape: int) -> Array:
        return random.lognormal(0.0, 0.7, shape)

    def batch() -> BatchStatistics:
        norms = {name: positive(size) for name in ("x", "w", "y", "g", "gx", "gw", "curvature")}
        return BatchStatistics(
            loss=4.0,
            errors=positive(size, 3, 3, 2) * grow,
            results=positive(size, 3, 3, 2) * grow,
            backward=positive(2, 2, weights, size),
            forward=positive(2, 2, weights, size),
            sensitivity=positive(2, weights),
            update=positive(weights),
            **norms,
        )

    shapes = tuple((64, 32) if layer.endswith("qkv") else (32, 128) for layer in LAYERS)
    return PrecisionProfile(
        model="model",
        device="cpu",
        step=300,
        layers=LAYERS,
        shapes=shapes,
        tokens=256,
        formats=FORMATS,
        weights=("embedding", *LAYERS),
        owners=tuple(range(1, size + 1)),
        optimizer="adamw",
        gains="ratios",
        batches=tuple(batch() for _ in range(num_batches)),
    )


def cell(policy: str, gap: float, seed: int = 0, budget: str = "0.75", **changes: Any) -> Cell:
    """A run that ends `gap` per cent above bf16's held-out loss of 4."""
    fixed = policy in ("bf16", "bf16-again", "fp8", "fp4", "last-blocks")
    loss = 4.0 * (1 + gap / 100)
    made = Cell(SETTING, seed, "" if fixed else budget, policy, 0.75, loss, loss, (loss,) * 40, {})
    return replace(made, **changes)


def runs(gaps: dict[str, float], seeds: int = 3) -> Cells:
    """The same gaps at every seed, and the control."""
    made = [cell(policy, gap, seed) for policy, gap in gaps.items() for seed in range(seeds)]
    return Cells([*made, *(cell("bf16", 0.0, seed) for seed in range(seeds))])


def everywhere(gap: float) -> dict[str, float]:
    """One gap for every baseline."""
    return {"random:1" if name == "random" else name: gap for name in BASELINES}


# -- statistics --------------------------------------------------------------------------------


@pytest.mark.parametrize("degrees", [1, 2, 3, 5, 10, 11, 20, 100])
def test_97_5_per_cent_of_students_distribution_lie_below_the_quantile(degrees: int) -> None:
    scale = math.gamma((degrees + 1) / 2) / (math.sqrt(degrees * math.pi) * math.gamma(degrees / 2))
    t = np.linspace(0.0, t_quantile(degrees), 200_001)
    density = scale * (1 + t**2 / degrees) ** (-(degrees + 1) / 2)
    assert 0.5 + np.trapezoid(density, t) == pytest.approx(0.975, abs=2e-5)


def test_an_interval_is_the_students_and_one_seed_has_none() -> None:
    assert Estimate((1.0,)).interval is None
    assert Estimate((1.0, math.inf)).interval is None
    low, high = Estimate((1.0, 2.0, 3.0)).interval or (0.0, 0.0)
    assert (low, high) == (pytest.approx(2 - 4.303 / math.sqrt(3)), pytest.approx(2 + 4.303 / math.sqrt(3)))


small = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=2, max_size=12)


@given(small)
def test_ties_have_their_mean_rank(items: list[tuple[int, int]]) -> None:
    sides = [[pair[k] for pair in items] for k in (0, 1)]
    ranks = [[sum(v < w for v in s) + (sum(v == w for v in s) + 1) / 2 for w in s] for s in sides]
    a, b = (np.array(rank) - np.mean(rank) for rank in ranks)
    found = rank_correlation(*(np.array(side, dtype=float) for side in sides))
    if (a**2).sum() * (b**2).sum() == 0:
        assert math.isnan(found)
    else:
        assert found == pytest.approx((a * b).sum() / math.sqrt((a**2).sum() * (b**2).sum()))


@given(small, st.randoms(use_true_random=False))
def test_an_item_that_is_drawn_twice_counts_as_two(items: list[tuple[int, int]], random: Any) -> None:
    counts = [random.randint(0, 3) for _ in items]
    a, b = (np.array([pair[k] for pair in items], dtype=float) for k in (0, 1))
    found = _weighted(a, b, np.array([counts], dtype=float))[0] if sum(counts) else math.nan
    expected = rank_correlation(np.repeat(a, counts), np.repeat(b, counts)) if sum(counts) else math.nan
    assert found == pytest.approx(expected, nan_ok=True)


def test_the_bootstrap_is_sure_of_an_order_and_unsure_of_noise() -> None:
    order, noise = np.arange(40.0), np.random.default_rng(3).normal(size=40)
    assert interval(order, order**3) == (pytest.approx(1.0), pytest.approx(1.0))
    low, high = interval(order, noise)
    assert low < 0 < high
    assert 2 * 1.96 / math.sqrt(39) == pytest.approx(high - low, rel=0.25)  # the textbook's width


# -- gaps --------------------------------------------------------------------------------------


def test_gaps_are_in_per_cent_of_bf16_of_the_same_seed() -> None:
    control = cell("bf16", 0.0, 1, held_out=2.0, losses=(3.0,) * 38 + (2.0, 4.0))
    ours = cell("snip", 0.0, 1, held_out=2.02, in_plan=2.1, losses=(9.0,) * 38 + (2.2, 4.2))
    cells = Cells([control, ours, cell("bf16", 50.0, 0)])
    found = {m: cells.gaps(SETTING, "0.75", "snip", m)[1] for m in ("held_out", "in_plan", "training")}
    assert found == pytest.approx({"held_out": 1.0, "in_plan": 5.0, "training": 7.5})


def test_a_run_without_control_has_no_gap_and_a_diverged_one_an_infinite() -> None:
    cells = Cells([cell("snip", 1.0, 0), cell("bf16", 0.0, 1), cell("snip", 0.0, 1, held_out=math.nan)])
    assert cells.gaps(SETTING, "0.75", "snip") == {1: math.inf}


def test_draws_of_random_are_one_policy_and_fixed_ones_stand_at_every_budget() -> None:
    drawn = [cell("random:1", 1.0), cell("random:2", 3.0), cell("random:1", 9.0, budget="0.5")]
    cells = Cells([cell("bf16", 0.0), cell("fp8", 0.5), *drawn])
    assert cells.gaps(SETTING, "0.75", "random") == {0: pytest.approx(2.0)}
    assert cells.gaps(SETTING, "0.5", "fp8") == cells.gaps(SETTING, "0.75", "fp8") == {0: pytest.approx(0.5)}


def test_a_difference_is_of_common_seeds_only() -> None:
    gaps = {"snip": {0: 1.0, 1: 2.0}, "first-last": {1: 2.5, 2: 9.0}}
    cells = Cells(
        [cell("bf16", 0.0, seed) for seed in range(3)]
        + [cell(policy, gap, seed) for policy, by_seed in gaps.items() for seed, gap in by_seed.items()]
    )
    found = cells.difference(SETTING, "0.75", "snip", "first-last")
    assert found is not None
    assert found.values == (pytest.approx(-0.5),)


# -- expectations ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("worst", "expected", "won"),
    [(0.2, "yes", "6 of 6"), (0.05, "no", "5 of 6"), (math.nan, "yes", "6 of 6")],
)
def test_snip_must_be_below_every_baseline(worst: float, expected: str, won: str) -> None:
    found = below_baselines(runs({"snip": 0.1, **everywhere(0.3), "min-rel-err": worst}), SETTING, "0.75")
    assert found.answer == expected
    assert f"below {won}" in found.note


def test_baselines_that_have_not_run_are_named() -> None:
    found = below_baselines(runs({"snip": 0.1, "first-last": 0.2}), SETTING, "0.75")
    assert found.answer == "yes"
    assert "not measured: layer-type, min-abs-err" in found.note
    assert below_baselines(runs({"snip": 0.1}), SETTING, "0.75").answer == "not measured"


@pytest.mark.parametrize(
    ("snip", "best", "expected"),
    [(0.1, 0.21, "yes"), (0.1, 0.19, "no"), (0.1, -0.01, "cannot be said"), (-0.1, 0.2, "yes")],
)
def test_half_is_of_the_best_baseline(snip: float, best: float, expected: str) -> None:
    found = at_most_half(runs({"snip": snip, **everywhere(0.9), "layer-type": best}), SETTING, "0.75")
    assert found.answer == expected
    assert "layer-type" in found.figure


def test_per_gemm_is_compared_with_per_layer() -> None:
    answers = [
        below_layers(runs({"snip": 0.1, "snip-layer": layer}), SETTING, "0.75").answer
        for layer in (0.2, 0.05)
    ]
    assert answers == ["yes", "no"]
    assert below_layers(runs({"snip": 0.1}), SETTING, "0.75").answer == "not measured"


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


def test_ranks_agree_with_the_labs_where_nothing_is_tied() -> None:
    a, b = np.random.default_rng(5).normal(size=(2, 30))
    assert rank_correlation(a, a + b) == pytest.approx(spearman(a, a + b))


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

"""A plan with its analysis: what it says, and what it refuses to read."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from profiles import names, profile

from scrimp.errors import PlanError
from scrimp.planner.precision import (
    Budget,
    PrecisionPlan,
    PrecisionProfile,
    Question,
    harm_of,
    make_plan,
)
from scrimp.planner.precision.stability import settle
from scrimp.precision import GEMMS, RECIPES


@pytest.fixture(scope="module")
def question() -> Question:
    return Question(profile(names(2), ("fp8", "nvfp4"), batches=3), Budget(fp4_flops=0.6))


@pytest.fixture(scope="module")
def plan(question: Question) -> PrecisionPlan:
    return make_plan(question, step=12)


def test_what_is_written_is_read_again(plan: PrecisionPlan, tmp_path: Path) -> None:
    plan.write(tmp_path / "plan.json")
    assert PrecisionPlan.read(tmp_path / "plan.json") == plan


def test_files_are_named_by_text_too(
    question: Question, plan: PrecisionPlan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    plan.write("plan.json")
    question.profile.write("profile")
    assert PrecisionPlan.read("plan.json") == plan
    assert (
        make_plan(replace(question, profile=PrecisionProfile.read("profile")), step=12).layers == plan.layers
    )


@pytest.mark.parametrize("policy", ["fp8", "last-blocks"])
def test_a_policy_that_keeps_no_budget_has_none_in_its_plan(question: Question, policy: str) -> None:
    found = make_plan(replace(question, policy=policy))
    assert (found.budget, found.reason) == ({}, f"policy {policy}, which keeps no budget")


def test_harm_and_its_parts_add_up_to_what_was_solved(question: Question, plan: PrecisionPlan) -> None:
    choice, _ = settle(question)
    total = 0.0
    for row in plan.layers.values():
        for gemm in row.gemms.values():
            assert gemm.harm == pytest.approx(
                {name: gemm.loss[name] + gemm.update[name] for name in gemm.harm}
            )
            total += gemm.harm[gemm.choice]
    assert total == pytest.approx(harm_of(choice.costs, choice.formats))


def test_what_is_said_of_the_plan_is_so(plan: PrecisionPlan) -> None:
    low = sum(
        row.flops_share / 3
        for row in plan.layers.values()
        for gemm in row.gemms.values()
        if RECIPES[gemm.choice].bits == 4
    )
    assert plan.predicted["fp4_flops"] == pytest.approx(low)
    assert plan.granularity == "gemm"
    assert (plan.step, plan.measured_at) == (12, 7)
    assert plan.certainty is not None
    for layer, row in plan.layers.items():
        assert plan.precisions[layer].gemm("dgrad") == row.gemms["dgrad"].choice
        assert tuple(row.gemms) == GEMMS


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda raw: raw.update(scrimp_precision=99), "another version"),
        (lambda raw: raw.pop("layers"), "missing layers"),
        (
            lambda raw: raw["layers"]["blocks.0.mlp.down"]["gemms"].pop("wgrad"),
            "expected fprop, dgrad, wgrad",
        ),
        (
            lambda raw: raw["layers"]["blocks.0.mlp.down"]["gemms"]["wgrad"].update(choice="fp3"),
            "unknown recipe",
        ),
        (lambda raw: raw.update(layers=[]), r"\$\.layers has the wrong type"),
    ],
)
def test_other_files_are_refused(plan: PrecisionPlan, change: object, says: str) -> None:
    raw = json.loads(plan.to_json())
    change(raw)  # type: ignore[operator]
    with pytest.raises(PlanError, match=says):
        PrecisionPlan.from_json(json.dumps(raw))


@pytest.mark.parametrize("text", ["", "[]", "null", '{"scrimp_plan": 1}', '{"scrimp_precision": 1, "lay'])
def test_text_that_is_no_plan_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text(text)
    with pytest.raises(PlanError):
        PrecisionPlan.read(tmp_path / "plan.json")


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="is missing"):
        PrecisionPlan.read(tmp_path / "none.json")

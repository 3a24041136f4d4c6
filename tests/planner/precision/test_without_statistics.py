"""Layers whose statistics are not finite are named wherever a plan is shown, or refused."""

from __future__ import annotations

import numpy as np
import pytest
from profiles import FORMATS, names, profile, with_statistics

from scrimp.errors import PlanError
from scrimp.planner.precision import Budget, PrecisionPlan, PrecisionProfile, Question, allowed_by, make_plan
from scrimp.planner.precision import plan_or_nearest as nearest
from scrimp.planner.precision.choose import without_statistics

ONE = "statistics of 1 layer are not finite, it stays in bf16: blocks.0.attention.out"


def spoiled(*layers: int, blocks: int = 1) -> PrecisionProfile:
    made = profile(names(blocks), seed=2)
    gw = made.batches[0].gw.copy()
    gw[list(layers)] = np.nan
    return with_statistics(made, gw=gw)


@pytest.mark.parametrize("policy", ["snip", "snip-layer", "first-last", "nvfp4"])
def test_they_stand_in_the_reason_and_in_the_note_of_the_plan(policy: str) -> None:
    plan = make_plan(Question(spoiled(1), Budget(fp4_flops=0.25), policy))
    assert plan.reason.endswith(f"; {ONE}")
    assert plan.solver["note"].endswith(ONE)
    assert PrecisionPlan.from_json(plan.to_json()).solver["note"] == plan.solver["note"]
    assert {gemm.choice for gemm in plan.layers["blocks.0.attention.out"].gemms.values()} == {"bf16"}


def test_they_stand_in_the_refusal_that_they_cause() -> None:
    with pytest.raises(PlanError, match=f"share of FLOPs in 4 bits: {ONE} - got at most"):
        make_plan(Question(spoiled(1), Budget(fp4_flops=1.0)))


@pytest.mark.parametrize("policy", ["first-last", "snip"])
def test_a_plan_that_they_keep_from_its_budget_is_not_called_the_lowest(policy: str) -> None:
    plan = nearest(Question(spoiled(0, 1, 2, 3), Budget(fp4_flops=0.5), policy), step=3)
    assert plan.reason.startswith(
        "the nearest plan: no plan can meet the share of FLOPs in 4 bits: statistics of 4 "
    )
    assert "lowest" not in plan.reason
    assert {gemm.choice for row in plan.layers.values() for gemm in row.gemms.values()} == {"bf16"}
    assert (plan.predicted["fp4_flops"], plan.budget) == (0.0, {"fp4_flops": 0.5})


def test_eight_are_named_and_the_others_counted() -> None:
    text = without_statistics(Question(spoiled(*range(11), blocks=3), Budget(fp4_flops=0.0)))
    assert text.startswith(
        "statistics of 11 layers are not finite, they stay in bf16: blocks.0.attention.qkv, "
    )
    assert text.endswith(" and 3 more")
    assert text.count("blocks.") == 8


def test_what_a_rule_fixes_is_not_said_to_stay() -> None:
    made = spoiled(1, 2)
    fixed = {made.layers[1]: dict.fromkeys(("fprop", "dgrad", "wgrad"), "fp8")}
    allowed = allowed_by(made.layers, FORMATS, fixed)
    text = without_statistics(Question(made, Budget(fp4_flops=0.0), allowed=allowed))
    assert text == f"statistics of 1 layer are not finite, it stays in bf16: {made.layers[2]}"


def test_of_finite_statistics_nothing_is_said() -> None:
    plan = make_plan(Question(spoiled(), Budget(fp4_flops=0.5)))
    assert "not finite" not in plan.reason
    assert plan.solver["note"] == ""

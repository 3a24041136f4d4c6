"""What a run goes on by when its budget gets out of reach."""

from __future__ import annotations

import numpy as np
import pytest
from profiles import profile

from scrimp.planner.precision import Budget, Question, choose, make_plan, plan_or_nearest
from scrimp.planner.precision.nearest import nearest_to


@pytest.mark.parametrize(
    ("budget", "formats", "policy"),
    [
        (Budget(divergence=0.0), ("bf16", "fp8", "nvfp4"), "bf16"),
        (Budget(divergence=0.0), ("fp8", "nvfp4"), "fp8"),
        (Budget(fp4_flops=1.0), ("bf16", "fp8", "nvfp4"), "nvfp4"),
    ],
)
def test_the_nearest_plan_is_the_safest_or_the_lowest_that_there_is(
    budget: Budget, formats: tuple[str, ...], policy: str
) -> None:
    nearest, _ = nearest_to(Question(profile(6, formats), budget))
    assert set(choose(nearest).recipes(nearest.profile).values()) == {(policy,) * 3}


def test_a_plan_that_is_not_possible_is_the_nearest_with_the_refusal_as_its_reason() -> None:
    made = profile(6, ("fp8", "nvfp4"))
    allowed = np.ones((6, 3, 2), dtype=bool)
    allowed[0, :, 1] = False
    found = plan_or_nearest(Question(made, Budget(fp4_flops=1.0), allowed=allowed), step=7)
    assert found.step == 7
    assert found.reason.startswith("the lowest plan: ")
    assert (found.policy, found.budget) == ("snip", {"fp4_flops": 1.0})
    choices = [{gemm.choice for gemm in layer.gemms.values()} for layer in found.layers.values()]
    assert choices == [{"fp8"}, *[{"nvfp4"}] * 5]


def test_a_plan_that_is_possible_is_that_plan() -> None:
    question = Question(profile(6, ("fp8", "nvfp4")), Budget(fp4_flops=0.5))
    found, plain = plan_or_nearest(question, step=3), make_plan(question, step=3)
    assert (found.reason, found.layers) == (plain.reason, plain.layers)

"""NVIDIA's last blocks within a budget: against every number of blocks that could be kept."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from profiles import names, profile
from property_tests import examples

from scrimp.errors import PlanError
from scrimp.planner.precision import Budget, Question, allowed_by, choose
from scrimp.planner.precision.choose import share_in_4_bits
from scrimp.precision import GEMMS

_, FP8, FP4 = range(3)
"""Places of the profiles' formats: bf16, fp8, nvfp4."""


@examples(30)
@given(st.integers(0, 10**6), st.integers(0, 1000), st.booleans())
def test_matched_last_blocks_are_the_most_that_the_budget_allows(
    seed: int, thousandths: int, fix: bool
) -> None:
    least = thousandths / 1000  # finer ones may lie within the tolerance of a share
    made = profile(names(5), seed=seed)
    fixed = {layer: dict.fromkeys(GEMMS, "fp8") for layer in made.layers[8:12]} if fix else {}
    allowed = allowed_by(made.layers, made.formats, fixed)
    question = Question(made, Budget(fp4_flops=least), "last-blocks-matched", allowed=allowed)
    # One plan for every number of blocks that are kept, from none to all.
    plans_of = [np.repeat(np.where(np.arange(20) < 20 - 4 * k, FP4, FP8)[:, None], 3, 1) for k in range(6)]
    for plan in plans_of:
        plan[8:12] = FP8 if fix else plan[8:12]
    fitting = [plan for plan in plans_of if share_in_4_bits(made, plan) >= least - 1e-9]
    if not fitting:
        with pytest.raises(PlanError, match="no plan can meet"):
            choose(question)
        return
    np.testing.assert_array_equal(choose(question).formats, fitting[-1])


def test_matched_last_blocks_are_counted_stage_by_stage() -> None:
    made = profile(names(6), shapes=[(8, 8)] * 24)
    question = Question(made, Budget(fp4_flops=0.5), "last-blocks-matched", stages=[0] * 16 + [1] * 8)
    by_block = choose(question).formats.reshape(6, -1)
    assert [set(block.tolist()) for block in by_block] == [{FP4}, {FP4}, {FP8}, {FP8}, {FP4}, {FP8}]

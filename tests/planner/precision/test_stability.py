"""How sure a plan is, and when it is worth a change."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from profiles import profile

from scrimp.config.snip import ORDERED
from scrimp.planner.precision import Budget, Question, choose, harm_of
from scrimp.planner.precision.choose import is_within
from scrimp.planner.precision.profile import PrecisionProfile
from scrimp.planner.precision.stability import RULE, WORTH, certainty, settle, switching_costs

FORMATS = ("fp8", "nvfp4")
HALF = Budget(fp4_flops=0.5)


def question(batches: int = 4, seed: int = 0, **changes: object) -> Question:
    made = profile(6, FORMATS, seed=seed, batches=batches)
    # fp8 errs less than nvfp4, by chance much or little.
    fixed = []
    for batch in made.batches:
        errors, results, losses = batch.errors.copy(), batch.results.copy(), batch.losses.copy()
        for found in (errors.swapaxes(1, 2), results.swapaxes(1, 2), losses):
            found[:, 0] = 0.2 * found[:, 1]
        fixed.append(dataclasses.replace(batch, errors=errors, results=results, losses=losses))
    made = dataclasses.replace(made, batches=tuple(fixed))
    return dataclasses.replace(Question(made, HALF), **changes)  # type: ignore[arg-type]


def almost_even(made: PrecisionProfile) -> PrecisionProfile:
    """Equal layers whose dgrad and wgrad reach their own weight alone: costs are within a few per cent."""
    batches = []
    own = np.zeros_like(made.batches[0].backward)
    own[:, :, list(made.owners), range(len(made.layers))] = 1.0
    for batch in made.batches:
        changes = {
            field.name: np.ones_like(getattr(batch, field.name)) for field in dataclasses.fields(batch)
        }
        errors = changes["errors"] * [[0.2], [1.0]] * (1 + 0.01 * np.tanh(np.log(batch.errors[:, :, 1:])))
        changes |= {"errors": errors, "results": errors, "losses": 0 * batch.losses, "loss": 1.0}
        changes["backward"] = own
        batches.append(dataclasses.replace(batch, **changes))
    return dataclasses.replace(made, shapes=((8, 8),) * len(made.layers), batches=tuple(batches))


def test_equal_batches_make_a_certain_plan() -> None:
    asked = question(batches=1)
    twice = dataclasses.replace(asked.profile, batches=asked.profile.batches * 3)
    sure = certainty(dataclasses.replace(asked, profile=twice), choose(asked))
    assert sure is not None
    np.testing.assert_array_equal(sure, 1.0)


def test_batches_that_contradict_each_other_make_an_uncertain_one() -> None:
    asked = question(batches=4)
    sure = certainty(asked, choose(asked))
    assert sure is not None
    assert 0.2 < sure.mean() < 1.0


def test_one_batch_says_nothing_of_certainty() -> None:
    asked = question(batches=1)
    assert certainty(asked, choose(asked)) is None
    assert switching_costs(dataclasses.replace(asked, current=choose(asked).formats)) is None


def test_leaving_a_format_costs_what_its_difference_spreads_over_batches() -> None:
    current = np.zeros((6, 3), dtype=np.int64)
    asked = question(current=current)
    found = switching_costs(asked)
    assert found is not None
    assert found.shape == (6, 3, 2)
    np.testing.assert_array_equal(found[:, :, 0], 0.0)
    samples = [
        choose(dataclasses.replace(asked, profile=dataclasses.replace(asked.profile, batches=(batch,)))).costs
        for batch in asked.profile.batches
    ]
    by_hand = np.stack([costs[:, :, 1] - costs[:, :, 0] for costs in samples]).std(axis=0, ddof=1) / 2
    np.testing.assert_allclose(found[:, :, 1], by_hand)


@pytest.mark.parametrize("policy", ["snip", RULE])
@pytest.mark.parametrize("seed", [0, 6])
def test_the_first_plan_leaves_the_rule_where_that_is_worth_it(seed: int, policy: str) -> None:
    """Costs that differ by chance make the best plan much better than the rule's, costs that hardly differ do not."""
    asked = question(batches=1, seed=seed)
    if policy == RULE:
        asked = dataclasses.replace(asked, profile=almost_even(asked.profile))
    rule, best = (choose(dataclasses.replace(asked, policy=name)) for name in (RULE, "snip"))
    assert (harm_of(best.costs, best.formats) < (1 - WORTH) * harm_of(best.costs, rule.formats)) == (
        policy == "snip"
    )
    found, reason = settle(asked)
    expected = best if policy == "snip" else rule
    np.testing.assert_array_equal(found.formats, expected.formats)
    assert found.fp4_flops == pytest.approx(expected.fp4_flops)
    assert reason.startswith("first plan: that of" if policy == RULE else "first plan: ")
    assert RULE in reason


def test_where_the_rule_says_nothing_the_first_plan_is_the_solvers() -> None:
    for changes in (
        {"policy": "snip-layer"},
        {"budget": Budget(divergence=0.5)},
        {"together": [(name,) * 3 for name in FORMATS]},
    ):
        asked = question(**changes)
        found, reason = settle(asked)
        assert reason == "first plan"
        np.testing.assert_array_equal(found.formats, choose(asked).formats)


def test_a_plan_that_is_hardly_better_is_not_taken() -> None:
    """The best plan but for one pair of GEMMs of equal FLOPs and nearly equal cost."""
    asked = question(batches=1)
    best = choose(asked)
    shares = np.repeat(asked.profile.flops[:, None], 3, 1)
    for low in zip(*np.nonzero(best.formats == 1), strict=True):
        for high in zip(*np.nonzero((best.formats == 0) & np.isclose(shares, shares[low])), strict=True):
            old = best.formats.copy()
            old[low], old[high] = 0, 1
            worse = harm_of(best.costs, old) / harm_of(best.costs, best.formats) - 1
            found, reason = settle(dataclasses.replace(asked, current=old))
            if worse / (1 + worse) < WORTH:
                assert "kept" in reason
                np.testing.assert_array_equal(found.formats, old)
            else:
                assert "changed" in reason
                np.testing.assert_array_equal(found.formats, best.formats)


def test_a_plan_that_no_longer_keeps_the_budget_is_left_however_good() -> None:
    safe = np.zeros((6, 3), dtype=np.int64)
    asked = question(current=safe)
    assert not is_within(asked, safe)
    found, reason = settle(asked)
    assert "no longer keeps the budget" in reason
    assert found.fp4_flops >= 0.5 - 1e-9


@pytest.mark.parametrize("policy", [*ORDERED, "last-blocks", "nvfp4"])
def test_policies_that_name_layers_are_settled_at_once(policy: str) -> None:
    asked = question(policy=policy)
    found, reason = settle(dataclasses.replace(asked, current=choose(asked).formats * 0))
    assert reason == f"policy {policy}" + ("" if policy in ORDERED else ", which keeps no budget")
    assert found.solution is None


def test_a_plan_that_costs_nothing_replaces_one_that_costs_something() -> None:
    asked = question(batches=1)
    free = [
        dataclasses.replace(
            b,
            errors=b.errors * [[0], [1]],
            results=b.results * [[0], [1]],
            losses=b.losses * [[0], [1]],
        )
        for b in asked.profile.batches
    ]
    made = dataclasses.replace(asked.profile, batches=tuple(free))
    current = np.ones((6, 3), dtype=np.int64)
    found, reason = settle(Question(made, Budget(fp4_flops=0.0), current=current))
    np.testing.assert_array_equal(found.formats, 0)
    assert "more than nothing" in reason

"""A budget over two phases: against all plans of a small problem."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
from profiles import profile

from scrimp.errors import PlanError
from scrimp.planner.precision import Budget, Question, choose, split
from scrimp.planner.precision.over_time import at_share

FORMATS = ("fp8", "nvfp4")


def question(share: float = 0.5, seed: int = 0) -> Question:
    made = profile(2, FORMATS, seed=seed, shapes=[(16, 16), (32, 16)])
    batch = made.batches[0]
    batch = dataclasses.replace(
        batch, results=batch.results * np.array([0.1, 1.0])[:, None], errors=batch.errors * 0
    )
    return Question(dataclasses.replace(made, batches=(batch,)), Budget(fp4_flops=share))


def cheapest(asked: Question, main: int, final: int, weight: float) -> float:
    """Least harm over all pairs of plans, one for each phase."""
    assert asked.budget.fp4_flops is not None
    costs = choose(asked).costs.reshape(6, 2)
    low = np.repeat(asked.profile.flops / 3, 3)
    plans = np.array(list(itertools.product((0, 1), repeat=6)))
    harm = np.take_along_axis(costs[None], plans[:, :, None], axis=2)[..., 0].sum(1)
    share = (plans * low).sum(1)
    both = main * share[:, None] + final * share[None, :]
    total = main * harm[:, None] + weight * final * harm[None, :]
    return float(total[both >= asked.budget.fp4_flops * (main + final) - 1e-9].min())


@pytest.mark.parametrize(("main", "final", "weight"), [(80, 20, 4.0), (50, 50, 1.0), (10, 90, 20.0)])
@pytest.mark.parametrize("seed", range(3))
def test_phases_cost_as_little_as_any_pair_of_plans(main: int, final: int, weight: float, seed: int) -> None:
    asked = question(seed=seed)
    phases = split(asked, main, final, weight)
    assert main * phases.main + final * phases.final >= 0.5 * (main + final) - 1e-9
    harm = [
        choose(at_share(asked, share)).solution.cost  # type: ignore[union-attr]
        for share in (phases.main - 1e-12, phases.final - 1e-12)
    ]
    assert main * harm[0] + weight * final * harm[1] <= cheapest(asked, main, final, weight) * (1 + 2e-3)


def test_harm_that_weighs_more_at_the_end_moves_four_bits_to_the_start() -> None:
    phases = split(question(), 80, 20, 50.0)
    assert phases.main > 0.5 > phases.final


def test_without_a_second_phase_there_is_one_share() -> None:
    assert split(question(), 100, 0, 4.0) == split(question(), 0, 100, 4.0)


def test_only_shares_of_flops_are_spread() -> None:
    with pytest.raises(PlanError, match="only a share"):
        split(dataclasses.replace(question(), budget=Budget(divergence=1.0)), 80, 20, 4.0)


def test_a_policy_that_decides_for_layers_spreads_its_budget_over_layers() -> None:
    """Two layers of a third and two thirds: at equal weights, half of the FLOPs in both phases is what layers give."""
    asked = dataclasses.replace(question(share=0.5), policy="snip-layer")
    costs = choose(asked).costs.sum(1)
    low = asked.profile.flops
    plans = np.array(list(itertools.product((0, 1), repeat=2)))
    harm = np.take_along_axis(costs[None], plans[:, :, None], axis=2)[..., 0].sum(1)
    share = (plans * low).sum(1)
    total = 50 * harm[:, None] + 4.0 * 50 * harm[None, :]
    least = total[50 * (share[:, None] + share[None, :]) >= 50 - 1e-9].min()
    phases = split(asked, 50, 50, 4.0)
    index = [int(np.isclose(share, found).nonzero()[0][0]) for found in (phases.main, phases.final)]
    assert total[index[0], index[1]] == pytest.approx(least)


def test_a_policy_without_costs_has_the_same_share_in_both_phases() -> None:
    phases = split(dataclasses.replace(question(share=0.5), policy="first-last"), 50, 50, 4.0)
    assert phases.main == phases.final == 0.5

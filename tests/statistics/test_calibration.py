"""Rates of kinds of layers: what real errors do, over what noise foretold."""

from __future__ import annotations

import copy
import math

import numpy as np
import pytest
import torch
from models import Bench, MlpModel, batch, bench, trained_decoder
from torch import Tensor, nn

from scrimp.gemm import LinearPrecision
from scrimp.planner.precision.divergence import divergence
from scrimp.statistics import collect
from scrimp.statistics.calibration import MEMBERS, calibrated, kinds_of, spread
from scrimp.statistics.gains import Gains
from scrimp.statistics.structure import Structure, SubLayer

LOW = "fp4"


def test_kinds_are_names_without_numbers_and_entries_of_a_branch_together() -> None:
    layers = [f"blocks.{n}.{name}" for n in range(3) for name in ("q", "k", "out", "gate", "up", "down")]
    subs = [
        SubLayer(tuple(f"blocks.{n}.{name}" for name in entries), f"blocks.{n}.{exit_}")
        for n in range(3)
        for entries, exit_ in ((("q", "k"), "out"), (("gate", "up"), "down"))
    ]
    structure = Structure(tuple(f"norm.{n}" for n in range(7)), tuple(subs))
    assert kinds_of(layers, None) == [[i, i + 6, i + 12] for i in range(6)]
    assert kinds_of(layers, structure) == [
        [0, 1, 6, 7, 12, 13],
        [2, 8, 14],
        [3, 4, 9, 10, 15, 16],
        [5, 11, 17],
    ]


def test_members_are_spread_from_the_first_to_the_last() -> None:
    assert spread([3, 5, 8]) == [3, 5, 8]
    assert spread(list(range(0, 64, 2))) == [0, 20, 42, 62]
    assert len(set(spread(range(MEMBERS + 1)))) == MEMBERS


def test_updates_are_multiplied_by_what_is_measured_over_what_is_foretold() -> None:
    """Two kinds of two layers: one does twice what noise foretells, of the other nothing is known."""
    generator = np.random.default_rng(0)
    gains = Gains(generator.random((2, 2, 3, 4)), generator.random((2, 2, 3, 4)), np.zeros(4))
    errors = generator.random((4, 2))

    def run(members: list[int]) -> np.ndarray:
        moved = np.full((2, 3), np.nan)
        if members == [0, 2]:
            squares = np.einsum("okl,lo->k", gains.forward[:, 1][..., members] ** 2, errors[members] ** 2)
            moved[1] = 2 * np.sqrt(squares)
        return moved

    found = calibrated(gains, errors, [[0, 2], [1, 3]], run)
    expected = gains.forward.copy()
    expected[:, 1, :, [0, 2]] *= 2
    assert np.allclose(found.forward, expected, rtol=1e-12)
    assert found.backward is gains.backward


@pytest.mark.parametrize("gains", ["ratios", "exact"])
def test_predictions_of_a_kind_add_up_to_what_its_layers_do_together(gains: str) -> None:
    """Measured by another hand: gradients of a model in the format, and copies of its optimizer's steps."""
    made = trained_decoder(layers=2) if gains == "ratios" else bench(MlpModel(), steps=10)
    profile = collect(made.subject(), [batch(500)], (LOW,), gains=gains)
    predicted = divergence(profile, profile.batches[0]).update[:, 0, 0]
    clean = updates(made, [])
    kinds = kinds_of(profile.layers, None)
    assert 1 < len(kinds) < len(profile.layers)
    for kind in kinds:
        moved = updates(made, [profile.layers[index] for index in kind])
        squares = sum(
            float((moved[name] - clean[name]).norm() / made.model.get_parameter(name).norm()) ** 2
            for name in profile.weights
        )
        found = math.sqrt(float((predicted[kind] ** 2).sum()))
        assert found == pytest.approx(math.sqrt(squares), rel=0.02)


def updates(made: Bench, names: list[str]) -> dict[str, Tensor]:
    """What the optimizer makes of the gradients with some layers' fprop in the format, without decay."""
    made.planned.replan({name: LinearPrecision(LOW, "fp32", "fp32", "fp32") for name in names})
    gradients = made.gradients(500)
    made.planned.replan(LinearPrecision.of("fp32"))
    other = copy.deepcopy(made.model)
    optimizer = torch.optim.AdamW(other.parameters(), lr=1.0, weight_decay=0.0)
    state = made.optimizer.state_dict()
    for group in state["param_groups"]:
        group |= {"lr": 1.0, "weight_decay": 0.0}
    optimizer.load_state_dict(copy.deepcopy(state))
    before = {name: parameter.detach().clone() for name, parameter in other.named_parameters()}
    for name, parameter in other.named_parameters():
        parameter.grad = gradients[name].clone()
    nn.utils.clip_grad_norm_(other.parameters(), made.max_norm)
    optimizer.step()
    return {name: before[name] - parameter.detach() for name, parameter in other.named_parameters()}

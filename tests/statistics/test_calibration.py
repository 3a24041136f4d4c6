"""Rates of kinds of layers: what real errors do, over what noise foretold."""

from __future__ import annotations

import copy
import importlib
import math
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from models import Bench, MlpModel, batch, bench, trained_decoder
from torch import Tensor, nn

from scrimp.gemm import LinearPrecision
from scrimp.planner.precision.divergence import divergence
from scrimp.statistics import collect, find_structure
from scrimp.statistics.calibration import BRANCHES, calibrated, kinds_of, spread
from scrimp.statistics.gains import Gains
from scrimp.statistics.structure import Structure, SubLayer

LOW = "fp4"
module: Any = importlib.import_module("scrimp.statistics.collect")  # the package has a function of this name


def layers_of(blocks: int) -> tuple[list[str], Structure]:
    names = ("attn.q", "attn.k", "attn.out", "mlp.fc1", "mlp.fc2")
    layers = [f"blocks.{n}.{name}" for n in range(blocks) for name in names]
    subs = [
        SubLayer(tuple(f"blocks.{n}.{name}" for name in entries), f"blocks.{n}.{exit_}")
        for n in range(blocks)
        for entries, exit_ in ((("attn.q", "attn.k"), "attn.out"), (("mlp.fc1",), "mlp.fc2"))
    ]
    return layers, Structure(tuple(f"norm.{n}" for n in range(2 * blocks + 1)), tuple(subs))


def test_kinds_are_names_without_numbers_of_blocks_entries_together_and_the_last_writers() -> None:
    layers, structure = layers_of(2)
    assert kinds_of(layers, None) == [[[i], [i + 5]] for i in range(5)]  # fc1 is not fc2
    assert kinds_of(layers, structure) == [[[0, 1], [5, 6]], [[2]], [[3], [8]], [[4]], [[7], [9]]]


@pytest.mark.parametrize("blocks", [1, 3, 4, 5, 12, 32, 61])
def test_all_names_of_a_kind_run_in_blocks_from_the_first_to_the_last(blocks: int) -> None:
    layers, structure = layers_of(blocks)
    members = [layers[index] for index in spread(kinds_of(layers, structure)[0])]
    chosen = sorted({int(name.split(".")[1]) for name in members})
    assert len(chosen) == min(blocks, BRANCHES)
    assert (chosen[0], chosen[-1]) == (0, blocks - 1)
    assert members == [f"blocks.{n}.attn.{name}" for n in chosen for name in ("q", "k")]


def test_updates_are_multiplied_by_what_is_measured_over_what_is_foretold() -> None:
    """Two kinds of two layers: one does twice what noise foretells, the other breaks in the format."""
    generator = np.random.default_rng(0)
    gains = Gains(generator.random((2, 2, 3, 4)), generator.random((2, 2, 3, 4)), np.zeros(4))
    errors = generator.random((4, 2))

    def run(members: list[int]) -> np.ndarray:
        moved = np.full((2, 3), np.nan)
        if members == [0, 2]:
            squares = np.einsum("okl,lo->k", gains.forward[:, 1][..., members] ** 2, errors[members] ** 2)
            moved[1] = 2 * np.sqrt(squares)
        return moved

    found = calibrated(gains, errors, [[[0], [2]], [[1], [3]]], run)
    expected = gains.forward.copy()
    expected[:, 1, :, [0, 2]] *= 2
    expected[:, 1, :, [1, 3]] = np.nan
    assert np.allclose(found.forward, expected, rtol=1e-12, equal_nan=True)
    assert found.backward is gains.backward


@pytest.mark.parametrize("gains", ["ratios", "exact"])
def test_predictions_of_a_kind_add_up_to_what_its_layers_do_together(gains: str) -> None:
    """Measured by another hand: gradients of a model in the format, and copies of its optimizer's steps."""
    made = trained_decoder(layers=2) if gains == "ratios" else bench(MlpModel(), steps=10)
    profile = collect(made.subject(), [batch(500)], (LOW,), gains=gains)
    predicted = divergence(profile, profile.batches[0]).update[:, 0, 0]
    clean = updates(made, [])
    structure = find_structure(made.model, profile.layers, lambda: next(made.losses(batch(500))))
    made.optimizer.zero_grad()
    kinds = kinds_of(profile.layers, structure if gains == "ratios" else None)
    assert 1 < len(kinds) < len(profile.layers)
    for branches in kinds:
        kind = [index for branch in branches for index in branch]
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


def test_a_pass_that_raises_leaves_every_layer_in_its_format(monkeypatch: pytest.MonkeyPatch) -> None:
    made = trained_decoder()
    before = {name: layer.precision for name, layer in made.planned.layers.items()}

    def broken(gains: Gains, errors: np.ndarray, kinds: list[list[list[int]]], run: Any) -> Gains:
        with patch.object(module._Measurement, "_pass", side_effect=RuntimeError("gone")):
            run(spread(kinds[0]))
        return gains

    monkeypatch.setattr(module, "calibrated", broken)
    with pytest.raises(RuntimeError, match="gone"):
        made.collect()
    assert {name: layer.precision for name, layer in made.planned.layers.items()} == before

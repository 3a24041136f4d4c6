"""Optimizers by name: settings that one cannot keep are refused by name, and choices follow it."""

from __future__ import annotations

import dataclasses
import importlib
from typing import Any

import pytest

from scrimp.config import Config, ModelConfig, preset, resolve
from scrimp.config.fields import replace_values
from scrimp.config.optimizers import OPTIMIZERS, check_choice
from scrimp.config.values import check_values
from scrimp.errors import ConfigError

MUON = Config(model=ModelConfig(preset="llama-3m"))
MUON = dataclasses.replace(MUON, optimizer=dataclasses.replace(MUON.optimizer, name="muon"))


def resolved(*, ranks: int = 1, **settings: Any) -> Any:
    config = replace_values(MUON, {key.replace("__", "."): value for key, value in settings.items()})
    return resolve(config, preset("llama-3m"), device_type="cpu", ranks=ranks)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_has_what_a_run_asks_for(name: str) -> None:
    module = importlib.import_module(OPTIMIZERS[name].module)
    assert callable(module.build)
    assert callable(module.memory)


@pytest.mark.parametrize("name", ["moun", "Muon"])
def test_an_unknown_name_is_refused_with_the_known_ones(name: str) -> None:
    config = replace_values(MUON, {"optimizer.name": name})
    with pytest.raises(ConfigError, match=r"optimizer\.name .*one of adamw, .*, muon"):
        check_values(config)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("memory.optimizer", "host", "muon updates on the device only.*memory.optimizer host"),
        ("memory.weights", "2", "memory.weights 2"),
        ("memory.gradients", "host", "memory.gradients host"),
        ("memory.update", "fastest", "muon has no update on the CPU"),
    ],
)
def test_what_muon_cannot_keep_is_refused_by_name(key: str, value: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolved(**{key.replace(".", "__"): value})


def test_muon_needs_masters_beside_bf16_parameters() -> None:
    with pytest.raises(ConfigError, match="muon needs master weights"):
        resolved(precision="bf16", optimizer__master_weights=False)
    assert resolved(precision="bf16").config.optimizer.master_weights is True


def test_what_is_open_stays_on_the_device_and_says_why() -> None:
    found = resolved()
    memory = found.config.memory
    assert (memory.weights, memory.gradients, memory.optimizer) == ("device",) * 3
    assert "muon" in found.reasons["memory.optimizer"]
    assert resolved(memory__optimizer="device").config.memory.optimizer == "device"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "chooses by budget.device_memory, and there is none.*--budget.device-memory"),
        ({"budget.host_memory": "1GB"}, "chooses by budget.device_memory, and there is none"),
        ({"budget.device_memory": "1GB", "optimizer.rank": 16}, "optimizer.rank 16.*--optimizer.name fira"),
        (
            {"budget.device_memory": "1GB", "optimizer.from_weights": True},
            "from_weights takes the states of one",
        ),
    ],
)
def test_a_choice_without_a_budget_or_beside_what_has_chosen_is_refused(
    settings: dict[str, Any], message: str
) -> None:
    config = replace_values(MUON, {"optimizer.name": "auto", **settings})
    check_values(config)
    with pytest.raises(ConfigError, match=message):
        check_choice(config)
    check_choice(replace_values(config, {"optimizer.name": "fira"}))


LOW_RANK = pytest.mark.parametrize("name", ["galore", "fira"])


@LOW_RANK
def test_the_rank_is_a_quarter_of_the_width_unless_it_is_given(name: str) -> None:
    found = resolved(optimizer__name=name)
    width = preset("llama-3m").width
    assert found.config.optimizer.rank == width // 4
    assert f"a quarter of the width {width}" in found.reasons["optimizer.rank"]
    assert resolved(optimizer__name=name, optimizer__rank=7).config.optimizer.rank == 7
    again = resolve(found.config, preset("llama-3m"), device_type="cpu")
    assert (again.config, again.reasons) == (found.config, {})


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_a_rank_is_refused_beside_an_optimizer_without_projectors(name: str) -> None:
    assert resolved(optimizer__name=name).config.optimizer.rank is None
    with pytest.raises(ConfigError, match=rf"{name} has no projectors.*optimizer\.rank 16.*galore or fira"):
        resolved(optimizer__name=name, optimizer__rank=16)


@LOW_RANK
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"optimizer__moments": "bf16"}, "does not keep its state in that format.*moments bf16"),
        ({"optimizer__moments": "8bit"}, "moments 8bit"),
        ({"precision": "bf16", "optimizer__master_weights": False}, "needs master weights"),
        ({"memory__optimizer": "host"}, "updates on the device only"),
        ({"memory__update": "cpu"}, "has no update on the CPU"),
        ({"outer__every": 4, "layout__dp": 2}, "not carried out beside outer.every"),
    ],
)
def test_what_low_rank_states_cannot_keep_is_refused_by_name(
    name: str, settings: dict[str, Any], message: str
) -> None:
    ranks = settings.get("layout__dp", 1)
    with pytest.raises(ConfigError, match=message) as caught:
        resolved(ranks=ranks, optimizer__name=name, **settings)
    assert name in str(caught.value)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("optimizer.rank", 0),
        ("optimizer.refresh_every", 0),
        ("optimizer.low_rank_scale", 0.0),
        ("optimizer.low_rank_scale", float("nan")),
    ],
)
def test_numbers_that_no_subspace_can_have_are_refused(key: str, value: float) -> None:
    with pytest.raises(ConfigError, match=f"{key} is out of range"):
        check_values(replace_values(MUON, {"optimizer.name": "galore", key: value}))

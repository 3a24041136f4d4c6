"""Optimizers by name: settings that one cannot keep are refused by name, and choices follow it."""

from __future__ import annotations

import dataclasses
import importlib
from typing import Any

import pytest

from scrimp.config import Config, ModelConfig, preset, resolve
from scrimp.config.fields import replace_values
from scrimp.config.optimizers import OPTIMIZERS
from scrimp.config.values import check_values
from scrimp.errors import ConfigError

MUON = Config(model=ModelConfig(preset="llama-3m"))
MUON = dataclasses.replace(MUON, optimizer=dataclasses.replace(MUON.optimizer, name="muon"))


def resolved(**settings: Any) -> Any:
    config = replace_values(MUON, {key.replace("__", "."): value for key, value in settings.items()})
    return resolve(config, preset("llama-3m"), device_type="cpu")


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_has_what_a_run_asks_for(name: str) -> None:
    module = importlib.import_module(OPTIMIZERS[name].module)
    assert callable(module.build)
    assert callable(module.memory)


@pytest.mark.parametrize("name", ["moun", "Muon"])
def test_an_unknown_name_is_refused_with_the_known_ones(name: str) -> None:
    config = replace_values(MUON, {"optimizer.name": name})
    with pytest.raises(ConfigError, match=r"optimizer\.name .*adamw, muon"):
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

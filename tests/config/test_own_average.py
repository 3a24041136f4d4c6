"""A model that learns from its own average: what is decided, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from scrimp.config import Config, Resolution, check_values, preset, replace_values, resolve
from scrimp.errors import ConfigError


def resolved(ranks: int = 1, **changes: Any) -> Resolution:
    values = {"objective.name": "distill", "objective.teachers": "ema"}
    config = replace_values(Config(), values | {key.replace("__", "."): one for key, one in changes.items()})
    check_values(config)
    return resolve(config, preset("llama-3m"), device_type="cpu", ranks=ranks)


def test_states_stay_on_the_device() -> None:
    found = resolved()
    memory = found.config.memory
    assert (memory.weights, memory.gradients, memory.optimizer) == ("device",) * 3
    assert "average of the weights" in found.reasons["memory.weights"]


@pytest.mark.parametrize(
    ("ranks", "changes"),
    [
        (2, {"layout.tp": 2}),
        (2, {"layout.cp": 2}),
        (2, {"layout.pp": 2}),
        (2, {"outer.every": 4}),
        (1, {"objective.written": 0.5}),
        (1, {"memory.weights": "host"}),
        (1, {"memory.optimizer": "host"}),
    ],
)
def test_what_it_does_not_go_with_is_named(ranks: int, changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as found:
        resolved(ranks, **changes)
    assert f"{next(iter(changes))} {next(iter(changes.values()))} is not carried out" in found.value.what


def test_low_rank_factors_may_be_averaged_but_not_refactored() -> None:
    architecture = replace(preset("llama-3m"), rank=8)
    values = {"objective.name": "distill", "objective.teachers": "ema", "model.rank": 8}
    config = replace_values(Config(), values)
    assert resolve(config, architecture, device_type="cpu").architecture.rank == 8
    config = replace_values(config, {"optimizer.refactor_every": 10})
    with pytest.raises(ConfigError, match="refactor_every 10 is not carried out"):
        resolve(config, architecture, device_type="cpu")


@pytest.mark.parametrize("momentum", [-0.1, 1.0, 1.5])
def test_a_momentum_is_a_share_below_one(momentum: float) -> None:
    with pytest.raises(ConfigError, match="out of range"):
        resolved(objective__teacher_momentum=momentum)

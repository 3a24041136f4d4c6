"""Which format AdamW's moments get, and that runs from before the setting go on."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from scrimp.config import (
    Architecture,
    Config,
    OptimizerConfig,
    TrainConfig,
    check_values,
    differences,
    resolve,
    with_later_choices,
)
from scrimp.errors import ConfigError

ARCHITECTURE = Architecture(
    family="llama",
    vocab_size=300,
    num_layers=1,
    width=32,
    num_heads=2,
    num_kv_heads=1,
    head_size=16,
    ffn_width=64,
    context=256,
)


def decided(precision: str = "bf16", parameters: Any = "auto", **given: Any) -> tuple[Config, dict[str, str]]:
    train, optimizer = TrainConfig(parameters=parameters), OptimizerConfig(**given)
    config = Config(precision=precision, train=train, optimizer=optimizer)
    result = resolve(config, ARCHITECTURE, device_type="cpu")
    return result.config, result.reasons


def test_moments_are_as_fine_as_the_weights_that_they_move() -> None:
    assert decided("fp32")[0].optimizer.moments == "fp32"
    assert decided("bf16")[0].optimizer.moments == "fp32"
    assert decided("bf16", parameters="fp32")[0].optimizer.moments == "fp32"
    config, reasons = decided("bf16", master_weights=False)
    assert config.optimizer.moments == "bf16"
    assert "bf16" in reasons["optimizer.moments"]


@pytest.mark.parametrize("moments", ["fp32", "bf16", "8bit"])
def test_given_moments_are_kept(moments: str) -> None:
    config, reasons = decided("bf16", moments=moments)
    assert config.optimizer.moments == moments
    assert "optimizer.moments" not in reasons


def test_an_unknown_format_is_refused_by_name() -> None:
    config = Config(optimizer=OptimizerConfig(moments="int4"))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"optimizer\.moments.*int4.*8bit"):
        check_values(config)


@pytest.mark.parametrize("master_weights", [False, True])
def test_a_run_from_before_the_setting_agrees_with_what_it_did(master_weights: bool) -> None:
    now = decided("bf16", master_weights=master_weights)[0]
    before = dataclasses.replace(now, optimizer=dataclasses.replace(now.optimizer, moments="auto"))
    assert with_later_choices(before) == now == with_later_choices(now)
    other = dataclasses.replace(now, optimizer=dataclasses.replace(now.optimizer, moments="8bit"))
    assert list(differences(with_later_choices(before), other)) == ["optimizer.moments"]

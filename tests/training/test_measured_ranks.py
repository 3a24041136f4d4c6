"""Rates that are corrected by a block give back the block's seconds."""

from __future__ import annotations

import dataclasses

import pytest

from scrimp.config import Config, preset, replace_values, resolve
from scrimp.config.resolved import ResolvedConfig
from scrimp.profiler import resolve_device
from scrimp.profiler.measured_cluster import RankRates
from scrimp.training.measured_ranks import low_recipes, predicted_block, rates_of_run, scaled, with_low

RATES = RankRates(5e10, 5e10, 3e10, 3e10, 1e10, 5e-6)
LLAMA = preset("llama-8m")
DEVICE = resolve_device("cpu")
SETTINGS = {"device": "cpu", "train.batch_tokens": 512, "train.sequence": 256, "train.micro_batch": 2}
CONFIG = resolve(replace_values(Config(), SETTINGS), LLAMA, device_type="cpu").config
LOW = resolve(replace_values(Config(), SETTINGS | {"precision": "fp8"}), LLAMA, device_type="cpu").config


def seconds(rates: RankRates, *, is_low: bool = False) -> float:
    if is_low:
        return predicted_block(rates, LOW, LLAMA, DEVICE, recipe="fp8")
    return predicted_block(rates, CONFIG, LLAMA, DEVICE, recipe="bf16")


@pytest.mark.parametrize("factor", [0.3, 1.0, 4.0])
def test_a_block_takes_as_many_times_less_as_its_rates_are_faster(factor: float) -> None:
    assert seconds(scaled(RATES, factor)) == pytest.approx(seconds(RATES) / factor)


@pytest.mark.parametrize("times", [0.8, 1.0, 3.0])
def test_a_block_in_a_lower_recipe_takes_what_was_measured(times: float) -> None:
    measured = times * seconds(RATES, is_low=True)
    found = with_low(RATES, measured, LOW, LLAMA, DEVICE)
    assert seconds(found, is_low=True) == pytest.approx(measured)
    assert dataclasses.replace(found, low=RATES.low) == RATES


def test_formats_that_are_planned_get_a_rate_for_each_width(monkeypatch: pytest.MonkeyPatch) -> None:
    formats = {"precision": "snip", "snip.formats": "bf16,fp8_row,fp8,nvfp4"}
    planned = resolve(replace_values(Config(), SETTINGS | formats), LLAMA, device_type="cpu").config
    assert low_recipes(planned) == ["fp8_row", "nvfp4"]
    assert (low_recipes(LOW), low_recipes(CONFIG)) == (["fp8"], [])
    took = {"bf16": 1.0, "fp8_row": 2.0, "nvfp4": 5.0}
    monkeypatch.setattr("scrimp.training.measured_ranks.rates_of_ranks", lambda *_, **__: RATES)
    monkeypatch.setattr("scrimp.training.measured_ranks.LIMIT_S", float("inf"))
    monkeypatch.setattr(
        "scrimp.training.measured_ranks._measured",
        lambda config, *_, is_low: took[config.precision_rules.base if is_low else "bf16"],
    )
    found = rates_of_run(planned, LLAMA, DEVICE)
    for recipe, seconds_of in took.items():
        predicted = predicted_block(found, planned, LLAMA, DEVICE, recipe=recipe)
        assert predicted == pytest.approx(seconds_of, rel=1e-6)


def test_products_that_take_no_time_are_as_fast_as_they_may_be() -> None:
    found = with_low(RATES, 1e-9, LOW, LLAMA, DEVICE)
    assert RATES.product < found.low < float("inf")


@pytest.mark.slow
@pytest.mark.parametrize("config", [CONFIG, LOW], ids=["bf16", "fp8"])
def test_a_block_that_would_take_too_long_is_not_timed(
    config: ResolvedConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model's own block on this machine: its rates are others than those of single operations."""
    timed = rates_of_run(config, LLAMA, DEVICE)
    assert all(value > 0 for value in vars(timed).values())
    monkeypatch.setattr("scrimp.training.measured_ranks.LIMIT_S", 0.0)
    monkeypatch.setattr(
        "scrimp.training.measured_ranks.measure_blocks", lambda *_, **__: pytest.fail("it was timed")
    )
    assert all(value > 0 for value in vars(rates_of_run(config, LLAMA, DEVICE)).values())

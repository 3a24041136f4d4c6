"""Layers that are products of two factors, and their refactorization: what does not go with them is refused by name."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from scrimp.config import Config, Resolution, preset, replace_values, resolve
from scrimp.config.values import check_values
from scrimp.errors import ConfigError


def resolved(
    rank: int | None = 16, ranks: int = 1, share: float | None = None, device: str = "cpu", **settings: Any
) -> Resolution:
    config = replace_values(Config(), {key.replace("__", "."): value for key, value in settings.items()})
    architecture = replace(preset("llama-3m"), rank=rank, sparse_share=share)
    return resolve(config, architecture, device_type=device, ranks=ranks)


def test_factors_ask_nothing_of_other_settings() -> None:
    found = resolved(optimizer__refactor_every=50)
    assert found.config.optimizer.refactor_every == 50
    assert resolve(found.config, found.architecture, device_type="cpu").config == found.config
    for name in ("galore", "fira", "muon", "nadamw"):
        assert resolved(optimizer__name=name).config.optimizer.name == name
    assert resolved(ranks=4, layout__pp=2).config.layout.fsdp == 2


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rank": None}, "refactor_every is of layers that are products.*set model.rank"),
        ({"ranks": 2, "layout__tp": 2}, "layout.tp is not carried out beside model.rank"),
        ({"optimizer__name": "galore"}, "optimizer.name galore is not carried out"),
        ({"optimizer__beta2": 0.999}, "optimizer.beta2 0.999 is not carried out"),
        ({"optimizer__name": "own.py:Own"}, "optimizer.name own.py:Own is not"),
        ({"precision": "bf16", "optimizer__master_weights": False}, "master_weights false is not"),
        ({"ranks": 2, "outer__every": 5}, "outer.every 5 is not carried out beside optimizer.refactor_every"),
    ],
)
def test_what_is_not_carried_out_is_refused_by_name(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"(?s){message}"):
        resolved(optimizer__refactor_every=50, **settings)


def test_what_a_matrix_made_for_a_product_cannot_have_is_refused_by_name() -> None:
    found = resolved(share=0.03, optimizer__refactor_every=50, precision="bf16", device="cuda")
    assert found.config.train.compile == "off"
    assert "kept in compiled blocks" in found.reasons["train.compile"]
    for name in ("galore", "fira", "muon", "nadamw"):
        assert resolved(share=0.03, optimizer__name=name).config.optimizer.name == name
    refused: list[dict[str, Any]] = [
        {"precision": "fp8"},
        {"precision": "snip"},
        {"precision": "bf16,head=fp8"},
        {"train__compile": "on"},
        {"ranks": 2, "layout__pp": 2, "layout__schedule": "zbv"},
        {"ranks": 2, "layout__tp": 2},
    ]
    for settings in refused:
        key, value = [(k.replace("__", "."), v) for k, v in settings.items()][-1]
        match = f"{key} ({value} )?is not carried out beside model"
        with pytest.raises(ConfigError, match=match):
            resolved(share=0.03, **settings)


@pytest.mark.parametrize("share", [0.0, 1.0, -0.1, float("nan")])
def test_shares_out_of_range_are_refused(share: float) -> None:
    with pytest.raises(ConfigError, match=r"model\.sparse_share is out of range"):
        check_values(replace_values(Config(), {"model.sparse_share": share}))


@pytest.mark.parametrize("key", ["model.rank", "optimizer.refactor_every"])
def test_numbers_below_their_range_are_refused(key: str) -> None:
    with pytest.raises(ConfigError, match=f"{key} is out of range"):
        check_values(replace_values(Config(), {key: -1}))

"""The embedding's learning rate: what is decided for whom, what is refused, and what earlier runs go on with."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from scrimp.config import (
    Config,
    check_values,
    differences,
    preset,
    replace_values,
    resolve,
    with_later_choices,
)
from scrimp.errors import ConfigError
from scrimp.training.trained_weights import going_on, refuse_states_of_others

TIED = preset("llama-3m")
APART = dataclasses.replace(TIED, tied_embeddings=False)
RATIO = "optimizer.embedding_lr_ratio"


def ratio(settings: dict[str, Any], *, tied: bool = True) -> float:
    config = replace_values(Config(), settings)
    check_values(config)
    found = resolve(config, TIED if tied else APART, device_type="cpu", ranks=1)
    assert RATIO in found.reasons or RATIO in settings
    return found.config.optimizer.embedding_lr_ratio


@pytest.mark.parametrize(
    ("settings", "tied", "apart"),
    [
        ({}, 4.0, 1.0),
        ({"optimizer.name": "nadamw"}, 4.0, 1.0),
        ({"optimizer.name": "schedule-free"}, 4.0, 1.0),
        ({"optimizer.name": "muon"}, 4.0, 4.0),
        ({"optimizer.name": "fira"}, 1.0, 1.0),
        ({"optimizer.name": "own.py:Own"}, 1.0, 1.0),
        ({"model.weights": Path("folder")}, 1.0, 1.0),
        ({"model.weights": Path("folder"), "adapter.rank": 4}, 1.0, 1.0),
        ({"optimizer.lr": 0.1, "optimizer.weight_decay": 3.2}, 1.0, 1.0),
        ({RATIO: 2.5}, 2.5, 2.5),
    ],
)
def test_what_is_decided(settings: dict[str, Any], tied: float, apart: float) -> None:
    assert (ratio(settings), ratio(settings, tied=False)) == (tied, apart)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({RATIO: 0.0}, [RATIO, "above 0"]),
        ({RATIO: 40.0, "optimizer.lr": 0.1, "optimizer.weight_decay": 0.5}, ["decays all", f"{RATIO} 40"]),
        ({RATIO: 2.0, "model.weights": Path("folder"), "adapter.rank": 4}, [f"{RATIO} 2", "beside adapters"]),
    ],
)
def test_what_is_refused(settings: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        ratio(settings)
    assert all(word in str(caught.value) for word in words)


@pytest.mark.parametrize(
    ("mine", "theirs", "expected"), [(None, 4.0, 4.0), (None, 1.0, 1.0), (2.0, 4.0, 2.0)]
)
def test_with_the_states_of_a_run_the_embedding_has_its_rate(
    mine: float | None, theirs: float, expected: float
) -> None:
    begun = {"model.weights": Path("folder"), "optimizer.from_weights": True}
    before = replace_values(Config(), {RATIO: theirs})
    found = going_on(replace_values(Config(), {RATIO: mine, **begun}), before)
    assert found.optimizer.embedding_lr_ratio == expected
    # Of weights alone, or of a folder that is not there yet, it says nothing.
    assert going_on(Config(), before) == Config()
    assert going_on(replace_values(Config(), begun)).optimizer.embedding_lr_ratio is None


def test_a_run_of_before_goes_on_with_one_rate() -> None:
    now = resolve(Config(), TIED, device_type="cpu", ranks=1).config
    before = replace_values(now, {RATIO: None})
    assert with_later_choices(before).optimizer.embedding_lr_ratio == 1.0
    assert with_later_choices(now) == now
    assert list(differences(with_later_choices(before), now)) == [RATIO]


def test_states_of_an_own_optimizer_with_other_groups_are_refused() -> None:
    own = replace_values(Config(), {"optimizer.name": "own.py:Own", RATIO: 1.0})
    refuse_states_of_others(own, own, "the states")
    with pytest.raises(ConfigError, match=rf"{RATIO} = 2.0 \(the run has 1.0\)"):
        refuse_states_of_others(replace_values(own, {RATIO: 2.0}), own, "the states")
    adamw = replace_values(Config(), {RATIO: 1.0})
    refuse_states_of_others(replace_values(adamw, {RATIO: 2.0}), adamw, "the states")

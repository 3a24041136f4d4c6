"""The schedule is the optimizer's own where none is given, and what does not go with an average is named."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from scrimp.config import Config, Resolution, check_values, preset, replace_values, resolve
from scrimp.config.optimizers import OPTIMIZERS
from scrimp.errors import ConfigError


def resolved(values: dict[str, Any], *, ranks: int = 1, rank: int | None = None) -> Resolution:
    config = replace_values(Config(), values)
    check_values(config)
    return resolve(config, replace(preset("llama-3m"), rank=rank), device_type="cpu", ranks=ranks)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_schedule_follows_the_optimizer_unless_it_is_given(name: str) -> None:
    found = resolved({"optimizer.name": name})
    expected, why = ("constant", "averages") if name == "schedule-free" else ("cosine", "0.1 of the peak")
    assert found.config.schedule.name == expected
    assert why in found.reasons["schedule.name"]
    again = resolve(found.config, found.architecture, device_type="cpu")
    assert (again.config, again.reasons) == (found.config, {})
    given = resolved({"optimizer.name": name, "schedule.name": "constant"})
    assert given.config.schedule.name == "constant"
    assert "schedule.name" not in given.reasons


@pytest.mark.parametrize(
    ("ranks", "rank", "values"),
    [
        (1, None, {"schedule.name": "wsd"}),
        (1, None, {"optimizer.beta1": 0.0}),
        (1, 8, {"optimizer.refactor_every": 5}),
        (2, None, {"outer.every": 4}),
        (1, None, {"objective.teachers": "ema", "objective.name": "distill"}),
    ],
)
def test_what_it_does_not_go_with_is_named(ranks: int, rank: int | None, values: dict[str, Any]) -> None:
    values = values | ({} if rank is None else {"model.rank": rank})
    assert resolved({**values, "optimizer.name": "adamw"}, ranks=ranks, rank=rank)
    with pytest.raises(ConfigError) as found:
        resolved({**values, "optimizer.name": "schedule-free"}, ranks=ranks, rank=rank)
    key, value = next(iter(values.items()))
    value = f"{value:g}" if isinstance(value, float) else value
    assert found.value.what == f"{key} {value} is not carried out beside optimizer.name schedule-free"


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"memory.optimizer": "host"}, "updates on the device only"),
        ({"memory.update": "cpu"}, "no update on the CPU"),
        ({"optimizer.moments": "8bit"}, "does not keep its state in that format"),
        ({"precision": "bf16", "optimizer.master_weights": False}, "needs master weights"),
        ({"optimizer.rank": 8}, "has no projectors"),
    ],
)
def test_what_it_cannot_keep_is_named(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"schedule-free .*{message}|schedule-free {message}"):
        resolved({**values, "optimizer.name": "schedule-free"})

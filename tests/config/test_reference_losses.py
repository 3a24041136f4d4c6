"""Reference losses of sources: how they are read, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from scrimp.config import Config, check_values, preset, replace_values, resolve
from scrimp.config.reference_losses import reference_losses
from scrimp.errors import ConfigError

MIX = "texts/a.txt=2,texts/b.txt=1,texts/c.txt=0"


def resolved(text: str, ranks: int = 1, **changes: Any) -> None:
    values = {"data.mix": MIX, "objective.reference_losses": text}
    config = replace_values(Config(), values | {key.replace("__", "."): one for key, one in changes.items()})
    check_values(config)
    resolve(config, preset("llama-3m"), device_type="cpu", ranks=ranks)


def test_losses_are_read_by_source() -> None:
    assert reference_losses("a.txt=3.1, stdlib:email = 0") == {"a.txt": 3.1, "stdlib:email": 0.0}
    resolved("b.txt=2.5,a.txt=0")


@pytest.mark.parametrize("text", ["", "a", "a=", "=1", "a=-1", "a=nan", "a=inf", "a=1,a=2", "a=1,", "a=one"])
def test_what_is_no_list_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="no list of sources and losses"):
        reference_losses(text)


@pytest.mark.parametrize("text", ["a.txt=1", "a.txt=1,b.txt=1,c.txt=1", "a.txt=1,x.txt=1"])
def test_each_source_that_is_trained_on_has_one(text: str) -> None:
    with pytest.raises(ConfigError, match="does not name the sources") as found:
        resolved(text)
    assert "a.txt, b.txt" in str(found.value.expected)


@pytest.mark.parametrize("mix", [None, "texts/a.txt=1,texts/b.txt=0"])
def test_one_source_has_nothing_to_be_weighed_against(mix: str | None) -> None:
    with pytest.raises(ConfigError, match="does not name the sources"):
        resolved("a.txt=1", data__mix=mix)


@pytest.mark.parametrize(
    ("ranks", "changes"),
    [
        (2, {"layout.tp": 2}),
        (2, {"layout.cp": 2}),
        (2, {"layout.pp": 2}),
        (2, {"outer.every": 4}),
        (1, {"precision": "snip"}),
        (1, {"objective.name": "own.py:Own"}),
    ],
)
def test_what_it_does_not_go_with_is_named(ranks: int, changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as found:
        resolved("a.txt=1,b.txt=1", ranks, **changes)
    assert next(iter(changes)) in found.value.what
    assert "objective.reference_losses" in found.value.what


@pytest.mark.parametrize("scale", [0.0, -1.0, 10_000.0])
def test_a_scale_is_a_positive_number_of_nats(scale: float) -> None:
    with pytest.raises(ConfigError, match="out of range"):
        resolved("a.txt=1,b.txt=1", objective__excess_scale=scale)

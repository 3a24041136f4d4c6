"""The shape of a model in a TOML file, or as a line of JSON says it.

Problem  A shape with a typo is predicted as happily as the right one: heads that key heads do not divide, more experts
         chosen than there are, a million layers.
Method   Every number has a range; beyond it a number is a typo or has another unit.
Checked  tests/planner/layout/test_shape_files.py
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any, Final

from scrimp.config import Range, check_range
from scrimp.errors import ConfigError
from scrimp.files import read_bounded
from scrimp.json_files import as_typed
from scrimp.models.shapes import ModelShape

_BYTES: Final = 2**16
_SIZE, _COUNT = Range(1, 10**7), Range(1, 10**4)
_ANY_SIZE, _ANY_COUNT = Range(0, 10**7), Range(0, 10**4)
_RANGES: Final[Mapping[str, Range]] = {
    **dict.fromkeys(("layers", "heads", "window_every"), _COUNT),
    "kv_heads": _ANY_COUNT,
    "width": _SIZE,
    **dict.fromkeys(("head_size", "ffn_width", "learned_positions", "window"), _ANY_SIZE),
    "vocab_size": Range(1, 10**8),
    "next_token_modules": Range(0, 16),
    **dict.fromkeys(("experts.count", "experts.chosen"), _COUNT),
    "experts.width": _SIZE,
    "experts.shared_width": _ANY_SIZE,
    **dict.fromkeys(("experts.shared", "experts.first_dense_layers"), _ANY_COUNT),
    **dict.fromkeys((f"latent_attention.{name}" for name in ("kv_rank", "nope_size", "value_size")), _SIZE),
    **dict.fromkeys((f"latent_attention.{name}" for name in ("q_rank", "rope_size")), _ANY_SIZE),
}
"""Possible numbers by dotted key."""
_IDLE: Final = (
    ("window_every", 1, "window", "a window, whose tokens `window` says"),
    ("experts.shared_width", 0, "experts.shared", "shared experts, whose number `experts.shared` says"),
)
"""Keys, with what they are by default, that say nothing where another one is 0."""


def read_shape(file: Path) -> ModelShape:
    """The shape in a TOML file.

    Raises:
        ConfigError: by the key that is wrong.
    """
    do = "see docs/planner.md for the keys of a shape"
    read = read_bounded(file, error=ConfigError, do=do, at_most=_BYTES)
    try:
        values = tomllib.loads(read.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{file} is not in UTF-8", got=f"byte {error.start:,} is 0x{read[error.start]:02x}", do=do
        ) from None
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise ConfigError(f"{file} is no TOML", got=str(error), do=do) from None
    found = as_typed(values, ModelShape, origin=str(file), error=ConfigError, do=do)
    check_shape(found, f" in {file}")
    return found


def check_shape(shape: ModelShape, where: str = " of the model") -> None:
    """Refuse numbers that no model has.

    Args:
        where: follows the key in a message.

    Raises:
        ConfigError: by the key.
    """
    values = _flat(shape)
    for key, allowed in _RANGES.items():
        if key in values:
            check_range(f"{key}{where}", values[key], allowed)
    _check_heads(shape, where)
    _check_experts(shape, where)
    for key, usual, other, needed in _IDLE:
        if values.get(key, usual) != usual and not values.get(other, 0):
            raise ConfigError(
                f"{key}{where} has no effect", got=f"{values[key]:,}", expected=f"{needed}; or leave it out"
            )


def _check_heads(shape: ModelShape, where: str) -> None:
    if shape.latent_attention is not None:
        return
    if shape.heads % shape.key_heads:
        raise ConfigError(
            f"kv_heads{where} does not divide its heads", got=f"{shape.heads:,} over {shape.kv_heads:,}"
        )
    if not shape.head_size and shape.width % shape.heads:
        raise ConfigError(
            f"heads{where} does not divide its width",
            got=f"{shape.width:,} over {shape.heads:,}",
            do="give head_size",
        )


def _check_experts(shape: ModelShape, where: str) -> None:
    experts = shape.experts
    if experts is not None and experts.chosen > experts.count:
        raise ConfigError(
            f"experts.chosen{where} is more than there are",
            got=f"{experts.chosen:,} of {experts.count:,}",
            expected=f"at most {experts.count:,}",
        )
    dense = shape.layers if experts is None else experts.first_dense_layers
    if experts is not None and dense >= shape.layers:
        raise ConfigError(
            f"experts.first_dense_layers{where} leaves no layer with experts",
            got=f"{dense:,} of {shape.layers:,} layers",
            expected="fewer, or no experts",
        )
    if dense and not shape.ffn_width:
        raise ConfigError(
            f"ffn_width{where} is 0, and {dense:,} of its layers have no experts",
            expected="the width of its feed-forward layers",
        )


def _flat(part: Any, prefix: str = "") -> dict[str, Any]:
    """Values by dotted key."""
    found: dict[str, Any] = {}
    for name, value in vars(part).items():
        found |= _flat(value, f"{prefix}{name}.") if is_dataclass(value) else {prefix + name: value}
    return found

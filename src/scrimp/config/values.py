"""Is each value possible? Ranges of numbers, byte sizes, and texts that can name something.

These checks know neither the model nor the device, so they run before either is touched.
Combinations (`train.sequence` against the model's context, ...) are checked where the missing values are
decided, in `scrimp.config.resolve`.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scrimp.config.fields import flatten, leaves
from scrimp.config.optimizers import AUTO, facts_of
from scrimp.config.presets import preset
from scrimp.config.schema import Config, DataConfig
from scrimp.config.snip import check_snip
from scrimp.errors import ConfigError
from scrimp.precision import parse_rules
from scrimp.user_code import is_code

_MANY = 2**31 - 1
"""Largest count. Positions and token ids are 32-bit in places; beyond it a value is a typo."""

_UNITS = {"B": 1} | {
    prefix + suffix: base**power
    for suffix, base in (("B", 1000), ("iB", 1024))
    for power, prefix in enumerate(("K", "M", "G", "T", "P"), start=1)
}
_POWERS = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "g": 1e9, "t": 1e12}


@dataclass(frozen=True)
class Range:
    """Allowed values of a number. NaN is in no range."""

    low: float
    high: float
    above: bool = False
    """The lower end itself is not allowed."""
    below: bool = False
    """The upper end itself is not allowed."""

    def __contains__(self, value: float) -> bool:
        over = value > self.low if self.above else value >= self.low
        under = value < self.high if self.below else value <= self.high
        return over and under

    def __str__(self) -> str:
        low = f"above {self.low:,}" if self.above else f"{self.low:,} or more"
        if self.high in (_MANY, 2**63 - 1, math.inf):
            return low
        if not self.above and not self.below:
            return f"{self.low:,} to {self.high:,}"
        return f"{low}, {'below' if self.below else 'at most'} {self.high:,}"


_COUNT = Range(1, _MANY)
_TOKENS = Range(1, 2**24)
_COUNT_OR_OFF = Range(0, _MANY)

RANGES: dict[str, Range] = {
    "run.seed": Range(0, 2**63 - 1),
    "run.rounding_seed": Range(0, 2**63 - 1),
    "data.tokens": Range(1, 2**40),
    "data.held_out": Range(0, 1, below=True),
    "data.vocab_size": Range(257, 2**24),  # the 256 bytes and the end of a document
    "model.vocab_size": _COUNT,
    "model.context": _TOKENS,
    "model.num_layers": _COUNT,
    "model.width": _COUNT,
    "model.num_heads": _COUNT,
    "model.num_kv_heads": _COUNT,
    "model.ffn_width": _COUNT,
    "model.rank": _COUNT,
    "model.sparse_share": Range(0, 1, above=True, below=True),
    "adapter.rank": Range(0, 2**16),
    "adapter.alpha": Range(0, 10**6, above=True),
    "train.steps": _COUNT,
    "train.sequence": _TOKENS,
    "model.capacity_factor": Range(0, 2**16, above=True),
    "train.batch_tokens": Range(1, 2**40),
    "train.micro_batch": Range(1, 2**16),
    # AdamW's update is about lr per element, whatever the gradient: above 1 it can only be a typo.
    "optimizer.lr": Range(0, 1, above=True),
    "schedule.warmup_steps": _COUNT_OR_OFF,
    "schedule.final_lr_ratio": Range(0, 1),
    "optimizer.weight_decay": Range(0, 10),
    "optimizer.beta1": Range(0, 1, below=True),
    "optimizer.beta2": Range(0, 1, below=True),
    "optimizer.momentum": Range(0, 1, below=True),
    "optimizer.embedding_lr_ratio": Range(0, 10**3, above=True),
    "optimizer.rank": _COUNT,
    "optimizer.refresh_every": _COUNT,
    "optimizer.low_rank_scale": Range(0, 100, above=True),
    "optimizer.refactor_every": _COUNT_OR_OFF,
    "optimizer.eps": Range(0, 1, above=True),
    "optimizer.clip": Range(0, 10**9),
    "objective.z_loss": Range(0, 1),
    "objective.teacher_weight": Range(0, 1),
    "objective.teacher_momentum": Range(0, 1, below=True),
    "objective.excess_scale": Range(0, 10**3, above=True),
    "objective.written": Range(0, 1, below=True),
    "objective.written_tokens": Range(1, 2**40),
    "train.loss_chunk": _COUNT_OR_OFF,
    "layout.dp": _COUNT,
    "layout.fsdp": _COUNT,
    "layout.cp": _COUNT,
    "layout.tp": _COUNT,
    "layout.ep": _COUNT,
    "layout.etp": _COUNT,
    "layout.pp": _COUNT,
    "layout.virtual": _COUNT,
    "layout.zero": Range(1, 3),
    "outer.every": _COUNT_OR_OFF,
    "outer.copies": Range(1, 4096),
    "outer.lr": Range(0, 10, above=True),
    "outer.momentum": Range(0, 1, below=True),
    "outer.clip": Range(0, 10**6, above=True),
    "evaluation.every": _COUNT_OR_OFF,
    "evaluation.tokens": _COUNT,
    "checkpoint.every": _COUNT_OR_OFF,
    "checkpoint.keep_last": _COUNT,
    "checkpoint.keep_every": _COUNT_OR_OFF,
    "train.nonfinite_patience": _COUNT,
    "budget.fp4_flops": Range(0, 1),
    "budget.step_seconds": Range(0, 10**6, above=True),
    "budget.speedup": Range(1, 100),
    "budget.divergence": Range(0, 1),
    "budget.saved_bytes": Range(0, 1, above=True),
    "snip.first": _COUNT_OR_OFF,
    "snip.every": _COUNT_OR_OFF,
    "snip.delay": _COUNT,
    "snip.batches": Range(1, 64),
    "snip.loss_weight": Range(0, 10**6),
    "snip.update_weight": Range(0, 10**6),
    "snip.curvature_weight": Range(0, 10**6),
    "snip.final_share": Range(0, 1, below=True),
    "snip.final_weight": Range(0, 10**6, above=True),
    "snip.probe_every": _COUNT_OR_OFF,
}
"""Every numeric setting; a test compares the keys with the schema."""


def check_values(config: Config) -> None:
    """Refuse values that no model and no device can make sense of.

    Raises:
        ConfigError: naming the key, the value and what is allowed.
    """
    values = flatten(config)
    known = leaves(Config)
    for key, value in values.items():
        if value is None:
            continue
        if known[key].choices:
            _check_choice(key, value, known[key].choices)
        elif key in RANGES and not isinstance(value, Path):
            check_range(key, value, RANGES[key])
        elif isinstance(value, (str, Path)) and key != "snip.at":
            _check_text(key, str(value))
    for key in ("budget.device_memory", "budget.host_memory"):
        if values[key] is not None:
            parse_bytes(values[key], key=key)
    if config.model.kind is not None and not is_code(config.model.kind):
        raise ConfigError(
            "model.kind names no class",
            got=repr(config.model.kind),
            expected="FILE.py:NAME",
            do="choose a kind that Scrimp has by its preset: --model.preset",
        )
    _check_mix(config.data)
    check_device(config.device)
    parse_rules(config.precision)
    check_snip(config)
    if config.optimizer.name != AUTO:
        facts_of(config.optimizer.name)
    preset(config.model.preset)  # with model.weights too: a misspelt name is a mistake, even unused


def _check_mix(data: DataConfig) -> None:
    """Refuse a mixture beside settings that it replaces, or has no use for."""
    if not data.mixed:
        return
    if data.held_out == 0 and (unused := [one.name for one in data.mixed if not one.share]):
        raise ConfigError(
            "a source of weight 0 in data.mix has no use",
            got=f"{', '.join(unused)}, and data.held_out 0",
            expected="held-out text of it, which is evaluated",
            do="leave the source out, or give a share with data.held_out",
        )
    if data.source != DataConfig().source:
        raise ConfigError(
            "data.mix and data.source contradict each other",
            got=f"data.mix {data.mix} and data.source {data.source}",
            expected="one of the two",
            do="leave data.source out, or give it a weight in data.mix",
        )
    if isinstance(data.held_out, Path):
        raise ConfigError(
            "data.held_out of a mixture must be a share",
            got=data.held_out,
            expected="a number: every source of data.mix holds out its own text, and is evaluated on it",
            do="give a share; `scrimp eval RUN --data FILE` evaluates on a text of its own",
        )


def check_range(key: str, value: float, allowed: Range) -> None:
    """Refuse a number outside its range."""
    if value not in allowed:
        raise ConfigError(f"{key} is out of range", got=f"{value:,}", expected=str(allowed))


def check_device(device: str, key: str = "device") -> None:
    """Refuse a device name that cannot be one. Whether the device is there is not asked here."""
    if not re.fullmatch(r"auto|cpu|cuda(:\d{1,4})?", device):
        raise ConfigError(f"{key} is not a device", got=repr(device), expected="auto, cpu, cuda or cuda:N")


def parse_bytes(text: str, *, key: str = "size") -> int:
    """Number of bytes in a size such as `16GB` (16 * 10^9) or `15.5GiB` (15.5 * 2^30).

    The unit is required, since a bare 16 could be anything; its case does not matter.
    """
    match = re.fullmatch(r"\s*(\d{1,15}(?:\.\d{1,15})?)\s*([a-z]+)\s*", text, flags=re.IGNORECASE | re.ASCII)
    units = {unit.lower(): size for unit, size in _UNITS.items()}
    if match is None or match[2].lower() not in units:
        raise ConfigError(
            f"{key} is not a size in bytes",
            got=repr(text),
            expected="a number and a unit, such as 16GB (10^9 bytes each) or 16GiB (2^30 bytes each)",
            do=f"use one of the units {', '.join(_UNITS)}",
        )
    size = int(float(match[1]) * units[match[2].lower()])
    if size < 1:
        raise ConfigError(f"{key} is out of range", got=repr(text), expected="one byte or more")
    return size


def parse_count(text: str, *, key: str = "count") -> float:
    """15T, 300B, 1.5e12 or 1,000,000 as a number."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?(?:e\d{1,2})?)([kmbgt]?)", text.strip().lower().replace(",", ""))
    if found is None:
        raise ConfigError(
            f"{key} is no number of tokens",
            got=repr(text),
            expected="a positive number, as 15T, 300B or 1.5e12",
        )
    return float(found[1]) * _POWERS[found[2]]


def _check_choice(key: str, value: Any, choices: tuple[str, ...]) -> None:
    # A Config made in Python has not been through the loader.
    if value not in choices:
        raise ConfigError(
            f"{key} is not one of its choices", got=repr(value), expected=f"one of {', '.join(choices)}"
        )


def _check_text(key: str, text: str) -> None:
    if not text.strip():
        raise ConfigError(f"{key} is empty", got=repr(text), expected="a name or a path")
    if "\0" in text:
        raise ConfigError(f"{key} contains a NUL character", got=repr(text), expected="a name or a path")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ConfigError(
            f"{key} is not valid text",
            got=repr(text),
            expected="characters that UTF-8 can write, since the configuration is saved in it",
            do="rename the file or folder",
        ) from None

"""The degrees of a layout: given, checked against the number of ranks, and decided where they are open.

    ranks = dp x fsdp x cp

Degrees that are left out are filled up: `cp` is 1, `fsdp` takes all that the others leave, and `dp` all that a given
`fsdp` leaves.
Of all layouts fsdp over all ranks takes the least memory of each, and asks nothing of the model's sizes: it is what
a run gets that says nothing.

Checked  tests/config/test_layout.py
"""

from __future__ import annotations

import math
from collections.abc import Collection

from scrimp.config.fields import replace_values
from scrimp.config.optimizers import facts_of
from scrimp.config.schema import Config, LayoutConfig, decided
from scrimp.errors import ConfigError

AXES = ("dp", "fsdp", "cp")
"""Their product is the number of ranks."""


def ranks_of(layout: LayoutConfig) -> int:
    """Ranks that a layout asks for by the degrees that are given: what is planned for where nobody has started any."""
    return math.prod(_given(layout).values())


def for_ranks(config: Config, ranks: int, given: Collection[str]) -> Config:
    """A saved configuration on another number of ranks: its degrees are open again but for those that the user gave."""
    if ranks_of(config.layout) == ranks:
        return config
    return replace_values(config, {f"layout.{axis}": None for axis in AXES if f"layout.{axis}" not in given})


def check_layout(layout: LayoutConfig, ranks: int) -> None:
    """Refuse degrees of which the product cannot be the number of ranks.

    Raises:
        ConfigError: with the nearest number of ranks that there are degrees for.
    """
    given = _given(layout)
    product, is_open = math.prod(given.values()), not {"dp", "fsdp"} <= given.keys()
    if product == ranks or (is_open and ranks % product == 0):
        return
    nearest = max(1, round(ranks / product)) * product if is_open else product
    raise ConfigError(
        "the layout does not fit the number of ranks",
        got=f"{' x '.join(f'layout.{axis} {degree:,}' for axis, degree in given.items())} "
        f"on {ranks:,} rank{'s' * (ranks > 1)}",
        expected=f"{'a multiple of ' * is_open}{product:,} ranks",
        do=f"start {nearest:,} ranks (`scrimp launch --ranks {nearest} train ...`), or leave the degrees out",
    )


def check_beside_layout(config: Config) -> None:
    """Refuse what is not carried out on several ranks yet, by name.

    Args:
        config: with the layout decided.

    Raises:
        ConfigError: with the setting to change.
    """
    ranks, memory, name = ranks_of(config.layout), config.memory, config.optimizer.name
    if ranks == 1:
        return
    on_device = ("auto", "device", "0")
    refused = [("precision", config.precision)] * config.is_planned
    refused += [("optimizer.name", name)] * (not facts_of(name).on_ranks)
    refused += [
        (f"memory.{key}", getattr(memory, key))
        for key in ("weights", "gradients", "update")  # FSDP2 has them where it gathers and reduces
        if getattr(memory, key) not in on_device
    ]
    for key, value in refused:
        raise ConfigError(
            f"{key} {value} is not carried out on several ranks yet",
            got=f"{ranks:,} ranks",
            do=f"change {key}, or train in one process",
        )


def decide_cp(layout: LayoutConfig) -> tuple[int, str]:
    """Ranks that share a row, and why."""
    return 1, "each rank reads whole rows"


def decide_dp(layout: LayoutConfig, ranks: int) -> tuple[int, str]:
    """Copies of the model, and why; after `decide_cp`."""
    if layout.fsdp is None:
        return 1, "one copy of the model, sharded over all ranks" if ranks > 1 else "one rank"
    rest = layout.fsdp * decided(layout.cp)
    return ranks // rest, f"{ranks:,} ranks / {rest:,} of fsdp and cp"


def decide_fsdp(layout: LayoutConfig, ranks: int) -> tuple[int, str]:
    """Ranks of a copy, and why; after the others."""
    rest = decided(layout.dp) * decided(layout.cp)
    return ranks // rest, f"{ranks:,} ranks / {rest:,} of dp and cp" if ranks > 1 else "one rank"


def _given(layout: LayoutConfig) -> dict[str, int]:
    degrees = {axis: getattr(layout, axis) for axis in AXES}
    return {axis: degree for axis, degree in degrees.items() if degree is not None}

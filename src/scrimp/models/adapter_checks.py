"""Which layers of a model can have adapters, and be stored beside them.

Checked  tests/models/test_adapters.py, tests/precision/test_stored_rules.py
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from scrimp.errors import ConfigError
from scrimp.precision import HEAD, parse_stored
from scrimp.user_code import is_code

if TYPE_CHECKING:
    from scrimp.config.architecture import Adapter
    from scrimp.models.spec import ModelSpec


def check_adapter(spec: ModelSpec) -> None:
    """Refuse adapters of layers that are not there, or that have experts.

    Raises:
        ConfigError: with the names that there are.
    """
    adapter = spec.architecture.adapter
    if adapter is None:
        return
    if is_code(spec.architecture.family):  # which of its layers need no gradient of their input?
        raise ConfigError(
            "adapters are not carried out for a kind of model of your own yet",
            got=spec.architecture.family,
            do="leave adapter.rank out, which trains every weight",
        )
    if spec.architecture.rank is not None:
        raise ConfigError(
            "adapters are not carried out beside layers of low rank yet",
            got=f"adapter.rank {adapter.rank}, and a base of model.rank {spec.architecture.rank}",
            do="export the base, which multiplies its factors out, and name that folder with --model.weights",
        )
    in_blocks = {name: linear for name, linear in spec.shapes.items() if name != HEAD}
    fit = [name for name, linear in in_blocks.items() if linear.experts == 1]
    unfit = [name for name in adapter.names or in_blocks if name not in fit]
    if unfit:
        raise ConfigError(
            "adapter.targets names layers that cannot have adapters",
            got=", ".join(f"{name}, of experts" if name in in_blocks else name for name in unfit),
            expected=f"linear layers of a block: {', '.join(fit)}",
            do=f"set --adapter.targets {','.join(fit)}, or fewer of them",
        )
    _check_base(spec, adapter)
    sides = {name: min(one.inputs, *one.stacked) for name, one in in_blocks.items() if adapter.has(name)}
    narrow = min(sides, key=lambda name: sides[name])
    if adapter.rank > sides[narrow]:
        raise ConfigError(
            "adapter.rank is larger than a layer",
            got=f"{adapter.rank:,}",
            expected=f"at most {sides[narrow]:,}, the smaller side of {narrow}",
        )


def _check_base(spec: ModelSpec, adapter: Adapter) -> None:
    names = [name for name, one in spec.layers().items() if name != HEAD and one.is_storable]
    for rule in parse_stored(adapter.base)[1:] if adapter.base else ():
        if not any(rule.matches(name) for name in names):
            raise ConfigError(
                f"adapter.base: the pattern of `{rule}` matches no layer",
                got=rule.pattern,
                expected=f"a pattern for linear layers of blocks that are no experts, such as {names[0]}",
            )

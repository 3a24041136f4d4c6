"""What the ranks of a run reach, corrected by a block of its own model.

Problem  Rates of single products and copies leave out what a block is besides: operations one by one, caches that
         neighbours share, the quantization of operands of its very shapes. On a CPU that is up to half of it.
Method   All ranks time both passes of the model's first block at once (`scrimp.profiler.block_times`), in the run's
         working format, and in its recipe where that is a lower one. All rates are then scaled by::

             f = predicted seconds of the block / measured ones            (in the working format)

         and the rate of the recipe's products is set so that the block in the recipe is predicted to take what it took.
         Where formats are planned while training, that is done for the first candidate of 8 bits and the first of 4.

Limits   The first block stands for all. One that would take over `LIMIT_S`, or that memory does not suffice for, is not
         timed: then rates are as measured one by one.
Checked  tests/training/test_measured_ranks.py; benchmarks/ranks_planned.py: against measured steps
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import replace

from scrimp.config import Architecture, ResolvedConfig, replace_values
from scrimp.planner.layout.block_times import block_seconds
from scrimp.planner.layout.predict import kernels_of
from scrimp.precision import HIGH_PRECISION, RECIPES, LinearPrecision, parse_rules
from scrimp.profiler import Device
from scrimp.profiler.block_times import measure_blocks
from scrimp.profiler.measured_cluster import RankRates, cluster_of, rates_of_ranks
from scrimp.runtime import deterministic, preferred_backends
from scrimp.training.memory.block_seconds import LIMIT_S, setting_on, timed_of

ROUNDS = 5
_FASTEST, _HALVINGS = 100.0, 40
"""How many times as fast, or as slow, as in the working format products in a recipe are at most."""


def rates_of_run(config: ResolvedConfig, architecture: Architecture, device: Device) -> RankRates:
    """The mean of what the ranks reach in the run's model; a collective where there are several."""
    rules, recipes = config.precision_rules, low_recipes(config)
    with deterministic(device.torch_device, config.train.deterministic):
        rates = rates_of_ranks(device, compute=rules.compute, recipe=recipes[0] if recipes else None)
    expected = predicted_block(rates, config, architecture, device, recipe="bf16")
    if device.world.largest(2 * ROUNDS * expected) > LIMIT_S:
        return rates
    measured = _measured(config, architecture, device, is_low=False)
    if measured is None:
        return rates
    rates = scaled(rates, expected / measured)
    for recipe in recipes:
        in_recipe = replace_values(
            config, {"precision": str(parse_rules(config.precision).with_base(recipe))}
        )
        measured = _measured(in_recipe, architecture, device, is_low=True)
        if measured is not None:
            rates = with_low(rates, measured, in_recipe, architecture, device)
    return rates


def low_recipes(config: ResolvedConfig) -> list[str]:
    """Those that blocks may run in below the working format, the first of each width."""
    rules = config.precision_rules
    names = config.candidates if config.is_planned else [rules.base or rules.compute]
    found: dict[int, str] = {}
    for name in names:
        if name not in HIGH_PRECISION:
            found.setdefault(RECIPES[name].bits, name)
    return list(found.values())


def scaled(rates: RankRates, factor: float) -> RankRates:
    """Rates of computing, so many times as fast."""
    names = ("product", "low", "low4", "attention_forward", "attention_backward", "memory")
    faster = {name: getattr(rates, name) * factor for name in names}
    return replace(rates, **faster, operation_seconds=rates.operation_seconds / factor)


def with_low(
    rates: RankRates, measured: float, config: ResolvedConfig, architecture: Architecture, device: Device
) -> RankRates:
    """With the rate of the recipe's products in which a block takes so many seconds, by bisection."""
    recipe = config.precision_rules.base or "bf16"
    rate = "low4" if RECIPES[recipe].bits == 4 else "low"
    slow, fast = rates.product / _FASTEST, rates.product * _FASTEST
    for _ in range(_HALVINGS):
        middle = math.sqrt(slow * fast)
        trial = replace(rates, **{rate: middle})
        found = predicted_block(trial, config, architecture, device, recipe=recipe)
        slow, fast = (middle, fast) if found > measured else (slow, middle)
    return replace(rates, **{rate: slow})


def predicted_block(
    rates: RankRates, config: ResolvedConfig, architecture: Architecture, device: Device, *, recipe: str
) -> float:
    """Seconds of both passes of the first block on one rank of these rates."""
    cluster = cluster_of(rates, ranks=1, name="here", memory_bytes=1)
    setting = replace(setting_on(cluster, config, architecture, device), precision=recipe)
    found = block_seconds(setting.model.blocks[0], setting, kernels_of(setting))
    return found.forward.compute + found.backward.compute


def _measured(
    config: ResolvedConfig, architecture: Architecture, device: Device, *, is_low: bool
) -> float | None:
    """The mean of the ranks' seconds; None where one of them could not time it."""
    timed = timed_of(config, architecture, (0,))
    if not is_low:
        plain = LinearPrecision.of(timed.compute)
        timed = dataclasses.replace(timed, classes=(tuple(plain for _ in timed.classes[0]),))
    here = device.torch_device
    device.world.barrier()
    with deterministic(here, config.train.deterministic):
        found = measure_blocks(
            timed, ("keep",), here, preferred_backends(here, config.backend), rounds=ROUNDS
        )
    own = found[0]["keep"].forward + found[0]["keep"].backward if found else 0.0
    told = device.world.gathered([own])
    return sum(one for (one,) in told) / len(told) if all(one > 0 for (one,) in told) else None

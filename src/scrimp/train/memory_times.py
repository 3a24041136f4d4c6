"""Seconds of every block and choice for the planner: measured on the device where that is quick, else from the work.

Method   The roofline of `scrimp.planner.bytes.work` is always there. Where it says that measuring takes at most
         `LIMIT_S` seconds, real blocks are timed in its place (`scrimp.profiler.block_times`), in as many rounds as
         fit into that time; where it says more, or there is no memory for it, the roofline stays.
Limits   A block's seconds do not depend on where its states live; copies beside computing are the timeline's affair.
Checked  tests/train/test_memory_times.py
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Literal

import torch

from scrimp.config import Architecture, Config, decided
from scrimp.config.activations import LEVELS, Activations
from scrimp.errors import PlanError
from scrimp.planner import Peaks, linear_layers
from scrimp.planner.bytes.costs import BlockCost, StepCosts
from scrimp.planner.bytes.work import PassSeconds, Rates, block_seconds
from scrimp.planner.flops import GEMM_NAMES
from scrimp.precision import LinearPrecision, PrecisionRules
from scrimp.profiler import Device, device_peaks
from scrimp.profiler.block_times import CHAIN, ROUNDS, Timed, measure_blocks, measure_ends
from scrimp.profiler.links import LinkRates, measure_links
from scrimp.runtime import deterministic, preferred_backends

Origin = Literal["measured", "predicted"]
Seconds = tuple[Sequence[Mapping[str, PassSeconds]], float]
"""Level to seconds by class of blocks, and of the ends."""
LIMIT_S = 5.0
"""Of measuring, as the roofline predicts it."""
SILENT_S = 1.0
"""Of measuring: what takes longer is announced."""
FEWEST_ROUNDS = 2


def linears_of(rules: PrecisionRules, architecture: Architecture) -> dict[str, LinearPrecision]:
    """Formats of every linear layer."""
    return {layer: choice for layer, (choice, _) in rules.assign(linear_layers(architecture)).items()}


def with_seconds(
    costs: StepCosts,
    config: Config,
    architecture: Architecture,
    device: Device,
    rates: LinkRates,
    *,
    may_measure: bool = True,
) -> tuple[StepCosts, Origin]:
    """Costs with the seconds of every block and choice, and where these come from.

    Args:
        may_measure: there is time and memory for it.
    """
    predicted = [
        _predicted(costs, number, config, architecture, device, rates) for number in range(len(costs.classes))
    ]
    measured = _measured(costs, config, architecture, device, predicted) if may_measure else None
    found = predicted if measured is None else measured[0]
    classes = tuple(
        dataclasses.replace(
            kind, choices={name: _with(cost, found[number], name) for name, cost in kind.choices.items()}
        )
        for number, kind in enumerate(costs.classes)
    )
    ends = costs.ends if measured is None else dataclasses.replace(costs.ends, seconds=measured[1])
    origin: Origin = "predicted" if measured is None else "measured"
    return dataclasses.replace(costs, classes=classes, ends=ends), origin


def _with(cost: BlockCost, seconds: Mapping[str, PassSeconds], name: str) -> BlockCost:
    one = seconds[Activations.parse(name).level]
    return dataclasses.replace(cost, forward_seconds=one.forward, backward_seconds=one.backward + one.again)


def _levels(costs: StepCosts) -> list[str]:
    """Levels of any choice, in their order; what they are compared with is the first."""
    names = {Activations.parse(name).level for kind in costs.classes for name in kind.choices}
    return [level for level in LEVELS if level in names or level == "keep"]


def _predicted(
    costs: StepCosts,
    number: int,
    config: Config,
    architecture: Architecture,
    device: Device,
    rates: LinkRates,
) -> dict[str, PassSeconds]:
    """By level, of one class of blocks."""
    linears, block = linears_of(config.precision_rules, architecture), costs.blocks.index(number)
    peaks: Peaks = device_peaks(device.torch_device, device.name)
    return {
        level: block_seconds(
            architecture,
            {name: linears[f"blocks.{block}.{name}"] for name in GEMM_NAMES},
            Activations.parse(level),
            Rates(peaks, rates.device_memory),
            tokens=decided(config.train.micro_batch) * decided(config.train.sequence),
            sequence=decided(config.train.sequence),
            compute=config.precision_rules.compute,
        )
        for level in _levels(costs)
    }


def _measured(
    costs: StepCosts,
    config: Config,
    architecture: Architecture,
    device: Device,
    predicted: list[dict[str, PassSeconds]],
) -> Seconds | None:
    one_round = CHAIN[device.torch_device.type] * sum(
        one.forward + one.backward + one.again for kind in predicted for one in kind.values()
    )
    rounds = min(ROUNDS, int(LIMIT_S / max(one_round, 1e-9)) - 1)
    if rounds < FEWEST_ROUNDS:
        return None
    if one_round * rounds > SILENT_S:
        print("timing the model's blocks ...", file=sys.stderr, flush=True)
    linears, train = linears_of(config.precision_rules, architecture), config.train
    first = [costs.blocks.index(number) for number in range(len(costs.classes))]
    timed = Timed(
        architecture,
        tuple(tuple(linears[f"blocks.{block}.{name}"] for name in GEMM_NAMES) for block in first),
        linears["head"],
        compute=config.precision_rules.compute,
        parameters=train.parameters,
        master_weights=bool(train.master_weights),
        micro_batch=decided(train.micro_batch),
        sequence=decided(train.sequence),
        loss_chunk=decided(train.loss_chunk),
    )
    # The vocabulary may change when the corpus is there: blocks are not timed again for it.
    blocks = dataclasses.replace(timed, architecture=dataclasses.replace(architecture, vocab_size=1))
    torch_device, levels = device.torch_device, tuple(_levels(costs))
    try:
        classes = _blocks_once(blocks, levels, torch_device, config.backend, rounds)
        ends = _ends_once(timed, torch_device, config.backend, rounds)
    except PlanError:
        return None  # a format that nothing runs here: refused by name when the plan is there
    return None if classes is None or ends is None else (classes, ends)


@cache
def _blocks_once(
    timed: Timed, levels: tuple[str, ...], device: torch.device, backend: str, rounds: int
) -> tuple[Mapping[str, PassSeconds], ...] | None:
    with deterministic(device):
        return measure_blocks(timed, levels, device, preferred_backends(device, backend), rounds=rounds)


@cache
def _ends_once(timed: Timed, device: torch.device, backend: str, rounds: int) -> float | None:
    with deterministic(device):
        return measure_ends(timed, device, preferred_backends(device, backend), rounds=rounds)


@cache
def links_of(device_type: str) -> LinkRates:
    """Measured once per process."""
    return measure_links(torch.device(device_type))

"""Seconds of every block and choice for the planner: measured on the device where that is quick, else from the work.

Method   The prediction of the search for layouts (`scrimp.planner.layout.block_times`), for this device
         (`scrimp.profiler.this_device`) alone, is always there. Where it says that measuring takes at most `LIMIT_S`
         seconds, real blocks are timed in its place (`scrimp.profiler.block_times`), in as many rounds as fit into that
         time; where it says more, or there is no memory for it, the prediction stays. So with the ends (embedding,
         norm, head, loss), whose prediction is scaled as the blocks' has proven wrong. What a level makes again takes
         no less than predicted: noise often measures nothing, and where levels tie, a search for what fits would let
         every block recompute.
         Blocks are timed as they train: by the kernels of `train.deterministic`, compiled where the run compiles them.
         Compiling them at every level is not in that limit; the run finds them in the compiler's cache. Of several
         ranks the first measures for all, which must come to one plan.
Limits   Predicted seconds of frozen weights count their wgrad, which does not run; measured ones do not. A block's
         seconds do not depend on where its states live; copies beside computing are the timeline's affair.
Checked  tests/training/memory/test_block_seconds.py
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from scrimp import objectives
from scrimp.config import Architecture, ResolvedConfig
from scrimp.config.activations import LEVELS, Activations
from scrimp.config.resolved import ResolvedLayout
from scrimp.errors import PlanError
from scrimp.models import HEAD, full_name, spec_of
from scrimp.models.shapes import sizes_of
from scrimp.planner.hardware import Cluster
from scrimp.planner.layout.block_times import (
    block_seconds,
    embedding_seconds,
    head_seconds,
    level_seconds,
)
from scrimp.planner.layout.predict import kernels_of
from scrimp.planner.layout.setting import Setting
from scrimp.planner.layout.state_formats import run_states
from scrimp.planner.memory.costs import BlockCost, LevelSeconds, StepCosts
from scrimp.precision import GEMMS, LinearPrecision, PrecisionRules
from scrimp.profiler import Device
from scrimp.profiler.bandwidth import LinkRates, measure_links
from scrimp.profiler.block_times import CHAIN, ROUNDS, Timed, measure_blocks, measure_ends
from scrimp.profiler.measured_cluster import software_here
from scrimp.profiler.this_device import cluster_here
from scrimp.runtime import deterministic, preferred_backends

Blocks = tuple[Mapping[str, LevelSeconds], ...]
"""Level to measured seconds, by class of blocks."""
Seconds = tuple[Sequence[Mapping[str, LevelSeconds]], float]
"""Level to seconds by class of blocks, and of the ends."""
LIMIT_S = 5.0
"""Most seconds for measuring blocks, and again for measuring the ends, as they are predicted."""
FEWEST_ROUNDS = 2


def linears_of(rules: PrecisionRules, architecture: Architecture) -> dict[str, LinearPrecision]:
    """Formats of every linear layer."""
    return rules.assign(spec_of(architecture).origins)


def with_seconds(
    costs: StepCosts,
    config: ResolvedConfig,
    architecture: Architecture,
    device: Device,
    *,
    may_measure: bool = True,
) -> StepCosts:
    """Costs with the seconds of every block and choice and of the ends, and where these come from.

    Args:
        may_measure: there is time and memory for it.
    """
    model = _Model(costs, config, architecture, device)
    predicted = model.predicted()
    measured = model.measured(predicted) if may_measure else None
    blocks, ends = measured or predicted
    classes = tuple(
        dataclasses.replace(
            kind, choices={name: _with(cost, blocks[number], name) for name, cost in kind.choices.items()}
        )
        for number, kind in enumerate(costs.classes)
    )
    return dataclasses.replace(
        costs,
        classes=classes,
        ends=dataclasses.replace(costs.ends, seconds=ends),
        seconds_origin="measured" if measured else "predicted",
    )


def _with(cost: BlockCost, seconds: Mapping[str, LevelSeconds], name: str) -> BlockCost:
    one = seconds[Activations.parse(name).level]
    return dataclasses.replace(cost, forward_seconds=one.forward, backward_seconds=one.backward + one.again)


@dataclass(frozen=True)
class _Model:
    """Whose seconds are wanted."""

    costs: StepCosts
    config: ResolvedConfig
    architecture: Architecture
    device: Device

    @property
    def levels(self) -> list[str]:
        """Levels of any choice, in their order; what they are compared with is the first."""
        names = {Activations.parse(name).level for kind in self.costs.classes for name in kind.choices}
        return [level for level in LEVELS if level in names or level == "keep"]

    @property
    def first_blocks(self) -> list[int]:
        """The first block of each class."""
        return [self.costs.blocks.index(number) for number in range(len(self.costs.classes))]

    def predicted(self) -> Seconds:
        """By the model of time that searches for layouts use."""
        rules = self.config.precision_rules
        with deterministic(self.device.torch_device, self.config.train.deterministic):
            cluster = cluster_here(self.device, compute=rules.compute, recipe=rules.base)
        setting = setting_on(cluster, self.config, self.architecture, self.device)
        kernels, linears = kernels_of(setting), linears_of(rules, self.architecture)
        classes = []
        for number in self.first_blocks:
            block = setting.model.blocks[number]
            formats = {one.name: linears[full_name(number, one.name)] for one in block.linears}
            own = dataclasses.replace(setting, formats=_recipes(formats))
            found = block_seconds(block, own, kernels)
            passes = found.forward.compute, found.backward.compute
            classes.append(
                {
                    level: LevelSeconds(*passes, level_seconds(block, own, kernels, level))
                    for level in self.levels
                }
            )
        own = dataclasses.replace(setting, formats=_recipes({HEAD: linears[HEAD]}))
        ends = (embedding_seconds(own, kernels), head_seconds(own, kernels))
        return classes, sum(one.forward.compute + one.backward.compute for one in ends)

    def measured(self, predicted: Seconds) -> Seconds | None:
        """On the device; None where it would take too long, or there is no memory for it."""
        classes, ends = predicted
        device, backend, repeats = (
            self.device.torch_device,
            self.config.backend,
            self.config.train.deterministic,
        )
        all_levels = sum(map(_passes, (one for kind in classes for one in kind.values())))
        rounds = _rounds(CHAIN[device.type] * all_levels)
        if not rounds:
            return None
        timed = timed_of(self.config, self.architecture, self.first_blocks)
        # The vocabulary may change when the corpus is there: blocks are not timed again for it.
        blocks = dataclasses.replace(timed, architecture=dataclasses.replace(self.architecture, vocab_size=1))
        try:
            found = self.device.world.once(
                "timing the model's blocks",
                lambda: _blocks_once(blocks, tuple(self.levels), device, backend, rounds, repeats),
                write=_blocks_as_json,
                read=_blocks_from_json,
            )
            if found is None:
                return None
            # As much slower as blocks are, where the ends themselves would take too long.
            slower = _passes(found[0]["keep"]) / _passes(classes[0]["keep"])
            ends_rounds = _rounds(slower * ends)
            measured: float | None = slower * ends
            if ends_rounds:
                measured = self.device.world.once(
                    "timing the model's ends",
                    lambda: _ends_once(timed, device, backend, ends_rounds, repeats),
                )
        except PlanError:
            return None  # a format that nothing runs here: refused by name when the plan is there
        if measured is None:
            return None
        return [_at_least(*pair) for pair in zip(found, classes, strict=True)], measured


def setting_on(
    cluster: Cluster, config: ResolvedConfig, architecture: Architecture, device: Device
) -> Setting:
    """A run's micro-batch on one device, alone."""
    train = config.train
    program = software_here(
        cluster,
        device.torch_device.type,
        compute=config.precision_rules.compute,
        compiled=train.compile == "on",
        states=run_states(config.optimizer),
        deterministic=config.train.deterministic,
        documents=config.data.mask_documents,
    )
    return Setting(
        model=sizes_of(spec_of(architecture)),
        cluster=cluster,
        sequence=train.sequence,
        global_batch=train.micro_batch,
        micro_batch=train.micro_batch,
        layout=ResolvedLayout(dp=1, fsdp=1),
        software=program,
    )


def _recipes(linears: Mapping[str, LinearPrecision]) -> dict[str, str]:
    return {f"{name}.{gemm}": one.gemm(gemm) for name, one in linears.items() for gemm in GEMMS}


def timed_of(config: ResolvedConfig, architecture: Architecture, blocks: Sequence[int]) -> Timed:
    """What is measured of a run's model: one of its micro-batches through these blocks, and through its ends."""
    linears, train, spec = (
        linears_of(config.precision_rules, architecture),
        config.train,
        spec_of(architecture),
    )
    return Timed(
        architecture,
        tuple(blocks),
        tuple(
            tuple(linears[full_name(block, one.name)] for one in spec.blocks[block].linears)
            for block in blocks
        ),
        linears[HEAD],
        compute=config.precision_rules.compute,
        parameters=train.parameters,
        master_weights=bool(config.optimizer.master_weights),
        micro_batch=train.micro_batch,
        sequence=train.sequence,
        loss_chunk=train.loss_chunk,
        objective=objectives.build(config.objective),
        compiled=train.compile == "on",
    )


def _blocks_as_json(found: Blocks | None) -> Any:
    return found and [{level: dataclasses.asdict(one) for level, one in kind.items()} for kind in found]


def _blocks_from_json(told: Any) -> Blocks | None:
    return told and tuple({level: LevelSeconds(**one) for level, one in kind.items()} for kind in told)


def _at_least(
    measured: Mapping[str, LevelSeconds], predicted: Mapping[str, LevelSeconds]
) -> dict[str, LevelSeconds]:
    """Seconds of one class of blocks, where what is made again takes no less than predicted."""
    return {
        level: dataclasses.replace(one, again=max(one.again, predicted[level].again))
        for level, one in measured.items()
    }


def _passes(seconds: LevelSeconds) -> float:
    return seconds.forward + seconds.backward + seconds.again


def _rounds(seconds: float) -> int:
    """Rounds of so many seconds that there is time for; 0 where it is too short for any use."""
    rounds = min(ROUNDS, int(LIMIT_S / max(seconds, 1e-9)) - 1)
    if rounds < FEWEST_ROUNDS:
        return 0
    return rounds


@cache
def _blocks_once(
    timed: Timed, levels: tuple[str, ...], device: torch.device, backend: str, rounds: int, repeats: bool
) -> Blocks | None:
    doing = "compiling and timing" if timed.compiled else "timing"
    print(f"{doing} the model's blocks ...", file=sys.stderr, flush=True)
    with deterministic(device, repeats):
        return measure_blocks(timed, levels, device, preferred_backends(device, backend), rounds=rounds)


@cache
def _ends_once(timed: Timed, device: torch.device, backend: str, rounds: int, repeats: bool) -> float | None:
    with deterministic(device, repeats):
        return measure_ends(timed, device, preferred_backends(device, backend), rounds=rounds)


def links_of(device: Device) -> LinkRates:
    """The rates that all ranks reckon with; measured by the first of them, once per process and device."""
    return device.world.once(
        "measuring bandwidths",
        lambda: _links_once(device.torch_device),
        write=dataclasses.asdict,
        read=lambda found: LinkRates(**found),
    )


@cache
def _links_once(device: torch.device) -> LinkRates:
    return measure_links(device)

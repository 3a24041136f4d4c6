"""What settings of a run say to a search on hardware that is not here: formats, budgets, memory, states.

The command line and `scrimp.search` read them here, so that both refuse the same.

Checked  tests/cli/test_plan_elsewhere.py, tests/api/test_predicted_layouts.py
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from scrimp.config import Config, SnipConfig, parse_bytes, snip
from scrimp.errors import ConfigError
from scrimp.models.shapes import ModelSizes
from scrimp.planner.hardware import Cluster
from scrimp.planner.layout.degree_checks import check_positions
from scrimp.planner.layout.format_budget import FormatBudget
from scrimp.planner.layout.given_memory import given_memory
from scrimp.planner.layout.lines import PRECISIONS
from scrimp.planner.layout.questions import Question
from scrimp.planner.layout.software import in_states, software_for, with_attention
from scrimp.planner.layout.state_formats import states_of
from scrimp.planner.precision.profile import PrecisionProfile

READ = (
    *("snip.formats", "budget.fp4_flops", "budget.divergence"),
    *("budget.host_memory", "budget.device_memory"),
    *("memory.activations", "memory.optimizer", "memory.gradients", "memory.weights"),
    *("train.parameters", "optimizer.name", "optimizer.master_weights", "optimizer.moments"),
    *("train.deterministic", "data.mask_documents"),
)
"""Settings that are read beside model, batch, layout and precision."""


def question_asked(
    config: Config,
    *,
    model: ModelSizes,
    cluster: Cluster,
    sequence: int,
    global_batch: int,
    given: Mapping[str, Any],
    software: str = "scrimp",
    statistics: PrecisionProfile | None = None,
) -> Question:
    """What a configuration asks to be searched.

    Args:
        global_batch: sequences of a step.
        given: fields of a layout, and `micro_batch`, that stay.

    Raises:
        ConfigError: a setting that no search knows, or settings that contradict one another.
    """
    formats = _formats(config, statistics)
    memory = given_memory(config.memory)
    if memory.activations is not None and formats is not None:
        raise ConfigError(
            "what blocks do is given, and their formats are searched",
            got="memory.activations beside precision snip",
            do="leave one of the two out",
        )
    memory.blocks(len(model.blocks))  # refused before the search begins
    precision = formats.base if formats else _precision(config)
    program = software_for(software, precision, given.get("schedule", "auto"))
    found = Question(
        model=model,
        cluster=_with_budget(cluster, config),
        sequence=sequence,
        global_batch=global_batch,
        software=with_attention(
            in_states(program, states_of(config.train, config.optimizer)),
            deterministic=config.train.deterministic,
            documents=config.data.mask_documents,
        ),
        precision=precision,
        formats=formats,
        given=given,
        memory=memory,
    )
    check_positions(model, sequence, found.software)
    return found


def _precision(config: Config) -> str:
    """The format of all blocks' products."""
    precision = "bf16" if config.precision == "auto" else config.precision
    if precision not in PRECISIONS:
        raise ConfigError(
            "a search takes one format for all blocks, or chooses",
            got=f"precision {config.precision}",
            expected=f"one of auto, {', '.join(PRECISIONS)}, snip",
        )
    return precision


def _formats(config: Config, statistics: PrecisionProfile | None) -> FormatBudget | None:
    """What formats the search chooses from; None: one is given."""
    divergence = config.budget.divergence
    # fp16 is other programs': no run of Scrimp's has it.
    if config.precision in PRECISIONS or not config.is_planned:
        if config.snip.formats != SnipConfig().formats:
            raise ConfigError(
                "snip.formats are for a search that chooses formats",
                got=f"precision {config.precision}",
                do="give --precision snip",
            )
        if statistics is not None or divergence is not None:
            raise ConfigError(
                "statistics and a budget of harm are for a search that chooses formats",
                got=f"precision {config.precision}",
                do="give --precision snip",
            )
        return None
    if divergence is not None and statistics is None:
        raise ConfigError(
            "only statistics say what a format spoils",
            got=f"--budget.divergence {divergence} without --statistics",
            do="give --statistics FILE, or a share of FLOPs as --budget.fp4-flops 0.5",
        )
    given = config.snip.formats
    names = (snip.DEFAULT_FORMATS if given == "auto" else given).split(",")
    return FormatBudget(
        names=tuple(name.strip() for name in names),
        share=snip.DEFAULT_SHARE if config.budget.fp4_flops is None else config.budget.fp4_flops,
        divergence=divergence,
        statistics=statistics,
    )


def _with_budget(cluster: Cluster, config: Config) -> Cluster:
    """The cluster with the memory that the user gives, of each device and of each host."""
    device, host = config.budget.device_memory, config.budget.host_memory
    groups = []
    for group in cluster.groups:
        node = group.node
        if device is not None:
            given = dataclasses.replace(node.device, memory_bytes=parse_bytes(device))
            node = dataclasses.replace(node, device=given)
        if host is not None:
            node = dataclasses.replace(node, host_memory_bytes=parse_bytes(host))
        groups.append(dataclasses.replace(group, node=node))
    return dataclasses.replace(cluster, groups=tuple(groups))

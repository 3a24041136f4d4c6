"""Why no layout has a degree: which number it does not divide.

Checked  tests/planner/layout/test_divisibility.py: there is a reason exactly where the search has no such layout
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

from scrimp.config.pipeline import V_SHAPED
from scrimp.config.resolved import ResolvedLayout
from scrimp.planner.layout.degree_checks import experts_of, shared_by_tp
from scrimp.planner.layout.given_memory import GivenMemory
from scrimp.planner.layout.pass_orders import SCHEDULES
from scrimp.planner.layout.questions import Question, layouts, micro_batches

_SHARES = (1, 2, 3)


def has_layout(question: Question) -> bool:
    """Whether any layout has what is given, a micro-batch, and states where they shall live."""
    return any(True for layout in _possible(question) for _ in micro_batches(question, layout))


def values_of(question: Question, name: str) -> list[Any]:
    """The values of a field that any layout has, whatever is given."""
    free = dataclasses.replace(question, given={})
    return sorted(
        {getattr(layout, name) for layout in _possible(free)}, key=lambda value: (str(type(value)), value)
    )


def _possible(question: Question) -> Iterator[ResolvedLayout]:
    return (layout for layout in layouts(question) if question.on_host(layout))


def objections(question: Question) -> list[str]:
    """What speaks against what is given, each alone and then together; empty where some layout has it."""
    found = [reason for name, value in question.given.items() for reason in _alone(question, name, value)]
    return found or ([] if has_layout(question) else [_together(question)])


def _alone(question: Question, name: str, value: Any) -> list[str]:
    if isinstance(value, str):
        return _about_stages(question, name, value)
    model, cluster = question.model, question.cluster
    node = math.gcd(*(group.used for group in cluster.groups))
    experts = experts_of(model)
    readers = [(cluster.devices, "devices"), (question.global_batch, "sequences of a batch")]
    shared = {
        "dp": readers,
        "fsdp": readers,
        "tp": [
            (node, "devices of a node"),
            *shared_by_tp(model, question.sequence),
            (model.vocab_size, "words of the vocabulary"),
        ],
        "pp": [(cluster.devices, "devices")],
        "cp": [(cluster.devices, "devices")],
        "ep": [(experts, "experts" if experts > 1 else "expert: the model has none")],
        "etp": [
            (
                cluster.devices if experts > 1 else 1,
                "devices" if experts > 1 else "expert: the model has none",
            )
        ],
        "micro_batch": [(question.global_batch, "sequences of a batch")],
    }.get(name, [])
    found = [f"{name} {value} does not divide {size:,} {what}" for size, what in shared if size % value]
    if name == "pp" and value > len(model.blocks):
        found.append(f"pp {value} is more than the {len(model.blocks)} blocks")
    if name == "cp" and question.sequence % (2 * value):
        found.append(
            f"cp {value} cuts a sequence into {2 * value} parts, which {question.sequence:,} tokens do not give"
        )
    if name == "zero" and value not in _SHARES:
        found.append(
            f"zero {value} is not searched: states alone (1), gradients and states (2), or weights too (3)"
        )
    return found


def _about_stages(question: Question, name: str, value: str) -> list[str]:
    """What speaks against a schedule, or sizes of stages."""
    blocks, sizes = len(question.model.blocks), value.split(",")
    if name == "schedule" and value not in SCHEDULES:
        return [f"schedule {value} is not predicted, only {', '.join(SCHEDULES)}"]
    if name == "stages" and not all(size.strip().isdecimal() and int(size) for size in sizes):
        return [f"stages {value} is no list of blocks, as 3,4,4,3"]
    if name == "stages" and sum(map(int, sizes)) != blocks:
        return [f"stages {value} have {sum(map(int, sizes))} blocks, the model {blocks}"]
    return []


def _together(question: Question) -> str:
    """The reason against degrees that are each possible."""
    given = question.given
    anywhere = dataclasses.replace(question, memory=GivenMemory())
    if question.memory.offload is not None and has_layout(anywhere):
        return "states and activations live on the host without a pipeline alone: layout.pp 1"
    devices, batch, blocks = question.cluster.devices, question.global_batch, len(question.model.blocks)
    words = " ".join(f"{name} {value}" for name, value in given.items()) + ": " * bool(given)
    product = math.prod(given.get(name, 1) for name in ("tp", "pp", "cp", "fsdp", "dp"))
    if devices % product:
        return f"{words}{product} ranks do not divide {devices:,} devices"
    if min(given.get("tp", 1), given.get("cp", 1)) > 1 and not question.software.cuts_shared_rows:
        return f"{words}software {question.software.name} does not run layout.cp beside layout.tp"
    if "schedule" in given or "stages" in given:
        if given.get("schedule") in V_SHAPED:
            return (
                f"{words}two stages on each of several ranks, of a block or more each; dualpipev takes as many "
                "micro-batches as stages"
            )
        return f"{words}stages on several ranks, as many as pp x virtual; more than one on a rank are interleaved"
    if given.get("virtual", 1) > 1 and given.get("pp") == 1:
        return f"{words}one rank has all blocks, and no stages to take turns in"
    if given.get("virtual", 1) * given.get("pp", 1) > blocks:
        return f"{words}more stages than the {blocks} blocks"
    return (
        f"{words}{batch:,} sequences of {question.sequence:,} tokens and {blocks} blocks cannot be shared by "
        f"{devices:,} devices in this way"
    )

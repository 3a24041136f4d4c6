"""Why no layout has a degree: which number it does not divide.

Checked  tests/planner/layout/test_divisibility.py: there is a reason exactly where the search has no such layout
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from scrimp.config.resolved import ResolvedLayout
from scrimp.planner.layout.search import Question, layouts, micro_batches

_STATES, _ALL = 1, 3
_FEW = ("dp", "etp", "schedule", "stages")
"""Fields of a layout of which the search tries few values."""


def has_layout(question: Question, given: Mapping[str, object] | None = None) -> bool:
    """Whether any layout has these degrees, and a micro-batch.

    Args:
        given: fields of a layout, and `micro_batch`.
    """
    wanted = given or {}
    return any(
        matches(layout, size, wanted)
        for layout in layouts(question)
        for size in micro_batches(question, layout)
    )


def matches(layout: ResolvedLayout, micro_batch: int, given: Mapping[str, object]) -> bool:
    """Whether a layout and its micro-batch have what is given."""
    return all(
        (micro_batch if name == "micro_batch" else getattr(layout, name)) == value
        for name, value in given.items()
    )


def values_of(question: Question, name: str) -> list[Any]:
    """The values of a field that any layout has."""
    return sorted(
        {getattr(layout, name) for layout in layouts(question)}, key=lambda value: (str(type(value)), value)
    )


def objections(question: Question, given: Mapping[str, object]) -> list[str]:
    """What speaks against degrees, each alone and then together; empty where some layout has them.

    Args:
        given: by name, as {"tp": 8}.
    """
    numbers = {name: value for name, value in given.items() if isinstance(value, int)}
    found = [reason for name, value in numbers.items() for reason in _alone(question, name, value)]
    for name in (name for name in _FEW if name in given):
        known = values_of(question, name)
        if given[name] not in known:
            words = ", ".join("unset" if value is None else str(value) for value in known)
            found.append(
                f"{name} {given[name]} is not searched here, only {words}; a line of --batch predicts it"
            )
    if found:
        return found
    return [] if has_layout(question, given) else [_together(question, numbers)]


def _alone(question: Question, name: str, value: int) -> list[str]:
    model, cluster = question.model, question.cluster
    attention = model.blocks[-1].attention
    node = math.gcd(*(group.used for group in cluster.groups))
    experts = max((one.experts for one in model.blocks[-1].linears), default=1)
    shared = {
        "tp": [
            (node, "devices of a node"),
            (attention.num_heads, "heads"),
            (attention.num_kv_heads, "key heads"),
            (model.vocab_size, "words of the vocabulary"),
            (question.sequence, "tokens of a sequence"),
        ],
        "pp": [(cluster.devices, "devices")],
        "cp": [(cluster.devices, "devices")],
        "fsdp": [(cluster.devices, "devices"), (question.global_batch, "sequences of a batch")],
        "ep": [(experts, "experts" if experts > 1 else "expert: the model has none")],
        "micro_batch": [(question.global_batch, "sequences of a batch")],
    }.get(name, [])
    found = [f"{name} {value} does not divide {size:,} {what}" for size, what in shared if size % value]
    if name == "pp" and value > len(model.blocks):
        found.append(f"pp {value} is more than the {len(model.blocks)} blocks")
    if name == "cp" and question.sequence % (2 * value):
        found.append(
            f"cp {value} cuts a sequence into {2 * value} parts, which {question.sequence:,} tokens do not give"
        )
    if name == "zero" and value not in (_STATES, _ALL):
        found.append(f"zero {value} is not searched: states alone (1), or weights, gradients and states (3)")
    return found


def _together(question: Question, given: Mapping[str, int]) -> str:
    """The reason against degrees that are each possible."""
    devices, batch, blocks = question.cluster.devices, question.global_batch, len(question.model.blocks)
    words = " ".join(f"{name} {value}" for name, value in given.items()) + ": " * bool(given)
    product = math.prod(given.get(name, 1) for name in ("tp", "pp", "cp", "fsdp", "dp"))
    if devices % product:
        return f"{words}{product} ranks do not divide {devices:,} devices"
    if given.get("zero") == _ALL and given.get("pp", 1) > 1:
        return f"{words}zero 3 is searched without stages alone (pp 1)"
    if given.get("virtual", 1) > 1 and given.get("pp") == 1:
        return f"{words}one rank has all blocks, and no stages to take turns in"
    if given.get("virtual", 1) * given.get("pp", 1) > blocks:
        return f"{words}more stages than the {blocks} blocks"
    return (
        f"{words}{batch:,} sequences of {question.sequence:,} tokens and {blocks} blocks cannot be shared by "
        f"{devices:,} devices in this way"
    )

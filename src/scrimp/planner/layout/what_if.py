"""The same question with one thing changed: one more node, a slower link, half the batch, twice the memory.

Method   Where no layout has one more node (17 nodes share few batches), as few more as have one.
Limits   Prices and rates of devices stay as they are.
Checked  tests/planner/layout/test_what_if.py
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from scrimp.planner.hardware import Cluster, Link
from scrimp.planner.layout.divisibility import has_layout
from scrimp.planner.layout.objectives import Searching
from scrimp.planner.layout.questions import Question
from scrimp.planner.layout.search import Candidate

_MOST_NODES = 32
"""More that are tried."""


@dataclass(frozen=True)
class Change:
    """What one change comes to."""

    name: str
    question: Question
    best: Candidate | None
    """None: no layout fits."""
    tried: int
    """Settings; 0: no layout has these numbers."""


def what_if(question: Question, searching: Searching) -> list[Change]:
    """The best plan after each change."""
    changes = []
    for name, changed in variants(question):
        found = searching.best(changed, name)
        changes.append(Change(name, changed, next(iter(found.best), None), found.tried))
    return changes


def variants(question: Question) -> list[tuple[str, Question]]:
    """The changed questions, by what changed; of several kinds of nodes the first ones change."""
    cluster, group = question.cluster, question.cluster.groups[0]
    links, node, device = group.node.link, group.node, group.node.device
    found = [_more_nodes(question)]
    if cluster.nodes > 1:
        slower = dataclasses.replace(links, outside=_half(links.outside))
        name = f"{links.outside.name} between nodes half as fast"
        changed = _with(question, node=dataclasses.replace(node, link=slower))
        between = dataclasses.replace(changed.cluster, between=_half(cluster.between))
        found.append((name, dataclasses.replace(changed, cluster=between)))
    if group.used > 1:
        slower = dataclasses.replace(links, inside=_half(links.inside))
        name = f"{links.inside.name} in a node half as fast"
        found.append((name, _with(question, node=dataclasses.replace(node, link=slower))))
    if not question.global_batch % 2:
        found.append(
            ("half the batch", dataclasses.replace(question, global_batch=question.global_batch // 2))
        )
    larger = dataclasses.replace(device, memory_bytes=2 * device.memory_bytes)
    found.append(("twice the memory", _with(question, node=dataclasses.replace(node, device=larger))))
    return found


def _more_nodes(question: Question) -> tuple[str, Question]:
    """One more, or as few as any layout has."""
    count = question.cluster.groups[0].count
    for more in range(1, _MOST_NODES + 1):
        larger = _with(question, count=count + more)
        if has_layout(larger):
            return "one more node" if more == 1 else f"{more} more nodes", larger
    return "one more node", _with(question, count=count + 1)


def _with(question: Question, **changes: object) -> Question:
    """With another first group of nodes."""
    cluster = question.cluster
    group = dataclasses.replace(cluster.groups[0], **changes)  # type: ignore[arg-type]
    changed: Cluster = dataclasses.replace(cluster, groups=(group, *cluster.groups[1:]))
    return dataclasses.replace(question, cluster=changed)


def _half(link: Link) -> Link:
    return dataclasses.replace(link, bytes_per_second=link.bytes_per_second / 2)

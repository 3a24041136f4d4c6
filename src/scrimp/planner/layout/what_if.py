"""The same question with one thing changed: one more node, a slower link, half the batch, twice the memory.

Limits   Prices and rates of devices stay as they are.
Checked  tests/planner/layout/test_what_if.py
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from scrimp.planner.hardware import Cluster, Link
from scrimp.planner.layout.objectives import Searching
from scrimp.planner.layout.search import Candidate, Question


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
    one_best = dataclasses.replace(searching, keep=1)
    for name, changed in variants(question):
        found = one_best.search(changed, name)
        changes.append(Change(name, changed, next(iter(found.best), None), found.tried))
    return changes


def variants(question: Question) -> list[tuple[str, Question]]:
    """The changed questions, by what changed."""
    cluster, group = question.cluster, question.cluster.groups[0]
    links, node, device = group.node.link, group.node, question.device
    found = [("one more node", _with(question, count=group.count + 1))]
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


def _with(question: Question, **changes: object) -> Question:
    """With another first group of nodes."""
    cluster = question.cluster
    group = dataclasses.replace(cluster.groups[0], **changes)  # type: ignore[arg-type]
    changed: Cluster = dataclasses.replace(cluster, groups=(group, *cluster.groups[1:]))
    return dataclasses.replace(question, cluster=changed)


def _half(link: Link) -> Link:
    return dataclasses.replace(link, bytes_per_second=link.bytes_per_second / 2)

"""The same question with one thing changed: one more node, a slower link, half the batch, twice the memory; of several
kinds of nodes, their order too.

Method   Where no layout has one more node (17 nodes share few batches), as few more as have one.
Limits   Prices and rates of devices stay as they are.
Checked  tests/planner/layout/test_what_if.py
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from scrimp.planner.hardware import Link, Node
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
    """The changed questions, by what changed; of several kinds of nodes all change alike, but for one more node."""
    cluster = question.cluster
    found = [_more_nodes(question)]
    if len(cluster.groups) > 1:
        # The first stages of a pipeline are on the first nodes.
        turned = cluster.groups[::-1]
        name = f"nodes in the order {', '.join(group.node.device.name for group in turned)}"
        found.append(
            (name, dataclasses.replace(question, cluster=dataclasses.replace(cluster, groups=turned)))
        )
    if cluster.nodes > 1:
        changed = _with(question, lambda node: _slower(node, outside=_half(node.link.outside)))
        between = dataclasses.replace(changed.cluster, between=_half(cluster.between))
        links = [*(group.node.link.outside for group in cluster.groups), cluster.between]
        name = f"{_names(links[: None if len(cluster.groups) > 1 else 1])} between nodes half as fast"
        found.append((name, dataclasses.replace(changed, cluster=between)))
    if any(group.used > 1 for group in cluster.groups):
        inside = _names([group.node.link.inside for group in cluster.groups if group.used > 1])
        changed = _with(question, lambda node: _slower(node, inside=_half(node.link.inside)))
        found.append((f"{inside} in a node half as fast", changed))
    if not question.global_batch % 2:
        found.append(
            ("half the batch", dataclasses.replace(question, global_batch=question.global_batch // 2))
        )
    found.append(("twice the memory", _with(question, _larger)))
    return found


def _names(links: Sequence[Link]) -> str:
    return ", ".join(dict.fromkeys(one.name for one in links))


def _slower(node: Node, **links: Link) -> Node:
    return dataclasses.replace(node, link=dataclasses.replace(node.link, **links))


def _larger(node: Node) -> Node:
    device = dataclasses.replace(node.device, memory_bytes=2 * node.device.memory_bytes)
    return dataclasses.replace(node, device=device)


def _more_nodes(question: Question) -> tuple[str, Question]:
    """One more, or as few as any layout has; of several kinds of the first."""
    cluster = question.cluster
    first, *others = cluster.groups
    kind = f" ({first.node.device.name})" if others else ""

    def with_more(more: int) -> Question:
        group = dataclasses.replace(first, count=first.count + more)
        return dataclasses.replace(question, cluster=dataclasses.replace(cluster, groups=(group, *others)))

    for more in range(1, _MOST_NODES + 1):
        larger = with_more(more)
        if has_layout(larger):
            return f"one more node{kind}" if more == 1 else f"{more} more nodes{kind}", larger
    return f"one more node{kind}", with_more(1)


def _with(question: Question, change: Callable[[Node], Node]) -> Question:
    """With other nodes."""
    cluster = question.cluster
    groups = tuple(dataclasses.replace(group, node=change(group.node)) for group in cluster.groups)
    return dataclasses.replace(question, cluster=dataclasses.replace(cluster, groups=groups))


def _half(link: Link) -> Link:
    return dataclasses.replace(link, bytes_per_second=link.bytes_per_second / 2)

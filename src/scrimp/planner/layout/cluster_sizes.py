"""Clusters of other sizes with the same devices, nodes and links.

Method   Sizes that are tried: 1, 2, 4, ... devices of one node, then 1, 2, 3, 4, 6, 8, 12, ... whole nodes (powers of
         two and three times these); between two of them all others, or some (`sizes_between`). Which have a layout,
         `nearest_sizes` finds one by one.
Limits   Clusters with one kind of nodes.
Checked  tests/planner/layout/test_cluster_sizes.py
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

from scrimp.errors import PlanError
from scrimp.planner.hardware import Cluster, NodeGroup

MOST_DEVICES = 2**15
"""Most devices of a cluster that is tried."""
_BETWEEN = 8
_NEAR = 64
"""Sizes below and above that are tried for the nearest one."""


def resized(cluster: Cluster, nodes: int, used: int) -> Cluster:
    """So many nodes of a cluster, with so many devices of each; of a file's, its name stands before the size."""
    group = _group(cluster)
    device = group.node.device.name
    given, colon, _ = cluster.name.rpartition(": ")
    before = given + colon if colon or cluster.name.endswith(device) else f"{cluster.name}: "
    name = before + (f"{nodes}x{used}x{device}" if nodes > 1 else f"{used}x{device}" if used > 1 else device)
    return dataclasses.replace(cluster, name=name, groups=(NodeGroup(nodes, group.node, used),))


def sizes_like(cluster: Cluster, most: int = MOST_DEVICES) -> Iterator[Cluster]:
    """Clusters of its nodes, the smallest first.

    Args:
        most: devices of the largest one.
    """
    node = _group(cluster).node
    # Whoever takes fewer devices of each of several nodes means it.
    whole = _group(cluster).used if cluster.nodes > 1 else node.fill or node.devices
    parts = [2**power for power in range(whole.bit_length()) if 2**power < whole]
    shapes = [(1, used) for used in parts] + [(nodes, whole) for nodes in _round_numbers(most // whole)]
    yield from (resized(cluster, nodes, used) for nodes, used in shapes if nodes * used <= most)


def sizes_between(below: Cluster, above: Cluster) -> list[Cluster]:
    """Clusters of other sizes between two, the smallest first; of many at most `_BETWEEN`, evenly spread."""
    one, other = _group(below), _group(above)
    if other.count == 1:
        found = [(1, used) for used in range(one.used + 1, other.used)]
    else:
        found = [(nodes, other.used) for nodes in range(one.count + 1, other.count)]
    every = -(-len(found) // _BETWEEN) or 1
    return [resized(above, nodes, used) for nodes, used in found[every - 1 :: every]]


def nearest_sizes(cluster: Cluster, is_good: Callable[[Cluster], bool]) -> list[Cluster]:
    """The nearest smaller and the nearest larger cluster that are good, if any is near.

    Args:
        is_good: whether there is a layout for a cluster.
    """
    group, found = _group(cluster), []
    whole = group.used if cluster.nodes > 1 else group.node.fill or group.node.devices
    most = max(whole, group.node.devices) if cluster.nodes == 1 else whole
    for step in (-1, 1):
        nodes, used = group.count, group.used
        for _ in range(_NEAR):
            if nodes == 1 and not (step == 1 and used >= most):
                used += step
            else:
                nodes, used = nodes + step, whole
            if not used:
                break
            one = resized(cluster, nodes, used)
            if is_good(one):
                found.append(one)
                break
    return found


def _round_numbers(most: int) -> list[int]:
    powers = [2**power for power in range(most.bit_length())]
    return sorted(number for number in {*powers, *(3 * power for power in powers)} if number <= most)


def _group(cluster: Cluster) -> NodeGroup:
    if len(cluster.groups) > 1:
        raise PlanError(
            "a cluster with several kinds of nodes has no other sizes",
            got=f"{cluster.name}: {len(cluster.groups)} kinds",
            do="name hardware with one kind of nodes, as 8xh100",
        )
    return cluster.groups[0]

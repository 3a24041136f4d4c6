"""Seconds of what ranks send one another, by the links that a group crosses.

Method   A group of n ranks is g in each of N nodes. Of a tensor of S bytes, whole::

             all-gather                max(S (n - 1)/n / inside, S (N - 1)/N / (g outside)) + hops
             reduce-scatter            the same, the first part times `Link.reduces`
             all-reduce                the same, times `Link.adds`
             tokens to k experts       S bytes of tokens on a rank, to k experts each by chance:
                                       S c (g - 1)/g / inside + S f / outside + latency
                                       one copy an expert: c = k, f = k (n - g)/n
                                       one copy a rank, and a node, from where it goes on:
                                       c = n (1 - (1 - 1/n)^k), f = (N - 1) (1 - (1 - 1/N)^k)
             all-to-all                max(S (g - 1)/n / inside, S (n - g)/n / outside) + latency
             send                      S / the link

         A copy goes over the network, then on within its node: HybridEP's kernels take the sum, not the larger
         (Qwen3 30B on two nodes of 8 H100, Megatron-Bridge 067f987d, skills/nemo-mbridge-perf-moe-comm-overlap: 8.25 s
         of 12,288 exchanges, 8.6 s by the sum, 4.6 by the larger).
         inside and outside are bytes per second of one device and direction that large messages reach: rings use the
         network cards of all g ranks of a node. A ring's tensor passes every other rank: n - N hops inside and N - 1
         outside, each of the link's latency. Tokens take log2 of the ranks inside and of the nodes.
Limits   Groups do not share links. A network card serves those of its devices that train (`NodeGroup.reached`).
Source   Hops: ncclTopoTuneModel in NVIDIA/nccl, src/graph/tuning.cc, which has no other algorithm for all-gather and
         reduce-scatter; Thakur, Rabenseifner, Gropp, Optimization of Collective Communication Operations in MPICH, 2005
Checked  tests/planner/layout/test_group_seconds.py
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

from scrimp.planner.hardware import Link


@dataclass(frozen=True)
class Group:
    """The ranks of one axis, or of several together.

    Args:
        ranks: n.
        in_node: g, those that share a node; it divides n.
    """

    ranks: int
    in_node: int
    inside: Link
    outside: Link

    def gathered(self, num_bytes: float) -> float:
        """Seconds of an all-gather of so many bytes, whole."""
        return self._collective(num_bytes, 1.0, 1.0)

    def reduced(self, num_bytes: float) -> float:
        """Seconds of a reduce-scatter of so many bytes on each rank."""
        return self._collective(num_bytes, self.inside.reduces, self.outside.reduces)

    def added(self, num_bytes: float) -> float:
        """Seconds of an all-reduce of so many bytes on each rank."""
        return self._collective(num_bytes, self.inside.adds, self.outside.adds)

    def _collective(self, num_bytes: float, inside: float, outside: float) -> float:
        if self.ranks == 1 or num_bytes == 0:
            return 0.0
        seconds = 0.0
        if self.in_node > 1:
            seconds = inside * num_bytes * (self.ranks - 1) / self.ranks / self.inside.bandwidth
        if self.nodes > 1:
            each = self.in_node * self.outside.bandwidth
            seconds = max(seconds, outside * num_bytes * (self.nodes - 1) / self.nodes / each)
        return seconds + self.hops

    @property
    def hops(self) -> float:
        """Seconds of an empty collective."""
        inside = (self.ranks - self.nodes) * self.inside.latency_seconds
        return inside + (self.nodes - 1) * self.outside.latency_seconds

    def travelled(self, num_bytes: float, chosen: int, *, once: bool) -> float:
        """Seconds of the tokens of a rank to their experts, or back.

        Args:
            num_bytes: of one copy of its tokens.
            chosen: experts of each token.
            once: whether one copy goes to a rank, and to a node, whatever experts of a token are there.
        """
        if self.ranks == 1:
            return 0.0
        copies, far = float(chosen), chosen * (self.ranks - self.in_node) / self.ranks
        if once:
            copies = self.ranks * (1.0 - (1.0 - 1.0 / self.ranks) ** chosen)
            far = (self.nodes - 1) * (1.0 - (1.0 - 1.0 / self.nodes) ** chosen)
        # What comes to a node goes on within it.
        near = copies * (self.in_node - 1) / self.in_node
        seconds = num_bytes * near / self.inside.bandwidth if self.in_node > 1 else 0.0
        return seconds + num_bytes * far / self.outside.bandwidth + self.latency

    def exchanged(self, num_bytes: float) -> float:
        """Seconds of an all-to-all in which each rank has so many bytes, an equal part for each of the ranks."""
        if self.ranks == 1:
            return 0.0
        near, far = (self.in_node - 1) / self.ranks, (self.ranks - self.in_node) / self.ranks
        seconds = num_bytes * near / self.inside.bandwidth if self.in_node > 1 else 0.0
        return max(seconds, num_bytes * far / self.outside.bandwidth) + self.latency

    def sent(self, num_bytes: float) -> float:
        """Seconds from a rank to the next one, over the slowest link between neighbours."""
        if self.ranks == 1:
            return 0.0
        link = self.outside if self.nodes > 1 else self.inside
        return num_bytes / link.bandwidth + link.latency_seconds

    @property
    def nodes(self) -> int:
        """That it spans."""
        return self.ranks // self.in_node

    @cached_property
    def latency(self) -> float:
        """Seconds until the first tokens have come."""
        found = math.log2(self.in_node) * self.inside.latency_seconds if self.in_node > 1 else 0.0
        return found + (math.log2(self.nodes) * self.outside.latency_seconds if self.nodes > 1 else 0.0)


def group_of(ranks: int, stride: int, node: int, inside: Link, outside: Link) -> Group:
    """The group of an axis.

    Args:
        stride: ranks between two neighbours of it: the product of the axes that vary faster.
        node: devices of one node.
    """
    in_node = math.gcd(ranks, max(1, node // stride)) if stride < node else 1
    return Group(ranks, in_node, inside, outside)

"""One way to train one model on one cluster: what a prediction is of."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any

from scrimp.config.resolved import ResolvedLayout
from scrimp.errors import PlanError
from scrimp.models.shapes import ModelSizes
from scrimp.planner.hardware import Cluster, Device, Link, NodeGroup
from scrimp.planner.layout.collectives import Group, group_of
from scrimp.planner.layout.execution import Execution
from scrimp.planner.layout.kernels import element_bytes
from scrimp.planner.layout.software import Software

FULL, SELECTIVE, NONE = "full", "selective", "none"


@dataclass(frozen=True, kw_only=True)
class Offload:
    """What lives in host memory."""

    activation_layers: int = 0
    """Blocks of a rank whose activations leave."""
    optimizer: bool = False
    master: bool = False
    gradients: bool = False
    weights: bool = False
    residuals: bool = False
    """The residual stream between blocks alone."""


@dataclass(frozen=True, kw_only=True)
class BlockPlan:
    """What is decided of one block."""

    recompute: str = NONE
    """none, selective or full."""
    offload: bool = False
    """Its activations wait in host memory."""
    gathered: bool = False
    """Under zero 3: its weights stay whole after its forward pass."""
    formats: tuple[tuple[str, str], ...] = ()
    """Products and their recipes, as ("mlp.down.wgrad", "nvfp4"); all others run in the setting's precision."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """All that a step's time and memory follow from.

    Raises:
        PlanError: degrees, batch and devices do not fit one another.
    """

    model: ModelSizes
    cluster: Cluster
    sequence: int
    global_batch: int
    """Sequences of a step, over all ranks."""
    micro_batch: int
    """Sequences of one pass."""
    layout: ResolvedLayout
    software: Software
    recompute: str | int = NONE
    """none, selective (attention's own, and what is cheap), full, or how many blocks of a rank are made again."""
    recompute_parts: tuple[str, ...] = ()
    """What selective recomputation makes again, of `block_activations.NAMED`; empty: what the software's does."""
    offload: Offload = field(default_factory=Offload)
    precision: str = "bf16"
    """Recipe of the blocks' products; head and attention run in bf16."""
    formats: Mapping[str, str] = field(default_factory=dict)
    """Recipes of single products of all blocks, as of mlp.down.wgrad."""
    blocks: tuple[BlockPlan, ...] = ()
    """What is decided block by block, and then stands for `recompute` and what leaves of activations; empty: nothing
    is."""
    execution: Execution = field(default_factory=Execution)
    sequence_parallel: bool = True
    """Ranks of tp share the tokens between layers."""
    keeps_operands: bool = False
    """Products keep the operands that they make of weights over a step (`scrimp.gemm.weight_operands`); the account of
    a step alone asks."""
    rank: int | None = None
    """Rank of the pipeline whose devices are meant; None: all devices."""

    def __post_init__(self) -> None:
        layout, devices = self.layout, self.cluster.devices
        if layout.ranks != devices:
            raise PlanError(
                "the degrees of the layout are not those of the cluster",
                got=f"{layout.ranks:,} ranks on {devices:,} devices",
                expected="pp x dp x fsdp x cp x tp equal to the number of devices",
                do=f"change a degree, or plan for {layout.ranks:,} devices",
            )
        unit = self.micro_batch * layout.data_ranks
        if self.global_batch % unit:
            raise PlanError(
                "the batch cannot be shared by the ranks that read it",
                got=f"{self.global_batch:,} sequences, {self.micro_batch:,} in a micro-batch of each of "
                f"{layout.data_ranks:,} ranks",
                expected=f"a multiple of {unit:,} sequences",
            )

    @property
    def device(self) -> Device:
        """That computes; of several kinds the slowest."""
        return self.place.node.device

    @property
    def place(self) -> NodeGroup:
        """The nodes of the devices that are meant; of several kinds the one with the slowest devices, for which all
        others wait."""
        return self.cluster.groups[self.place_number]

    @cached_property
    def place_number(self) -> int:
        """Which of the cluster's groups of nodes that is."""
        groups = self.cluster.groups
        return min(self.places, key=lambda one: groups[one].node.device.rate("bf16") or 0.0)

    @property
    def memory_bytes(self) -> int:
        """Bytes of memory of each device that is meant; of several kinds the least."""
        return min(self.cluster.groups[one].node.device.memory_bytes for one in self.places)

    @cached_property
    def places(self) -> tuple[int, ...]:
        """The cluster's groups of nodes that the devices that are meant stand in. Ranks of the same ones compute and
        exchange alike; a rank on two of them crosses the link between."""
        if self.rank is None:
            return tuple(range(len(self.cluster.groups)))
        each = self.cluster.devices // self.layout.pp
        return tuple(self.cluster.groups_of(self.rank * each, (self.rank + 1) * each))

    def at(self, rank: int) -> Setting:
        """As a rank of the pipeline sees it."""
        if len(self.cluster.groups) == 1:
            return self
        return dataclasses.replace(self, rank=rank)

    @property
    def micro_batches(self) -> int:
        """Passes of a rank in a step."""
        return self.global_batch // (self.micro_batch * self.layout.data_ranks)

    @property
    def tokens(self) -> float:
        """That a rank's attention has in one pass."""
        return self.micro_batch * self.sequence / self.layout.cp

    @property
    def shares_weights(self) -> bool:
        """Whether ranks gather weights, or reduce gradients, in every pass."""
        layout = self.layout
        own = layout.fsdp if self.software.shards_over_copies else layout.shards
        return own > 1 and layout.zero > 1

    @property
    def streams_weights(self) -> bool:
        """Whether weights live in host memory, and come to the device block by block."""
        is_shared = self.layout.zero == 3 or self.layout.shards == 1
        masters = self.offload.master and self.software.weights_are_masters and is_shared
        return self.offload.weights or masters

    @property
    def block_weight_bytes(self) -> float:
        """Bytes of a number of a block's weights while they are gathered, or come from the host."""
        each = self.software.weight_bytes
        return min(each, element_bytes(self.precision)) if self.software.gathers_weight_codes else each

    @property
    def gathers_copies(self) -> bool:
        """Whether ranks of zero 1 gather weights in every pass, and reduce gradients once a step."""
        return self.software.gathers_copies and self.layout.zero == 1 and self.layout.shards > 1

    @property
    def weight_shards(self) -> tuple[int, int]:
        """Ranks over which weights that are gathered in every pass are cut, beside tp and pp: those outside of routed
        experts, and those of an expert."""
        return self._shards(self.layout.shards) if self.shares_weights else (1, 1)

    @property
    def state_shards(self) -> tuple[int, int]:
        """The same of optimizer states."""
        layout = self.layout
        over_copies = self.software.shards_over_copies and layout.fsdp == 1 and layout.zero > 0
        return self._shards(layout.dp * layout.cp if over_copies else layout.shards)

    def _shards(self, ranks: int) -> tuple[int, int]:
        return ranks, _expert_shards(self.layout, ranks)

    def recipe(self, linear: str, gemm: str) -> str:
        """Recipe of one product of a block."""
        return self.formats.get(f"{linear}.{gemm}", self.precision)

    def in_formats(self, formats: tuple[tuple[str, str], ...]) -> Setting:
        """With these products in these recipes, as one block runs them."""
        return dataclasses.replace(self, formats=dict(formats), blocks=()) if formats else self

    @cached_property
    def held_parts(self) -> dict[int, Mapping[str, float]]:
        """What `block_activations` found that a block keeps, by the block's identity."""
        return {}

    @cached_property
    def numbers_of_ranks(self) -> dict[int, Any]:
        """What `stages` found that a rank of the pipeline has of parameters."""
        return {}

    @cached_property
    def groups(self) -> Mapping[str, Group]:
        """Each axis; tp changes fastest, then cp, fsdp, dp and pp. ep: the ranks that share experts; edp: those
        that have the same ones; data: all that read other tokens. Of several kinds of nodes the slowest links count,
        and the one between them."""
        nodes = [self.cluster.groups[one] for one in self.places]
        crossed = [one.reached(one.node.link.outside) for one in nodes]
        crossed += [one.reached(self.cluster.between) for one in nodes] * (len(nodes) > 1)
        inside, outside = (
            min(links, key=lambda link: link.bandwidth)
            for links in ([one.node.link.inside for one in nodes], crossed)
        )
        return _groups(self.layout, self.place.used, inside, outside)


@lru_cache(maxsize=1024)
def _groups(layout: ResolvedLayout, node: int, inside: Link, outside: Link) -> Mapping[str, Group]:
    def group(ranks: int, stride: int) -> Group:
        return group_of(ranks, stride, node, inside, outside)

    found, stride, experts = {}, 1, layout.ep * layout.etp
    for axis in ("tp", "cp", "fsdp", "dp", "pp"):
        found[axis] = group(getattr(layout, axis), stride)
        stride *= getattr(layout, axis)
    found["ep"] = group(layout.ep, layout.etp)
    found["data"] = group(layout.cp * layout.data_ranks, layout.tp)
    found["shards"] = group(layout.shards, layout.tp)
    found["expert_shards"] = group(_expert_shards(layout, layout.shards), experts)
    found["edp"] = group(layout.ranks // (layout.pp * experts), experts)
    return found


def _expert_shards(layout: ResolvedLayout, shards: int) -> int:
    """How many ranks share an expert where so many share dense weights; at least 1."""
    return max(1, shards * layout.tp // (layout.ep * layout.etp))

"""One way to train one model on one cluster: what a prediction is of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from scrimp.config.resolved import ResolvedLayout
from scrimp.errors import PlanError
from scrimp.models.shapes import ModelSizes
from scrimp.planner.hardware import Cluster, Device
from scrimp.planner.layout.collectives import Group, group_of
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
    offload: Offload = field(default_factory=Offload)
    precision: str = "bf16"
    """Recipe of the blocks' products; head and attention run in bf16."""
    gemms: Mapping[str, str] = field(default_factory=dict)
    """Recipes of single products, as mlp.down.wgrad."""
    sequence_parallel: bool = True
    """Ranks of tp share the tokens between layers."""

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
        """That computes."""
        return self.cluster.groups[0].node.device

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
    def gathers_copies(self) -> bool:
        """Whether ranks of zero 1 gather weights in every pass and reduce gradients once a step, as Scrimp's do."""
        return self.software.name == "scrimp" and self.layout.zero == 1 and self.layout.shards > 1

    @property
    def state_shards(self) -> int:
        """Ranks over which optimizer states are cut, beside tp and pp."""
        layout = self.layout
        over_copies = self.software.shards_over_copies and layout.fsdp == 1
        return layout.dp * layout.cp if over_copies else layout.shards

    def recipe(self, linear: str, gemm: str) -> str:
        """Recipe of one product of a block."""
        return self.gemms.get(f"{linear}.{gemm}", self.precision)

    @cached_property
    def groups(self) -> dict[str, Group]:
        """Each axis; tp changes fastest, then cp, fsdp, dp and pp. ep: the ranks that share experts; data: all that
        read other tokens."""
        layout, found, stride = self.layout, {}, 1
        for axis in ("tp", "cp", "fsdp", "dp", "pp"):
            found[axis] = self._group(getattr(layout, axis), stride)
            stride *= getattr(layout, axis)
        found["ep"] = self._group(layout.ep, layout.etp)
        found["data"] = self._group(layout.cp * layout.data_ranks, layout.tp)
        found["shards"] = self._group(layout.shards, layout.tp)
        found["edp"] = self._group(
            layout.ranks // (layout.pp * layout.ep * layout.etp), layout.ep * layout.etp
        )
        return found

    def _group(self, ranks: int, stride: int) -> Group:
        node = self.cluster.groups[0]
        return group_of(ranks, stride, node.used, node.node.link.inside, node.node.link.outside)

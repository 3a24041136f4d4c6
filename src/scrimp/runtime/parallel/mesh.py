"""One mesh of all ranks, its axes by name.

Neighbouring ranks differ in the last axis first: it gets the fastest links, those of one node. From the first to the
last the axes are::

    pp       stages of a pipeline: these ranks read the same rows
    dp       copies of the model
    fsdp     shards of a copy
    cp       parts of every row
    tp       pieces of every layer: these ranks read the same rows

Ranks of pp have different blocks: what is said below of a copy is of the part of it that a stage has.
Ranks of cp share the copy as well: weights are cut over fsdp and cp together.
Routed experts see the same ranks of a stage in other axes (MoE folding), edp, ep and etp, the last again among
neighbours::

    edp      shards of the same experts
    ep       experts of a block
    etp      pieces of an expert

Axes of degree 1 are there too, so that nothing has to ask which exist.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

from scrimp.config.axis_backends import AxisBackend, axis_backends
from scrimp.config.pipeline import V_SHAPED
from scrimp.config.resolved import ResolvedLayout
from scrimp.world import ALONE, World

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

T = TypeVar("T")
AXES = ("pp", "dp", "fsdp", "cp", "tp")


@dataclass(frozen=True)
class RankMesh:
    """This rank's place in a layout; by default one process alone.

    Args:
        layout: as many degrees as there are ranks.
        world: the ranks, of which every one makes its mesh.
        device_type: of the tensors, cpu or cuda.
        copies_apart: each copy takes steps by its own gradients alone.
    """

    layout: ResolvedLayout = field(default_factory=lambda: ResolvedLayout(dp=1, fsdp=1))
    world: World = ALONE
    device_type: str = "cpu"
    copies_apart: bool = False

    @property
    def is_trivial(self) -> bool:
        """Whether there is one rank."""
        return self.world.size == 1

    @cached_property
    def devices(self) -> DeviceMesh:
        """torch's mesh; making it is a collective."""
        from torch.distributed.device_mesh import init_device_mesh

        degrees = tuple(getattr(self.layout, axis) for axis in AXES)
        return init_device_mesh(
            self.device_type, degrees, mesh_dim_names=AXES, backend_override=self._backends(*AXES)
        )

    @cached_property
    def copies_and_shards(self) -> DeviceMesh:
        """The same ranks as FSDP2 sees them: copies, the ranks that share one, and what has pieces of its layers."""
        from torch.distributed.device_mesh import init_device_mesh

        degrees = (self.layout.pp, self.layout.dp, self.layout.shards, self.layout.tp)
        return init_device_mesh(
            self.device_type,
            degrees,
            mesh_dim_names=("pp", "dp", "shards", "tp"),
            backend_override=self._backends("pp", "dp", "fsdp", "tp"),
        )

    @cached_property
    def of_copy(self) -> DeviceMesh:
        """The ranks that share this copy of the model, as one axis."""
        return self.copies_and_shards["pp", "shards", "tp"]._flatten("of_copy")

    @cached_property
    def of_stage(self) -> DeviceMesh:
        """Those of them that have parts of the same stage, and so of the same layers."""
        return self.copies_and_shards["shards", "tp"]._flatten("of_stage")

    @cached_property
    def of_layers(self) -> DeviceMesh:
        """The ranks, of all copies, that have parts of the same layers as this one."""
        return self.copies_and_shards["dp", "shards", "tp"]._flatten("of_layers")

    @cached_property
    def of_experts(self) -> DeviceMesh:
        """The ranks, of all copies, that have parts of a stage's routed experts."""
        return self.sparse["edp", "sharing"]._flatten("of_experts")

    @property
    def copy(self) -> int:
        """Which copy of the model this rank has a part of."""
        return self.world.rank // (self._ranks_of_stage // self.layout.dp) % self.layout.dp

    def of_step(self, counts: list[T]) -> list[T]:
        """The part of what `gathered_rows` gives whose gradients are added up in one step."""
        own = slice(self.copy * self.layout.fsdp, (self.copy + 1) * self.layout.fsdp)
        return counts[own] if self.copies_apart else counts

    @cached_property
    def sparse(self) -> DeviceMesh:
        """The same ranks as routed experts see them: those with the same experts, and those that share them."""
        from torch.distributed.device_mesh import init_device_mesh

        sharing = self.layout.ep * self.layout.etp
        degrees = (self.layout.pp, self._ranks_of_stage // sharing, sharing)
        return init_device_mesh(
            self.device_type,
            degrees,
            mesh_dim_names=("pp", "edp", "sharing"),
            # Shards of experts lie on all copies: what joins copies joins them.
            backend_override=self._backends("pp", "fsdp" if self.layout.dp == 1 else "dp", "ep"),
        )

    def _backends(self, *axes: str) -> dict[int | str, Any] | None:
        """What carries these axes' messages, by their place, as torch's meshes take it."""
        named = axis_backends(self.layout.backends)
        return {i: _for_torch(named[axis]) for i, axis in enumerate(axes) if axis in named} or None

    @cached_property
    def of_expert(self) -> DeviceMesh:
        """The ranks that share each expert that this one has (`layout.etp`); making it is a collective."""
        from torch.distributed.device_mesh import init_device_mesh

        etp = self.layout.etp
        mesh = init_device_mesh(
            self.device_type,
            (self.world.size // etp, etp),
            mesh_dim_names=("others", "etp"),
            backend_override=self._backends("others", "ep"),
        )
        return mesh["etp"]

    @property
    def data_ranks(self) -> int:
        """Ranks that read rows of their own."""
        return self.layout.data_ranks

    @property
    def data_rank(self) -> int:
        """Which of them this is: it reads its share of every batch."""
        return self.world.rank // (self.layout.cp * self.layout.tp) % self.layout.data_ranks

    def gathered(self, value: T) -> list[T]:
        """What the ranks say of the tokens that they read, of each token once; a collective."""
        return self._of_last_stage(value)[:: self.layout.tp]

    def gathered_rows(self, value: T) -> list[T]:
        """What they say of whole rows, of each row once; a collective."""
        return self._of_last_stage(value)[:: self.layout.cp * self.layout.tp]

    @property
    def pipeline_rank(self) -> int:
        """Which rank of its pipeline this is."""
        return self.world.rank // self._ranks_of_stage

    @property
    def _ranks_of_stage(self) -> int:
        """Ranks that hold the same stages."""
        return self.layout.ranks // self.layout.pp

    def _of_last_stage(self, value: T) -> list[T]:
        """What the ranks say that have the last stage, and with it the loss."""
        last = 0 if self.layout.schedule in V_SHAPED else self.layout.pp - 1
        each = self._ranks_of_stage
        return self.world.gathered(value)[last * each : (last + 1) * each]


def _for_torch(backend: AxisBackend) -> Any:
    """A back end's name, or for a network of NCCL that and its options."""
    if backend.network is None:
        return backend.name
    from torch.distributed import ProcessGroupNCCL  # not there in torch's builds for CPUs

    options = ProcessGroupNCCL.Options()
    config: Any = options.config  # torch's stubs leave its network out
    config.net_name = backend.network
    return backend.name, options


ONE_RANK = RankMesh()

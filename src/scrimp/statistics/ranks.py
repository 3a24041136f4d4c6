"""Statistics of a model that trains on several ranks: what each rank adds to the sums, and what it holds a copy of.

Problem  A rank sees its own rows of the batch (DDP, FSDP2), its shards of parameters, gradients and the optimizer's
         state (FSDP2), or its columns of some tensors (tensor parallel). The planner needs the numbers of the whole.
Method   Every statistic is a sum of squares, or of products. Each rank adds its part, divided by the number of ranks
         that hold the same part; one all-reduce in FP64 over all ranks adds these up, so that all hold equal numbers::

             data parallel     X, Y, G, gX and their errors: sum; W and its error: copies
             FSDP2             W, gW, changes of gradients and updates: sum over shards
             context parallel  ranks that share rows are data-parallel ranks to all that is summed
             pipeline          each rank adds what its own layers show; all know the names of all
             expert parallel   each rank adds what its own experts show of the tokens that came to them; pieces of an
                               expert are cut as layers are, and the gradient of what they read is a partial sum
             tensor parallel   what a layer cuts (`Shard.cut_axes`): sum; the rest: copies; partial sums (gX of
                               column-parallel, Y of row-parallel layers) are reduced before they are squared;
                               between layers copies, or with sequence parallelism (`Ranks.tokens`) a sum over tokens

Gradients  Both data-parallel kinds average gradients over ranks: the loss is the mean of the ranks' mean losses, and
           what a rank sees of G and gX is D times the global mean loss's, D data-parallel ranks. It counts by 1/D.
           Where ranks add up gradients of parts of one loss (`Ranks.adds`), what a rank sees is of the whole loss.
Noise      Independent between data-parallel ranks: micro-batch m of rank r draws as number m D + r, as if one process
           ran the ranks' micro-batches in turn. Ranks that hold copies draw the same, pieces draw the
           whole and take their part, and so do ranks that share rows or tokens (`SharedRows`). Experts draw for the
           tokens that came to a rank. Stochastic rounding is told apart by the clock: loops begin it by row.
Limits     Ranks must run equally many micro-batches, of equally many tokens. That gradients are summed instead of
           averaged (`set_gradient_divide_factor`, a communication hook) has to be said. Refused by name: FSDP1, and in
           others' loops sequence parallel and pipeline stages, of which a model does not show who has what (Scrimp's
           own runs say it, `scrimp.training.precision.ranks_of_run`).
Source     SNIP (arXiv 2602.01410), reconstruction section 6, all-reduce.
Checked    tests/statistics/test_ranks.py: on gloo, against one process on the whole batch; Scrimp's own layouts:
           tests/training/precision/test_statistics_on_ranks.py
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from scrimp.errors import ModelError
from scrimp.gemm import PlannedLayer
from scrimp.gemm.layer import Shard
from scrimp.precision import LinearPrecision
from scrimp.statistics.structure import is_norm
from scrimp.world import World

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Piece:
    """What one rank holds of a parameter."""

    shape: tuple[int, ...]
    """Shape of the whole parameter."""
    copies: int
    """Ranks that hold the same."""
    cut: Callable[[Tensor], Tensor]
    """From a tensor like the whole to what lies here."""


NOTHING = Piece((), 1, lambda whole: whole)
"""What stands for a parameter that other ranks have."""


@dataclass(frozen=True)
class SharedRows:
    """How ranks share the tokens of every row."""

    size: int
    """Ranks that share a row; neighbours among those that read different tokens."""
    positions: Callable[[int], Tensor]
    """From the tokens of a whole row to those that this rank has, int64 on the CPU."""

    def normal(self, like: Tensor, generator: torch.Generator) -> Tensor:
        """Standard normal numbers for the tokens that lie here, [B, T, D]: those of whole rows."""
        rows, length, width = like.shape
        length *= self.size
        whole = torch.randn(rows, length, width, generator=generator, device=like.device)
        return whole.index_select(1, self.positions(length).to(like.device))


@dataclass(frozen=True)
class Ranks:
    """The ranks that train one model together; by default one process alone."""

    world: World = field(default_factory=World)
    data_size: int = 1
    """Ranks, or groups of tensor-parallel ranks, that read different tokens."""
    data_rank: int = 0
    adds: bool = False
    """Whether gradients are sums over ranks, each of which has a part of one loss; else means of their losses'."""
    rows: SharedRows | None = None
    """How ranks share rows; None: each reads whole ones."""
    tokens: SharedRows | None = None
    """How tensor-parallel ranks share tokens between layers (sequence parallelism); None: each has all of them."""
    stages: int = 1
    """Groups of ranks that hold other layers: a pipeline."""
    pieces: Mapping[str, Piece] | None = None
    """By parameter of the whole model, in its order, what lies here; None: parameters show it."""
    experts: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """Grouped layer to the first expert that is here, and how many there are; others have all of theirs."""

    @classmethod
    def of(cls, model: nn.Module, *, adds: bool = False, rows: SharedRows | None = None) -> Ranks:
        """Find out from a model how it is trained; between two steps, on all ranks.

        Parameters that FSDP2 left whole after a forward pass become shards again.

        Args:
            model: with its wrappers: a DistributedDataParallel, or one that `fully_shard` or
                `parallelize_module` was applied to.
            adds: gradients are sums over ranks.
            rows: how ranks share them, which a model does not show.

        Raises:
            ModelError: ranks that nothing joins, or that are joined in a way that is not known here.
        """
        world = World.current()
        if world.size == 1:
            return cls()
        data_size, data_rank, data_mesh = _data_parallel(model)
        mesh = _tensor_mesh(model, data_mesh)
        tensor_size = 1 if mesh is None else mesh.size()
        if data_size * tensor_size != world.size:
            raise ModelError(
                "ranks hold parts of the training that statistics are not reduced over",
                got=f"{world.size} ranks: {data_size} of data parallel x {tensor_size} of tensor parallel",
                expected="DistributedDataParallel, fully_shard or tensor parallel over all ranks of the default group",
                do="measure in one process, write the plan to a file, and apply it on every rank",
            )
        return cls(world, data_size, data_rank, adds, rows)

    @property
    def size(self) -> int:
        """All ranks."""
        return self.world.size

    @property
    def tensor_size(self) -> int:
        """Ranks that read the same rows for the same layers."""
        return self.size // (self.data_size * self.stages)

    @property
    def share(self) -> float:
        """What a gradient of this rank's loss counts in the one that all ranks reduce."""
        return 1.0 if self.adds else 1.0 / self.data_size

    def draw(self, micro_batch: int) -> int:
        """Number of a micro-batch among those of all ranks; equal on ranks that share its rows."""
        sharing = 1 if self.rows is None else self.rows.size
        return micro_batch * (self.data_size // sharing) + self.data_rank // sharing

    def draw_of_experts(self, micro_batch: int, sharing: int) -> int:
        """The same for the tokens that come to the experts here.

        Args:
            sharing: neighbours that have pieces of them, and so the same tokens.
        """
        return (micro_batch * self.size + self.world.rank) // sharing

    @property
    def between(self) -> SharedRows | None:
        """How ranks share the tokens of what lies between layers."""
        return self.rows if self.tokens is None else self.tokens

    def parts(self, micro_batch: int, micro_batches: int, count: int) -> NDArray[np.int64]:
        """Which of `count` equal parts of the tokens of all ranks those of a micro-batch lie in, each `count`-th of its
        own; equal on ranks that share its rows."""
        sharing = 1 if self.rows is None else self.rows.size
        pieces = self.draw(micro_batch) * count + np.arange(count)
        found: NDArray[np.int64] = pieces // (micro_batches * (self.data_size // sharing))
        return found

    def member(self, layer: PlannedLayer, expert: int) -> PlannedLayer:
        """The layer itself, or of a grouped one the expert of this number among those of all ranks."""
        return layer.members[expert - self.experts.get(layer.name, (0, 0))[0]] if layer.members else layer

    def copies(self, shard: Shard | None = None) -> int:
        """Tensor-parallel ranks that hold the same of a tensor between layers.

        Args:
            shard: how its features are cut; None: they are not.
        """
        return self.tensor_size if self.tokens is None and shard is None else 1

    def sum(self, values: Iterable[float] | Array) -> Array:
        """Sums over all ranks, in float64; equal on every rank."""
        own = np.asarray(values if isinstance(values, np.ndarray) else list(values), dtype=np.float64)
        return self.world.sum(own)

    def join(self, sums: dict[Any, float], factors: Mapping[Any, float]) -> None:
        """Make sums by key those of all ranks, in place; each rank's counts by the factor of its key."""
        if self.size > 1:
            total = self.sum([sums.get(key, 0.0) * factor for key, factor in factors.items()])
            sums.update(zip(factors, total.tolist(), strict=True))

    def mean(self, loss: float) -> float:
        """Loss of all ranks from each one's own."""
        total = float(self.sum([loss])[0])
        return total / self.tensor_size if self.adds else total / self.size

    def norms(self, norms: Array, pieces: Sequence[Piece]) -> Array:
        """Norms of whole tensors from those of what lies here.

        Args:
            norms: [..., K].
            pieces: K.
        """
        if self.size == 1:
            return norms
        copies = np.array([piece.copies for piece in pieces], dtype=np.float64)
        return np.sqrt(self.sum(norms**2 / copies))

    def piece(self, name: str, value: Tensor | None) -> Piece:
        """What lies here of a parameter.

        Args:
            value: the parameter or its gradient; None: not here.

        Raises:
            ModelError: shards, and one process alone.
        """
        if self.pieces is not None:
            return self.pieces[name]
        if value is None:
            return NOTHING
        shape = tuple(value.shape)
        if not hasattr(value, "device_mesh"):
            return Piece(shape, self.size, lambda whole: whole)
        from torch.distributed.tensor import distribute_tensor

        mesh, placements = value.device_mesh, cast(Any, value).placements
        shards = math.prod(mesh.size(d) for d, p in enumerate(placements) if not p.is_replicate())
        if shards > self.size:
            raise ModelError(
                "a parameter lies on more ranks than are measured",
                got=f"{shards} shards, {self.size} rank",
                do="give ranks=Ranks.of(model), on all ranks",
            )

        def cut(whole: Tensor) -> Tensor:
            return local(distribute_tensor(whole, mesh, placements, src_data_rank=None))

        return Piece(shape, self.size // shards, cut)

    def refuse_straddling(self, layers: Mapping[str, PlannedLayer], recipes: Iterable[str]) -> None:
        """Refuse candidates that tensor-parallel layers could not run; after a forward pass.

        Raises:
            PlanError: groups of a recipe straddle the cut of a layer.
        """
        for layer, recipe in itertools.product(layers.values(), recipes):
            layer.check(LinearPrecision.of(recipe))


ALONE = Ranks()


def in_model_order(lists: Sequence[Sequence[str]]) -> list[str]:
    """The names that ranks have, in the order of the whole model, whose blocks bear numbers.

    Args:
        lists: of each rank in its order; what has no number comes before the blocks, or after them, on every rank.
    """
    if all(names == lists[0] for names in lists):
        return list(lists[0])
    places: dict[str, tuple[float, int]] = {}
    for names in lists:
        number = -1.0
        for index, name in enumerate(names):
            found = re.search(r"\.(\d+)\.", name)
            number = float(found[1]) if found else number if number < 0 else math.inf
            places.setdefault(name, (number, index))
    return sorted(places, key=places.__getitem__)


def local(value: Tensor) -> Tensor:
    """What lies on this rank, outside of any graph; partial sums are reduced first."""
    value = value.detach()
    if not hasattr(value, "device_mesh"):
        return value
    from torch.distributed.tensor import Replicate

    sharded = cast(Any, value)
    if any(placement.is_partial() for placement in sharded.placements):
        whole = [Replicate() if placement.is_partial() else placement for placement in sharded.placements]
        sharded = sharded.redistribute(placements=whole)
    here: Tensor = sharded.to_local()
    return here


def shard_at(module: nn.Module, side: str) -> Shard | None:
    """How the features of a planned layer's outputs, or inputs, are cut; None: they are not."""
    planned: PlannedLayer | None = getattr(module, "planned", None)
    shard = None if planned is None else planned.piece
    return shard if shard is not None and shard.split == side else None


def settle(model: nn.Module) -> None:
    """FSDP2: make shards again of what a forward pass without a backward pass has left whole."""
    for module in model.modules():
        if hasattr(module, "reshard") and hasattr(module, "_get_fsdp_state"):
            cast(Any, module).reshard()


def _data_parallel(model: nn.Module) -> tuple[int, int, Any]:
    """How many ranks read different rows, which one this is, and FSDP2's DeviceMesh of them if it has one."""
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

    settle(model)
    modules = list(model.modules())
    copied = [module for module in modules if isinstance(module, nn.parallel.DistributedDataParallel)]
    sharded = [module for module in modules if isinstance(module, FSDPModule)]
    if any(isinstance(module, FullyShardedDataParallel) for module in modules) or (copied and sharded):
        raise ModelError(
            "statistics are not reduced over ranks that train this way",
            got="FullyShardedDataParallel" if not copied else "DistributedDataParallel of sharded parameters",
            expected="fully_shard, or DistributedDataParallel",
        )
    if copied:
        if copied[0].gradient_as_bucket_view and any(p.grad is not None for p in model.parameters()):
            raise ModelError(
                "gradients lie in the buckets that measuring writes to",
                got="gradient_as_bucket_view, and gradients",
                do="call zero_grad before",
            )
        group = copied[0].process_group
        return group.size(), group.rank(), None
    if sharded:
        mesh, place = _mesh_of(sharded), 0
        for axis, coordinate in enumerate(mesh.get_coordinate() or ()):
            place = place * mesh.size(axis) + coordinate
        return mesh.size(), place, mesh
    if not any(hasattr(parameter, "device_mesh") for parameter in model.parameters()):
        raise ModelError(
            "nothing joins the ranks: each would measure its own data",
            got=f"{World.current().size} ranks, and a model without wrappers",
            expected="the model as training calls it: in DistributedDataParallel, or after fully_shard",
            do="measure and plan in one process, write the plan to a file, and apply it on every rank",
        )
    return 1, 0, None


def _mesh_of(modules: Sequence[Any]) -> Any:
    """The mesh of FSDP2's data-parallel ranks, for which torch has no public function."""
    for module in modules:
        state = module._get_fsdp_state()
        groups = getattr(state, "_fsdp_param_groups", None) or [getattr(state, "_fsdp_param_group", None)]
        if groups[0] is not None:
            return groups[0].mesh_info.mesh
    raise ModelError("fully_shard was applied to modules without parameters", got=type(modules[0]).__name__)


def _tensor_mesh(model: nn.Module, data_mesh: Any) -> Any:
    """The mesh of the tensor-parallel ranks, taken from the parameters; None where there are none."""
    found: dict[tuple[int, ...], Any] = {}
    for name, parameter in model.named_parameters():
        mesh = entire = getattr(parameter, "device_mesh", None)
        if mesh is None:
            continue
        if data_mesh is not None:
            if mesh.ndim == data_mesh.ndim:
                continue
            names = [axis for axis in mesh.mesh_dim_names if axis not in data_mesh.mesh_dim_names]
            mesh = mesh[names[0]] if len(names) == 1 else mesh
        if mesh.ndim != 1 or is_norm(model.get_submodule(name.rpartition(".")[0])):
            raise ModelError(
                "statistics are not reduced over a model that is cut this way",
                got=f"{name}: {cast(Any, parameter).placements} on {entire}",
                expected="layers cut by ColwiseParallel and RowwiseParallel on one axis; norms and the stream whole",
                do="measure without sequence parallel: the plan holds with it too",
            )
        found[tuple(mesh.mesh.flatten().tolist())] = mesh
    if len(found) > 1:
        raise ModelError("layers are cut over different ranks", got=", ".join(map(str, found)))
    return next(iter(found.values()), None)

"""Lays a model over a mesh of ranks: what is applied to it, in which order.

Problem  A model and its optimizer's states are larger than one device, or one device is too slow for its batches.
Method   The model is described on the meta device, laid over the mesh, and only then gets memory: no rank ever holds
         all of it. FSDP2 (`torch.distributed.fsdp.fully_shard`) cuts the weights of every block by rows, and those of
         embedding, final norm and head as one more unit. A unit's weights are gathered when it runs; its gradients are
         reduced and cut when its backward pass is over.
         Before that, the ranks of `tp` cut the layers themselves (`cut_layers`): FSDP2 then shards each rank's pieces
         over the ranks that have the same ones.
         Routed experts are units of their own, over the ranks that have the same ones (`scrimp.models.expert_ranks`).
         `layout.zero` says how long the gathered lives::

             3   weights of a unit until it has run, and again for its backward pass
             2   weights until the unit's backward pass; with 3 those of `layout.gathered`'s blocks too
             1   and gradients are reduced in the last micro-batch of a step alone: until then each rank keeps its own
                 whole sums

         Schedules that split backward passes (zbv, dualpipev) make the gradients of weights when the backward pass of
         their unit is over and its weights are gone: blocks are reduced then (`reduce_now`), with zero 1 at the end.
         Where ranks share rows (`layout.cp`), attention alone needs the others (`scrimp.models.context_parallel`).
Sums     A rank's loss is divided by the targets of all ranks, so gradients are added up, not averaged: in float32,
         whatever their type. (FSDP2 would divide by the number of ranks; gloo knows no sum with a factor, hence
         `set_force_sum_reduction_for_comms`.)
Limits   Weights are gathered in their own format; beside fp32 weights autocast keeps its bf16 copies of those that were
         gathered until the loss is over. Weights and gradients cannot live on the host.
Source   ZeRO, arXiv 1910.02054; PyTorch FSDP, arXiv 2304.11277, and its second version in torch
Checked  tests/parity/: losses, gradients and bytes beside one process and formulas
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Protocol, cast, runtime_checkable

import torch
from torch import Tensor

from scrimp.config.gathered import gathered_blocks
from scrimp.config.pipeline import V_SHAPED, Pipeline
from scrimp.models.context_parallel import ContextParallel
from scrimp.models.cut_layers import cut_layers
from scrimp.models.expert_ranks import ExpertRanks, cut_experts
from scrimp.models.experts import Experts, RoutedBlock
from scrimp.models.model import Model, ModelPart
from scrimp.models.spec import EMBEDDING_WEIGHT
from scrimp.models.tensor_ranks import TensorRanks
from scrimp.parts import Cut
from scrimp.runtime.parallel.mesh import RankMesh

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule


@runtime_checkable
class _Unit(Protocol):
    """What FSDP2 makes of a module."""

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """Whether its backward passes reduce gradients."""

    def _get_fsdp_state(self) -> Any:
        """What torch knows of it."""


def parallelise(model: Model, mesh: RankMesh) -> Mapping[str, Cut]:
    """Lay a model that has no memory yet over the ranks; nothing happens where there is one rank.

    Returns:
        by name what this rank has of a parameter, where layers are cut: to be noted when it has memory (`set_cut`).
    """
    cuts: dict[str, Cut] = {}
    if mesh.is_trivial:
        return cuts
    if mesh.layout.tp > 1:
        cuts |= cut_layers(model, TensorRanks(mesh.devices["tp"].get_group()))
    sharing = mesh.layout.ep * mesh.layout.etp > 1
    ranks = None
    if sharing:
        place = mesh.sparse["edp"].get_local_rank()
        ranks = ExpertRanks(mesh.sparse["sharing"].get_group(), mesh.layout.etp, place)
    for name, cut in cut_experts(model, ranks).items():
        cuts.pop(name, None)  # what is no piece of a tp rank's
        cuts |= {} if cut is None else {name: cut}
    if mesh.layout.pp > 1:
        # Of two copies of the words, those of the first stage are written.
        cuts = _noted(model, cuts, lambda name: name != EMBEDDING_WEIGHT or model.part.is_first)
    if mesh.layout.cp > 1:
        model.context_parallel = ContextParallel(mesh.layout.cp_method, mesh.devices["cp"].get_group())
    if is_sharded(model, mesh):
        _shard(model, mesh)
    elif has_whole_copies(model, mesh):
        cuts = _noted(model, cuts, lambda name: mesh.copy == 0)
    return cuts


def part_of_rank(pipeline: Pipeline, rank: int) -> ModelPart:
    """What a rank of a pipeline has of the model."""
    stages = pipeline.stages_of(rank)
    return ModelPart(pipeline.blocks_of(rank), 0 in stages, pipeline.num_stages - 1 in stages)


def is_sharded(model: Model, mesh: RankMesh) -> bool:
    """Whether ranks have shards of parameters; else each has its own ones whole, or nobody else's."""
    with_experts = model.spec.routing is not None and mesh.layout.ranks > mesh.layout.pp
    return mesh.layout.shards > 1 or with_experts


def has_whole_copies(model: Model, mesh: RankMesh) -> bool:
    """Whether ranks have equal weights that nobody shards, and learn from one another's gradients in every step."""
    return mesh.layout.dp > 1 and not mesh.copies_apart and not is_sharded(model, mesh)


def _noted(model: Model, cuts: Mapping[str, Cut], writes: Callable[[str], bool]) -> dict[str, Cut]:
    """Notes on all parameters: other ranks have others, or copies, of which one rank's are written."""
    found = dict(cuts)
    for name, parameter in model.named_parameters():
        shape = tuple(parameter.shape)
        cut = cuts.get(name) or Cut(shape, (range(shape[0]),))
        found[name] = dataclasses.replace(cut, is_writer=cut.is_writer and writes(name))
    return found


def units(model: Model) -> list[FSDPModule]:
    """What is gathered together: the blocks, and the rest as the model itself; none where nothing is."""
    modules = (*_experts(model).values(), *model.blocks, model)
    return cast("list[FSDPModule]", [module for module in modules if isinstance(module, _Unit)])


def _experts(model: Model) -> dict[int, Experts]:
    """By number of their block."""
    blocks = zip(model.part.blocks, model.each_block(), strict=True)
    return {number: block.mlp.experts for number, block in blocks if isinstance(block, RoutedBlock)}


def _shard(model: Model, mesh: RankMesh) -> None:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    # It warns of operations in place on what the model returns; nobody here makes any.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    sums = MixedPrecisionPolicy(reduce_dtype=torch.float32)
    both = mesh.copies_and_shards
    adds_over_copies = mesh.layout.dp > 1 and not mesh.copies_apart
    over = both["dp", "shards"] if adds_over_copies else both["shards"]
    stay = gathered_blocks(mesh.layout, model.spec.num_blocks)
    for number, experts in _experts(model).items():
        fully_shard(
            experts, mesh=mesh.sparse["edp"], reshard_after_forward=number not in stay, mp_policy=sums
        )
    for number, block in zip(model.part.blocks, model.blocks, strict=True):
        fully_shard(block, mesh=over, reshard_after_forward=number not in stay, mp_policy=sums)
    # The loss reads the head after the model's own forward pass is over.
    fully_shard(model, mesh=over, reshard_after_forward=False, mp_policy=sums)
    for unit in units(model):
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)
    if mesh.layout.schedule in V_SHAPED:
        reduce_later(model, ends=mesh.layout.zero == 1)


def reduce_gradients(model: Model, reduce: bool) -> None:
    """Whether the backward passes from now on reduce gradients over ranks, or only add them up here."""
    for unit in units(model):
        unit.set_requires_gradient_sync(reduce, recurse=False)


def reduce_later(model: Model, *, ends: bool) -> None:
    """Leave the gradients of blocks to `reduce_now`: those of their weights come after their backward pass.

    Args:
        ends: those of embedding, final norm and head as well, which come in it.
    """
    for unit in units(model):
        unit.set_requires_gradient_sync(unit is cast(object, model) and not ends, recurse=False)


def whole_weights(model: Model, block: int) -> list[Tensor]:
    """The parameters of a block as its passes read them: gathered, where ranks share it."""
    found = []
    for module in model.blocks[block].modules():
        groups = groups_of(module) if isinstance(module, _Unit) else []
        found += [getattr(one, "_unsharded_param", None) for group in groups for one in group.fsdp_params]
    return [one for one in found if one is not None] or list(model.blocks[block].parameters())


def reduce_now(model: Model, blocks: Iterable[int], *, ends: bool) -> None:
    """Reduce over ranks what the gradients of some blocks have added up to here.

    FSDP2 reduces a unit in its backward pass alone; for afterwards torch's own pipelines call the same parts of it
    (`_PipelineStage.perform_reduce_grad`).

    Args:
        blocks: their numbers, each reduced before the next one is asked for.
        ends: embedding, final norm and head as well.
    """
    if not isinstance(model, _Unit):
        for _ in blocks:
            pass
        return
    for number in blocks:
        for module in model.blocks[number].modules():
            if isinstance(module, _Unit):
                _reduce(module)
    if ends:
        _reduce(model)
    root: Any = model
    root._get_fsdp_state()._root_post_backward_final_callback()


def _reduce(unit: Any) -> None:
    # First in one type: gradients of vectors have waited in float32, those of weights are in their own.
    for reduce in (False, True):
        unit.set_requires_gradient_sync(reduce, recurse=False)
        for group in groups_of(unit):
            group.post_backward()
    unit.set_requires_gradient_sync(False, recurse=False)


def groups_of(unit: Any) -> list[Any]:
    """What FSDP2 gathers and reduces of a unit."""
    state = unit._get_fsdp_state()
    # Older versions have one, or None.
    groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
    return [group for group in groups if group is not None]

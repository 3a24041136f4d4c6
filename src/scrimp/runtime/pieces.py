"""Tells planned layers which piece of them this rank has, so that pieces quantize as the whole layer would.

Method   A rank of `layout.tp` has outputs or inputs of a layer (`scrimp.models.cut_layers`), one of `layout.etp` those
         of each expert that it has. Scales that span the cut become the largest of all ranks' numbers, rounding noise
         has the features' places in the whole, and groups that straddle the cut are refused (`Shard`). So operands
         are those of one process bit for bit wherever the numbers are that they are made from; products differ by the
         order of sums.
Proofs   `scrimp.gemm.fingerprints` proves each rank's pieces, with the same scales.
Checked  tests/runtime/parallel/test_cut_formats.py
"""

from __future__ import annotations

from collections.abc import Mapping

import torch.distributed as dist
from torch import Tensor

from scrimp.errors import PlanError
from scrimp.gemm import PlannedLayer, PlannedModel
from scrimp.gemm.clock import Clock
from scrimp.gemm.layer import Shard
from scrimp.models import LinearSpec, ModelSpec
from scrimp.models.expert_ranks import ExpertRanks
from scrimp.models.experts import RoutedBlock
from scrimp.models.model import Model
from scrimp.parts import cut_of
from scrimp.precision import HEAD
from scrimp.runtime.parallel import RankMesh


def share_formats(model: Model, planned: PlannedModel, mesh: RankMesh) -> None:
    """Give the planned layers of a model that has been cut their pieces; nothing where none is. A collective.

    Raises:
        PlanError: groups of a recipe would lie on two ranks, or the model's specification does not say how its ranks
            share a layer.
    """
    layers = {**planned.layers, **({} if model.planned_head is None else {HEAD: model.planned_head})}
    ranks = model.tensor_ranks
    if ranks is not None:
        for name, layer in layers.items():
            linear = model.spec.linear(name)
            weight = model.head_weight if name == HEAD else model.get_parameter(f"{name}.weight")
            if linear.experts == 1:
                _share(layer, linear, weight, ranks.group)
    shared = [block.mlp.ranks for block in model.each_block() if isinstance(block, RoutedBlock)]
    if shared and shared[0] is not None:
        of_experts = {name: layer for name, layer in layers.items() if layer.members}
        _share_experts(model.spec, of_experts, planned.clock, shared[0], mesh)


def _share_experts(
    spec: ModelSpec, layers: Mapping[str, PlannedLayer], clock: Clock, ranks: ExpertRanks, mesh: RankMesh
) -> None:
    of_experts = Clock(clock.seed)
    ranks.clocks = (clock, of_experts)
    group = mesh.of_expert.get_group() if ranks.etp > 1 else None
    for name, layer in layers.items():
        linear, layer.clock = spec.linear(name), of_experts
        for member, expert in zip(layer.members, ranks.experts(linear.experts), strict=True):
            member.name = f"{name}.{expert}"
            if group is None:
                continue
            if linear.cut is None:
                raise PlanError(
                    f"{name}: its specification does not say how ranks share an expert",
                    do="set cut of its LinearSpec, or leave the layer in high precision",
                )
            pieces, rank = linear.pieces(ranks.etp), ranks.rank % ranks.etp
            size = linear.outputs if linear.cut == "outputs" else linear.inputs
            member.share(Shard(linear.cut, group, pieces[rank], _begins(pieces), size))


def _share(layer: PlannedLayer, linear: LinearSpec, weight: Tensor, group: dist.ProcessGroup) -> None:
    cut = cut_of(weight)
    if cut is None or cut.local_shape == cut.shape:
        return
    pieces, rank = linear.pieces(dist.get_world_size(group)), dist.get_rank(group)
    split = "inputs" if cut.dimension else "outputs"
    if (linear.cut, pieces[rank]) != (split, cut.ranges):
        raise PlanError(
            f"{layer.name}: its specification does not say how ranks share it",
            got=f"cut {linear.cut}",
            expected=f"{split} {', '.join(f'{one.start}-{one.stop}' for one in cut.ranges)} of rank {rank}",
            do="set cut of its LinearSpec, or leave the layer in high precision",
        )
    layer.share(Shard(split, group, pieces[rank], _begins(pieces), cut.shape[cut.dimension]))


def _begins(pieces: tuple[tuple[range, ...], ...]) -> frozenset[int]:
    return frozenset(features.start for piece in pieces for features in piece)

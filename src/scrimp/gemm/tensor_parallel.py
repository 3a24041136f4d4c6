"""Planned linear layers under tensor parallelism: DTensor weights cut along one axis.

Column-parallel layers hold rows of W (Shard(0)) and make columns of Y; row-parallel ones hold columns of W
(Shard(1)), read columns of X, and make a partial sum of Y. Each rank runs the layer's GEMMs on its
pieces; DTensor does the communication around them, as it does for an ordinary layer.

Equal to the unsharded layer, because

    scales  that span the cut (one per tensor, and per row where rows are cut) take the maximum
            over the ranks; groups must not straddle the cut: a cut that does is refused,
    noise   is addressed by the feature's place in the whole tensor,

and up to the order in which partial sums are added, which is not this module's.

Sources  DTensor's own sharding of aten.linear; TorchTitan's float8 layers for what must be reduced.
Checked  tests/gemm/test_tensor_parallel.py, on gloo.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate
from torch.distributed.tensor import Shard as Split

from scrimp.errors import ModelError
from scrimp.gemm.layer import PlannedLayer, Shard

LocalLinear = Callable[[Tensor, Tensor, Tensor | None, PlannedLayer], Tensor]
"""x W^T + bias by a layer's plan, on ordinary tensors."""


def sharded_linear(
    x: Tensor, weight: DTensor, bias: Tensor | None, layer: PlannedLayer, run: LocalLinear
) -> Tensor:
    """x W^T + bias on DTensors.

    Args:
        x: a DTensor on the weight's mesh, as the styles of `parallelize_module` make it.
        run: on the pieces of this rank.

    Raises:
        ModelError: a layout that this layer cannot run.
        PlanError: groups of a recipe straddle the cut.
    """
    split = split_of(weight, layer.name)
    if not isinstance(x, DTensor):
        raise ModelError(
            f"{layer.name} has a sharded weight and an ordinary input",
            got=f"weight {weight.placements} on {weight.device_mesh}",
            expected="a DTensor input, as ColwiseParallel and RowwiseParallel make it",
        )
    mesh, last = weight.device_mesh, x.dim() - 1
    if split is not None and layer.shard is None:
        if torch.compiler.is_compiling():
            # The compiler quotes an ordinary error; how one of ours is made it cannot trace, and complains of that.
            raise RuntimeError(
                f"{layer.name} does not know its shard yet - call locate_shards() of the PlannedModel"
            )
        locate(layer, weight)
    wanted: Placement = Split(last) if split == "inputs" else Replicate()
    gradient: Placement = {"inputs": Split(last), "outputs": Partial(), None: Replicate()}[split]
    result: Placement = {"inputs": Partial(), "outputs": Split(last), None: Replicate()}[split]
    x_here = x.redistribute(mesh, [wanted]).to_local(grad_placements=[gradient])
    w_here = weight.to_local(grad_placements=weight.placements)
    y_here = run(x_here, w_here, None, layer)
    # With its shape: from its piece alone DTensor would take all pieces for equally large.
    shape = torch.Size([*x.shape[:-1], weight.shape[0]])
    stride = torch.empty(shape, device="meta").stride()
    y: Tensor = DTensor.from_local(y_here, mesh, [result], run_check=False, shape=shape, stride=stride)
    if bias is None:
        return y
    if split == "inputs":
        y = cast(DTensor, y).redistribute(mesh, [Replicate()])
    return y + bias.to(y.dtype)


def split_of(weight: DTensor, name: str) -> str | None:
    """ "outputs", "inputs", or None for a whole copy on every rank."""
    known = {Split(0): "outputs", Split(1): "inputs", Replicate(): None}
    placement = weight.placements[0]
    if len(weight.placements) != 1 or placement not in known:
        raise ModelError(
            f"{name}: this layout of the weight cannot be planned",
            got=f"{weight.placements} on {weight.device_mesh}",
            expected="Shard(0), Shard(1) or Replicate() on a mesh of one axis",
        )
    return known[placement]


def locate(layer: PlannedLayer, weight: DTensor) -> None:
    """Tell a layer which piece of its weight lies here.

    Raises:
        PlanError: groups of its recipes straddle the cut.
    """
    split = split_of(weight, layer.name)
    if split is None:
        return
    mesh = weight.device_mesh
    size = weight.shape[0 if split == "outputs" else 1]
    piece = -(-size // mesh.size())  # DTensor cuts as torch.chunk does
    first = min(size, piece * mesh.get_local_rank())
    features = (range(first, min(size, first + piece)),)
    layer.share(Shard(split, mesh.get_group(), features, frozenset(range(0, size, piece)), size))

"""AdamW over the shards that FSDP2 leaves on a rank, with states of some blocks at home on the host.

Problem  Under FSDP2 a parameter is a `DTensor`: this rank's rows of it. Sharding divides the states by the ranks;
         with few ranks they are still most of the memory.
Method   The optimizer sees plain tensors: each rank's own rows, in the memory that FSDP2 gathers from. Before a step
         the gradients' rows are taken over from the parameters. The update is elementwise, so that every rank
         updates its rows alone; only the norm is of all ranks::

             |g|^2 = sum over ranks of |g_rank|^2            one all-reduce of a scalar in float64

         States visit the device block by block as in `scrimp.optim.streaming`. Where FSDP2 itself keeps
         shards on the host (`CPUOffloadPolicy`), they are updated there, by torch's fused kernel for CPUs.
Exact    Bit-equal to `torch.optim.AdamW` on the same `DTensor`s where nothing is clipped; the norm may differ from
         torch's in the last bits, since sums are in another order. Rounding noise of 8-bit moments is each rank's own.
Limits   float32 shards on one mesh with one dimension: for products in bf16 give FSDP2 `param_dtype=torch.bfloat16`,
         which makes masters needless. Weights and gradients of shards stay where FSDP2 has them. State tensors are
         of this rank's rows: another number of ranks cannot read them.
Checked  tests/optim/test_sharded_adamw.py
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from scrimp.config import OptimizerConfig
from scrimp.errors import PlanError
from scrimp.optim.streaming import Homes, StreamedAdamW


class ShardedAdamW(StreamedAdamW):
    """`StreamedAdamW` over a model after `fully_shard`.

    Args:
        parameters: float32 DTensors, cut by rows over one mesh.
        homes: only states can live on the host: `weights`, `gradients` and `cpu` are empty.
        seed: of the rounding noise, the same on all ranks.

    Raises:
        PlanError: a parameter that is not such a shard, or homes for weights or gradients.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        settings: OptimizerConfig,
        homes: Homes,
        *,
        seed: int = 0,
    ) -> None:
        if homes.weights.blocks or homes.gradients or homes.cpu:
            raise PlanError(
                "under FSDP2 optimizer states alone can be given a home",
                got=f"weights of {homes.weights.blocks}, gradients of {sorted(homes.gradients)}, "
                f"updates on the CPU of {sorted(homes.cpu)}",
                do="leave these at device, or give fully_shard a CPUOffloadPolicy",
            )
        self._mesh = _mesh_of(parameters)
        self._shards = {name: cast(DTensor, parameter) for name, parameter in parameters.items()}
        # A parameter of fewer rows than there are ranks leaves some with nothing to update.
        rows = {
            name: nn.Parameter(mine) for name, shard in self._shards.items() if (mine := _rows(shard)).numel()
        }
        # Ranks draw apart: rows of one parameter would else share their noise.
        super().__init__(rows, settings, homes, seed=seed * self._mesh.size() + self._mesh.get_local_rank())

    def gradient_norm(self) -> float:
        """Global 2-norm of all gradients of all ranks; every rank must ask."""
        self._take_over()
        mine = super().gradient_norm() if self.gradients() else 0.0
        # On the mesh's device: shards that FSDP2 keeps on the host are none that NCCL can reduce.
        square = torch.tensor(mine, dtype=torch.float64, device=self._mesh.device_type).square_()
        dist.all_reduce(square, group=self._mesh.get_group())
        return float(square.sqrt())

    def step(self, lr: float) -> None:
        """One update at learning rate `lr` of this rank's rows."""
        self._take_over()
        super().step(lr)

    def zero_grad(self) -> None:
        """Free the gradients, of the shards too."""
        super().zero_grad()
        for shard in self._shards.values():
            shard.grad = None

    def _take_over(self) -> None:
        """The rows as FSDP2 has them now (it moves uneven ones before the first pass), and their gradients."""
        for name, rows in self._parameters.items():
            shard = self._shards[name]
            rows.data = _rows(shard)
            if isinstance(shard.grad, DTensor):
                rows.grad, shard.grad = shard.grad.to_local(), None


def _rows(shard: DTensor) -> Tensor:
    """This rank's, in FSDP2's own memory."""
    return cast(DTensor, shard.detach()).to_local()


def _mesh_of(parameters: Mapping[str, nn.Parameter]) -> DeviceMesh:
    """The mesh of all parameters."""
    found: DeviceMesh | None = None
    for name, parameter in parameters.items():
        is_shard = isinstance(parameter, DTensor) and tuple(parameter.placements) == (Shard(0),)
        if not is_shard or parameter.dtype != torch.float32:
            kind = (
                f"placements {list(parameter.placements)}" if isinstance(parameter, DTensor) else "no shard"
            )
            raise PlanError(
                f"the sharded optimizer cannot train {name}",
                got=f"{kind}, {str(parameter.dtype).removeprefix('torch.')}",
                expected="float32, cut by rows over a mesh of one dimension",
                do="call fully_shard on the whole float32 model first; for bf16 give it "
                "MixedPrecisionPolicy(param_dtype=torch.bfloat16)",
            )
        mesh = cast(DTensor, parameter).device_mesh
        if found is not None and mesh != found:
            raise PlanError(
                "parameters are sharded over two meshes", got=f"{name} on {mesh}, others on {found}"
            )
        found = mesh
    if found is None:
        raise PlanError("there is nothing to train", got="no parameters")
    return found

"""Weights gathered in FP8: each rank quantizes its own rows once, and sends codes and scales.

Problem  FSDP2 gathers a weight in its own format, four or two bytes a number, and each rank quantizes all of it for its
         FP8 GEMMs: the same work on every rank, on numbers of which the GEMMs read one byte.
Method   FSDP2 asks the local tensor of a parameter for `fsdp_pre_all_gather` and `fsdp_post_all_gather`. Both are set
         on the tensor itself, so that optimizers and checkpoints see plain tensors. The gathered parameter is a
         `CodedWeight`. With O x I numbers over F ranks of w bytes each, a rank sends for a gathering::

             block    (O / F I + 4 ceil(O / 128) / F ceil(I / 128)) (F - 1)      codes and scales
             tensor   (O / F I + 4) (F - 1)                                      codes and maxima
             before   w O / F I (F - 1)

         Operands are bit-equal to those of the whole weight: a scale of a block sees the rows of one rank alone, that
         of a tensor the largest magnitude of all ranks.
Where    `_wanted`: a planned linear layer of a block whose fprop and dgrad read the same shareable codes; in blocks of
         128 where ranks begin at multiples of 128 rows. Not in pipelines, tensor-parallel layers, routed experts,
         compiled blocks, nor layers that anyone observes. All others are gathered as before.
When     Before each forward pass of the model, by the plan in force and the compute type; all ranks share both. A
         change takes away the gathered parameter, whose gradient waits where FSDP2 adds up those of other types.
Limits   Shards are quantized by the reference's rules, also where a back end has a kernel. Each tensor's maximum is a
         collective of its own. dgrad makes a transposed copy of the codes for its product, which may sum in another
         order than that of the whole weight.
Facts    FSDP2 (torch 2.13) makes the gathered parameter itself by `as_strided`, which needs storage; where one is there
         already it calls `fsdp_post_all_gather(..., out=it)` alone. It views all it gathers of a unit as bytes where
         types differ. Uneven shards with hooks must all have the weight's padded size, so they are left out.
Source   PyTorch FSDP2's extensions, as torchao's float8 uses them
Checked  tests/runtime/parallel/test_quantized_gather.py: bit for bit, and bytes counted
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from scrimp.formats import QuantizedTensor
from scrimp.gemm.coded_weight import CodedWeight, is_shareable
from scrimp.gemm.layer import PlannedLayer
from scrimp.gemm.linear import PlannedLinear
from scrimp.gemm.observe import is_observed
from scrimp.gemm.problem import compute_dtype, operands_of
from scrimp.models.model import Model
from scrimp.precision import Operand
from scrimp.precision.formats import lookup_scaling
from scrimp.runtime.parallel.mesh import RankMesh
from scrimp.runtime.parallel.parallelise import groups_of

HOOKS = ("fsdp_pre_all_gather", "fsdp_post_all_gather")


def gather_codes(model: Model, mesh: RankMesh) -> None:
    """From now on gather in FP8 what may be; decided before each forward pass."""
    layout = mesh.layout
    if layout.shards > 1 and layout.pp == 1 and layout.tp == 1:
        model.register_forward_pre_hook(lambda module, _: _choose(module, layout.shards), prepend=True)


def can_share(operands: tuple[Operand | None, Operand | None], rows: int, shards: int) -> bool:
    """Whether a weight of so many rows is gathered in the codes that its fprop and dgrad read."""
    first, second = operands
    if first is None or first != second or not is_shareable(first) or rows % shards:
        return False
    return first.scaling == "tensor" or rows // shards % (lookup_scaling(first.scaling).rows or 1) == 0


def _choose(model: Any, shards: int) -> None:
    for block in model.blocks:
        is_compiled = block._compiled_call_impl is not None
        for group in groups_of(block):
            for shared in group.fsdp_params:
                wanted = None if is_compiled else _wanted(shared, shards)
                if wanted == _now(shared):
                    continue
                if not group.is_sharded:
                    block.reshard()  # an evaluation keeps what it gathered under zero 1 and 2
                _change(shared, wanted)


def _wanted(shared: Any, shards: int) -> tuple[Operand, torch.dtype] | None:
    """How a parameter is gathered: as which operand of which type, or None as it is."""
    module = shared._module_info.module
    # Planned layers have classes of their own, which may run otherwise.
    is_planned = getattr(type(module), "forward", None) is PlannedLinear.forward
    if not is_planned or shared._module_info.param_name != "weight":
        return None
    layer, local = module.planned, shared._sharded_local_tensor
    first, second = (operands_of(gemm, layer.precision.gemm(gemm))[1] for gemm in ("fprop", "dgrad"))
    rows = shared._orig_size[0]
    if first is None or layer.shard is not None or is_observed(layer):
        return None
    return (first, compute_dtype(local)) if can_share((first, second), rows, shards) else None


def _now(shared: Any) -> tuple[Operand, torch.dtype] | None:
    hook = getattr(shared._sharded_local_tensor, HOOKS[0], None)
    return None if hook is None else (hook.__self__.operand, hook.__self__.compute)


def _change(shared: Any, wanted: tuple[Operand, torch.dtype] | None) -> None:
    """Gather a parameter, which is sharded now, in another way."""
    local = shared._sharded_local_tensor
    before = shared.__dict__.pop("_unsharded_param", None)
    if before is not None and before.grad is not None:
        sums = before.grad.to(torch.float32)
        waiting = shared.unsharded_accumulated_grad
        shared.unsharded_accumulated_grad = sums if waiting is None else waiting + sums
    shared.all_gather_outputs, shared._unsharded_inner_tensors = [], []
    if wanted is None:
        for hook in HOOKS:
            delattr(local, hook)
        return
    coded = _Coded(shared, *wanted)
    for hook in HOOKS:
        setattr(local, hook, getattr(coded, hook))
    shared._init_extensions()
    weight = CodedWeight(shared._orig_size, local.dtype, local.device, coded.compute)
    shared._unsharded_param = nn.Parameter(weight, requires_grad=shared.sharded_param.requires_grad)


class _Coded:
    """What FSDP2 asks for the shards of one weight."""

    def __init__(self, shared: Any, operand: Operand, compute: torch.dtype) -> None:
        self.shared, self.operand, self.compute = shared, operand, compute

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any
    ) -> tuple[tuple[Tensor, ...], QuantizedTensor]:
        """Codes of this rank's rows and their scales, and the format."""
        layer: PlannedLayer = module.planned
        use = layer.uses("fprop", layer.clock.now)[1]
        spans = self.operand.scaling == "tensor"
        if spans:
            use = replace(use, reduce_amax=lambda amax: _largest(amax, mesh.get_group()))
        codes = use.codes(self.shared._sharded_local_tensor.detach().to(self.compute))
        kept = codes.with_tensors(codes.payload.new_empty(0), codes.scales, None)
        return (codes.payload,) if spans else (codes.payload, codes.scales), replace(kept, shape=outer_size)

    def fsdp_post_all_gather(
        self, outputs: tuple[Tensor, ...], like: QuantizedTensor, dtype: torch.dtype, *, out: CodedWeight
    ) -> None:
        """Codes of the whole weight."""
        scales = outputs[1] if len(outputs) > 1 else like.scales
        out.codes = like.with_tensors(outputs[0], scales, None)


def _largest(amax: Tensor, group: Any) -> None:
    """The maximum over ranks, in place: gathered, so that it counts among what the axis gathers."""
    found = [torch.empty_like(amax) for _ in range(dist.get_world_size(group))]
    dist.all_gather(found, amax, group=group)
    # A NaN of any rank is the maximum, as in the whole tensor.
    amax.copy_(torch.stack(found).amax(0))

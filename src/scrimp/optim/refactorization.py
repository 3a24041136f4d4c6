"""Layers that are products W = B A, factored anew by their singular vectors.

Problem  W stays as it is where B becomes B X and A becomes X^-1 A, but its gradients do not: with factors of unequal
         norms one hardly moves, and a step that suits one is too large for the other. The averages of an optimizer
         hold gradients of factors that have moved on.
Method   By W = U S V', of which the first r singular values are not 0::

             B = U S^1/2            A = S^1/2 V'            then B' B = A A' = S: factors are balanced

         W has no numbers of its own: with B = Q R and A' = P T the SVD of R T' (r x r) is all that is needed, in
         float64. Of each singular vector in B the largest number is made positive. Averages of both factors are then
         cleared, in all formats that they may have, and the learning rate rises anew (`scrimp.training.schedule`).
Ranks    The ranks that have parts of a layer add them up to a whole one, which one of them factors and sends to all:
         factors that two machines found are no factors of one product. Layers have their owners in turn.
State    None: steps decide when it happens, and weights and averages are in checkpoints.
Limits   Masters are needed beside bf16 parameters, whose rounding would change W. Parts come and go as a checkpoint's
         do, wherever they live. In passing a rank holds both factors of a layer twice, and in float64 where it is the
         owner, between two steps: when no activation and no gradient is there.
         A singular value of 0 leaves a row and a column of zeros, which no gradient moves any more; training does not
         meet one.
Source   Glentis et al., arXiv 2505.22922: weight refactorization and momentum reset
Checked  tests/optim/test_refactorization.py: products in float64, balance, parts on ranks;
         tests/training/test_low_rank_runs.py: a run goes on bit for bit, and on two ranks as on one
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from scrimp.errors import TrainingError
from scrimp.parts import TensorPart
from scrimp.world import group_device

FACTORS = "A.weight", "B.weight"
MASTER = "master"


@torch.no_grad()
def refactor(
    layers: Sequence[str],
    weights: Mapping[str, TensorPart],
    states: Mapping[str, TensorPart],
    group: dist.ProcessGroup | None,
) -> None:
    """Factor layers anew, and clear what the optimizer has averaged of their factors.

    Args:
        layers: names of those that are products, as of their modules in the model.
        weights: what lies here of parameters, by name.
        states: what lies here of the optimizer's states, by the parameter's name and their own.
        group: all ranks that have parts of these layers or copies of them; None: they lie here whole.
    """
    for number, layer in enumerate(layers):
        names = [f"{layer}.{factor}" for factor in FACTORS]
        exact = [states.get(f"{name}.{MASTER}", weights[name]) for name in names]
        first, second = (_whole(part, group) for part in exact)
        if not (first.isfinite().all() and second.isfinite().all()):  # all ranks have all of both
            raise TrainingError(
                f"the factors of {layer} are not finite, and have no decomposition",
                got="NaN or infinity",
                do="lower --optimizer.lr in a new run; --model.weights takes an older checkpoint",
            )
        owner = None if group is None else dist.get_global_rank(group, number % group.size())
        if owner is None or owner == dist.get_rank():
            first, second = balanced(first, second)
        for name, part, found in zip(names, exact, (first, second), strict=True):
            if owner is not None:
                dist.broadcast(found, src=owner, group=group)
            for box in (*part.boxes(), *weights[name].boxes()):
                box.local.copy_(found[box.place])
    cleared = tuple(f"{layer}.{factor}." for layer in layers for factor in FACTORS)
    for name, part in states.items():
        if name.startswith(cleared) and not name.endswith(f".{MASTER}"):
            part.local.zero_()


def balanced(first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    """A and B of the same product B A, with B' B = A A'."""
    q, r = torch.linalg.qr(second.double())
    p, t = torch.linalg.qr(first.double().t())
    u, s, v = torch.linalg.svd(r @ t.t())
    left, right = q @ u, v @ p.t()
    largest = left.gather(0, left.abs().argmax(0, keepdim=True)).squeeze(0)
    signed = torch.where(largest < 0, -s.sqrt(), s.sqrt())
    return (signed[:, None] * right).to(first.dtype), (left * signed).to(second.dtype)


def _whole(part: TensorPart, group: dist.ProcessGroup | None) -> Tensor:
    """A tensor of which ranks have parts: each number once, and zeros of all others."""
    if group is None:
        return part.local
    whole = torch.zeros(part.shape, dtype=part.local.dtype, device=group_device())
    for box in part.boxes() if part.is_writer else ():
        whole[box.place].copy_(box.local)
    dist.all_reduce(whole, group=group)
    return whole

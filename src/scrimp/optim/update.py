"""AdamW's update of one tensor, piece by piece, whatever format its weights and averages have.

Problem  With averages in 8 bits and weights in bf16 every step decodes, computes in fp32 and rounds. Done on whole
         tensors, that takes several times the parameter in temporary memory: of a 128k-word embedding, gigabytes.
Method   For pieces of rows, in fp32, g the gradient, t the number of the step::

             m = b1 m + (1 - b1) g             v = b2 v + (1 - b2) g^2
             w = (1 - lr wd) w - lr / (1 - b1^t) * m / (sqrt(v) / sqrt(1 - b2^t) + eps)

         then w, m and v are rounded to what they are stored in: bf16 and 8 bits stochastically, with noise of the
         element's address, so that results depend neither on the pieces nor on the shard. Every operation is one
         correctly rounded IEEE operation (no fused multiply-add), so that they do not depend on where a vector
         register ends either. Where everything is fp32, torch's fused AdamW does it all in one pass; on a GPU one
         kernel does everything else (`scrimp.gemm.kernels.adamw`), where it gave these bits when it was tried.
         Tensors are arguments: the same call serves blocks of states that were copied from the host a moment ago.
Limits   About seven fp32 arrays of a piece live at once: 4 MiB on a CPU; on CUDA 30 MiB without the kernel, and
         some 80 small kernels per piece.
         One operation after another: on one core 8 ns per parameter with bf16 weights and moments, 13 ns with 8
         bits, beside 1 ns of the fused update in fp32.
         torch's square roots on a CPU are MKL's: on one with AVX2 alone every fifth is off by a last place.
Source   Loshchilov & Hutter, arXiv 1711.05101.
Checked  tests/optim/test_update.py: float64, any piece size, shards, torch's own AdamW.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from scrimp.formats import Noise
from scrimp.formats.moment_codes import BLOCK
from scrimp.gemm import kernels
from scrimp.gemm.backends.operands import has_triton
from scrimp.gemm.kernels.launch import INPUT_TYPES, may_run
from scrimp.optim.moments import MomentFormat, Moments, Place, as_matrix
from scrimp.optim.stochastic_rounding import NoiseTable, Scratch, to_bf16

PIECE_ELEMENTS = {"cpu": 2**17, "cuda": 2**20}
"""Elements that are updated at once: a CPU's cache holds them; on CUDA a kernel has enough to do."""
_FORMATS: dict[tuple[torch.dtype, torch.dtype], MomentFormat] = {
    (torch.float32, torch.float32): "fp32",
    (torch.bfloat16, torch.bfloat16): "bf16",
    (torch.int8, torch.bfloat16): "8bit",
}
"""By the types of the first and the last tensor of `Moments.tensors`."""


@dataclass(frozen=True)
class Step:
    """The numbers of one AdamW step."""

    number: int
    """From 1."""
    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    clip: float = 1.0
    """What a gradient is multiplied by first, and rounded to its type."""

    @property
    def root(self) -> float:
        """What corrects the square root of v."""
        return 1 / math.sqrt(1 - self.beta2**self.number)

    @property
    def rate(self) -> float:
        """The learning rate of a corrected m."""
        return self.lr / (1 - self.beta1**self.number)

    @property
    def kept(self) -> float:
        """What decay leaves of a weight."""
        return 1 - self.lr * self.weight_decay


@torch.no_grad()
def update(
    weight: Tensor,
    gradient: Tensor,
    moments: Moments,
    step: Step,
    noise: Noise,
    *,
    piece: int | None = None,
    scratch: Scratch | None = None,
) -> None:
    """Update one tensor and its moments in place.

    Args:
        weight: a parameter in float32 or bfloat16 (then rounded stochastically), or an fp32 master.
        gradient: of the same shape, in any floating type; clipped in place, or not at all.
        noise: of this tensor and this step; with `first_row` where the tensor is a shard by rows.
        piece: most elements at once; None: what suits the device.
        scratch: arrays to work in, from an update before; None: new ones.
    """
    if is_fused(weight, gradient, moments):
        update_fused([weight], [gradient], [moments], step)
        return
    if _takes_kernel(weight, gradient, moments, noise):
        update_by_kernel(weight, gradient, moments, step, noise)
        return
    update_by_operators(weight, gradient, moments, step, noise, piece=piece, scratch=scratch)


@torch.no_grad()
def update_by_operators(
    weight: Tensor,
    gradient: Tensor,
    moments: Moments,
    step: Step,
    noise: Noise,
    *,
    piece: int | None = None,
    scratch: Scratch | None = None,
) -> None:
    """`update` by torch's operators, piece by piece."""
    work = Workspace(as_matrix(weight), noise, piece, scratch)
    gradients = gradient.reshape(work.matrix.shape)
    for place in work.places:
        if step.clip != 1.0:  # torch's foreach operators round a factor to bf16 on a CPU
            gradients[place].mul_(step.clip)
        _update_piece(gradients[place], moments, step, place, work)


@torch.no_grad()
def update_by_kernel(weight: Tensor, gradient: Tensor, moments: Moments, step: Step, noise: Noise) -> None:
    """`update` by one kernel (`scrimp.gemm.kernels.adamw`), which takes nothing beside the tensors."""
    matrix = as_matrix(weight)
    kernels.update_adamw(
        matrix,
        gradient.reshape(matrix.shape),
        {name: as_matrix(tensor) for name, tensor in moments.tensors().items()},
        noise,
        clip=step.clip,
        beta1=step.beta1,
        beta2=step.beta2,
        root=step.root,
        eps=step.eps,
        rate=step.rate,
        kept=step.kept,
    )


def _takes_kernel(weight: Tensor, gradient: Tensor, moments: Moments, noise: Noise) -> bool:
    states = list(moments.tensors().values())
    format_ = _FORMATS.get((states[0].dtype, states[-1].dtype))
    are_plain = all(one.is_cuda and one.is_contiguous() for one in (weight, gradient, *states))
    if not are_plain or format_ is None or gradient.dtype not in INPUT_TYPES or noise.columns:
        return False
    return has_triton() and _may_run(weight.device, weight.dtype, gradient.dtype, format_)


@functools.cache
def _may_run(device: torch.device, weight: torch.dtype, gradient: torch.dtype, format_: MomentFormat) -> bool:
    """Whether the kernel gives the operators' bits there in these formats, tried once in a process."""
    return may_run(f"AdamW ({format_})", lambda: _is_equal(device, weight, gradient, format_))


def _is_equal(
    device: torch.device, weight: torch.dtype, gradient: torch.dtype, format_: MomentFormat
) -> bool:
    """Whether two steps of the kernel are those of the operators, bit for bit."""
    generator = torch.Generator().manual_seed(0)
    made = (torch.randn(9, 130, generator=generator).to(device) for _ in range(3))
    start, *gradients = (one.to(kind) for one, kind in zip(made, (weight, gradient, gradient), strict=True))
    found = []
    for update_by in (update_by_operators, update_by_kernel):
        own, moments = start.clone(), Moments.zeros(format_, start)
        for number, one in enumerate(gradients, start=1):
            step = Step(number, 0.01, 0.9, 0.95, 1e-8, 0.1, clip=0.7)
            update_by(own, one.clone(), moments, step, Noise(number, 3, 11))
        found.append([own, *moments.tensors().values()])
    return all(torch.equal(one, other) for one, other in zip(*found, strict=True))


class Workspace:
    """What is needed to go through a matrix in pieces: where they lie, arrays to work in, noise.

    Args:
        matrix: [rows, columns].
        piece: most elements at once, but no less than a block of a row; None: what suits the device.
    """

    def __init__(
        self, matrix: Tensor, noise: Noise, piece: int | None = None, scratch: Scratch | None = None
    ) -> None:
        self.matrix = matrix
        num_rows, num_columns = matrix.shape
        most = piece or PIECE_ELEMENTS.get(matrix.device.type, PIECE_ELEMENTS["cpu"])
        # At least 1: of a parameter of fewer rows than there are ranks, some have none.
        width = max(1, min(num_columns, max(1, most // BLOCK) * BLOCK))
        height = max(1, min(num_rows, most // width))
        self.scratch = scratch or Scratch(matrix.device)
        self._noise = NoiseTable(noise, num_columns, self.scratch, matrix.device)
        places = [
            (slice(row, min(num_rows, row + height)), slice(column, min(num_columns, column + width)))
            for row in range(0, num_rows, height)
            for column in range(0, num_columns, width)
        ]
        if isinstance(matrix, FakeTensor):
            # Without numbers, pieces of one shape are all alike.
            places = list(
                {(min(num_rows - r.start, height), c.stop - c.start): (r, c) for r, c in places}.values()
            )
        self.places = places

    def noise(self, place: Place) -> Iterator[Tensor]:
        """Independent hashes of a piece's elements, one array after another."""
        return self._noise.streams(*place)

    def floats(self, name: str, values: Tensor) -> Tensor:
        """A float32 copy of a piece in an array of this name."""
        return self.scratch.floats(name, (values.shape[0], values.shape[1])).copy_(values)


def is_fused(weight: Tensor, gradient: Tensor, moments: Moments) -> bool:
    """Whether torch's fused AdamW does it: everything in float32."""
    return weight.dtype == gradient.dtype == torch.float32 and moments.are_fp32


@torch.no_grad()
def update_fused(
    weights: Sequence[Tensor], gradients: Sequence[Tensor], moments: Sequence[Moments], step: Step
) -> None:
    """Update float32 tensors with float32 moments by torch's fused AdamW, many in one call."""
    from torch.optim.adamw import adamw

    if not weights:
        return
    clip(gradients, step.clip)
    states = [one.tensors() for one in moments]
    # One per tensor: the kernel adds 1 to each of them.
    counts = torch.full((len(weights),), float(step.number - 1), device=weights[0].device)
    adamw(
        list(weights),
        list(gradients),
        [state["exp_avg"] for state in states],
        [state["exp_avg_sq"] for state in states],
        [],
        list(counts.unbind()),
        fused=True,
        amsgrad=False,
        maximize=False,
        beta1=step.beta1,
        beta2=step.beta2,
        lr=step.lr,
        weight_decay=step.weight_decay,
        eps=step.eps,
    )


def clip(gradients: Sequence[Tensor], factor: float) -> None:
    """Scale float32 gradients in place."""
    if factor != 1.0 and gradients:
        torch._foreach_mul_(list(gradients), factor)


def follow_move(target: Tensor, move: Tensor, rate: float, decay: float) -> None:
    """Decay, and follow what was made of a gradient."""
    target.mul_(1 - decay)
    target.add_(move, alpha=-rate)


def _update_piece(gradient: Tensor, moments: Moments, step: Step, place: Place, work: Workspace) -> None:
    shape = (gradient.shape[0], gradient.shape[1])
    noise, (g, other, mean, square) = (
        work.noise(place),
        (work.scratch.floats(name, shape) for name in ("gradient", "other", "mean", "square")),
    )
    g.copy_(gradient)
    mean = moments.mean.read(place, mean, work.scratch)
    mean.mul_(step.beta1).add_(torch.mul(g, 1 - step.beta1, out=other))
    square = moments.square.read(place, square, work.scratch)
    square.mul_(step.beta2).add_(g.mul_(g).mul_(1 - step.beta2))
    torch.sqrt(square, out=g).mul_(step.root).add_(step.eps)
    change = torch.div(mean, g, out=other).mul_(step.rate)
    weight = work.matrix[place]
    w = weight if weight.dtype == torch.float32 else g.copy_(weight)
    w.mul_(step.kept).sub_(change)
    if weight.dtype == torch.bfloat16:
        weight.copy_(to_bf16(w, next(noise), work.scratch))
    moments.mean.write(place, mean, noise, work.scratch)
    moments.square.write(place, square, noise, work.scratch)
